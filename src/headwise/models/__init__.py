"""Models to look at: `open_model` opens any of them, `load_builtin` the small GPT in the package.

`checkpoint.open_checkpoint` reads the attention layers out of files of weights. Imports `huggingface` and
the rooms below.
"""

from headwise.models.builtin import LanguageModel, load, load_builtin
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.opening import open_model
from headwise.models.text_model import TextModel

__all__ = ["GPT", "GPTConfig", "LanguageModel", "TextModel", "load", "load_builtin", "open_model"]
