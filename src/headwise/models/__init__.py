"""A small GPT on headwise layers."""

from headwise.models.gpt import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
