"""Numbers in a page: little tensors as text, small and quick to read.

A section is a tensor, compressed. Bytes of equal rank lie together (all first bytes, then all second ones), because
those compress well. Pictures take one byte a pixel: the square root of a share, or the logarithm of a ratio.
"""

import base64
import ctypes
import gzip
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {
    torch.uint8: "u1", torch.uint16: "u2", torch.uint32: "u4", torch.float16: "f2", torch.float32: "f4",
}  # fmt: skip
OCTAVE = 12  # steps of a logarithmic byte that double the number
EVEN = 128  # the byte of a ratio of 1


class Section(NamedTuple):
    """A tensor in a page: type of its numbers, shape, what a byte stands for, and the compressed bytes."""

    type: str
    shape: tuple[int, ...]
    code: str
    data: bytes

    @property
    def size(self) -> int:
        """Bytes it takes in the page, as text."""
        return 4 * -(-len(self.data) // 3) + 64

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        text = base64.b64encode(self.data).decode("ascii")
        return {"type": self.type, "shape": list(self.shape), "code": self.code, "data": text}


def plain(tensor: Tensor) -> Section:
    """The numbers as they are, in the dtype they have."""
    data = tensor.detach().cpu().contiguous()
    width = data.element_size()
    planes = data.view(torch.uint8).view(-1, width).T.contiguous()
    return Section(TYPES[data.dtype], tuple(data.shape), "plain", _compressed(planes))


def whole_numbers(tensor: Tensor) -> Section:
    """Whole numbers from 0, in two bytes where they fit, else in four."""
    fits = not tensor.numel() or int(tensor.max()) < 2**16
    return plain(tensor.to(torch.uint16 if fits else torch.uint32))


def shares(picture: Tensor) -> Section:
    """Numbers from 0 to 1, a byte each: 255 times the square root, so that small ones are told apart."""
    levels = (picture.clamp(0, 1).sqrt() * 255).round().to(torch.uint8)
    return plain(levels)._replace(code="sqrt")


def ratios(picture: Tensor) -> Section:
    """Numbers from 0 up, a byte each: 0 for 0, else by their logarithm, 12 steps to the double and 1 at 128."""
    levels = (picture.clamp(min=1e-30).log2() * OCTAVE + EVEN).round().clamp(1, 255)
    return plain(torch.where(picture > 0, levels, 0).to(torch.uint8))._replace(code="log")


def _compressed(data: Tensor) -> bytes:
    # By address, because numpy need not be installed. No time stamp: the same numbers give the same bytes.
    return gzip.compress(ctypes.string_at(data.data_ptr(), data.nbytes) if data.numel() else b"", 6, mtime=0)
