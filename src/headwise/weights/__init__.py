"""Attention weights as a lazy matrix: the scoring, the map, and exact statistics without the dense matrix.

Imports masks, shapes and errors.
"""

from headwise.weights.map import AttentionMap, Selector
from headwise.weights.panel import Panel
from headwise.weights.readings import Reading
from headwise.weights.scoring import Relative, Scoring

__all__ = ["AttentionMap", "Panel", "Reading", "Relative", "Scoring", "Selector"]
