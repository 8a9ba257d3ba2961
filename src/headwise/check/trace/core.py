"""One attention as (B, H, T, S), and the lines of the learner's file on which each stage of it happens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.check.trace.recorder import (
    ARITHMETIC,
    COMPARES,
    MOVES,
    PARTS,
    PRODUCTS,
    REPEATS,
    ROUNDING,
    SCALES,
    SOFTMAX,
    SWAPS,
    VIEWS,
    Node,
    Trace,
)

ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "elu", "leaky_relu", "softplus")

if TYPE_CHECKING:
    from headwise.check.trace.finder import AttentionNodes


def _has_numbers(x: Tensor, held: Tensor) -> bool:
    """Whether a tensor holds these sorted numbers, in any order of its axes."""
    return x.numel() == held.numel() and torch.equal(x.flatten().sort().values.to(held.dtype), held)


def _square(mask: Tensor) -> Tensor | None:
    """The one table (T, S) that a mask repeats; None where it holds several."""
    if mask.dim() < 2:
        return None
    tables = mask.reshape(-1, *mask.shape[-2:])
    return tables[0] if bool((tables == tables[0]).all()) else None


def _holds(value: Tensor, hidden: Tensor) -> bool:
    """Whether a tensor is this boolean table, or its opposite."""
    table = _square(value != 0) if value.dim() >= 2 and value.shape[-2:] == hidden.shape else None
    return table is not None and (torch.equal(table, hidden) or torch.equal(~table, hidden))


@dataclass
class Core:
    """One softmax (or one per head) and the products around it, as (B, H, T, S), with the lines of each stage."""

    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    weights: Tensor  # (B, H, T, S), as they meet the values
    softmax: Tensor | None  # (B, H, T, S), as they leave the softmax
    heads: Tensor  # (B, H, T, Dv)
    nodes: "AttentionNodes"
    weights_first: bool  # weights @ values, not valuesᵀ @ weightsᵀ
    order: str  # how batch and heads lie in the products' first axis

    @property
    def trace(self) -> Trace:
        return self.nodes.trace

    def with_heads_in_rows(self, T: int) -> "Iterator[Core]":
        """The same where all heads share keys and values and lie one after another in the rows: (B, 1, H·T, S)."""
        B, H, rows, _ = self.weights.shape
        if H != 1 or T == 0 or rows <= T or rows % T or self.query.shape[2] != rows:
            return
        key, value = (x.expand(B, rows // T, *x.shape[2:]) for x in (self.key, self.value))

        def split(x: Tensor, inner: bool) -> Tensor:
            made = x.reshape(B, *((rows // T, T) if inner else (T, rows // T)), x.shape[-1])
            return made if inner else made.transpose(1, 2)

        # Rows are (heads, tokens) or (tokens, heads); `einsum` may choose another order for each of its two products.
        for inner, later in ((True, True), (False, False), (True, False), (False, True)):
            softmax = None if self.softmax is None else split(self.softmax, later)
            query, weights, heads = split(self.query, inner), split(self.weights, later), split(self.heads, later)
            kind = f"{self.order}, heads in rows {inner} {later}"
            yield Core(query, key, value, weights, softmax, heads, self.nodes, self.weights_first, kind)

    @property
    def softmax_line(self) -> int | None:
        return self.nodes.softmax[0].line

    @property
    def score_line(self) -> int | None:
        """The line of the query-key product."""
        return self.nodes.scores[0].line

    def before_softmax(self) -> Iterator[Node]:
        """Operations between the query-key product and the softmax, last first."""
        return self.trace.ancestors(self.nodes.softmax[0].parents, PRODUCTS)

    def scale_line(self, total: float | None = None, right: float = 1.0) -> int | None:
        """The line that scales the scores; without one, the line of the product.

        Of several, the one without which a scale of `total` would be `right`; of none, one whose result is lost.
        """
        behind = [*self.trace.ancestors(self.nodes.scores[0].operand_nodes[-2:], PRODUCTS)]
        size = self.nodes.softmax[0].value.numel()
        between = [n for n in self.before_softmax() if n.value.numel() == size]  # not on the way to a mask
        steps = [n for n in (*between, *behind) if n.numbers and n.line is not None]
        scaled = [n for n in steps if n.op in SCALES]
        undone = [n for n in scaled if total and n.factor and abs(total / n.factor - right) <= 1e-4 * right]
        shifted = [n for n in steps if n.op.rstrip("_") in ("add", "sub", "pow") and n not in behind]
        inside = [n for n in scaled if n not in behind]
        found = undone or inside or shifted or scaled or self._lost_scales()
        return found[0].line if found else self.score_line

    def _lost_scales(self) -> list[Node]:
        """Operations that scale a table of scores and whose result nothing reads."""
        table = self.nodes.softmax[0].value.shape
        nodes = [n for n in self.trace.nodes if n.factor and n.value.shape == table and n.line is not None]
        read = {parent for n in self.trace.nodes for parent in n.parents}
        return [n for n in nodes if n.index not in read]

    def factor_line(self) -> int | None:
        """The line between the product with the values and the next product that multiplies with a number."""
        start = max(n.index for n in self.nodes.products)
        reached = self.trace.reaches(start)
        for node in self.trace.nodes[start + 1 :]:
            if node.index in reached and node.op in PRODUCTS:
                return None
            if node.index in reached and node.op in SCALES and node.numbers and node.line is not None:
                return node.line
        return None

    def behind(self, name: str, stop: set[str] | None = None) -> list[Node]:
        """Operations on the way to queries, keys or values, last first."""
        node, side = self.nodes.scores[0], -1 if name == "key" else -2
        if name == "value":
            node, side = self.nodes.products[0], -1 if self.weights_first else -2
        return [*self.trace.ancestors(node.operand_nodes[side:][:1], stop)]

    def _own_line(self, name: str, node: Node) -> int | None:
        """The innermost line of an operation that is on the way to this one of the three only: not in a helper."""
        others = {n.index for other in ("query", "key", "value") if other != name for n in self.behind(other)}
        theirs = {line for index in others for line in self.trace.nodes[index].stack}
        return next((line for line in node.stack if line not in theirs), None)

    def projection_line(self, name: str) -> int | None:
        """The line that makes queries, keys or values out of the input."""
        made = next((n for n in self.behind(name) if n.op in PRODUCTS and n.line is not None), None)
        return None if made is None else self._own_line(name, made) or made.line

    def is_made_with_others(self, name: str) -> bool:
        """Whether the line that projects this one of query, key and value, in a loop, projects another as well."""
        made = next((n for n in self.behind(name) if n.op in PRODUCTS and n.line is not None), None)
        others = {n.index for other in ("query", "key", "value") if other != name for n in self.behind(other)}
        return made is not None and made.index not in others and self._own_line(name, made) is None

    def reader(self, name: str) -> Node:
        """The product that reads queries, keys or values."""
        return (self.nodes.products if name == "value" else self.nodes.scores)[0]

    def use_line(self, name: str) -> int | None:
        """The last line that leads only to this one of query, key and value; without one, the product that reads it."""
        product = self.reader(name)
        own = (self._own_line(name, n) for n in self.behind(name) if n.line is not None)
        return next((line for line in own if line is not None), product.outer or product.line)

    def taken_line(self, name: str) -> int | None:
        """The last line between projection and product that takes a part of queries, keys or values."""
        behind = (n for n in self.behind(name, PRODUCTS) if n.op in PARTS and n.line not in (None, self.score_line))
        return next((n.line for n in behind if n.value.numel() < self.trace.nodes[n.parents[0]].value.numel()), None)

    @property
    def turned_after_softmax(self) -> bool:
        """Whether the product with the values reads the transpose of what left the softmax."""
        made, product = self.nodes.softmax[0].value, self.nodes.products[0]
        read = product.operands[self.nodes.sides[0] - 2]
        tables = [x.reshape(-1, *x.shape[-2:]) for x in (made, read)] if min(made.dim(), read.dim()) > 1 else []
        return len(tables) == 2 and tables[0].mT.shape == tables[1].shape and torch.equal(tables[0].mT, tables[1])

    def turned_line(self) -> int | None:
        """The last line between the scores and their product with the values that swaps queries and keys."""
        start, end = self.nodes.scores[0].index, self.nodes.products[0].index
        behind = self.trace.ancestors(self.nodes.products[0].operand_nodes[-2:])
        table = {self.weights.shape[-2], self.weights.shape[-1]}
        swaps = (n for n in behind if start < n.index < end and n.op in SWAPS and set(n.value.shape[-2:]) == table)
        return next((n.line for n in swaps if n.line is not None), self.score_line)

    def first_line(self, name: str) -> int | None:
        """The first line that does something to what becomes queries, keys or values."""
        behind = [n for n in self.behind(name) if n.line is not None]
        return (self._own_line(name, behind[-1]) or behind[-1].outermost) if behind else None

    def was_split_into(self, heads: int, width: int) -> bool:
        """Whether the view that split the queries put the numbers of a head last."""
        views = [n for n in self.behind("query", PRODUCTS) if n.op in VIEWS and n.value.dim() >= 4]
        return bool(views) and tuple(views[-1].value.shape[-2:]) == (heads, width)

    def last_step(self, name: str) -> int | None:
        """The last line that changes queries, keys or values before they are multiplied with the others."""
        behind = [n for n in self.behind(name, PRODUCTS) if n.line not in (None, self.score_line)]
        lines = (self._own_line(name, n) for n in behind)
        return next((line for line in lines if line is not None), None) or self.projection_line(name)

    def value_scale_line(self) -> int | None:
        """The line that scales the values between their projection and the product."""
        node, side = self.nodes.products[0], -1 if self.weights_first else -2
        behind = self.trace.ancestors(node.operand_nodes[side:][:1], PRODUCTS)
        return next((n.line for n in behind if n.op in SCALES and n.numbers and n.line is not None), None)

    def sharing_line(self, name: str = "key") -> int | None:
        """The line that gives keys or values to several heads."""
        made = self.score_line if name == "key" else self.nodes.products[0].line
        shared = [n for n in self.behind(name, PRODUCTS) if n.op in REPEATS and n.line not in (None, made)]
        return (self._own_line(name, shared[0]) or shared[0].line) if shared else made

    def earlier_softmax(self) -> Node | None:
        """A softmax of the scores before the one that gives the weights."""
        return next((n for n in self.before_softmax() if n.op in SOFTMAX), None)

    def after_softmax_line(self) -> int | None:
        """The line that changes the weights between softmax and values."""
        reached, end = self.trace.reaches(self.nodes.softmax[0].index), self.nodes.products[0].index
        steps = [n for n in self.trace.nodes[self.nodes.softmax[0].index + 1 : end] if n.index in reached]
        changed = (n.line for n in steps if n.op.rstrip("_") in ("masked_fill", "where", "mul", "div", "tril", "triu"))
        return next((line for line in changed if line is not None), self.softmax_line)

    def activation_line(self, name: str, kinds: set[str]) -> tuple[str, int | None]:
        """The name and line of an operation of these kinds between projection and product."""
        node = next(n for n in self.behind(name, PRODUCTS) if n.op in kinds)
        return node.op.strip("_"), self._own_line(name, node) or node.line

    def step_line(self, name: str, outermost: bool = False) -> int | None:
        """The last line, in any function, that computes with queries, keys or values after their projection."""
        behind = (n for n in self.behind(name, PRODUCTS) if n.op in ARITHMETIC and n.line != self.score_line)
        lines = (n.outermost if outermost else n.line for n in behind)
        return next((line for line in lines if line is not None), self.score_line)

    def bypass_line(self) -> int | None:
        """Where the result leaves the way of queries and keys without meeting the weights."""
        ends = [n for n in self.trace.returned if n is not None]
        earlier = {n.index for n in self.trace.ancestors([n.index for n in self.nodes.scores])}
        later = [n for n in self.trace.ancestors(ends[:1]) if n.index not in earlier and n.line is not None]
        return later[-1].line if later else None

    def same_step_line(self, name: str, other: str) -> int | None:
        """The line that does to one of the three, in a helper, what is also done to another."""
        theirs = {n.line for n in self.behind(other, PRODUCTS)}
        shared = [n for n in self.behind(name, PRODUCTS) if n.op in ARITHMETIC and n.line in theirs]
        lines = (self._own_line(name, n) for n in shared)
        helped = next((n.outermost for n in shared if n.outer is not None), None)  # in a loop over all three
        return next((line for line in lines if line is not None), None) or helped or self.last_step(name)

    def bias_line(self) -> int | None:
        """The line that adds something to the scores."""
        added = (n.line for n in self.before_softmax() if n.op.rstrip("_") in ("add", "sub") and n.line is not None)
        return next(added, self.softmax_line)

    def slope_line(self) -> int | None:
        """The line that multiplies distances with slopes: the last product of numbers that do not come from queries."""
        behind = {n.index for name in ("query", "key") for n in self.behind(name)}
        tables = [n for n in self.trace.nodes[: self.nodes.softmax[0].index] if n.index not in behind]
        size = self.weights.shape[-2] * self.weights.shape[-1]
        made = [n for n in tables if n.op.rstrip("_") in ("mul", "neg") and n.value.numel() % size == 0]
        made = [n for n in made if n.line is not None and not any(p in PRODUCTS for p in self._ops_behind(n))]
        return made[-1].line if made else None

    def _ops_behind(self, node: Node) -> set[str]:
        return {n.op for n in self.trace.ancestors([node.index])}

    def swap_line(self, last: int | None = None) -> int | None:
        """The last line between projection and product that swaps axes of the queries, with this size put last."""
        behind = (n for n in self.behind("query", PRODUCTS) if n.op in SWAPS and n.line not in (None, self.score_line))
        return next((n.line for n in behind if n.value.dim() >= 4 and last in (None, n.value.shape[-1])), None)

    def split_line(self, name: str = "query") -> int | None:
        """The line that mixes up the axes between projection and product, or else the view that makes the heads."""
        behind = [n for n in self.behind(name, PRODUCTS) if n.line != self.score_line and not self._is_of_layer(n)]
        views = [n for n in behind if n.op in VIEWS]
        four = [n for n in views if n.value.dim() >= 4] or views
        later = [n for n in reversed(behind) if four and n.index > four[-1].index]
        odd = next((n for n in later if n.op in SWAPS and self._axes(n) not in ("BHTD", "HBTD", "")), None)
        if odd is not None and sorted(self._axes(self.trace.nodes[odd.parents[0]])[-2:]) == ["D", "H"]:
            return odd.line  # the view was right, and the heads did not come before the tokens
        return four[-1].line if four else self.score_line

    def reordering_view(self, B: int, T: int) -> int | None:
        """The first view between projection and product that gives the axis of the tokens to something else."""
        for node in reversed(self.behind("query", PRODUCTS)):
            before = [self.trace.nodes[p].value.shape[:2] for p in node.parents[:1]]
            if node.op in VIEWS and before == [(B, T)] and node.value.dim() > 3 and node.value.shape[:2] != (B, T):
                return node.line
        return None

    def weight_line(self, weight: Tensor) -> int | None:
        """The line of the last product that reads these weights."""
        held = weight.detach().flatten().sort().values
        used = (n for n in reversed(self.trace.nodes) if n.op in PRODUCTS and n.line is not None)
        alike = (n for n in used if any(x.numel() == held.numel() for x in n.operands))
        return next((n.line for n in alike if any(_has_numbers(x, held) for x in n.operands)), None)

    def _is_of_layer(self, node: Node) -> bool:
        """Whether this only gives the result of a linear layer the shape of its input."""
        parents = [self.trace.nodes[p] for p in node.parents]
        return any(p.op in PRODUCTS and p.stack == node.stack for p in parents) and node.value.dim() <= 3

    def _axes(self, node: Node) -> str:
        """The axes of a tensor in letters, such as `BTHD`; empty where its sizes do not tell them apart."""
        (B, H, T, D), shape = self.heads.shape, tuple(node.value.shape)
        letters = {B: "B", H: "H", T: "T", D: "D"}
        if len(letters) < 4 or sorted(shape) != sorted(self.heads.shape):
            return ""
        return "".join(letters[size] for size in shape)

    def merge_line(self) -> int | None:
        """The line between the weights-value product and the next product that puts the axes into a wrong order.

        Without one, the view that joins the heads: what should come before it is missing.
        """
        start = max(n.index for n in self.nodes.products)
        reached, line = self.trace.reaches(start), self.nodes.products[-1].line
        for node in self.trace.nodes[start + 1 :]:
            if node.index not in reached:
                continue
            if node.op in PRODUCTS:
                break
            if node.op in SWAPS and self._axes(node) and self._axes(node)[-2:] != "HD":
                return node.line
            if node.op in VIEWS and (node.line != self.nodes.products[-1].line or node.value.dim() == 3):
                line = node.line
                if self._joins(node):
                    break
        return line

    def _joins(self, node: Node) -> bool:
        """Whether a view puts the heads side by side: (B, T, H·D) or (B·T, H·D)."""
        return node.value.dim() <= 3 and node.value.shape[-1] == self.heads.shape[1] * self.heads.shape[3]

    def writing_line(self) -> int | None:
        """The first line after the products that copies heads into a tensor that was made before them."""
        start = min(n.index for n in self.nodes.products)
        written = (n.line for n in self.trace.nodes[start:] if n.op in ("copy_", "add_", "index_put_") and n.line)
        return next(written, None)

    def output_line(self) -> int | None:
        """The line of the last product, which makes the output; without one, the last line that computes."""
        start = max(n.index for n in self.nodes.products)
        reached = self.trace.reaches(start)
        made = [n for n in self.trace.nodes[start + 1 :] if n.index in reached and n.op in PRODUCTS and n.line]
        return made[-1].line if made else self.trace.last_line()

    def mask_line(self, plain: Trace | None = None, moves: bool = False) -> int | None:
        """The last line before the softmax that masks something; `plain` is a trace without the mask, to leave out."""
        before = self.trace.nodes[: self.nodes.softmax[0].index]
        usual = set() if plain is None else {n.line for n in plain.nodes}
        new = [n for n in before if n.line is not None and n.line not in usual] if plain is not None else []
        if new:
            moved = [n.line for n in new if n.op in MOVES] if moves else []
            repeated = [n.line for n in new if n.op in REPEATS and n.value.dim() < 4] if moves else []
            moved = repeated[:1] or moved
            numbers = [n for n in new if n.value.is_floating_point()]
            filled = [n.line for n in numbers if n.op.rstrip("_") in ("masked_fill", "where", "add", "mul", "sub")]
            if moved or filled:
                return (moved or filled)[-1]
        masking = ("masked_fill", "where", "tril", "triu")
        last = next((n.line for n in reversed(before) if n.op.rstrip("_") in masking and n.line), None)
        made = new[-1].line if new else None
        return made if made is not None and last in usual else last or made

    def pattern_line(self, inverted: bool, nan: bool = False) -> int | None:
        """The line that made the wrong pattern of a mask: its table, or, where a right one was inverted, the masking.

        Going back from the masking operation, the table is the first tensor that holds the pattern or its opposite.
        """
        for masking in (n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where")):
            side = 1 if masking.op.startswith("masked_fill") else 0
            if len(masking.operands) <= side or not masking.operands[side].any():
                continue
            hidden = _square(masking.operands[side] != 0)
            behind = [n for n in self.trace.ancestors(masking.operand_nodes[side : side + 1]) if n.line is not None]
            alike = [n for n in behind if hidden is not None and _holds(n.value, hidden)]
            written = [n.line for n in behind if n.op in ("fill_", "copy_") and n.line != masking.line]
            if written and all(n.line == masking.line for n in alike):
                return written[0]  # entry by entry
            if hidden is not None and nan and not bool(hidden.all(-1).any()):
                return masking.line  # every row has a key left: it is the number that is written
            if hidden is not None:
                return (behind[0].line if behind and inverted else None) or (alike[-1].line if alike else masking.line)
        return None

    def mask_is_turned(self) -> bool:
        """Whether a mask is compared or inverted on its way to the scores."""
        masking = [n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where")]
        masks = [n.operand_nodes[1 if n.op.startswith("masked_fill") else 0] for n in masking if n.operand_nodes]
        return any(node.op in COMPARES for node in self.trace.ancestors(masks))

    def hides_rows(self) -> bool:
        """Whether some query has a score of minus infinity, or of one large number, for every key."""
        masking = [n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where", "add", "sub")]
        tables = [n.value for n in masking if n.value.shape[-2:] == self.weights.shape[-2:]]
        return any(bool((table <= -1e4).all(-1).any()) for table in tables)

    def bad_fill_line(self) -> int | None:
        """The line that writes NaN or plus infinity in place of scores."""
        fills = (n for n in self.before_softmax() if n.op.rstrip("_") in ("masked_fill", "where") and n.line)
        return next((n.line for n in fills if bool(n.value.isnan().any() | n.value.isposinf().any())), None)

    def activated_scores(self) -> Node | None:
        """An activation of the scores whose result, or a multiple of it, went through the softmax."""
        nodes = [n for n in self.before_softmax() if n.op.rstrip("_") in ACTIVATIONS]
        logits = self.weights.clamp_min(1e-300).log()
        a = logits - logits.mean(-1, keepdim=True)
        for node in (n for n in nodes if n.value.numel() == a.numel()):
            b = node.value.reshape(a.shape) - node.value.reshape(a.shape).mean(-1, keepdim=True)
            factor = (a * b).sum() / (b * b).sum().clamp_min(1e-300)
            if float((a - factor * b).norm()) <= 1e-6 * float(a.norm()):
                return node
        return None

    def rounding(self) -> Node | None:
        """Where scores are rounded to whole numbers before the softmax."""
        return next((n for n in self.before_softmax() if n.op.rstrip("_") in ROUNDING), None)

    def idle_mask(self) -> Node | None:
        """A masking operation before the softmax that hides nothing."""
        fills = (n for n in self.before_softmax() if n.op.rstrip("_") == "masked_fill" and len(n.operands) > 1)
        return next((n for n in fills if not bool(n.operands[1].any())), None)

    def sliced_mask_line(self) -> int | None:
        """The last line that takes a part of a stored table, before a masking operation that hides nothing."""
        idle = self.idle_mask()
        behind = [] if idle is None else self.trace.ancestors(idle.operand_nodes[1:2])
        return next((n.line for n in behind if n.op in PARTS and n.line is not None), None)

    def is_of_positions(self, masking: Node) -> bool:
        """Whether the mask of this operation was made from the numbers of the positions, or is a triangle."""
        behind = self.trace.ancestors(masking.operand_nodes[1:2])
        return any(n.op in ("arange", "tril", "triu") for n in behind)

    def is_constant(self, masking: Node) -> bool:
        """Whether the mask of this operation was made from sizes alone, without the input or anything stored."""
        source = masking.operand_nodes[1] if len(masking.operand_nodes) > 1 else None
        behind = list(self.trace.ancestors([source]))
        return source is not None and all(None not in node.operand_nodes for node in behind)

    def maker_line(self, masking: Node) -> int | None:
        """The first line of those that made the mask of this operation."""
        lines = (n.line for n in self.trace.ancestors(masking.operand_nodes[1:2]) if n.line is not None)
        return min(lines, default=None)

    def misaligned_position(self, masking: Node) -> int | None:
        """The line that numbers queries or keys along the wrong axis: `key <= query` needs (1, S) and (T, 1)."""
        compared = {"le": (0, 1), "lt": (0, 1), "ge": (1, 0), "gt": (1, 0)}
        for node in self.trace.ancestors(masking.operand_nodes[1:2]):
            if node.op in compared and len(node.parents) == 2:
                key, query = (self.trace.nodes[node.parents[i]] for i in compared[node.op])
                if query.value.dim() < 2 or query.value.shape[-1] != 1:
                    return query.line
                if key.value.dim() >= 2 and key.value.shape[-1] == 1:
                    return key.line
        return None

    def discarded_mask(self) -> Node | None:
        """A masking operation whose result is never used."""
        table, nodes = self.nodes.softmax[0].value.shape[-2:], self.trace.nodes
        masked = (n for n in nodes if n.op in ("masked_fill", "where") and n.value.is_floating_point())
        tables = (n for n in masked if n.value.dim() >= 2 and n.value.shape[-2:] == table)
        return next((n for n in tables if not any(n.index in m.parents for m in nodes[n.index + 1 :])), None)
