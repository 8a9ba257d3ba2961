"""The order of axes in which a class takes its input, and how to bring its output back to (B, T, E)."""

from torch import Tensor

PLAIN = "batch first"
OTHERS = ("unbatched", "batch second", "channels first", "image", "image, channels last")
ROWS, COLUMNS = 2, 3  # of an image: its pixels are the tokens


def tokens_of(layout: str, T: int) -> int:
    """The number of tokens: an image needs rows and columns, one sample alone needs many."""
    if layout.startswith("image"):
        return ROWS * COLUMNS
    return 43 if layout == "unbatched" else T


def lay_out(x: Tensor, layout: str) -> Tensor:
    """(B, T, E) as the class wants it.

    >>> lay_out(torch.zeros(7, 6, 8), "image").shape
    torch.Size([7, 8, 2, 3])
    """
    if layout == "unbatched":
        return x[0]
    if layout == "batch second":
        return x.transpose(0, 1)
    if layout == "channels first":
        return x.transpose(1, 2).contiguous()
    if layout == "image":
        return x.transpose(1, 2).contiguous().view(len(x), x.shape[2], ROWS, -1)  # torch crashes on norms of a view
    return x.reshape(len(x), ROWS, -1, x.shape[2]) if layout == "image, channels last" else x


def taken_back(leaf: Tensor, layout: str, B: int, T: int) -> Tensor | None:
    """A result as (B, T, …), or None where it has another shape."""
    shape = tuple(leaf.shape)
    image = (ROWS, T // ROWS)
    if layout == "unbatched":
        return leaf[None] if leaf.dim() == 2 and shape[0] == T else None
    if layout == "batch second":
        return leaf.transpose(0, 1) if leaf.dim() == 3 and shape[:2] == (T, B) else None
    if layout == "channels first":
        return leaf.transpose(1, 2) if leaf.dim() == 3 and shape[0] == B and shape[2] == T else None
    if layout == "image":
        return leaf.flatten(2).transpose(1, 2) if leaf.dim() == 4 and shape[0] == B and shape[2:] == image else None
    if layout == "image, channels last":
        return leaf.flatten(1, 2) if leaf.dim() == 4 and shape[:3] == (B, *image) else None
    if leaf.dim() == 3 and shape[:2] == (B, T):
        return leaf
    return leaf.reshape(B, T, -1) if leaf.dim() == 2 and shape[0] == B * T else None


def merged(leaf: Tensor, B: int, T: int) -> Tensor | None:
    """Heads (B, H, T, D) that were returned one by one, side by side; a table of weights is no such thing."""
    if leaf.dim() != 4 or leaf.shape[0] != B or leaf.shape[2] != T or leaf.shape[3] == T:
        return None
    return leaf.transpose(1, 2).flatten(2)
