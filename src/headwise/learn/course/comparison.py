"""A learner's code beside the model answer: the same code under other names is the same."""

import ast
import difflib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator

from headwise.learn.course.exercise import Exercise

ALIKE = 0.5  # of two answers, the share of lines below which a comparison line by line is no help
WORD = re.compile(r"\b[A-Za-z_]\w*")
SHOWN = 8  # names
WIDTH = 79  # columns
MARKS = "Yours is marked with -, the model answer with +:"


def compared(exercise: Exercise, answer: str) -> str:
    """Where an answer differs from the model answer, without comments, docstrings and annotations."""
    try:
        theirs = _plain(answer)
    except SyntaxError as error:
        return f"your file is not Python yet (line {error.lineno}: {error.msg})"
    ours = _plain(exercise.solution)
    counts = f"Your answer has {_lines(len(code_of(theirs)))} of code and the model answer {len(code_of(ours))}."
    names = _names(theirs, ours)
    lines, wanted = [_renamed(line, names) for line in code_of(theirs)], code_of(ours)
    if lines == wanted:
        return "\n".join([counts, "They are the same" + (", under other names." if names else ".")])
    if difflib.SequenceMatcher(None, lines, wanted).ratio() < ALIKE:
        return "\n".join([counts, "Yours does it in another way. The model answer:", "", *_shown(exercise.solution)])
    difference = difflib.unified_diff(lines, wanted, lineterm="", n=2)
    shown = ", ".join(f"{theirs} → {ours}" for theirs, ours in [*names.items()][:SHOWN])
    renamed = [f"Your names are written as in the model answer: {shown}"] if names else []
    marked = [part for line in list(difference)[2:] for part in _folded(line)]
    return "\n".join([counts, *textwrap.wrap(" ".join(renamed), WIDTH), MARKS, *marked])


def code_of(source: str) -> list[str]:
    """The lines of a source without comments, docstrings and blank lines, written uniformly."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [_without_parentheses(line) for line in ast.unparse(tree).splitlines() if line.strip()]


def _without_parentheses(line: str) -> str:
    """An assignment of several values as people write it: Python's own writing has parentheses around them."""
    target, equals, value = line.partition(" = ")
    try:
        whole, inside = (ast.parse(text, mode="eval").body for text in (value, value[1:-1]))
    except SyntaxError:
        return line
    is_wrapped = isinstance(whole, ast.Tuple) and isinstance(inside, ast.Tuple) and ast.dump(whole) == ast.dump(inside)
    return f"{target}{equals}{value[1:-1]}" if is_wrapped and len(line) <= WIDTH else line


def _shown(source: str) -> list[str]:
    """The code of a source for the terminal: folded, with a blank line before each definition."""
    lines: list[str] = []
    for line in code_of(source):
        starts = line.lstrip().startswith(("def ", "class ")) and lines and not lines[-1].startswith("class ")
        lines += [*([""] if starts else []), *_folded(line)]
    return lines


def _folded(line: str) -> list[str]:
    """A line of code in pieces that fit, cut after commas, each further one indented."""
    indent = " " * (len(line) - len(line[1:].lstrip()) + 4)
    mark = line[:1] if line[:1] in "+-" else ""
    pieces = [""]
    for word in re.findall(r".+?(?:, | (?=(?:for|if|else|and|or|[-+*/@]) )|$)", line):
        if pieces[-1].strip() and len(pieces[-1] + word.rstrip()) > WIDTH:
            pieces.append(mark + indent[len(mark) :])
        pieces[-1] += word
    return [piece.rstrip() for piece in pieces]


def _lines(count: int) -> str:
    return f"{count} line" + ("" if count == 1 else "s")


def _plain(source: str) -> str:
    """A source without annotations of functions, and without the choice of a bias."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.Call):  # projections of exercises are right with and without
            node.keywords = [word for word in node.keywords if word.arg != "bias"]
    return ast.unparse(tree)


def _own_names(source: str) -> Iterator[str]:
    """The names that a source gives: to variables, arguments and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _names(theirs: str, ours: str) -> dict[str, str]:
    """The names of one source that stand where another has a different name, in lines that are otherwise the same."""
    own, wanted = {*_own_names(theirs)}, {*_own_names(ours)}
    lines, others = code_of(theirs), code_of(ours)
    blank = [[_renamed(line, dict.fromkeys(names, "_")) for line in code] for code, names in
             ((lines, own), (others, wanted))]  # fmt: skip
    votes: Counter[tuple[str, str]] = Counter()
    for block in difflib.SequenceMatcher(None, blank[0], blank[1], autojunk=False).get_matching_blocks():
        for i in range(block.size):
            pairs = zip(WORD.findall(lines[block.a + i]), WORD.findall(others[block.b + i]), strict=True)
            votes.update((a, b) for a, b in pairs if a in own and b in wanted)
    found: dict[str, str] = {}
    for (name, other), _ in votes.most_common():
        if name not in found and other not in found.values():
            found[name] = other
    return {name: other for name, other in found.items() if name != other}


def _renamed(line: str, names: dict[str, str]) -> str:
    return WORD.sub(lambda found: names.get(found[0], found[0]), line)
