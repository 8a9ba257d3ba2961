"""For learners: the ten steps on real tensors, what attention costs, and the sizes of known models."""

from headwise.learn.configs import CONFIGS, Config
from headwise.learn.cost import Cost, alternatives
from headwise.learn.forms import FORMS, Form
from headwise.learn.interview import answers
from headwise.learn.layout import key_operations
from headwise.learn.steps import Setting, explain_steps, trace

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
