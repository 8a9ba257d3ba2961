"""Code in the terminal: long lines are broken inside brackets, so that it can be copied and still runs."""

import ast
import io
import tokenize
from collections.abc import Iterator

WIDTH = 79
OPEN, CLOSED = "([{", ")]}"


def fitted(source: str, width: int = WIDTH) -> str:
    """A source in lines of at most so many columns, where that is possible; what it computes is the same.

    >>> print(fitted("x = first(1, second(2, 3))  # a comment", width=20))
    # a comment
    x = first(1, second(
        2, 3))
    """
    kept = _in_strings(source)
    lines = enumerate(source.splitlines(), 1)
    return "\n".join(piece for n, line in lines for piece in ([line] if n in kept else _fitted(line, width)))


def _in_strings(source: str) -> set[int]:
    """The numbers of the lines that a string of several lines is on, such as a docstring."""
    try:
        strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    except SyntaxError:
        return set()
    several = [(node.lineno, node.end_lineno or 0) for node in strings if node.end_lineno != node.lineno]
    return {line for first, last in several for line in range(first, last + 1)}


def _fitted(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    tokens = [*_tokens(line)]
    comment = next((token for token in tokens if token.type == tokenize.COMMENT), None)
    if comment is not None and line[: comment.start[1]].strip():
        return [f"{indent}{comment.string}", *_fitted(line[: comment.start[1]].rstrip(), width)]
    first = _best([*_places(tokens)], width)
    if first is None or not line[first:].strip():
        return [line]
    rest = f"{indent}    {line[first:].lstrip()}"
    return [line[:first].rstrip(), *_rest(rest, line[:first], width)]


def _rest(rest: str, before: str, width: int) -> list[str]:
    """The continuation of a line, which is inside its brackets already."""
    depth = sum(before.count(letter) for letter in OPEN) - sum(before.count(letter) for letter in CLOSED)
    if len(rest) <= width:
        return [rest]
    first = _best([*_places([*_tokens(rest)], depth)], width)
    indent = rest[: len(rest) - len(rest.lstrip())]
    if first is None or first <= len(indent) or not rest[first:].strip():
        return [rest]
    return [rest[:first].rstrip(), *_rest(f"{indent}{rest[first:].lstrip()}", before + rest[:first], width)]


def _best(places: list[int], width: int) -> int | None:
    """The last place that fits, or the first one."""
    return max((place for place in places if place <= width), default=min(places, default=None))


def _places(tokens: list[tokenize.TokenInfo], depth: int = 0) -> Iterator[int]:
    """Where a line can be broken: inside brackets, after a comma or an opening bracket, outside strings."""
    strings = 0  # a formatted string has tokens of its own from Python 3.12 on
    for token in tokens:
        name = tokenize.tok_name[token.type]
        strings += (name == "FSTRING_START") - (name == "FSTRING_END")
        if token.type != tokenize.OP or strings:
            continue
        depth += (token.string in OPEN) - (token.string in CLOSED)
        if depth > 0 and (token.string == "," or token.string in OPEN):
            yield token.end[1]


def _tokens(line: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of one line, which alone may be an incomplete statement."""
    indent = len(line) - len(line.lstrip())
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.lstrip() + "\n").readline):
            start, end = ((place[0], place[1] + indent) for place in (token.start, token.end))
            yield token._replace(start=start, end=end)
    except (tokenize.TokenError, SyntaxError):
        return
