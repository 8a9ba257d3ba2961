"""`MultiHeadAttention`: project, split, attend, merge, project; its positions and caches.

Imports attention and what lies below it.
"""

from headwise.layer.layer import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
