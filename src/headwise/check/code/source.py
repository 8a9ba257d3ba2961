"""Reads a learner's file without running it: Python, a notebook, or a page with Python blocks. Imports no torch.

A notebook and a page become one Python text. Cells that do not parse are left out, as a notebook too runs without
them, unless they hold the attention itself. Lines of the text can be named as the reader sees them: by cell and line.
"""

import ast
import json
import re
import textwrap
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from headwise.check.mistakes import Finding, place
from headwise.check.report import Report

LARGEST = 64 * 2**20  # bytes; notebooks with pictures have several million
MAGICS = 200  # in one file or cell; more are no code
PAGES = (".md", ".markdown", ".txt", ".rst")
# Lines that only IPython understands. Whether one is meant is decided by the parser: `% (a, b)` may continue a line.
EXPORTED = r"%%?[A-Za-z]|![^=]"  # what is left of them in an exported .py file
MAGIC_IN_PYTHON = re.compile(rf"\s*({EXPORTED})")
MAGIC = re.compile(
    rf"\s*({EXPORTED}|\?+[\w%.]|[\w%.]+(\[\w+\])?\?+\s*$|(pip3?|conda|mamba|uv)\s+\w+|\w[\w, ]*=\s*[%!]\w)"
)
NOT_PYTHON = re.compile(
    r"%%(bash|sh|script|system|sx|!|html|svg|javascript|js|latex|markdown|perl|ruby|sql|cython|R)\b"
)
FENCE = re.compile(r"^\s*(```|~~~)\s*\{?\.?(python|py|ipython)3?\b", re.IGNORECASE | re.MULTILINE)
DEFINITION = re.compile(r"^\s*(?:async\s+)?(class|def)\s+(\w+)", re.MULTILINE)
ATTENTION = re.compile(r"attn|attention|mha|mhsa|msa|multi_?head|selfatt|crossatt|softmax|heads?\b", re.IGNORECASE)
MULTI = re.compile(r"mult|mha|mhsa|msa|heads", re.IGNORECASE)
# Words without which nothing in a file can be attention, and words that only PyTorch code contains.
ATTENDS = re.compile(r"softmax|scaled_dot|att(n|ent)|mha|mhsa|msa|head|qkv|query|\.exp\(|logsumexp", re.IGNORECASE)
LINEAR = re.compile(r"Linear\(([^()]*)\)")
GAP_OR_PRODUCT = re.compile(
    r"[\w\])][ \t]*@|matmul|einsum|bmm|= *\.\.\.|NotImplementedError|^\s*(\.\.\.|pass)\s*$", re.MULTILINE
)
FRAGMENT = re.compile(r"@|matmul|einsum|\bq(uery|ueries)?\b|self\.", re.IGNORECASE)
TORCH = re.compile(r"\btorch|\bnn\.|\bF\.|\.softmax\(|masked_fill|\bModule\b|\bLinear\b|einops")
OTHERS = {"tensorflow", "jax", "flax", "keras", "mxnet", "mlx", "paddle", "tinygrad", "cupy", "haiku", "equinox"}
DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class CodeCell(NamedTuple):
    """A code cell of a notebook."""

    number: int  # among the code cells, from 1
    run: int | None  # n of the `In [n]` beside it
    first: int  # its first line in the joined text, from 1


class CodePiece(NamedTuple):
    """The code of a cell or of a block, at its place in the joined text."""

    first: int
    text: str
    error: SyntaxError | None = None

    @property
    def names(self) -> set[str]:
        """What it defines."""
        return {name for _, name in DEFINITION.findall(self.text)}

    @property
    def rank(self) -> int:
        """How much it looks like the attention to judge: 3 a class of several heads, 2 another, 1 a mention, 0."""
        found = [name for kind, name in DEFINITION.findall(self.text) if kind == "class" and ATTENTION.search(name)]
        if found:
            return 3 if any(MULTI.search(name) for name in found) else 2
        return int(bool(self.names) and ATTENTION.search(self.text) is not None)

    @property
    def error_line(self) -> int:
        """The line of the joined text where it is no Python."""
        return self.first - 1 + ((self.error.lineno if self.error else None) or 1)


@dataclass
class SourceText:
    """The Python text of a file, its syntax tree, and what is wrong where there is none."""

    path: Path
    text: str = ""
    tree: ast.Module | None = None
    error: SyntaxError | None = None
    problem: str = ""  # why it cannot be read at all
    cells: list[CodeCell] = field(default_factory=list)  # of a notebook
    broken: list[CodePiece] = field(default_factory=list)  # left out, because they do not parse
    notes: str = ""  # what a notebook says between its code

    def line(self, number: int | None) -> str:
        """The text of a line, without its indentation."""
        lines = self.text.splitlines()
        return lines[number - 1].strip() if number is not None and 0 < number <= len(lines) else ""

    def locate(self, finding: Finding) -> None:
        """Give the line of a finding as the reader of a notebook sees it: by its cell."""
        cell = None if finding.line is None or finding.cell is not None else self._cell(finding.line)
        if cell is not None and finding.line is not None:
            finding.cell, finding.execution_count = cell.number, cell.run
            finding.line -= cell.first - 1

    def place(self, line: int) -> str:
        """A line in words: "line 12" of a file or page, "code cell 7, line 3" of a notebook."""
        cell = self._cell(line)
        return place(line) if cell is None else place(line - cell.first + 1, cell.number, cell.run)

    def _cell(self, line: int) -> CodeCell | None:
        return next((cell for cell in reversed(self.cells) if cell.first <= line), None)

    @property
    def left_out(self) -> list[str]:
        """The pieces that do not parse, in words."""
        return [f"{self.place(p.error_line)}: {p.error.msg}" for p in self.broken if p.error is not None]

    def uses_torch(self) -> bool:
        """Whether it is written for PyTorch, as far as its words tell."""
        return bool(TORCH.search(self.text)) and ("torch" in self.text or not OTHERS & imported(self.tree))

    def defines(self) -> set[str]:
        """Names of the classes and functions in it."""
        return {node.name for node in ast.walk(self.tree or ast.Module([], [])) if isinstance(node, DEFINED)}

    @property
    def nothing(self) -> str:
        """That nothing can be judged, and what to do."""
        cure = "name the class with --name" if self.defines() else "one step is judged together with those before it"
        return f"nothing in this file looks like attention; {cure}"

    def answer(self, name: str | None = None) -> Report | None:
        """The report on a file that need not run to be judged; None where it must."""
        unknown = Report("unknown", subject=self.path.name, file=str(self.path.resolve()), left_out=self.left_out)
        if self.problem:
            return replace(unknown, subject=str(self.path), doubts=[self.problem])
        if self.error is not None:
            finding = Finding("syntax", _said(self.error), self.error.lineno, self.line(self.error.lineno))
            self.locate(finding)
            return replace(unknown, verdict="wrong", findings=[finding])
        begun = ATTENDS.search(self.text) if self.defines() else FRAGMENT.search(self.text)
        if name is None and begun is None and not projects(self.text):
            return replace(unknown, doubts=[self.nothing])
        fragment = not any(isinstance(node, ast.ClassDef) for node in ast.walk(self.tree or ast.Module([], [])))
        foreign = bool((OTHERS | {"numpy"}) & imported(self.tree))
        if (name is None or name in self.defines()) and not self.uses_torch() and (foreign or not fragment):
            return replace(unknown, doubts=["nothing in this file uses PyTorch, and only PyTorch can be judged"])
        return None


def _said(error: SyntaxError) -> str:
    """What Python says, and what to do where it says only what is there."""
    cure = "; remove the spaces at the start of this line and of those that follow it"
    return f"{error.msg}{cure if error.msg == 'unexpected indent' else ''}"


def projects(text: str) -> bool:
    """Whether three linear layers of the same sizes are made, whatever their names, and there is a product or a gap.

    That is what the projections of a class look like whose softmax is still to be written, in any language.
    """
    alike = Counter(LINEAR.findall(text))
    three = max(alike.values(), default=0) >= 3 or re.search(rf"{LINEAR.pattern}\s*for \w+ in range\([34]\)", text)
    return bool(three) and GAP_OR_PRODUCT.search(text) is not None


def imported(tree: ast.AST | None) -> set[str]:
    """The top-level packages that a module imports."""
    found: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def read_source(path: Path, name: str | None = None) -> SourceText:
    """The file, read and parsed. `name` is the class asked for: a syntax error matters if it is in that one's cell."""
    problem = _unreadable(path)
    if problem:
        return SourceText(path, problem=problem)
    text = path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff")
    try:
        if path.suffix == ".ipynb":
            return _of_notebook(path, text, name)
        code, tree, error = parsed(text, MAGIC_IN_PYTHON)
        if isinstance(error, IndentationError):
            code, tree, error = parsed(with_bodies(text), MAGIC_IN_PYTHON)
        if error is not None and (path.suffix in PAGES or FENCE.search(text)):
            return _of_page(path, text, name)
    except RecursionError:
        return SourceText(path, problem="its expressions are nested too deeply to be parsed")
    return SourceText(path, code, tree, error)


def _unreadable(path: Path) -> str:
    """Why the path cannot be read, or nothing."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    if not path.is_file():
        return f"there is no file {path}"
    try:
        size = path.stat().st_size
        with path.open("rb"):
            return f"{path} has {size >> 20} MiB, more than any source" if size > LARGEST else ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def parsed(text: str, magic: re.Pattern[str] = MAGIC) -> tuple[str, ast.Module | None, SyntaxError | None]:
    """The text with every magic replaced that keeps it from being Python, its tree, and the error that is left.

    The parser says where: only a line at which it fails can be a magic, so strings and continued lines stay.
    """
    lines = text.split("\n")
    for left in range(MAGICS, -1, -1):
        try:
            return "\n".join(lines), _tree("\n".join(lines)), None
        except SyntaxError as found:
            error = found
        except (ValueError, MemoryError) as found:  # a null byte, or too many brackets
            error = SyntaxError(str(found) or "it is nested too deeply")
        at = (error.lineno or 0) - 1
        if not left or not 0 <= at < len(lines) or not magic.match(lines[at]):
            break
        _replace_magic(lines, at)
    return "\n".join(lines), None, error


def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in a string is not worth a word here
        return ast.parse(text)


def _replace_magic(lines: list[str], at: int) -> None:
    """Replace a magic, and the lines it continues on, by statements of the same indentation that do nothing."""
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    target = re.match(r"\s*(\w[\w, ]*=)\s*[%!]", lines[at])
    goes_on = lines[at].rstrip().endswith("\\")
    lines[at] = f"{indent}{target[1]} None" if target else f"{indent}pass"
    while goes_on and at + 1 < len(lines):
        at += 1
        goes_on = lines[at].rstrip().endswith("\\")
        lines[at] = ""


# Notebooks and pages: several pieces of code, of which each may be broken.


def _of_notebook(path: Path, text: str, name: str | None) -> SourceText:
    try:
        found = _code_cells(json.loads(text))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return SourceText(path, problem=f"{path.name} is no notebook: {error}")
    cells, first = [], 1
    for number, (code, run) in enumerate(found, 1):
        cells.append(CodeCell(number, run, first))
        first += code.count("\n") + 2
    source = _joined(path, [CodePiece(cell.first, code) for cell, (code, _) in zip(cells, found, strict=True)], name)
    source.cells, source.notes = cells, _notes(json.loads(text))
    return source


def _notes(data: dict[str, Any]) -> str:
    """The text of the cells that hold no code."""
    cells = [cell for cell in data.get("cells", []) if cell.get("cell_type") == "markdown"]
    return "\n".join("".join(cell.get("source", "")) for cell in cells)


def _code_cells(data: dict[str, Any]) -> list[tuple[str, int | None]]:
    """The code of every code cell and the number of its last run; also of the older format, which has worksheets."""
    cells = data["cells"] if "cells" in data else [c for sheet in data.get("worksheets", []) for c in sheet["cells"]]
    code = [cell for cell in cells if cell.get("cell_type") == "code"]
    counts = [cell.get("execution_count", cell.get("prompt_number")) for cell in code]
    return [(_cell_code(cell), n if isinstance(n, int) else None) for cell, n in zip(code, counts, strict=True)]


def _cell_code(cell: dict[str, Any]) -> str:
    """The Python of a cell, with an empty line in place of a `%%` magic; empty if the cell is in another language."""
    code = "".join(cell.get("source", cell.get("input", "")))
    begin = code.lstrip()
    if NOT_PYTHON.match(begin):
        return ""
    return re.sub(r"%%.*", "", code, count=1) if begin.startswith("%%") else code


def _of_page(path: Path, text: str, name: str | None) -> SourceText:
    """The Python blocks of a page. The rest becomes empty lines, so that line numbers stay those of the page."""
    lines = text.replace("\r\n", "\n").split("\n")
    blocks: list[tuple[int, list[str]]] = []
    inside = False
    for number, line in enumerate(lines, 1):
        if re.match(r"\s*(```|~~~)", line):
            inside = bool(FENCE.match(line)) and not inside
            blocks += [(number + 1, [])] if inside else []
        elif inside:
            blocks[-1][1].append(line)
    return _joined(path, [CodePiece(first, textwrap.dedent("\n".join(block))) for first, block in blocks], name)


def _joined(path: Path, pieces: list[CodePiece], name: str | None) -> SourceText:
    """One text of several pieces, each at its line: those that parse, and the broken one that holds the attention."""
    read = []
    for piece in pieces:
        text, _, error = parsed(piece.text)
        read.append(CodePiece(piece.first, text, error))
    fatal = _fatal(read, name)
    lines: list[str] = []
    for piece in read:
        if piece.error is None or piece is fatal:
            lines += [""] * (piece.first - 1 - len(lines)) + piece.text.split("\n")
    text = "\n".join(lines)
    if fatal is not None and fatal.error is not None:
        fatal.error.lineno = fatal.error_line
        return SourceText(path, text, error=fatal.error)
    return SourceText(path, text, _tree(text), broken=[piece for piece in read if piece.error is not None])


def _fatal(pieces: list[CodePiece], name: str | None) -> CodePiece | None:
    """The broken piece that cannot be left out: it defines the name asked for, or looks most like attention."""
    good, broken = ([p for p in pieces if (p.error is None) == whole] for whole in (True, False))
    defined = {found for piece in good for found in piece.names}
    if name is not None:
        return next((piece for piece in broken if name in piece.names - defined), None)
    likely = max((p for p in broken if not p.names or p.names - defined), key=lambda p: p.rank, default=None)
    best = max((piece.rank for piece in good), default=0)
    return likely if likely is not None and likely.rank > best else None


def with_bodies(source: str) -> str:
    """The source with `pass` before a comment that is all a function holds, which Python would refuse."""
    lines = source.splitlines()
    for _ in lines:
        try:
            ast.parse("\n".join(lines))
        except IndentationError as error:
            header = re.search(r"after (?:function|class) definition on line (\d+)", str(error))
            place = _comment_after(lines, int(header[1])) if header else None
            if place is None:
                return source
            indent, _, comment = lines[place].partition("#")
            lines[place] = f"{indent}pass  #{comment}"
        except (SyntaxError, ValueError):
            return source
        else:
            return "\n".join(lines) + "\n"
    return source


def _comment_after(lines: list[str], header: int) -> int | None:
    """The index of a comment that stands where the body of a function is expected."""
    outside = len(lines[header - 1]) - len(lines[header - 1].lstrip())
    for index in range(header, len(lines)):
        text = lines[index].strip()
        if text:
            inside = len(lines[index]) - len(lines[index].lstrip()) > outside
            return index if inside and text.startswith("#") else None
    return None
