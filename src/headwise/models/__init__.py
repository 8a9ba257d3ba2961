"""A small GPT on headwise layers, and the one that comes trained with the package; models of others in a folder."""

from headwise.models.builtin import LanguageModel, load, load_builtin
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.opening import TextModel, open_model

__all__ = ["GPT", "GPTConfig", "LanguageModel", "TextModel", "load", "load_builtin", "open_model"]
