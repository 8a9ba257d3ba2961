"""Reads the attention weights of other libraries into a layer, and writes them back.

`forms.py` is how tensors are arranged, `layouts.py` how they are named, `reading.py` puts the two together for one
layer. Imports shapes and errors; whole models are opened by `headwise.models`.
"""

from headwise.layer.checkpoints.reading import Found, check_options, merge, read

__all__ = ["Found", "check_options", "merge", "read"]
