"""Reads the weights of other people's attention, and writes them back.

`forms.py` is how tensors are arranged, `layouts.py` and `known.py` how they are named, `reading.py` makes layers;
`families.py` says what the configuration of a known model adds, `files.py` where tensors come from. `checkpoint.py`
puts them together for whole models.
"""

from headwise.layer.checkpoints.reading import Found, arrange, check_options, check_said, merge, read

__all__ = ["Found", "arrange", "check_options", "check_said", "merge", "read"]
