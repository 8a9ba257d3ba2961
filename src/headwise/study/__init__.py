"""A whole model under observation: collect its maps, change its heads, measure them, survey a corpus.

Imports `models` and the rooms below; `view` shows what is found here.
"""
