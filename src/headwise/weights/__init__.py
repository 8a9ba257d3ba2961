"""Attention weights as a lazy matrix: what one score is, and every statistic of the weights without the matrix.

Imports masks, shapes and errors.
"""

from headwise.weights.map import AttentionMap, Selector
from headwise.weights.panel import Panel
from headwise.weights.scoring import Scoring

__all__ = ["AttentionMap", "Panel", "Scoring", "Selector"]
