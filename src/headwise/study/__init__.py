"""A whole model under observation: the maps of every layer, heads switched off, heads over a corpus.

Imports models and what lies below it.
"""
