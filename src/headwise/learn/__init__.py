"""For learners: the ten steps on tensors and on words, what attention costs, known models, the course, the quiz.

May import every room except `cli`.
"""

from headwise.learn.configs import CONFIGS, Config
from headwise.learn.cost import Cost, alternatives, answers
from headwise.learn.forms import FORMS, Form
from headwise.learn.steps import Setting, explain_steps, key_operations, trace
from headwise.learn.words import WordSteps, word_steps, words_page, words_text

__all__ = [
    "CONFIGS",
    "FORMS",
    "Config",
    "Cost",
    "Form",
    "Setting",
    "WordSteps",
    "alternatives",
    "answers",
    "explain_steps",
    "key_operations",
    "trace",
    "word_steps",
    "words_page",
    "words_text",
]
