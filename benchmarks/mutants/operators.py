"""The mistakes a person could make, one function each: it gives places and the edits to make there."""

import ast
import itertools
import re
from collections.abc import Callable, Iterator

from mutants.mutate import Edit, Tree

Edits = Iterator[tuple[ast.AST, list[Edit]]]
AXES = (-3, -2, -1, 0, 1, 2, 3)
AXIS_CALLS = {
    "softmax", "Softmax", "transpose", "permute", "cat", "size", "chunk", "split", "unsqueeze", "flatten", "mean",
    "sum", "unbind", "stack", "unflatten", "repeat_interleave", "squeeze",
}  # fmt: skip
SIZE = re.compile(
    r"^([BCDEHLNST]|b|h|n|d|bsz|batch\w*|\w*_?len(gth)?|seq\w*|length|offset|num_\w+|n_\w+|d_\w+|dim\w*|heads|depth|sz_\w+"
    r"|\w+_dim|\w+_size|\w*head_size|hidden_size|embed_dim|dim_head|context_length|src_len|tgt_len)$"
)
LAYERS = re.compile(r"\b(Linear|Dropout|Softmax|Sequential|ModuleList|Parameter|ScaledDotProductAttention|Conv)\b")


def _called(node: ast.AST) -> str:
    """The last part of the name of the function called."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _kind(name: str, value: str = "") -> str:
    """What a name stands for: a layer, a size, or a tensor."""
    layer = LAYERS.search(value)
    if layer:
        return layer[1]
    return "size" if SIZE.match(name) and "nn." not in value else "other"


def _locals(tree: Tree, function: ast.FunctionDef) -> dict[str, str]:
    """The names of a function and their kinds."""
    names = [a.arg for a in function.args.args if a.arg != "self"]
    names += [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {name: _kind(name) for name in names if name != "_"}


def _attributes(tree: Tree, node: ast.AST) -> dict[str, str]:
    """The attributes of the class around a node and their kinds."""
    top = tree.enclosing(node, ast.ClassDef)
    found = {}
    for target in ast.walk(top) if top else ():
        if _is_self(target) and isinstance(target.ctx, ast.Store):
            statement = tree.statement(target)
            found[target.attr] = _kind(target.attr, tree.text(statement.value))
    return found


def _modules(tree: Tree) -> set[str]:
    """The names that imports bring."""
    return {(a.asname or a.name).split(".")[0] for n in ast.walk(tree.root)
            if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}  # fmt: skip


# Names.


def swap_name(tree: Tree) -> Edits:
    """Another local variable of the same kind."""
    for function in tree.functions():
        names = _locals(tree, function)
        for node in tree.nodes(ast.Name, function):
            if isinstance(node.ctx, ast.Load) and node.id in names:
                for other, kind in names.items():
                    if other != node.id and kind == names[node.id]:
                        yield node, [tree.edit(node, other)]


def swap_attribute(tree: Tree) -> Edits:
    """Another attribute of the same kind."""
    for node in tree.nodes(ast.Attribute):
        kinds = _attributes(tree, node) if _is_self(node) and isinstance(node.ctx, ast.Load) else {}
        for other, kind in kinds.items():
            if other != node.attr and kind == kinds.get(node.attr):
                yield node, [tree.edit(node, f"self.{other}")]


def misspell(tree: Tree) -> Edits:
    """An attribute, method, function or variable whose name is not quite right."""
    for node in tree.nodes((ast.Attribute, ast.Name)):
        if not isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node, ast.Attribute):
            yield node, [tree.edit(node, f"{tree.text(node.value)}.{_typo(node.attr)}")]
        elif node.id not in ("self", "super"):
            yield node, [tree.edit(node, _typo(node.id))]


def _typo(name: str) -> str:
    if "_" in name.strip("_"):
        return name.replace("_", "", 1)
    if len(name) <= 2:
        return name.swapcase()
    return name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name[:-1]


def missing_import(tree: Tree) -> Edits:
    """An import that was forgotten."""
    for node in tree.root.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, [tree.edit(node, "")]


# Calls.


def drop_call(tree: Tree) -> Edits:
    """A call left out: its object or first argument stands in its place."""
    for node in tree.nodes(ast.Call):
        name, inner = _called(node), None
        if isinstance(node.func, ast.Attribute) and not _is_self(node.func):
            root = node.func.value
            module = isinstance(root, ast.Name) and root.id in _modules(tree)
            inner = node.args[0] if module and node.args else None if module else root
        elif node.args:
            inner = node.args[0]
        if inner is not None and name not in ("super", "range", "__init__", "register_buffer"):
            yield node, [tree.edit(node, tree.text(inner))]


def add_call(tree: Tree) -> Edits:
    """A call too much: detach, a transposition, a projection or dropout once more."""
    for node in tree.nodes((ast.Assign, ast.Return)):
        function = tree.enclosing(node, ast.FunctionDef)
        if node.value is None or function is None or function.name == "__init__" or isinstance(node.value, ast.Tuple):
            continue
        single = isinstance(node, ast.Return) or isinstance(node.targets[0], ast.Name)
        if single and (isinstance(node, ast.Return) or _kind(node.targets[0].id) == "other"):
            for before, after in _additions(tree, node):
                yield node, [tree.insertion(node.value, f"{before}(", f"){after}")]
    for node in tree.nodes(ast.Name):
        function = tree.enclosing(node, ast.FunctionDef)
        if isinstance(node.ctx, ast.Load) and function and function.name != "__init__" and "mask" in node.id:
            yield node, [tree.insertion(node, "", ".transpose(-2, -1)")]
            yield node, [tree.insertion(node, "~", "")]
            yield node, [tree.insertion(node, "", "[:1]")]
            yield node, [tree.insertion(node, "", ".float()")]


def _additions(tree: Tree, node: ast.AST) -> Iterator[tuple[str, str]]:
    yield "", ".detach()"
    yield "", ".transpose(-2, -1)"
    yield "", ".softmax(-1)"
    yield "", ".relu()"
    yield "2 * ", ""
    for name, kind in _attributes(tree, node).items():
        if kind in ("Linear", "Dropout", "Sequential"):
            yield f"self.{name}", ""


def drop_argument(tree: Tree) -> Edits:
    """A keyword argument, or the last argument by position, left out."""
    for node in tree.nodes(ast.Call):
        arguments = [*node.args, *node.keywords]
        for index, argument in enumerate(arguments):
            if index < len(node.args) - 1 or len(arguments) == 1:
                continue
            start, end = tree.span(argument)
            if index + 1 < len(arguments):
                end = tree.span(arguments[index + 1])[0]
            elif index:
                start = tree.span(arguments[index - 1])[1]
            yield argument, [Edit(start, end, "")]


def swap_arguments(tree: Tree) -> Edits:
    """Two neighbors exchanged: arguments, elements of a tuple or list, targets, keyword values."""
    for node in tree.nodes((ast.Call, ast.Tuple, ast.List)):
        items = node.args if isinstance(node, ast.Call) else node.elts
        yield from _exchanged(tree, node, items)
        if isinstance(node, ast.Call):
            yield from _exchanged(tree, node, [k.value for k in node.keywords])
    for node in tree.nodes(ast.BinOp):
        if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div | ast.Pow | ast.FloorDiv):
            yield from _exchanged(tree, node, [node.left, node.right])


def _exchanged(tree: Tree, node: ast.AST, items: list[ast.AST]) -> Edits:
    for i, one in enumerate(items):
        for two in items[i + 1 :]:
            if isinstance(one, ast.Starred) or isinstance(two, ast.Starred):
                continue
            yield node, [tree.edit(one, tree.text(two)), tree.edit(two, tree.text(one))]


def swap_calls(tree: Tree) -> Edits:
    """Two neighbors in a chain of methods exchanged, or a chain that lost its order."""
    for node in tree.nodes(ast.Call):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            middle, last = tree.span(inner.func.value)[1], tree.span(inner)[1]
            one, two = tree.bytes[middle:last].decode(), tree.bytes[last : tree.span(node)[1]].decode()
            yield node, [Edit(middle, tree.span(node)[1], two + one)]


SIMILAR = {
    "view": ("reshape", "transpose"), "reshape": ("view",), "triu": ("tril",), "tril": ("triu",),
    "masked_fill": ("masked_fill_",), "masked_fill_": ("masked_fill",), "softmax": ("log_softmax", "sigmoid"),
    "repeat_interleave": ("repeat",), "matmul": ("mul",), "cat": ("stack",), "ones": ("zeros",), "zeros": ("ones",),
    "sqrt": ("exp", "log"), "cos": ("sin",), "sin": ("cos",), "max": ("min",), "min": ("max",), "mean": ("sum",),
    "unflatten": ("view",),
}  # fmt: skip


def similar_call(tree: Tree) -> Edits:
    """A function that looks much the same."""
    for node in tree.nodes(ast.Attribute):
        for other in SIMILAR.get(node.attr, ()):
            yield node, [tree.edit(node, f"{tree.text(node.value)}.{other}")]


# Numbers.


def _number(node: ast.AST) -> int | float | None:
    """The value of a literal number, minus included."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    return None


def _numbers(tree: Tree) -> Iterator[tuple[ast.AST, int | float]]:
    for node in tree.nodes((ast.UnaryOp, ast.Constant)):
        value = _number(node)
        if value is not None and not (isinstance(tree.parents[node], ast.UnaryOp) and _number(tree.parents[node])):
            yield node, value


def _is_axis(tree: Tree, node: ast.AST) -> bool:
    parent = tree.parents[node]
    if isinstance(parent, ast.keyword):
        return parent.arg == "dim"
    if isinstance(parent, ast.Subscript) and parent.slice is node:
        return True
    return isinstance(parent, ast.Call) and _called(parent) in AXIS_CALLS


def wrong_axis(tree: Tree) -> Edits:
    """Another axis."""
    for node, value in _numbers(tree):
        if _is_axis(tree, node):
            for other in AXES:
                if other != value:
                    yield node, [tree.edit(node, str(other))]


def off_by_one(tree: Tree) -> Edits:
    """One more or one less: numbers that are no axes, ends of slices, diagonals, ranges, sizes in shapes."""
    for node, value in _numbers(tree):
        if type(value) is int and not _is_axis(tree, node):
            for other in (value - 1, value + 1):
                yield node, [tree.edit(node, str(other))]
    for node in tree.nodes(ast.Slice):
        for end in (node.lower, node.upper):
            if end is not None and _number(end) is None:
                for more in (" - 1", " + 1"):
                    yield node, [tree.insertion(end, "", more)]
    for node in tree.nodes(ast.Call):
        if _called(node) in ("tril", "triu") and not node.keywords:
            for diagonal in ("-1", "1"):
                end = tree.span(node)[1] - 1
                bare = not node.args
                yield node, [Edit(end, end, f"diagonal={diagonal}" if bare else f", diagonal={diagonal}")]
        if _called(node) in ("range", "arange", "Linear") and node.args:
            yield node, [tree.insertion(node.args[-1], "", " + 1")]


def wrong_constant(tree: Tree) -> Edits:
    """Another number, flag or string."""
    for node, value in _numbers(tree):
        if type(value) is float:
            for other in _other_floats(value):
                yield node, [tree.edit(node, other)]
    for node in tree.nodes(ast.Constant):
        if isinstance(node.value, bool):
            yield node, [tree.edit(node, str(not node.value))]
        elif node.value in ("-inf", "inf"):
            for other in ('"inf"', "0", '"nan"', "-1e9", "-1"):
                yield node, [tree.edit(node, other)]
    for node in tree.nodes(ast.Attribute):
        if node.attr == "inf" and isinstance(tree.parents[node], ast.UnaryOp):
            for other in (tree.text(node), "-1e9", "0.0", "-1.0"):
                yield node, [tree.edit(tree.parents[node], other)]


def _other_floats(value: float) -> Iterator[str]:
    if abs(value) >= 1e4:
        yield from ("-1e-9", "1e9", "0", "-1", "-1e4", 'float("-inf")')
    elif abs(value) == 0.5:
        yield from (str(-value), "1", "2", "0.25")
    elif value != 0:
        yield from (str(-value), str(value * 2), "0.0")


# Operators and branches.

BINARY = {
    ast.Mult: ("/", "+"), ast.Div: ("*", "//", "-"), ast.Add: ("-", "*"), ast.Sub: ("+",), ast.MatMult: ("*",),
    ast.Pow: ("*", "/"), ast.FloorDiv: ("*", "/", "%"), ast.Mod: ("//",), ast.BitOr: ("&", "^"), ast.BitAnd: ("|",),
}  # fmt: skip
COMPARISON = {
    ast.Eq: ("!=", ">"), ast.NotEq: ("==",), ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="), ast.Is: ("is not",), ast.IsNot: ("is",),
}  # fmt: skip


def wrong_operator(tree: Tree) -> Edits:
    """Another operator, or one left out."""
    for node in tree.nodes(ast.BinOp):
        for other in BINARY.get(type(node.op), ()):
            yield node, [_between(tree, node.left, node.right, other)]
        yield node, [tree.edit(node, tree.text(node.left))]
    for node in tree.nodes(ast.AugAssign):
        for other in BINARY.get(type(node.op), ()):
            yield node, [_between(tree, node.target, node.value, f"{other}=")]
    for node in tree.nodes(ast.Compare):
        for other in COMPARISON.get(type(node.ops[0]), ()):
            yield node, [_between(tree, node.left, node.comparators[0], other)]
        if isinstance(node.ops[0], ast.Eq) and _number(node.comparators[0]) is not None:
            yield node, [tree.edit(node.comparators[0], "1")]
    for node in tree.nodes(ast.UnaryOp):
        if isinstance(node.op, ast.Invert | ast.Not | ast.USub) and _number(node) is None:
            yield node, [tree.edit(node, tree.text(node.operand))]


def _between(tree: Tree, left: ast.AST, right: ast.AST, operator: str) -> Edit:
    """The operator between two operands replaced, parentheses left alone."""
    start, end = tree.span(left)[1], tree.span(right)[0]
    text = tree.bytes[start:end].decode()
    return Edit(start, end, re.sub(r"[^\s()]+(\s+not)?", operator, text, count=1))


def wrong_branch(tree: Tree) -> Edits:
    """A condition negated, fixed, or asked in another way; everything after it moved into its branch."""
    for node in tree.nodes((ast.If, ast.IfExp)):
        test = tree.text(node.test)
        for other in (f"not ({test})", "True", "False"):
            yield node.test, [tree.edit(node.test, other)]
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.IsNot):
            yield node.test, [tree.edit(node.test, tree.text(node.test.left))]
        if isinstance(node, ast.IfExp):
            yield from _exchanged(tree, node, [node.body, node.orelse])
        else:
            yield from _moved_inside(tree, node)


def _moved_inside(tree: Tree, node: ast.If) -> Edits:
    """The statements after an `if` indented into it."""
    body = getattr(tree.parents[node], "body", [])
    after = body[body.index(node) + 1 :] if node in body else []
    if after:
        first, last = tree.starts[after[0].lineno - 1], tree.span(after[-1])[1]
        text = tree.bytes[first:last].decode()
        yield after[-1], [Edit(first, last, re.sub(r"^(?=.*\S)", "    ", text, flags=re.MULTILINE))]


def wrong_mode(tree: Tree) -> Edits:
    """Training and evaluation confused, and layers that nobody registers."""
    for node in tree.nodes(ast.Attribute):
        if node.attr == "training" and _is_self(node):
            for other in ("not self.training", "True", "False"):
                yield node, [tree.edit(node, other)]
    for node in tree.nodes(ast.Call):
        name, kinds = _called(node), _attributes(tree, node)
        if _is_self(node.func) and kinds.get(name) == "Dropout":
            yield node, [tree.edit(node.func, "nn.Dropout(0.4)")]
            yield node, [tree.edit(node.func, "nn.functional.dropout")]
        if _is_self(node.func) and kinds.get(name) == "Linear" and node.args:
            width = f"{tree.text(node.args[0])}.size(-1)"
            yield node, [tree.edit(node.func, f"nn.Linear({width}, {width})")]
        if name == "register_buffer":
            yield node, [tree.edit(node, f"self.{node.args[0].value} = {tree.text(node.args[1])}")]
            yield node, [tree.edit(node, f"self.{node.args[0].value} = nn.Parameter({tree.text(node.args[1])})")]
        if name in ("ModuleList", "Parameter") and node.args:
            yield node, [tree.edit(node, tree.text(node.args[0]))]
        if name == "ModuleList" and isinstance(node.args[0], ast.ListComp):
            comp = node.args[0]
            yield node, [tree.edit(comp, f"[{tree.text(comp.elt)}] * {tree.text(comp.generators[0].iter.args[0])}")]


# Statements.


def _blocks(tree: Tree) -> Iterator[list[ast.stmt]]:
    for node in tree.nodes((ast.FunctionDef, ast.If, ast.For)):
        yield node.body
        if getattr(node, "orelse", None):
            yield node.orelse


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def delete_statement(tree: Tree) -> Edits:
    """A statement left out, or its result thrown away."""
    for block in _blocks(tree):
        for node in block:
            if _is_docstring(node):
                continue
            alone = len([other for other in block if not _is_docstring(other)]) == 1
            yield node, [tree.edit(node, "pass" if alone else "")]
            if isinstance(node, ast.Assign):
                yield node, [tree.edit(node, tree.text(node.value))]
            if isinstance(node, ast.Return) and node.value is not None:
                yield node, [tree.edit(node, tree.text(node.value))]


def swap_statements(tree: Tree) -> Edits:
    """A statement moved behind one of the next three."""
    for block in _blocks(tree):
        body = [node for node in block if not _is_docstring(node)]
        for i in range(len(body)):
            for count in range(2, 5):
                if len(moved := body[i : i + count]) == count:
                    yield moved[0], [_rotated(tree, moved)]


def _rotated(tree: Tree, nodes: list[ast.stmt]) -> Edit:
    """The first of some statements moved behind the last, with as many lines as before."""
    spans = [tree.span(node) for node in nodes]
    gaps = [tree.bytes[one[1] : two[0]].decode() for one, two in itertools.pairwise(spans)]
    texts = [tree.text(node) for node in nodes]
    rest = "".join(text + gap for text, gap in zip(texts[1:], [*gaps[1:], gaps[0]], strict=True))
    return Edit(spans[0][0], spans[-1][1], rest + texts[0])


def repeat_statement(tree: Tree) -> Edits:
    """A statement made twice, in one line so that the numbers stay."""
    for block in _blocks(tree):
        for node in block:
            if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not _is_docstring(node):
                yield node, [tree.insertion(node, "", "; " + tree.text(node))]


# Patterns in strings.


def wrong_pattern(tree: Tree) -> Edits:
    """Letters exchanged in the pattern of einsum or einops."""
    for node in tree.nodes(ast.Constant):
        if isinstance(node.value, str) and "->" in node.value:
            words = list(re.finditer(r"[a-z]" if " " not in node.value else r"\w+", node.value))
            for i, one in enumerate(words):
                for two in words[i + 1 : i + 5]:
                    if one[0] != two[0]:
                        text = list(node.value)
                        text[one.start()], text[two.start()] = two[0], one[0]
                        yield node, [tree.edit(node, '"' + "".join(text) + '"')]
            for one in words:
                for other in sorted({w[0] for w in words} - {one[0]}):
                    text = node.value[: one.start()] + other + node.value[one.end() :]
                    yield node, [tree.edit(node, f'"{text}"')]


OPERATORS: dict[str, Callable[[Tree], Edits]] = {
    "missing-import": missing_import, "swap-name": swap_name, "swap-attribute": swap_attribute, "misspell": misspell,
    "drop-call": drop_call, "add-call": add_call, "drop-argument": drop_argument, "swap-arguments": swap_arguments,
    "swap-calls": swap_calls, "similar-call": similar_call, "wrong-axis": wrong_axis, "off-by-one": off_by_one,
    "wrong-constant": wrong_constant, "wrong-operator": wrong_operator, "wrong-branch": wrong_branch,
    "wrong-mode": wrong_mode, "delete-statement": delete_statement, "swap-statements": swap_statements,
    "repeat-statement": repeat_statement, "wrong-pattern": wrong_pattern,
}  # fmt: skip
