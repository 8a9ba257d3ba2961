"""The ten steps on real words: one layer of a real model (`trace`), as text (`text`) and as a page (`page`).

May import everything below `learn`, and the steps and forms beside it.
"""

from headwise.learn.words.page import words_page
from headwise.learn.words.text import words_text
from headwise.learn.words.trace import WordSteps, word_steps

__all__ = ["WordSteps", "word_steps", "words_page", "words_text"]
