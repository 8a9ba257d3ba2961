"""Code that does not run as it is: what its text shows, what had to be repaired, and which error is the learner's own.

Where nothing ran, `judge_unbound` writes the whole report: an error is a mistake only where it is certainly not ours.
"""

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from headwise.check.arguments import constructor_role, flags_asked_of, parameters_of
from headwise.check.binding import Bound, Failure
from headwise.check.calls import PLAIN, leaves
from headwise.check.code.case import Case
from headwise.check.code.intent import states_no_tokens, states_one_token
from headwise.check.code.names import globals_read, imports_missing_in_siblings, names_used, stand_ins_used
from headwise.check.code.stubs import StubBase, StubLayer
from headwise.check.environment import Repaired
from headwise.check.explain import nearest
from headwise.check.mistakes import Finding, Found, settled
from headwise.check.objects import described
from headwise.check.reading import AttentionReading
from headwise.check.report import Report
from headwise.check.trace import PRODUCTS, SWAPS, VIEWS

INDIRECT = {"setattr", "vars", "__dict__", "__getattr__", "exec", "eval", "locals", "globals"}  # other ways to set
REGISTERING = {"register_buffer", "register_parameter", "add_module", "register_module"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
CERTAIN = (NameError, AttributeError, TypeError, IndexError, KeyError, UnboundLocalError, ZeroDivisionError)
ARGUMENTS = re.compile(r"(?:\w+\.)*(\w+)\(\) (?:missing|takes) ")
OUR_CALLS = {"forward", "__init__", "__call__"}
SEVERAL = 4  # guesses, of numbers and of None
EMPTY_VIEW = re.compile(r"shape '\[([^\]]*, )?0[,\]].* is invalid for input of size")
OF_PICTURES = "1, 1], expected input"  # a layer for pictures refuses what we passed
# Perhaps we passed something of another kind.
OURS = (
    "values to unpack", "config has no", "NoneType", "Stub", "is not callable", "'dict' object", "PerLayer", "stand-in",
    "non-iterable", "not subscriptable", "scalar types", "no rule registered",
)  # fmt: skip


def text_findings(case: Case) -> list[Finding]:
    """Attributes and names that are certainly missing, and a missing `super().__init__()`."""
    if case.loaded is None:
        return []
    tree = ast.parse(case.loaded.source)
    found: list[Finding] = []
    definition = definition_of(tree, case.target.__name__) if inspect.isclass(case.target) else None
    if definition is not None and _inherits_only_torch(case.target):
        derived = [other for name in case.derived() if (other := definition_of(tree, name)) is not None]
        elsewhere = {name for other in derived for name in _set_attributes(other)}
        found += [*_missing_super(definition, case.target), *_unset_attributes(definition, case.target, elsewhere)]
    return [*found, *_undefined_names(tree, case)]


def definition_of(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """The last class of this name at module level."""
    return next((n for n in reversed(tree.body) if isinstance(n, ast.ClassDef) and n.name == name), None)


def missing_base(case: Case) -> Iterator[Finding]:
    """A class with a forward method and layers of torch that is no nn.Module."""
    if case.loaded is None or not inspect.isclass(case.target) or case.target.__mro__[1:] != (object,):
        return
    definition = definition_of(ast.parse(case.loaded.source), case.target.__name__)
    methods = {n.name: n for n in definition.body if isinstance(n, Function)} if definition is not None else {}
    if definition is None or "forward" not in methods or "__init__" not in methods or "__call__" in methods:
        return
    made = [n.func for n in ast.walk(methods["__init__"]) if isinstance(n, ast.Call)]
    layers = [f for f in made if isinstance(f, ast.Attribute) and getattr(f.value, "id", "") == "nn"]
    own = [f for f in made if isinstance(f, ast.Attribute) and f.attr in REGISTERING]
    if layers or own:
        yield Finding("missing-base", "it has a forward method and layers of torch.nn", definition.lineno)


def _inherits_only_torch(cls: type) -> bool:
    return all(base is object or base.__module__.startswith("torch.") for base in cls.__mro__[1:])


def _missing_super(definition: ast.ClassDef, cls: type) -> Iterator[Finding]:
    init = next((n for n in definition.body if isinstance(n, Function) and n.name == "__init__"), None)
    if init is not None and issubclass(cls, nn.Module):
        names = {getattr(n, "id", None) or getattr(n, "attr", None) for n in ast.walk(init)}
        if not names & {"super", "__init__"}:
            yield Finding("missing-super", "", init.lineno)


def _unset_attributes(definition: ast.ClassDef, cls: type, elsewhere: set[str]) -> Iterator[Finding]:
    """Attributes that are read and set neither here nor `elsewhere`, in the classes that inherit from this one."""
    words = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(definition) if isinstance(n, ast.Attribute)}
    assigned = set(_set_attributes(definition)) | elsewhere
    if words & INDIRECT or "*" in assigned:
        return
    known = set(dir(cls)) | set(dir(nn.Module())) | {"training"} | assigned | set(_guarded_attributes(definition))
    read = [node for node in _of_self(definition) if isinstance(node.ctx, ast.Load) and node.attr not in known]
    missing: dict[str, int] = {}
    for node in sorted(read, key=lambda node: node.lineno):
        missing.setdefault(node.attr, node.lineno)
    if missing:
        yield Finding("missing-attribute", _attributes(missing, definition), min(missing.values()))


def _attributes(names: Iterable[str], definition: ast.ClassDef | None) -> str:
    """Attributes that were never set, each with the one that was probably meant."""
    known = set() if definition is None else {*_set_attributes(definition)} - {*names}
    near = {name: nearest(name, known) for name in names}
    return ", ".join(f"self.{name}" + (f" (did you mean self.{near[name]}?)" if near[name] else "") for name in names)


def _of_self(definition: ast.ClassDef) -> Iterator[ast.Attribute]:
    for method in definition.body:
        if isinstance(method, Function) and method.args.args and not _is_static(method):
            first = method.args.args[0].arg
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == first:
                    yield node


def _is_static(method: Function) -> bool:
    return any(getattr(d, "id", "") in ("staticmethod", "classmethod") for d in method.decorator_list)


def _set_attributes(definition: ast.ClassDef) -> Iterator[str]:
    """Names of attributes that are assigned or registered; `*` for one that is put together at run time."""
    yield from (node.attr for node in _of_self(definition) if not isinstance(node.ctx, ast.Load))
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REGISTERING:
            named = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
            yield from (str(n.value) if isinstance(n, ast.Constant) else "*" for n in named)


def _guarded_attributes(definition: ast.ClassDef) -> Iterator[str]:
    """Names in `hasattr(self, "…")` and `getattr(self, "…", …)`."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            yield from (str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant))


def _undefined_names(tree: ast.Module, case: Case) -> Iterator[Finding]:
    """Names that the class looks up in its module and that no line of the file binds anywhere."""
    if any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in ast.walk(tree)):
        return
    bound = set(dir(builtins)) | set(bound_names(tree)) | {"__file__", "__name__", "__class__"}
    bound |= set() if case.loaded is None else set(case.loaded.missing_imports)  # reported as missing imports
    bound |= {"self"} & set(case.namespace)  # of a fragment, which is given an object
    missing = {name: line for name, line in globals_read(case.target).items() if name not in bound}
    if missing:
        yield Finding("undefined-name", _named(missing, case), min(missing.values()))


def _named(names: Iterable[str], case: Case) -> str:
    """Names that are not defined, each with what was probably meant."""
    return ", ".join(f"{name}{_meant(name, case)}" for name in names)


def _meant(name: str, case: Case) -> str:
    """What a name that is not defined was probably meant to be, in words; empty where nothing is near."""
    tree = case.whole_tree
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    registered = [n.args[0] for n in calls if n.args and getattr(n.func, "attr", "") in REGISTERING]
    if any(isinstance(first, ast.Name) and first.id == name for first in registered):
        return f' (a name that is registered stands in quotes: "{name}")'
    definition = definition_of(tree, getattr(case.target, "__name__", ""))
    if definition is not None and name in set(_set_attributes(definition)):
        return f" (self.{name} is set; self. is missing here)"
    near = nearest(name, {*bound_names(tree), *(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg))} - {name})
    return f" (did you mean {near}?)" if near else ""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names that the code gives a value anywhere, other than arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


# What had to be supplied or repaired before it ran.


def supplied(bound: Bound, reading: AttentionReading | None) -> Found:
    """Imports that were forgotten, and names that only the demo code defines."""
    yield from _supplied(bound.case)
    yield from missing_base(bound.case)


def _of_itself(case: Case) -> Iterator[Finding]:
    """An import of a name from the very file that defines it; of a package, another file of that name may be meant."""
    path = None if case.filename is None else Path(case.filename)
    if path is None or (path.parent / "__init__.py").exists():
        return
    tree = case.whole_tree
    defined = {n.name: n.lineno for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    for node in tree.body:
        later = {name for name, line in defined.items() if line > node.lineno}  # the others are there by then
        names = {a.name for a in node.names} & later if isinstance(node, ast.ImportFrom) else set()
        if isinstance(node, ast.ImportFrom) and names and (node.level, node.module) == (0, path.stem):
            yield Finding("imports-itself", ", ".join(sorted(names)), node.lineno)


def _supplied(case: Case) -> Iterator[Finding]:
    if case.loaded is None:
        return
    used = names_used(case.target)
    used |= names_at_import(case.loaded.source) if used else set()
    missing = {n: line for n, line in case.loaded.missing_imports.items() if n in used or not used}
    if missing:
        other = next((found for n in sorted(missing) if (found := _other_alias(case, n)) is not None), None)
        words, place = other or ("", min(missing.values()))
        yield Finding("missing-import", ", ".join(sorted(missing)) + words, place)
    yield from _of_itself(case)
    for path, names in imports_missing_in_siblings(case).items():
        imports = enumerate(case.whole.splitlines(), 1)
        line = next((n for n, text in imports if re.match(rf"\s*(from|import)\b.*\b{Path(path).stem}\b", text)), None)
        yield Finding("missing-import", f"{', '.join(sorted(names))} in {Path(path).name}", line)
    demo = {n: line for n, line in globals_read(case.target).items() if n in case.loaded.only_in_main}
    if demo:
        words = f"{', '.join(demo)}: defined only under `if __name__ == '__main__'`"
        yield Finding("undefined-name", words, min(demo.values()), severity="fragile")


def _other_alias(case: Case, name: str) -> tuple[str, int] | None:
    """That the file imports the same module under another name, which nothing reads, with that line."""
    tree, wanted = case.whole_tree, case.namespace.get(name)
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for node in (n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)):
        for alias in node.names:
            if alias.asname not in (None, *read) and case.namespace.get(alias.asname or "") is wanted is not None:
                return f"; {alias.name} is imported as {alias.asname}", node.lineno
    return None


def names_at_import(source: str) -> set[str]:
    """Names that the file reads while it is imported: outside the bodies of functions; in annotations up to 3.13."""
    found: set[str] = set()
    tree = ast.parse(source)
    pending: list[ast.AST] = [n for n in tree.body if not isinstance(n, ast.If | ast.For | ast.While)]
    annotated = _reads_annotations(tree)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += [*getattr(node, "decorator_list", []), *node.args.defaults]
            arguments = [n.annotation for n in ast.walk(node.args) if isinstance(n, ast.arg)]
            pending += [n for n in (*arguments, getattr(node, "returns", None)) if n is not None and annotated]
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        pending += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.arg)]
    return found


def _reads_annotations(tree: ast.Module) -> bool:
    """Whether this Python evaluates the annotations of a file while it is imported."""
    later = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    return sys.version_info < (3, 14) and not any(a.name == "annotations" for n in later for a in n.names)


def repaired(bound: Bound, reading: AttentionReading | None) -> Found:
    """Small faults that were repaired so that the call could go on."""
    yield from _repaired(bound.repaired, bound.case)


def _repaired(repairs: Repaired, case: Case) -> Iterator[Finding]:
    if repairs.super_missing:
        yield next((f for f in text_findings(case) if f.name == "missing-super"), Finding("missing-super"))
    assigned = set() if case.loaded is None else case.loaded.assigned  # a name that the file assigns is no fault
    unknown = {name: line for name, line in repairs.names.items() if name not in assigned}
    if unknown:
        yield Finding("undefined-name", _named(unknown, case), next(iter(unknown.values())))
    if repairs.attributes:
        definition = definition_of(case.whole_tree, getattr(case.target, "__name__", ""))
        words = _attributes(repairs.attributes, definition)
        yield Finding("missing-attribute", words, next(iter(repairs.attributes.values())))
    if "contiguous" in repairs.lines:
        yield Finding("contiguous", "", repairs.lines["contiguous"])
    if "cuda" in repairs.lines:
        yield Finding("cuda-only", "", repairs.lines["cuda"])


# What never gave an output.


def judge_unbound(case: Case, bound: Bound | None, failures: list[Failure]) -> Report:
    """The report where no attempt gave an output."""
    doubts = _stand_in_doubts(case)  # attempts failed because of it, so they say nothing more
    report = Report("unknown", subject=case.name, doubts=doubts, tried=[] if doubts else _attempts(failures))
    ran = bound is not None and bound.form.layout == PLAIN and (bound.returned is None or bound.form.natural)
    own = None if ran or report.doubts else _own_failure(failures)
    if own is not None and isinstance(own.error, RuntimeError) and (said := states_one_token(case)) is not None:
        report.doubts.append(f"line {said} says that a call takes one token at a time")
        own = None
    if own is not None and (excuse := _excuse(own, case)):
        report.doubts.append(excuse)
        own = None
    findings = [*_supplied(case), *missing_base(case), *_failed_imports(case)]
    if own is not None:
        report.subject, report.call = own.built, "" if own.called is None else f"forward({own.called})"
        findings += [*_repaired(own.repaired, case), _crash(own, case)]
    elif bound is not None:
        findings += _repaired(bound.repaired, case)
        if bound.returned is None:
            findings.append(Finding("no-return", "", case.return_line()))
        elif (turned := _misshaped(bound)) is not None:
            findings.append(turned)
        else:
            returned = described(bound.returned, bound.sizes)
            report.doubts.append(f"it returns {returned}, where (batch, tokens, width) is expected")
    if own is None:
        known = {f.name for f in findings}
        findings += [f for f in text_findings(case) if f.name not in known]
    if own is not None or any(f.mistake.certain for f in findings):
        report.verdict = "wrong" if any(f.severity == "wrong" for f in findings) else "unknown"
    report.findings = settled(findings)
    return report


def _excuse(failure: Failure, case: Case) -> str:
    """Why an error need not be the learner's, although it came with everything that we know how to pass; or nothing."""
    if inspect.isclass(case.target) and issubclass(case.target, StubBase | StubLayer):
        return "it inherits from a class that is neither installed nor in the project"
    derived = case.derived()
    if derived and (failure.deliberate or isinstance(failure.error, NotImplementedError)):
        names = " or ".join(f"--name {name}" for name in derived[:3])
        return f"it is the base of {', '.join(derived[:3])}, and cannot be used alone. Try {names}"
    kinds = (False, None) if inspect.isclass(case.target) else ()
    flags = sorted(name for off in kinds for name in flags_asked_of(case.target, off) if name not in failure.built)
    if flags and failure.called is None and (failure.deliberate or isinstance(failure.error, AssertionError)):
        return f"the constructor asks for arguments that are off or None by default: {', '.join(flags[:3])}"
    about_shapes = isinstance(failure.error, RuntimeError | ValueError) and failure.called is not None
    if about_shapes and EMPTY_VIEW.search(str(failure.error)) is not None:
        return "a size comes out as 0: the input may be too short for it"
    if about_shapes and (said := states_no_tokens(case, (failure.called or "").split(", "))) is not None:
        return f"line {said} gives an input no axis of tokens"
    zero = [p.name for p in parameters_of(case.target) if type(p.default) is int and p.default == 0]
    zero = [name for name in zero if constructor_role(name) not in ("dropout", "bias") and name not in failure.built]
    if zero and failure.called is None and not isinstance(failure.error, CERTAIN):
        return f"the constructor needs another {' and '.join(zero)} than 0, and what it means is not known"
    return ""


def _misshaped(bound: Bound) -> Finding | None:
    """Why what it returns is not an output."""
    return _uncalled(bound) or _joined_elsewhere(bound) or _heads_in_batch(bound) or _turned_output(bound)


def _heads_in_batch(bound: Bound) -> Finding | None:
    """An output in which every head is still a sample of its own."""
    (B, T), H = bound.inputs.query.shape[:2], bound.sizes.H
    out = next(iter(leaves(bound.returned)), None)
    if bound.form.layout != PLAIN or out is None or out.dim() != 3 or out.shape[:2] != (B * H, T):
        return None
    start = max((n.index for n in bound.trace.softmax_nodes()), default=0)
    views = [n for n in bound.trace.nodes[start:] if n.op in VIEWS and n.line is not None]
    split = [n.line for n in views if n.value.dim() == 4 and n.value.shape[0] == B * H]
    words = f"the output has {B * H} samples for {B}: heads that were folded into the batch stay there"
    return Finding("output-shape", words, split[0] if split else bound.case.return_line())


def _uncalled(bound: Bound) -> Finding | None:
    """A layer or method that is returned in place of its result."""
    returned = bound.returned if isinstance(bound.returned, tuple | list) else [bound.returned]
    layer = next((part for part in returned if isinstance(part, nn.Module) or inspect.ismethod(part)), None)
    if layer is None or layer is bound.thing:
        return None
    own = bound.thing.named_modules() if isinstance(bound.thing, nn.Module) else ()
    name = next((n for n, module in own if module is layer), getattr(layer, "__name__", ""))
    line = bound.case.line_with(rf"(=|return\b).*self\.{re.escape(name)}\s*(#.*|,.*)?$") or bound.case.return_line()
    return Finding("not-called", f"self.{name} is returned, not its result", line)


def _joined_elsewhere(bound: Bound) -> Finding | None:
    """An output in which the heads are more tokens, more samples or an axis of their own."""
    (B, T), H, nodes = bound.inputs.query.shape[:2], bound.sizes.H, bound.trace.nodes
    out = next(iter(leaves(bound.returned)), None)
    if bound.form.layout != PLAIN or out is None or out.dim() not in (3, 4):
        return None
    source = bound.trace.source(out)
    joined = None if source is None else nodes[source]
    if out.dim() == 3 and out.shape[:2] == (B, H * T):
        made = [n for n in nodes if n.value.shape[:2] == out.shape[:2] and n.line is not None]
        words = f"the output has {out.shape[1]} rows for {T} tokens and {H} heads"
        return Finding("joined-axis", words, made[0].line if made else bound.case.return_line())
    if joined is not None and joined.op == "cat" and out.dim() == 3 and out.shape[:2] == (B * H, T):
        words = f"they are joined along the batch, which makes {B * H} samples of {B}"
        return Finding("joined-axis", words, joined.line)
    if joined is not None and joined.op == "stack" and out.dim() == 4 and {B, T, H} <= {*out.shape}:
        words = f"they are stacked on a new axis, and the output is {bound.sizes.named(out.shape)}"
        return Finding("joined-axis", words, joined.line)
    return None


def _is_turned(value: Tensor, output: Tensor) -> bool:
    """Whether a tensor has as many numbers as the output, and its first axes."""
    return value.numel() == output.numel() and value.shape[:2] == output.shape[:2]


def _turned_output(bound: Bound) -> Finding | None:
    """An output with the axes of the input in another order."""
    given = bound.inputs.query.shape
    for leaf in leaves(bound.returned)[:1]:
        if bound.form.layout == PLAIN and leaf.shape != given and sorted(leaf.shape) == sorted(given):
            named = bound.sizes.named
            words = f"its shape is {named(leaf.shape)}, that of the input {named(given)}"
            layers = {n.line for n in bound.trace.nodes if n.op in PRODUCTS}
            start = max((n.index for n in bound.trace.softmax_nodes()), default=0)
            moved = (n for n in bound.trace.nodes[start:] if n.op in SWAPS and _is_turned(n.value, leaf))
            turned = _turning_line(bound)
            views = (n for n in reversed(bound.trace.nodes) if n.op in VIEWS and n.line not in layers)
            last = [n.line for n in (*moved, *views) if n.line is not None]
            return Finding("output-shape", words, turned or (last[0] if last else bound.case.return_line()))
    return None


def _turning_line(bound: Bound) -> int | None:
    """The first line that brings the tokens before the batch, where the samples then stay behind them."""
    nodes, (B, T) = bound.trace.nodes, bound.inputs.query.shape[:2]
    for node in (n for n in nodes if n.op in SWAPS and n.parents and n.line is not None):
        before, after = nodes[node.parents[0]].value.shape, node.value.shape
        if len(after) >= 3 and before[0] == B and after[0] == T and B in after[1:]:
            return node.line
    return None


def _failed_imports(case: Case) -> list[Finding]:
    """What the class needs and cannot import: gone from a package, or in a file that is not here."""
    failed = {} if case.loaded is None else case.loaded.failed_imports
    used = names_used(case.target)
    return [Finding("missing-import", words, line) for name, (line, words) in failed.items() if name in used][:1]


def _stand_in_doubts(case: Case) -> list[str]:
    """What the class needs and this machine does not have: never the learner's fault."""
    used = {name: origin for name, origin in stand_ins_used(case.target).items() if origin != name}
    folders = case.loaded.folders if case.loaded is not None else []
    where = f" (searched {', '.join(folders[:3])})" if folders else ""
    modules: dict[str, list[str]] = {}
    for origin in used.values():
        module, _, name = origin.rpartition(".")
        modules.setdefault(module or origin, []).append(name)
    return [
        f"it needs {module}, which is neither installed nor in the project{where}. Put {module.replace('.', '/')}.py "
        f"beside the file, or copy what it needs into the file{_ours_instead(names)}"
        for module, names in modules.items()
    ][:3]


def _ours_instead(names: list[str]) -> str:
    """The import that replaces one of a textbook's files; empty where we do not have all of it."""
    from headwise import textbook  # with the layer, which most files do without

    known = all(name in textbook.__all__ for name in names)
    return f"; this line replaces the import: from headwise.textbook import {', '.join(names)}" if known else ""


def _attempts(failures: list[Failure]) -> list[str]:
    seen: dict[str, str] = {}
    for f in failures:
        words = f.built if f.called is None else f"{f.built} called with ({f.called})"
        seen.setdefault(words, f"{words}: {_error_words(f.error, 100)}")
    return list(seen.values())


def _error_words(error: BaseException, most: int) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:most] if str(error) else ''}"


def _own_failure(failures: list[Failure]) -> Failure | None:
    """The failure that is certainly the learner's: in their lines, in the most natural attempt."""
    inside = [f for f in failures if f.line is not None]
    if not inside:
        return None
    calls = [f for f in inside if f.called is not None]
    if (sure := _after_attention(calls) or _own_call(calls) or _with_certain_cause(calls)) is not None:
        return sure
    bare = [f for f in calls if f.bare]
    if bare and all(f.confused for f in bare):
        return bare[0]
    if (refused := _refuses_everything(failures) or _refuses_every_type(calls) or _too_few_axes(calls)) is not None:
        return refused
    natural = [f for f in calls if f.natural]
    simple = [f for f in natural if f.projected and not f.guessed and "NoneType" not in str(f.error)]
    same_end = [f for f in natural if f.guessed and _end(f) in {_end(g) for g in calls if g.without}]
    natural = simple or same_end or natural
    if calls and not natural:
        return _whatever_we_pass(calls)
    first = natural[0] if natural else inside[0]
    return first if _is_own(first, calls, inside) else None


def _refuses_everything(failures: list[Failure]) -> Failure | None:
    """A check of the constructor that refuses every usual size, although each has a known meaning."""
    first = failures[0]
    built = [f for f in failures if f.called is None]
    if len(built) < len(failures) or not first.natural or not first.refuses_all:
        return None
    return first


def _refuses_every_type(calls: list[Failure]) -> Failure | None:
    """A line after a projection that takes neither booleans nor numbers for a mask."""
    late = [f for f in calls if f.guessed and f.projected and f.line is not None and not f.deliberate]
    for line in dict.fromkeys(f.line for f in late):
        here = [f for f in late if f.line == line]
        words = " ".join(str(f.error) for f in here)
        if "bool tensor is not supported" in words and "only supports boolean" in words:
            return next(f for f in here if "bool" in str(f.error))
    return None


def _too_few_axes(calls: list[Failure]) -> Failure | None:
    """A shape taken apart under two names, where samples × tokens × width has three, and one sample fails later on."""
    first = next((f for f in calls if f.natural), None)
    if first is None or "too many values to unpack (expected 2)" not in str(first.error):
        return None
    passed = [f for f in calls if f.line is not None and f.line != first.line and f.projected]
    late = [f for f in passed if f.built == first.built and isinstance(f.error, RuntimeError)]
    late = [f for f in late if (f.line or 0) > (first.line or 0)]
    return first if late and not any(f.deliberate for f in passed) else None


def _is_own(first: Failure, calls: list[Failure], inside: list[Failure]) -> bool:
    if first.called is not None and not _form_is_certain(first, calls):
        return False
    guesses = first.called is None and not first.natural  # then None is one of the values that were tried
    kinds = {(type(f.error), str(f.error), f.line) for f in inside if guesses or "NoneType" not in str(f.error)}
    always = len(kinds) == 1 and isinstance(first.error, CERTAIN)
    if _may_be_ours(first) or not (first.natural or always):
        return False
    if isinstance(first.error, CERTAIN) or "only one dimension" in str(first.error):
        return True
    guessed = "<" in first.built or "None" in first.built
    return isinstance(first.error, RuntimeError | ValueError) and not guessed


def _may_be_ours(failure: Failure) -> bool:
    """Whether the code rejected what we passed, or we passed something of the wrong kind."""
    rejected = isinstance(failure.error, AssertionError) or failure.deliberate
    own = (
        ("NoneType", "is not callable", "values to unpack")
        if failure.bare and failure.projected
        else ("is not callable",)
    )
    excused = [word for word in OURS if not (word in own and failure.bare)]
    excused += [] if failure.attended else [OF_PICTURES]
    return rejected or any(word in str(failure.error) for word in excused)


def _own_call(calls: list[Failure]) -> Failure | None:
    """A function of the learner's own that is called with too few or too many arguments, whatever we pass."""
    for f in calls:
        match = ARGUMENTS.match(str(f.error)) if isinstance(f.error, TypeError) else None
        if match and match[1] not in OUR_CALLS:
            return f if f.projected else None
    return None


def _with_certain_cause(calls: list[Failure]) -> Failure | None:
    """A failure with a cause that no input of ours can have: among others, a size that is written into the code."""
    explained = ((f, f.explained) for f in calls if f.bare and f.explained is not None)
    return next((f for f, cause in explained if cause.mistake.certain or cause.name == "size-fixed"), None)


def _after_attention(calls: list[Failure]) -> Failure | None:
    """An error after the softmax: the input was right up to there. All calls that get this far must fail alike."""
    late = [f for f in calls if f.attended and not f.guessed and f.layout in (PLAIN, *_demanded(calls))]
    if not late or len({_end(f) for f in late}) > 1:
        return None
    return None if _may_be_ours(late[0]) else late[0]


def _demanded(calls: list[Failure]) -> tuple[str, ...]:
    """Layouts of an input with as many axes as the code takes apart: four, of images, or five."""
    words = {str(f.error) for f in calls if f.layout == PLAIN and f.natural}
    if any("expected 4, got 3" in text for text in words):
        return ("image", "image, channels last")
    return ("volume",) if any("expected 5, got 3" in text for text in words) else ()


def _whatever_we_pass(calls: list[Failure]) -> Failure | None:
    """An error that does not depend on our guesses: a name that is not defined, or the same error every time."""
    names = [f for f in calls if isinstance(f.error, NameError) and not isinstance(f.error, UnboundLocalError)]
    if names and names[0].projected:
        return names[0]
    ends = {(type(f.error), str(f.error), f.line) for f in calls}
    same = len(ends) == 1 and len({f.built for f in calls}) >= SEVERAL and isinstance(calls[0].error, CERTAIN)
    return calls[0] if same and not any(word in str(calls[0].error) for word in OURS) else None


def _form_is_certain(first: Failure, calls: list[Failure]) -> bool:
    """Whether the error cannot be ours: it does not depend on the input, or the input had passed a projection.

    Where a mask had to be guessed, the call without one must have ended in the same way.
    """
    if isinstance(first.error, NameError | AttributeError) and "NoneType" not in str(first.error):
        return True
    if all(str(f.error) == str(first.error) for f in calls):  # in every layout
        return True
    if first.guessed:
        without = [f for f in calls if f.without and (f.built, f.called) == (first.built, first.called)]
        ends = {_end(f) for f in without if f.projected} or {_end(f) for f in calls if f.natural}
        return _end(first) in ends if without else ends == {_end(first)}
    return first.projected or (isinstance(first.error, CERTAIN) and not isinstance(first.error, LookupError))


def _end(failure: Failure) -> tuple[type, int | None]:
    return type(failure.error), failure.line


def _crash(failure: Failure, case: Case) -> Finding:
    """The error as a finding, by its own name where it has one."""
    error, words = failure.error, _error_words(failure.error, 160)
    name = "crashes"
    if failure.explained is not None and not (failure.called is not None and failure.made_layer):
        return failure.explained
    if isinstance(error, UnboundLocalError):
        name = "used-before-set"
    elif isinstance(error, NameError):
        name = "undefined-name"
        words = _named([error.name], case) if error.name else words
    elif failure.called is not None and failure.made_layer:
        name = "layers-in-forward"
    elif "view size is not compatible" in str(error):
        name = "contiguous"
    elif "before Module.__init__" in str(error):
        name = "missing-super"
    elif failure.guessed and re.search(r"\bbool", words):
        name = "mask-crashes"
    elif isinstance(error, AttributeError) and "object has no attribute" in str(error) and "Tensor" not in str(error):
        name = "missing-attribute"
    return Finding(name, words, failure.line)
