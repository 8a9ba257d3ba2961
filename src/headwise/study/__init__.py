"""A whole model under observation: collect its attention maps, switch heads off, survey its heads over a corpus.

Imports `models` and the rooms below; `view` shows what is found here.
"""
