"""Plain data and tensors over a pipe whose other end is not trusted: no pickle, every size bounded and checked.

A message is a JSON text, in which a tensor is a number into a table of types and shapes, and then the tensors' bytes.
"""

import ctypes
import json
import math
import struct
from typing import IO, Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError

LENGTHS = struct.Struct(">QQ")  # bytes of text, bytes of tensors
LONGEST_TEXT = 32 * 2**20
LONGEST = 2**30  # bytes of tensors in one message
ALIGNED = 16  # tensors start at multiples of this
MOST_AXES = 8
TENSOR = "tensor#"  # {TENSOR: 3} is the tensor of that number
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )
}  # fmt: skip


class WireError(HeadwiseError, ValueError):
    """A message that is cut off, too long, or not what it says it is."""


def send(stream: IO[bytes], message: Any) -> None:
    """Write dictionaries, lists, texts, numbers and tensors; a tensor that occurs twice is sent once."""
    held: dict[int, tuple[int, Tensor]] = {}  # by identity: number and tensor
    plain = _without_tensors(message, held)
    tensors = [tensor.detach().contiguous() for _, tensor in held.values()]
    table = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = json.dumps({"message": plain, "tensors": table}).encode()
    stream.write(LENGTHS.pack(len(text), sum(_padded(t.nbytes) for t in tensors)))
    stream.write(text)
    for tensor in tensors:
        if tensor.nbytes:
            stream.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
            stream.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
    stream.flush()


def _without_tensors(value: Any, held: dict[int, tuple[int, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        return {TENSOR: held.setdefault(id(value), (len(held), value))[0]}
    if isinstance(value, dict):
        return {str(k): _without_tensors(v, held) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(v, held) for v in value]
    return value


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises `WireError` for anything that `send` does not write."""
    text_bytes, data_bytes = LENGTHS.unpack(_exactly(stream, LENGTHS.size))
    if text_bytes > LONGEST_TEXT or data_bytes > LONGEST:
        raise WireError(f"a message of {text_bytes} + {data_bytes} bytes; at most {LONGEST_TEXT} + {LONGEST} are read")
    text, data = _exactly(stream, text_bytes), _exactly(stream, data_bytes)
    try:
        told = json.loads(text)
        return _with_tensors(told["message"], _tensors(told["tensors"], data))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"a message that cannot be read: {type(error).__name__}") from error


def _exactly(stream: IO[bytes], count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        part = stream.read(min(count - len(data), 2**24))
        if not part:
            raise WireError("no answer came" if not data else f"an answer ends after {len(data)} of {count} bytes")
        data += part
    return data


def _tensors(table: Any, data: bytearray) -> list[Tensor]:
    """Views of the bytes, which must be exactly those of the table."""
    found, start = [], 0
    for name, shape in table:
        dtype = DTYPES[name]
        if len(shape) > MOST_AXES or any(type(n) is not int or not 0 <= n <= LONGEST for n in shape):
            raise WireError(f"a tensor of shape {str(shape)[:80]}")
        count = math.prod(shape)
        size = count * dtype.itemsize
        if start + size > len(data):
            raise WireError("tensors that are longer than their bytes")
        found.append(_tensor(data, start, dtype, count).reshape(shape))
        start += _padded(size)
    if start != len(data):
        raise WireError("tensors that are shorter than their bytes")
    return found


def _tensor(data: bytearray, start: int, dtype: torch.dtype, count: int) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if dtype is torch.bool:  # any other byte than 0 and 1 would be neither true nor false
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start) != 0
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start)


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        return (
            tensors[_index(value[TENSOR])]
            if TENSOR in value
            else {k: _with_tensors(v, tensors) for k, v in value.items()}
        )
    return [_with_tensors(v, tensors) for v in value] if isinstance(value, list) else value


def _index(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise WireError("a tensor without a number")
    return number
