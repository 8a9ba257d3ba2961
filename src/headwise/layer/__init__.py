"""`MultiHeadAttention`: project, split, normalize and rotate, attend, merge, project; its positions and caches.

`options` is what a layer is made with, `inputs` what it is called with; `checkpoints/` reads the weights of other
libraries, `compat` has torch's interface. May import attention and the rooms below it.
"""

from headwise.layer.layer import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
