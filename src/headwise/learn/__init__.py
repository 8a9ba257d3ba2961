"""For learners: the ten steps on real tensors, what attention costs, the sizes of known models, and the quiz.

May import every room except `cli`.
"""

from headwise.learn.configs import CONFIGS, Config
from headwise.learn.cost import Cost, alternatives, answers
from headwise.learn.forms import FORMS, Form
from headwise.learn.steps import Setting, explain_steps, key_operations, trace

__all__ = [
    "CONFIGS",
    "FORMS",
    "Config",
    "Cost",
    "Form",
    "Setting",
    "alternatives",
    "answers",
    "explain_steps",
    "key_operations",
    "trace",
]
