"""Attention weights as a lazy matrix: the scoring, the map, and exact statistics without the dense matrix.

Imports masks, shapes and errors.
"""

from headwise.weights.map import AttentionMap, Selector
from headwise.weights.panel import Panel
from headwise.weights.readings import Reading
from headwise.weights.scoring import Relative, Scoring
from headwise.weights.statistic import Pairs, Statistic

__all__ = ["AttentionMap", "Pairs", "Panel", "Reading", "Relative", "Scoring", "Selector", "Statistic"]
