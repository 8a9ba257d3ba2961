"""For learners: the ten steps on real tensors, what attention costs, and the sizes of known models."""

from headwise.learn.configs import CONFIGS, Config, find

__all__ = ["CONFIGS", "Config", "find"]
