"""A small GPT on headwise layers, and the one that comes trained with the package."""

from headwise.models.builtin import LanguageModel, load, load_builtin, open_model
from headwise.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig", "LanguageModel", "load", "load_builtin", "open_model"]
