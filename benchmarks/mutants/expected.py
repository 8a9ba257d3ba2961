"""What a report should say about a mutant: the mistakes that describe it, and the lines where it was made.

Names are given by how they begin, so that a new row in the checker's table counts when it belongs to the same subject.
"""

import ast
import re

from mutants.drivers import source_of
from mutants.mutate import Mutant

SHAPES = (
    "split-", "merge-", "attends-over-", "batch-", "single-head", "sees-a-part", "tokens-alone", "heads-", "too-wide",
    "contiguous", "cross-length", "wrong-role", "scores-transposed", "size", "sizes", "d_in",
    "width", "output-width", "head-width",
)  # fmt: skip
ROLES = (
    "wrong-role", "scores-transposed", "one-projection", "no-out-proj", "no-qkv-proj", "dead-parameter",
    "heads-share", "output-", "out-", "layers-in", "project", "input-", "no-gradient", "tokens-alone", "unused-",
    "attention-unused", "bias-",
)  # fmt: skip
CRASHES = (
    "crashes", "undefined-", "missing-", "contiguous", "mask-crashes", "cross-length", "grouped-", "buffer-",
    "beyond-buffer", "backward-", "no-return", "sizes", "size", "option-", "not-called", "misspelled-", "float-size",
    "root-of-number", "tensor-as-condition", "unknown-name", "product-axes", "view-sizes", "joined-", "wrong-arguments",
)  # fmt: skip
RETURNS = ("no-return", "weights-", "returned", "returns", "output-", "scores-")

# What the changed lines speak of, and the mistakes that they can hold.
SUBJECTS = (
    (r"sqrt|scal|temperature|0\.5", ("scale",)),
    (r"softmax|attend\b", ("softmax", "attends-over", "weights", "scale", "mask-after", "merge-")),
    (r"mask|tril|triu|inf\b|hidden|allowed|causal|future|rows|cols|offset|total_len",
     ("mask", "causal", "buffer-", "nan-", "batch-", "cross-length", "padding", "fully-", "option-")),
    (r"view|shape|transpose|permute|rearrange|flatten|chunk|split|einsum|unbind|cat|size|//|len|\bmT\b|bmm|matmul|@",
     SHAPES),
    (r"Linear|Parameter|proj|W_|\bw[qkvo]\b|to_|query|key|value|dense|\bfc\b|einsum|matmul|@|\b[qkvQKV]\b", ROLES),
    (r"ropout|training", ("dropout", "training", "no-gradient", "option-")),
    (r"cos|sin|rotar|angles|freqs|rotate|base", ("rotary", "position")),
    (r"detach|no_grad", ("no-gradient", "gradient-", "dead-parameter", "weights-", "detach")),
    (r"return|attn|weights|attention", RETURNS),
    (r"repeat|num_groups|num_kv", ("grouped-", "heads-")),
    (r"past|cache", ("cache", "causal", "cross-length")),
    (r"ModuleList|register_buffer|Parameter", ("layers-", "not-a-buffer", "missing-", "heads-share", "dead-")),
    (r"relu|2 \*", ("extra", "scale", "activation", "values-", "softmax-")),
)  # fmt: skip

BY_OPERATOR = {
    "missing-import": ("missing-import", "undefined-"),
    "misspell": ("missing-", "undefined-", "unknown-name", "misspelled-", "crashes", "mask-crashes"),
    "swap-name": ROLES, "swap-attribute": ROLES, "swap-arguments": ROLES,
    "drop-call": (), "add-call": ROLES, "delete-statement": ROLES, "repeat-statement": ROLES,
    "wrong-branch": (*RETURNS, "mask", "causal", "dropout", "option-", "wrong-role", "scores-transposed"),
    "wrong-mode": ("layers-", "dropout", "not-a-buffer"),
    "swap-statements": ROLES,
}  # fmt: skip
ALWAYS = ("unexplained", "differs", "not-attention", "certificate")  # findings that show numbers instead of a cause


def beginnings(mutant: Mutant, reason: str) -> tuple[str, ...]:
    """How the names of fitting mistakes begin. `reason` is that of the truth."""
    operators = mutant.operator.split(" + ")
    found = [prefix for operator in operators for prefix in BY_OPERATOR.get(operator, ())]
    if operators[0] in ("missing-import", "misspell") and len(operators) == 1:
        return tuple(found)
    text = changed_text(mutant)
    for pattern, prefixes in SUBJECTS:
        if re.search(pattern, text):
            found += prefixes
    if re.search(r"raises|Error", reason):
        found += CRASHES
    return tuple(dict.fromkeys([*found, *ALWAYS]))


def changed_text(mutant: Mutant) -> str:
    """The changed lines, before and after."""
    old = source_of(mutant.style).splitlines() if mutant.style else []
    new = mutant.source.splitlines()
    return "\n".join(lines[n - 1] for lines in (old, new) for n in mutant.lines if n <= len(lines))


def accepted_lines(mutant: Mutant, reason: str) -> set[int]:
    """Where the mistake was made, and where it shows: the line that raises, uses of what it set up, a gap's edges."""
    raised = re.search(r"\(line (\d+)\)", reason)
    return {*mutant.lines, *([int(raised[1])] if raised else []), *_uses(mutant), *_around_gap(mutant)}


def _around_gap(mutant: Mutant) -> set[int]:
    """For a statement that was left out or moved away: the lines between which it should stand."""
    if not re.search("delete-statement|swap-statements", mutant.operator):
        return set()
    filled = [n for n, text in enumerate(mutant.source.splitlines(), 1) if text.strip()]
    before = [n for n in filled if n < mutant.line][-1:]
    return {*before, *[n for n in filled if n >= mutant.line][:1]}


def _uses(mutant: Mutant) -> set[int]:
    """The lines that read an attribute or an import whose statement was changed, or a name whose statement is gone."""
    old = ast.parse(source_of(mutant.style))
    changed = [n for n in ast.walk(old) if isinstance(n, ast.Assign | ast.Import | ast.ImportFrom | ast.Expr)]
    changed = [n for n in changed if {*range(n.lineno, n.end_lineno + 1)} & {mutant.line}]
    gone = "delete" in mutant.operator
    names = {name for node in changed for name in _set_names(node, gone)}
    return {n.lineno for n in ast.walk(ast.parse(mutant.source)) if _read_name(n) in names}


def _set_names(node: ast.AST, gone: bool) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).split(".")[0] for a in node.names}
    stored = [n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store)]
    found = {f"self.{n.attr}" for n in stored if isinstance(n, ast.Attribute)}
    found |= {n.id for n in stored if isinstance(n, ast.Name) and gone}
    if isinstance(node, ast.Expr) and "register_buffer" in ast.unparse(node):
        found |= {f"self.{n.value}" for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


def _read_name(node: ast.AST) -> str:
    if not isinstance(getattr(node, "ctx", None), ast.Load):
        return ""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def fits(mutant: Mutant, reason: str, cause: str | None) -> bool:
    """Whether a mistake's name describes the mutant."""
    return cause is not None and cause.startswith(beginnings(mutant, reason))
