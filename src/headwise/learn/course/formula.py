"""Arithmetic in a sentence: "8 T d^2 + 4·T²·d = 4,294,967,296" is three formulas, compared by what they compute.

Letters have the meanings that people give them: n, T, L, S and N are the length, d and E the width, h and H the number
of heads. A lone `d` may also be the width of a head, so both readings are tried.
"""

import ast
import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping

Sizes = Mapping[str, float]
Formula = Callable[[float, float, float], float]  # of the length T, the width E and the number of heads H
NAMES = {
    **dict.fromkeys(("n", "N", "T", "L", "S", "seq", "seq_len", "seqlen", "seq_length", "length"), "T"),
    **dict.fromkeys(("E", "d_model", "dmodel", "dim", "width", "embed_dim", "hidden"), "E"),
    **dict.fromkeys(("d", "D"), "d"),
    **dict.fromkeys(("h", "H", "heads", "num_heads", "n_heads"), "H"),
    **dict.fromkeys(("d_k", "d_v", "d_h", "dk", "dh", "d_head", "head_dim"), "D"),
    **dict.fromkeys(("B", "batch", "batch_size"), "B"),
}
COUNTS = {"two": "2", "three": "3", "four": "4", "eight": "8"}
OPERATORS = {
    **dict.fromkeys("·×*∙⋅", "*"), **dict.fromkeys(("times", "by", "x"), "*"), **dict.fromkeys("-−–", "-"),
    **dict.fromkeys(("^", "**"), "**"), "squared": "**2", "cubed": "**3",
    "+": "+", "plus": "+", "/": "/", "÷": "/", "(": "(", ")": ")",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
SUFFIXES = {
    "k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "g": 1e9, "bn": 1e9, "billion": 1e9, "t": 1e12,
    "trillion": 1e12,
}  # fmt: skip
PAIR = "MAC"  # a multiply-add, which is two operations
TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:[,_ ]\d{3})+(?![\d_]|,\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+(?!\w))?)"
    r"(?:\s?(?P<suffix>[kMG](?=(?:FLOPs?|flops?|ops|MACs?|FMAs?)?\b)|T(?=FLOPs?|flops?|ops|MACs?|FMAs?)"
    r"|(?:thousand|million|[bt]rillion|billion|bn)\b))?"
    r"|(?P<pairs>(?:MAC|FMA)s?\b|(?:multiply|multiplication)[- /]?(?:and[- ])?(?:add|accumulate|addition)(?:s\b|\b))"
    r"|(?P<raised>⁻?[⁰¹²³⁴-⁹]+)|(?P<word>[A-Za-z_][A-Za-z_0-9]*(?:\^T\b)?)|(?P<sign>\*\*|[·×*∙⋅^+/÷()−–-])|(?P<gap>\s+)|(?P<stop>.)",
    re.DOTALL,
)
CROSS = re.compile(r"(?<=\d)( ?)[xX]( ?)(?=\d)")  # 512x512
ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
TRIALS = ((1024.0, 512.0, 8.0), (7.0, 30.0, 5.0), (11.0, 26.0, 13.0))  # T, E, H; the first is the interview's
MOST_POWER, FEWEST_DIGITS = 64, 2


@dataclasses.dataclass(frozen=True)
class Expression:
    """One piece of arithmetic.

    Args:
        text: as it was written.
        tree: what it computes.
        slack: how far a rounded number, such as 4.29 G, may be from the exact one.
        digits: how many digits such a number has.
    """

    text: str
    tree: ast.expr
    slack: float = 0.0
    digits: int = 99

    @property
    def letters(self) -> set[str]:
        """What its letters stand for."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}

    @property
    def is_number(self) -> bool:
        """Whether it is one number, as in 4.29·10⁹ or 2^32, and nothing is computed."""
        return _is_number(self.tree)

    def value(self, sizes: Sizes) -> float:
        """What it computes for some sizes; NaN if that is not a number."""
        try:
            return _value(self.tree, sizes)
        except (ArithmeticError, TypeError, ValueError, KeyError):
            return float("nan")

    def summands(self) -> Iterator["Expression"]:
        """The expression, and what it adds up."""
        yield self
        if isinstance(self.tree, ast.BinOp) and isinstance(self.tree.op, ast.Add):
            for side in (self.tree.left, self.tree.right):
                yield from dataclasses.replace(self, tree=side).summands()

    def equals(self, formula: Formula) -> bool:
        """Whether it computes the same as a formula: at the interview's sizes, and at others if it has letters."""
        return any(self._equals(formula, reading) for reading in ("E", "D"))

    def spelled(self) -> "Expression":
        """The expression with T for the number of tokens: 8·1024·512² and 4·1024²·512 are equal, but not the same."""
        return dataclasses.replace(self, tree=_Lettered().visit(copy.deepcopy(self.tree)))

    def _equals(self, formula: Formula, reading: str) -> bool:
        used = {reading if letter == "d" else letter for letter in self.letters}
        used |= {"E", "H"} if "D" in used else set()
        for trial in TRIALS if used else TRIALS[:1]:
            T, E, H = (new if name in used else first for name, new, first in zip("TEH", trial, TRIALS[0], strict=True))
            found = self.value({"T": T, "E": E, "H": H, "D": E / H, "B": 1.0, "d": E if reading == "E" else E / H})
            if not abs(found - formula(T, E, H)) <= max(self.slack, 1e-12 * abs(found)):
                return False
        return True


class _Lettered(ast.NodeTransformer):
    """Replaces the interview's number of tokens by its letter."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """The letter, or the number."""
        return ast.Name("T") if float(str(node.value)) == TRIALS[0][0] else node


def _is_number(tree: ast.expr) -> bool:
    if not isinstance(tree, ast.BinOp):
        return isinstance(tree, ast.Constant)
    if isinstance(tree.op, ast.Pow):
        return isinstance(tree.left, ast.Constant) and isinstance(tree.right, ast.Constant | ast.UnaryOp)
    is_power = isinstance(tree.right, ast.BinOp) and isinstance(tree.right.op, ast.Pow)
    scales = isinstance(tree.op, ast.Mult) and is_power and ast.unparse(tree.right.left) == "10"  # type: ignore[attr-defined]
    return scales and isinstance(tree.left, ast.Constant)


def _value(tree: ast.expr, sizes: Sizes) -> float:
    if isinstance(tree, ast.Constant):
        return float(str(tree.value))
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    if isinstance(tree, ast.UnaryOp):
        value = _value(tree.operand, sizes)
        return -value if isinstance(tree.op, ast.USub) else value
    if not isinstance(tree, ast.BinOp):  # empty parentheses
        raise TypeError(f"{ast.unparse(tree)} is not arithmetic")
    left, right = _value(tree.left, sizes), _value(tree.right, sizes)
    if isinstance(tree.op, ast.Pow):
        return float("nan") if abs(right) > MOST_POWER or left < 0 else left**right  # a root of it is complex
    return ARITHMETIC[type(tree.op)](left, right)


def expressions(text: str) -> list[Expression]:
    """The arithmetic in a text, in order.

    >>> [found.text for found in expressions("The weights: 4·512² = 1,048,576 numbers.")]
    ['4·512²', '1,048,576']
    >>> expressions("8 n d^2")[0].equals(lambda T, E, H: 8 * T * E * E)
    True
    """
    made = (_expression(run) for run in _runs(text))
    return [found for found in made if found is not None]


Token = tuple[str, str]  # as written, and as Python


def _runs(text: str) -> Iterator[list[Token]]:
    """Tokens that follow each other without a word or sign that is not arithmetic."""
    run: list[Token] = []
    for match in TOKEN.finditer(CROSS.sub(r"\1×\2", text)):
        if match["gap"]:
            run += [(" ", "")] if run else []
            continue
        found = _tokens(match)
        if not found and run:
            yield run
        run = run + found if found else []
    if run:
        yield run


def _tokens(match: re.Match[str]) -> list[Token]:
    written = match[0]
    if match["number"]:
        digits = re.sub(r"[,_ ]", "", match["number"])
        scale = SUFFIXES[match["suffix"].lower()] if match["suffix"] else 1.0
        is_plain = scale == 1.0 and "e" not in digits.lower()
        return [(written, digits if is_plain else repr(float(digits) * scale))]
    if match["raised"]:
        return [(written, "**" + written.translate(SUPERSCRIPTS))]
    if match["pairs"]:
        return [(written, PAIR)]
    if written in OPERATORS:
        return [(written, OPERATORS[written])]
    word = match["word"] or ""
    if word.lower() in COUNTS or word in NAMES:
        return [(word, COUNTS.get(word.lower()) or NAMES[word])]
    letters = re.fullmatch(r"[nNTLSdEDhHB]{2,4}", word)  # TE, nnd
    return [(letter, NAMES[letter]) for letter in word] if letters else []


def _expression(run: list[Token]) -> Expression | None:
    tokens = _trimmed(run)
    words = [word for _, word in tokens if word]
    pairs, words = words[-1:] == [PAIR], words[:-1] if words[-1:] == [PAIR] else words
    source = ""
    for before, word in zip(["+", *words], words, strict=False):
        joins = _ends_operand(before) and (word == "(" or word[0].isalnum())
        source += "*2" if word == PAIR else ("*" if joins else "") + word
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    made = Expression("".join(written for written, _ in tokens).rstrip(), tree)
    made = _rounded(made) if made.is_number else made
    return _doubled(made) if pairs else made


def _rounded(number: Expression) -> Expression:
    """A number with what its last digit leaves open."""
    written = re.match(r"[\d,_ ]+(\.\d+)?", number.text)
    digits = re.sub(r"[,_ ]", "", written[0]) if written else "0"
    unit = number.value({}) / float(digits) if float(digits) else 1.0
    if "." not in digits and (unit == 1.0 or isinstance(number.tree, ast.BinOp)):  # 1,024 and 2^10
        return number
    slack = 0.5 * unit * 10.0 ** -len(digits.partition(".")[2])
    return dataclasses.replace(number, slack=slack, digits=len(digits.replace(".", "").lstrip("0")))


def _doubled(counted: Expression) -> Expression:
    """Operations from multiply-adds."""
    tree = (
        ast.Constant(2 * counted.value({}))
        if counted.is_number
        else ast.BinOp(ast.Constant(2), ast.Mult(), counted.tree)
    )
    return dataclasses.replace(counted, tree=tree, slack=2 * counted.slack)


def _ends_operand(word: str) -> bool:
    return word == ")" or word[-1].isalnum()


def _trimmed(run: list[Token]) -> list[Token]:
    """A run without signs that join nothing and parentheses without a partner."""
    unmatched, opened = set[int](), list[int]()
    for i, (_, word) in enumerate(run):
        if word == "(":
            opened.append(i)
        elif word == ")":
            unmatched |= set() if opened else {i}
            opened = opened[:-1]
    kept = [token for i, token in enumerate(run) if i not in {*unmatched, *opened}]
    while kept and not (kept[-1][1] and _ends_operand(kept[-1][1])):
        kept = kept[:-1]
    while kept and (kept[0][1] == PAIR or not (kept[0][1] == "(" or kept[0][1][:1].isalnum())):
        kept = kept[1:]
    return kept
