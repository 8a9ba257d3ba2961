"""The line where a shape went wrong, which is often not the line that raises.

Every axis of a test call has a size of its own, so the shape of a tensor says what its axes are. Of the tensors that
meet in the failing line, the one in an unusual order is to blame, and the trace knows the line that made it.
"""

import ast
import functools
import linecache
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from headwise.check.sizes import CallSizes, value_for
from headwise.check.trace import PRODUCTS, SWAPS, VIEWS, Trace, error_line
from headwise.check.vocabulary import constructor_role

MEANT = ("heads", "head_width", "width")  # attributes whose names say which size they hold


def blamed_line(error: BaseException, trace: Trace, filename: str | None, sizes: CallSizes) -> int | None:
    """The line that made the tensor, layer or size which does not fit; the line that raised where none stands out."""
    raised = error_line(error, filename)
    if raised is None or filename is None or not isinstance(error, RuntimeError):
        return raised
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame.f_code.co_filename == filename][-1]
    text = "".join(linecache.getlines(filename))
    linear = _idle_assignment(text, _names(text, raised), raised) or _of_linear(frames, own, trace, sizes, text)
    if linear is not None:
        return linear
    mine = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == filename]
    if len(mine) > 1 and _worked_before(trace, raised):
        mine.pop()
        raised = mine[-1][1]
    merges = "is invalid for input of size" in str(error)
    for own, line in reversed(mine):  # then the functions that called it, with the tensors that they passed
        names = _names(text, line)
        if (idle := _idle_assignment(text, names, line)) is not None:
            return idle
        found = _of_attributes(own, names, sizes, text) or _of_tensors(own, names, trace, sizes, merges)
        if found is not None:
            return found
    return raised


def _worked_before(trace: Trace, line: int) -> bool:
    """Whether a line, in a helper, had already run to its end in this call."""
    lines = [node.line for node in trace.nodes]
    while lines and lines[-1] == line:
        lines.pop()
    return line in lines


def _idle_assignment(text: str, names: set[str], raised: int) -> int | None:
    """The last plain `a = b` before the line that raised, where that line uses `a`: something was left out there."""
    stored = [s for s in _statements(text) if isinstance(s, ast.Assign) and s.lineno < raised]
    function = max((s.lineno for s in _statements(text) if _is_around(s, raised)), default=0)
    idle = [s for s in stored if isinstance(s.value, ast.Name) and s.lineno > function]
    lines = [s.lineno for s in idle if isinstance(s.targets[0], ast.Name) and s.targets[0].id in names]
    return max(lines, default=None)


def _is_around(statement: ast.stmt, line: int) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.lineno <= line <= (statement.end_lineno or 0)


def _of_linear(frames: list[FrameType], own: FrameType, trace: Trace, sizes: CallSizes, text: str) -> int | None:
    """For an input that a linear layer refuses: the line that made the input, or that made the layer."""
    inside = (f for f in frames if isinstance(f.f_locals.get("self"), nn.Linear))
    layer = next((f for f in inside if isinstance(f.f_locals.get("input"), Tensor)), None)
    x = None if layer is None else layer.f_locals.get("input")
    if layer is None or not isinstance(x, Tensor):
        return None
    source, softmax = trace.source(x), min((n.index for n in trace.softmax_nodes()), default=None)
    if source is not None and softmax is not None and source < softmax:
        return None  # a tensor from before: the line that passes it is to blame
    if x.shape[-1] in (sizes.E, sizes.out, sizes.H * sizes.Dv) and x.dim() == 3:
        owner = own.f_locals.get("self")
        made = owner.named_modules() if isinstance(owner, nn.Module) else ()
        name = next((name for name, module in made if module is layer.f_locals["self"]), "")
        return _assignment(text, name.partition(".")[0]) if name else None
    return _misshaped(x, trace, sizes) or _made(x, trace, own)


def _misshaped(x: Tensor, trace: Trace, sizes: CallSizes) -> int | None:
    """On the way from the weights' product with the values to this tensor, the first line that made a wrong shape."""
    source = trace.source(x)
    softmax = min((n.index for n in trace.softmax_nodes()), default=None)
    if source is None or softmax is None or source < softmax:
        return None
    after = trace.reaches(softmax)
    way = [n for n in reversed([*trace.ancestors([source], PRODUCTS)]) if n.index in after]
    for position, node in enumerate(way):
        if position + 1 < len(way) and way[position + 1].line == node.line:
            continue  # a step inside a line, as of an einsum
        axes = _kind(node.value, sizes)
        if node.op in PRODUCTS and node.value.dim() == 3 and node.value.shape[-1] not in (sizes.Dv, sizes.D):
            return node.line
        if node.op in SWAPS and len(axes) >= 3 and "?" not in axes and axes[-1] not in "DE":
            return node.line
    return None


def _of_tensors(own: FrameType, names: set[str], trace: Trace, sizes: CallSizes, merges: bool) -> int | None:
    """The line of the one tensor in the failing statement whose axes are in an order of their own.

    Where heads are merged by a view, `BTHD` is the right order.
    """
    held = {name: value for name, value in own.f_locals.items() if isinstance(value, Tensor) and value.dim() >= 3}
    kinds = {name: _kind(value, sizes) for name, value in held.items()}
    common = Counter(kind for kind in kinds.values() if len(kind) == 4).most_common(1)
    meeting = [name for name in held if name in names]
    odd = [name for name in meeting if "?" in kinds[name] or kinds[name] == "BHDT"]
    if not odd and common:
        usual = {"BHTT", "BTHD"} if merges else {"BHTT"}
        odd = [n for n in meeting if len(kinds[n]) == 4 and kinds[n][:3] != common[0][0][:3] and kinds[n] not in usual]
    if not odd and {"BTD", "BTE"} <= {kinds[n] for n in meeting}:
        odd = [n for n in meeting if kinds[n] == "BTE"]
    lines = [line for name in odd if (line := _turned(held[name], trace, sizes)) is not None]
    return lines[0] if lines and len(odd) < max(2, len(meeting)) else None


def _kind(value: Tensor, sizes: CallSizes) -> str:
    """The axes of a tensor by their sizes, such as `BHTD`, with ? for a size that means nothing."""
    letters = {
        sizes.B: "B", sizes.H: "H", sizes.T: "T", sizes.S: "T", sizes.D: "D", sizes.Dv: "D", sizes.E: "E",
        sizes.out: "E", sizes.B * sizes.H: "N", sizes.T * sizes.H: "N", 3 * sizes.E: "E", 2 * sizes.E: "E",
        1: "1", 3: "3",
    }  # fmt: skip
    return "".join(letters.get(size, "?") for size in value.shape)


def _turned(value: Tensor, trace: Trace, sizes: CallSizes) -> int | None:
    """The first line, between a projection and this tensor, that puts its axes into an unusual order."""
    source, way = trace.source(value), []
    while source is not None and trace.nodes[source].op not in PRODUCTS:
        way.append(trace.nodes[source])
        source = way[-1].parents[0] if way[-1].parents else None
    split = False
    for node in reversed(way):
        axes = _kind(node.value, sizes)
        if len(axes) == 4 and "3" not in axes and node.op in VIEWS | SWAPS:
            before = _kind(trace.nodes[node.parents[0]].value, sizes) if node.parents else ""
            usual = ("BHTD", "HBTD") if split else ("TBHD",) if before.startswith("TB") else ("BTHD",)
            if axes not in usual:
                return node.line
            split = True
    shaped = next((node.line for node in way if node.op in VIEWS | SWAPS and node.value.dim() >= 4), None)
    return shaped or _made(value, trace)


def _made(value: Tensor, trace: Trace, own: FrameType | None = None) -> int | None:
    """The line that gave a tensor its present shape; with `own`, a line of that function, which may call a helper."""
    node = trace.source(value)
    if node is None or own is None:
        return None if node is None else trace.nodes[node].line
    lines = {line for _, _, line in own.f_code.co_lines() if line is not None}
    return next((line for line in trace.nodes[node].stack if line in lines), None)


def _of_attributes(own: FrameType, names: set[str], sizes: CallSizes, text: str) -> int | None:
    """The line that sets an attribute, used in the failing statement, which is none of the sizes that there are."""
    owner = own.f_locals.get("self")
    held: dict[str, Any] = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    one = {sizes.B, sizes.H, sizes.T, sizes.S, sizes.D, sizes.Dv, sizes.E, sizes.out, sizes.context, 0, 1, 2, 3, -1}
    known = one | {sizes.H * sizes.Dv, 3 * sizes.E, 2 * sizes.E}
    meant = {n: constructor_role(n) for n in names if type(held.get(n)) is int}
    told = {n: role for n, role in meant.items() if role in MEANT and (len(n) > 1 or held[n] not in known)}
    wrong = [n for n, role in told.items() if held[n] != value_for(str(role), sizes)]
    odd = wrong or [n for n in meant if held[n] not in known]
    return _assignment(text, odd[0]) if odd else None


@functools.lru_cache(maxsize=4)
def _statements(text: str) -> list[ast.stmt]:
    try:
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    except (SyntaxError, ValueError):
        return []


def _names(text: str, line: int) -> set[str]:
    """Names and attributes in the smallest statement around a line."""
    around = [s for s in _statements(text) if s.lineno <= line <= (s.end_lineno or s.lineno)]
    if not around:
        return set()
    smallest = min(around, key=lambda s: (s.end_lineno or s.lineno) - s.lineno)
    return set(_loaded(smallest))


def _loaded(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _assignment(text: str, name: str) -> int | None:
    """The first line that assigns this attribute."""
    pattern = re.compile(rf"self\.{re.escape(name)}\b[^=\n]*=(?!=)")
    return next((n for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)), None)
