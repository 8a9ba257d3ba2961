"""Where in the learner's file a stage happens, and which number it used."""

from headwise.check.core import Core
from headwise.check.trace import PRODUCTS, Node, Trace

VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsafe_split", "split", "chunk", "unflatten"}
SCALES = {"mul", "div", "mul_", "div_", "baddbmm"}


def scale_line(trace: Trace, core: Core) -> int | None:
    """The line that scales the scores; without one, the line of the product."""
    node = core.softmax_nodes[0]
    for other in trace.ancestors(node.parents, PRODUCTS):
        if other.op in SCALES and other.numbers:
            return other.line
    return core.score_nodes[0].line


def projection_line(trace: Trace, core: Core, name: str) -> int | None:
    """The line that makes queries, keys or values out of the input."""
    node, side = (
        (core.value_nodes[0], -1 if core.weights_first else -2) if name == "value" else (core.score_nodes[0], -2)
    )
    side = -1 if name == "key" else side
    found = (n for n in trace.ancestors(node.operand_nodes[side:][:1]) if n.op in PRODUCTS and n.line is not None)
    return next((n.line for n in found), None)


def split_line(trace: Trace, core: Core) -> int | None:
    """The first view between projection and product."""
    sources = core.score_nodes[0].operand_nodes[-2:-1]
    views = [n for n in trace.ancestors(sources, PRODUCTS) if n.op in VIEWS and n.line != core.score_nodes[0].line]
    four = [n for n in views if n.value.dim() >= 4] or views
    return four[-1].line if four else core.score_nodes[0].line


def merge_line(trace: Trace, core: Core) -> int | None:
    """The last view between the values' product and the next product."""
    start = max(n.index for n in core.value_nodes)
    found: Node | None = None
    reached = trace.reaches(start)
    for node in trace.nodes[start + 1 :]:
        if node.op in PRODUCTS:
            break
        if node.index in reached and node.op in VIEWS and node.line != core.value_nodes[-1].line:
            found = node
            if node.value.dim() == 3:
                break
    return found.line if found else core.value_nodes[-1].line


def last_line(trace: Trace) -> int | None:
    """The last line of the learner's file that computed something."""
    return next((n.line for n in reversed(trace.nodes) if n.line is not None), None)


def dropout_line(trace: Trace) -> int | None:
    """The first line that draws random numbers."""
    random = ("native_dropout", "bernoulli_", "bernoulli", "rand_like", "rand", "dropout")
    return next((n.line for n in trace.nodes if n.op in random), None)


def rounding(trace: Trace, core: Core) -> Node | None:
    """Where scores lose their fractions on the way to the softmax."""
    before = trace.ancestors(core.softmax_nodes[0].parents, PRODUCTS)
    return next((n for n in before if n.op.rstrip("_") in ("floor_divide", "floor", "round", "trunc", "ceil")), None)


def idle_mask(trace: Trace, core: Core) -> Node | None:
    """A masking on the way to the softmax that hides nothing."""
    before = trace.ancestors(core.softmax_nodes[0].parents, PRODUCTS)
    fills = (n for n in before if n.op.rstrip("_") == "masked_fill" and len(n.operands) > 1)
    return next((n for n in fills if not bool(n.operands[1].any())), None)


def discarded_mask(trace: Trace, core: Core) -> Node | None:
    """A masking whose result nobody read."""
    for node in trace.nodes:
        if (
            node.op in ("masked_fill", "where", "masked_fill.Scalar")
            and node.value.shape[-2:] == core.softmax_nodes[0].value.shape[-2:]
        ):
            used = any(node.index in other.parents for other in trace.nodes[node.index + 1 :])
            if not used and node.value.dim() >= 2 and node.value.is_floating_point():
                return node
    return None
