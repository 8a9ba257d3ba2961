"""What a file says about its masks: comments, docstrings and notes such as `1 = keep` or `True for padding`."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headwise.check.code.case import Case
from headwise.check.vocabulary import call_role

ON = r"(?:1s?|ones?|True|nonzero|non-zero)"
OFF = r"(?:0s?|zeros?|False)"
LINK = r"\s*(?:=+|:|->|→|means?|for|where|at|on|is|are|marks?|indicates?|to)\s*"
FILLER = (
    r"(?:(?:the|an?|any|all|to|be|is|are|it|which|that|this|tokens?|positions?|keys?|can|may|you|must|should|will"
    r"|shall|has|have|needs?)\s+)*"
)
NOT = r"(not\s+|cannot\s+|can't\s+|don't\s+|never\s+|no\s+)?"
SEEN = r"(?:attend|attended|keep|kept|visible|real|valid|allowed|see|seen|use|used|look|unmasked|content)"
HIDDEN = (
    r"(?:mask|masked|masking|hide|hidden|hides|ignored?|pad|padding|padded|block|blocked|drop|dropped|forbidden|future"
    r"|invisible|disallowed|excluded?)"
)
TOKENS = re.compile(
    r"1|\w*(seq|len|tok|time|pos)\w*|[tslqknmij]|[tslqk]_?\d?|tgt|src|target|source|keys?|quer(y|ies)|num_\w+",
    re.IGNORECASE,
)
MASK = r"\b(?!masked\b|masking\b)\w*mask\w*\b"
OF_TORCH = re.compile(
    r"\b(?:in|by) (?:py)?torch\b|\b(?:py)?torch's\b|\bkernel\b|\b(?:sdpa|torch) (?:expects|wants|takes|reads)\b",
    re.IGNORECASE,
)
OTHER_MASK = re.compile(r"\b(padding|pad|causal|ahead|key|source|target)[ -]masks?\b", re.IGNORECASE)
# Where a description of a shape ends: an arrow, or the name of something else.
NEXT = re.compile(r"->|→|=>|变为|\bbecomes\b|\breturns?\b|\s(?!shapes?|sizes?|mask)[a-z_]+\s*:\s", re.IGNORECASE)
ARROW = re.compile(r"->|→|=>")
REFUSED = re.compile(
    r"\bnot (?:supported|allowed|accepted|possible)\b|\bunsupported\b|\bisn't supported\b", re.IGNORECASE
)
HEADS = re.compile(r"h|\w*heads?", re.IGNORECASE)
BATCH = r"(?:batch\w*|bs|bsz|b|n)"
DESCRIBED = r"\bshape\b\W{0,4}[(\[]\s*batch\w*\s*,\s*\w+\s*,\s*\w+\s*[)\]]"  # of an input, in a docstring
ADDED = re.compile(r"\badd(ed|itive)\b|\bnegative\b|-\s*inf|-\s*1e\d", re.IGNORECASE)
NOUN = r"(?:\s+(?:entry|entries|values?|elements?|bits?|positions?|keys?|tokens?|places?))?"
PHRASE = re.compile(rf"\b({ON}|{OFF})\b{NOUN}{LINK}{FILLER}{NOT}{FILLER}\W{{0,3}}({SEEN}|{HIDDEN})\b", re.IGNORECASE)


class Stated(NamedTuple):
    """A convention for a mask, and the line that states it."""

    meaning: str  # keep: 1 is visible; drop: 1 is hidden; additive: 0 is visible; or a shape
    line: int  # 0 for the text between the code of a notebook

    @property
    def place(self) -> str:
        """Where it is stated, in words."""
        return f"line {self.line}" if self.line else "the text"


def stated_meaning(case: Case, name: str) -> Stated | None:
    """The one meaning that the file states for this mask; None where it states none or contradicts itself."""
    for text in (case.own, case.around):  # what another class says of its mask may be another convention
        found = [
            Stated(meaning, line)
            for line, said in _statements(case, text)
            for part in _about(case, "" if OF_TORCH.search(said) or _is_of_other(case, line, name) else said, name)
            if (meaning := _meaning(part)) is not None
        ]
        if found:
            return found[0] if len({stated.meaning for stated in found}) == 1 else None
    return None


def _about(case: Case, text: str, name: str, others: str = rf"{MASK}|\b\w+_lens?\b") -> Iterator[str]:
    """The part of a line that speaks of this mask: from its name, or from the word mask, to the name of another one."""
    words = {"mask", "masks"} - _beside(case, name)
    names = list(re.finditer(others, text, re.IGNORECASE))
    others_named = [m for m in names if m[0].lower() not in (*words, name.lower())]
    for match in names:
        if match[0] == name or (match[0].lower() in words and not others_named):
            yield text[match.start() : next((m.start() for m in others_named if m.start() > match.start()), None)]


def _beside(case: Case, name: str) -> set[str]:
    """The other arguments of the functions that take one of this name."""
    functions = (n for n in ast.walk(case.tree) if isinstance(n, ast.FunctionDef))
    taken = ({a.arg for a in ast.walk(f.args) if isinstance(a, ast.arg)} for f in functions)
    return set().union(*(names - {name} for names in taken if name in names))


def stated_shapes(case: Case, name: str) -> list[Stated]:
    """Every shape that the file states for this mask, such as (B,S) or (B,T,S); of an arrow, what comes before it."""
    found = []
    for line, said in _statements(case):
        others = MASK
        first = ARROW.split(said)[0]
        text = first if re.search(others, first) else said  # what follows is the shape that it is given later
        text = "" if _is_of_other(case, line, name) or REFUSED.search(text) else text
        for part in _about(case, "" if _computes(text, name) or OTHER_MASK.search(text) else text, name, others):
            before = NEXT.split(re.sub(r"\s+", " ", part)[:120])[0]
            near = re.match(r"\w+.{0,40}?[(\[]", before) is not None
            groups = re.findall(r"[(\[]([\w\s,·*]+)[)\]]", before) if near else []
            shapes = [shape for group in groups if (shape := _shape(group.split(",")))]
            found += [Stated(shape, line) for shape in dict.fromkeys(shapes)]
    return found


def _is_of_other(case: Case, line: int, name: str) -> bool:
    """Whether a comment on a line of its own is followed by a statement that makes another mask.

    Or whether a line of a docstring stands under the name of another mask.
    """
    lines = case.whole.splitlines()
    if line == 0:
        return False
    if not lines[line - 1].lstrip().startswith("#"):
        above = (
            text for text in reversed(lines[: line - 1]) if text.strip() and _indent(text) < _indent(lines[line - 1])
        )
        heading = re.match(r"\s*[`*-]*\s*(\w+)`*\s*(?:\([^)]*\))?\s*:", next(above, ""))
        return heading is not None and heading[1] not in (name, "mask", "masks") and call_role(heading[1]) == "mask"
    code = next((text for text in lines[line:] if text.strip() and not text.lstrip().startswith("#")), "")
    made = re.match(r"\s*(\w+)\s*=[^=]", code)
    return made is not None and made[1] != name and call_role(made[1]) == "mask"


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _shape(axes: list[str]) -> str:
    """The axes of a mask in our letters; empty where they are not known."""
    words = [axis.strip() for axis in axes]
    square = len(words) == 2 and words[0] == words[1]  # (n, n) is a table of queries and keys
    first = ["B"] if re.fullmatch(BATCH, words[0], re.IGNORECASE) and not square else []
    rest = words[len(first) :]
    letters = [a if a == "1" else "H" if HEADS.fullmatch(a) else "T" if TOKENS.fullmatch(a) else "" for a in rest]
    known = len(words) > 1 and "" not in letters and letters[-1:] == ["T"]
    return f"({','.join([*first, *letters[:-1], 'S'])})" if known else ""


def states_boolean(case: Case, name: str) -> int | None:
    """The line that says that this mask holds booleans: a word of the text, or the type of the argument."""
    typed = rf"\b{re.escape(name)}\s*:\s*[^,=)]*\b(BoolTensor|Bool\[)"
    lines = enumerate(case.source.splitlines(), 1)
    annotated = next((n for n, text in lines if re.search(typed, text)), None)
    told = ((n, part) for n, text in _statements(case) for part in _described(case, text, name))
    said = (n for n, part in told if re.search(r"\bbool(ean|s)?\b", part, re.IGNORECASE))
    return next(said, annotated)


def states_integers(case: Case, name: str) -> int | None:
    """The line that says that this mask holds whole numbers: a word of the text, or the type of the argument."""
    typed = rf"\b{re.escape(name)}\s*:\s*[^,=)]*\b(LongTensor|IntTensor|Int\[)"
    annotated = next((n for n, text in enumerate(case.source.splitlines(), 1) if re.search(typed, text)), None)
    told = ((n, part) for n, text in _statements(case) for part in _described(case, text, name))
    said = (n for n, part in told if re.search(r"\b(u?int\d*|integers?|long)\b", part, re.IGNORECASE))
    return next(said, annotated)


def _described(case: Case, text: str, name: str) -> Iterator[str]:
    """What a line says of this mask, with the two words before its name, as in `an optional boolean mask`."""
    before = re.search(r"((?:\w+\s+){0,2})$", text.partition(name)[0]) if name in text else None
    yield from ((before[1] if before is not None else "") + part for part in _about(case, text, name))


def stated_window(case: Case, sizes: dict[str, int]) -> tuple[str, int, int] | None:
    """The argument that a window is named for, how many keys a token sees, and the line that says so."""
    for name, size in sizes.items():
        said = (
            rf"itself\W+(?:and\W+)?(?:the\W+)?{name}\W+1\b|{name}`?\s*-\s*1`?\s+(?:tokens|keys|positions)\b.*\bbefore"
        )
        for line, text in _statements(case):
            if re.search(said, text):
                return name, size, line
    return None


def states_norm(case: Case, name: str) -> bool:
    """Whether the file says that queries, keys or values are normalized."""
    many = {"query": "quer(?:y|ies)", "key": "keys?", "value": "values?"}[name]
    said = rf"\b{many}\b[^.,;]{{0,30}}\bnormali[sz]|normali[sz]\w*[^.,;]{{0,30}}\b{many}\b"
    return any(re.search(said, text, re.IGNORECASE) for _, text in _statements(case))


def states_one_length(case: Case, first: str, second: str) -> int | None:
    """The line that gives a second input the shape of the first, length included; None where none does."""
    shape = r"\s*(?:\([^()]*\)|[:=\-–—])?[^()\[\n]{0,40}[(\[]\s*\w+\s*,\s*([a-z]\w*)\s*,"
    made = r"\s*=[^#]*#\s*[(\[]?\s*\w+\s*[x×,]\s*([a-z]\w*)\s*[x×,]"  # k = self.key(k)  # N x T x D
    found: dict[str, tuple[str, int]] = {}
    for line, text in _statements(case):
        for name in (first, second):
            start = rf"[\s\-*#]*{re.escape(name)}\b"
            if match := re.match(start + shape, text, re.IGNORECASE) or re.match(start + made, text, re.IGNORECASE):
                found.setdefault(name, (match[1], line))
    if len(found) < 2 or found[first][0] != found[second][0]:
        return None
    return found[second][1]


def states_left_padding(case: Case) -> int | None:
    """The line that says that padding comes first; None where none does."""
    place = r"\b(?:on|at|to|from) the (?:left|start|beginning|front)\b"
    said = rf"\bleft[- ]?pad|\bpad\w*[^.,;]{{0,20}}{place}|padding_side\W+left"
    told = [(n, text) for n, text in _statements(case) if re.search(said, text, re.IGNORECASE)]
    return next((n for n, text in told if not re.search(r"\b(not|never|no|instead|unlike)\b|n't\b", text, re.I)), None)


def states_no_nan(case: Case) -> int | None:
    """The line that says that a row without a visible key gives no NaN; None where none does."""
    said = r"\b(no|not|never|without|instead of|rather than|avoids?|free of)\b[^.;]{0,12}\bnans?\b"
    about = r"\b(rows?|quer(y|ies)|masked|empty|hidden|visible|pad\w*)\b"
    lines = case.source.splitlines()
    for n, text in _statements(case):
        around = " ".join(lines[max(0, n - 3) : n]) if n else text
        if re.search(said, text, re.IGNORECASE) and re.search(about, around, re.IGNORECASE):
            return n
    return None


def states_one_token(case: Case) -> int | None:
    """The line that says that a call takes one token at a time; None where none does."""
    said = rf"\b(?:one|single) token\b|token by token|[(\[]\s*{BATCH}\s*,\s*1\s*,"
    return next((line for line, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)


def states_no_tokens(case: Case, names: Iterable[str]) -> int | None:
    """The line that gives an input the shape (batch, width); None where none does."""
    inputs = "|".join(map(re.escape, names))
    width = r"(?:\w*(?:dim|model|embed|hidden|feat|channel)\w*|[dec])"
    said = rf"\b(?:{inputs})\b(?:(?!mask|padding)[^.\n]){{0,40}}[(\[]\s*{BATCH}\s*,\s*{width}\s*[)\]]"
    return next((line for line, text in _statements(case, case.own) if re.search(said, text, re.IGNORECASE)), None)


def states_pieces(case: Case) -> int | None:
    """The line that says that a text may be given piece by piece; None where none does."""
    said = r"\b(?:several|many|more than one) (?:pieces|chunks|parts|tokens|calls)\b|\bchunk(?:ed|s|wise)\b|\bprefill"
    return next((line for line, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)


def states_channels(case: Case) -> int | None:
    """The line that says that attention runs between channels, in words or by the class's name; None without one."""
    said = "|".join(
        (
            r"\bcross[- ]?covariance\b",
            r"\b(between|across|over|along)( the)? channels\b",
            r"\btransposed (self[- ])?attention\b",
            r"\bchannel([- ]?wise)?[- ](self[- ])?attention\b",
        )
    )
    told = next((n for n, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)
    return told or case.line_with(r"class (XC[Ai]\b|\w*(Channel|CrossCovariance|Transposed)\w*Att)")


def states_slopes(case: Case) -> bool:
    """Whether the file says that its slopes are those of the paper on ALiBi."""
    said = r"slopes?\b[^.;]{0,20}\b(paper|authors?|original)|\b(paper|authors?|original)[^.;]{0,20}\bslopes?"
    told = [text for _, text in _statements(case) if re.search(said, text, re.IGNORECASE)]
    return bool(told) and not any(re.search(r"\b(not|other|instead|unlike)\b|n't\b", text) for text in told)


def states_unscaled(case: Case) -> int | None:
    """The line that says that scores are not scaled on purpose; None where none does."""
    factor = r"(?:1\s*/\s*(?:math\.)?(?:sqrt|\u221a)\s*\(?\w+\)?|d\w*\s*\*\*\s*-0?\.5|scal(?:e|ing)(?:\s+factor)?)"
    said = rf"\bun-?scaled\b|\bnot (?:scaled|divided)\b|\bno {factor}|\bwithout (?:a |the |any )?{factor}"
    doubt = r"\b(todo|fixme|yet|bug|wrong|mistake|forgot|instead of)\b|\?"
    told = [(n, text) for n, text in _statements(case) if re.search(said, text, re.IGNORECASE)]
    return next((n for n, text in told if not re.search(doubt, text, re.IGNORECASE)), None)


def states_other_scale(case: Case) -> int | None:
    """The line that says that another scale than the usual one is meant, as that of muP; None where none does."""
    width = r"\(?\s*(?:d_?k|d_?h\w*|head_?(?:dim|size)|dim_?head|d)\b"
    root = rf"(?:1\s*/\s*)?(?:math\.|torch\.|np\.)?(?:sqrt|\u221a)\s*{width}"
    instead = rf"\b(?:rather than|instead of|in place of) (?:the |a )?(?:usual |standard )?{root}"
    said = rf"(?i:{instead})|\b(?:u-)?(?:mu|\u00b5|\u03bc)-?P\b"
    doubt = r"\b(todo|fixme|bug|wrong|mistake|forgot|should)\b|\?"
    told = [(n, text) for n, text in _statements(case) if re.search(said, text)]
    return next((n for n, text in told if not re.search(doubt, text, re.IGNORECASE)), None)


def states_mask_instead(case: Case) -> int | None:
    """The line that says that a mask takes the place of the causal one; None where none does."""
    said = r"\bcausal\b[^.;]{0,30}\b(?:unless|if no|without an?|only (?:if|when) no)\b[^.;]{0,30}\bmask"
    return next((n for n, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)


def states_output_first(case: Case) -> int | None:
    """The line that says that the output is returned before the weights; None where none does."""
    said = r"\breturns?\b\W{0,12}(?:out|output|context|result|y|x)\b[^.\n]{0,20},[^.\n]{0,12}\b(?:att\w*|weights?)"
    return next((line for line, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)


def states_strict(case: Case) -> int | None:
    """The line that says that a token does not see itself; None where none does."""
    hidden = r"(?:not|never|cannot|except|excluding|exclude[sd]?|without|other than|but)"
    penalty = r"own (?:position|key|score)s? (?:gets?|is|are) (?:-|\u2212|minus|hidden|masked|excluded|penali[sz]ed)"
    said = rf"\b{hidden}\b[^.,;]{{0,30}}\bitself\b|\bstrict(?:ly)? (?:causal|past|earlier|before|lower)|{penalty}"
    return next((line for line, text in _statements(case) if re.search(said, text, re.IGNORECASE)), None)


def _computes(text: str, name: str) -> bool:
    """Whether there is code before a comment that does more than take this argument or ask whether it is there."""
    code = text.partition("#")[0].strip() if "#" in text else ""
    return re.fullmatch(rf"(def .*|{name}\s*(:[^=]*)?(=\s*None)?\s*,?|if {name} is not None:)?", code) is None


def states_batch_first(case: Case, names: Iterable[str]) -> int | None:
    """The line that says of an input that its batch comes first; None where none does, or another says the opposite."""
    inputs = "|".join(map(re.escape, names))
    whole = rf"\b(?:inputs?|takes|expects|in/out)\b[^.(\[]{{0,30}}[(\[]\s*{BATCH}\s*,\s*\w+\s*,\s*\w+\s*[)\]]"
    said = rf"\b({inputs})\b(?:(?!mask|padding).)*[(\[]\s*{BATCH}\s*,|\bbatch[- ]first\b|{whole}"
    first = [
        n
        for n, text in _statements(case, case.own)
        if re.search(said, text, re.I) and not re.search("not batch", text, re.I)
    ]
    whole = rf"[(\[]\s*\w+\s*,\s*{BATCH}\s*,\s*\w+\s*[)\]]"  # with heads, it is what something becomes later
    second = [n for n, text in _statements(case, case.own) if re.search(whole, text, re.I)]
    first = first or [
        n for n, text in _statements(case, case.own) if re.search(DESCRIBED, text, re.I) and "#" not in text
    ]
    return first[0] if first and not second else None


def states_batch_second(case: Case, names: Iterable[str]) -> int | None:
    """The line that says of an input that its tokens come first, then the batch; None where another says otherwise."""
    inputs = "|".join(map(re.escape, names))
    first = [n for n, text in _statements(case, case.own) if re.search(rf"[(\[]\s*{BATCH}\s*,", text, re.I)]
    tokens = r"(?:seq\w*|t|l|len\w*|length|time|tokens?|src_?len|tgt_?len)"
    order = rf"\b({inputs})\b.*[(\[]\s*{tokens}\s*,\s*{BATCH}\s*,"
    second = [n for n, text in _statements(case, case.own) if re.search(order, text, re.I)]
    return second[0] if second and not first else None


def _statements(case: Case, text: str | None = None) -> Iterator[tuple[int, str]]:
    """Everything that the file says in words about the class and what it uses, with the number of the line."""
    yield from _words(case.source if text is None else text)
    notes = "" if case.loaded is None else case.loaded.origin.notes
    yield from ((0, text.replace("*", "").replace("`", "")) for text in notes.splitlines())


def _words(source: str) -> Iterator[tuple[int, str]]:
    """Lines that hold a comment or belong to a string of several words, whole, with their numbers."""
    lines = source.splitlines()
    numbers: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
                numbers |= set(range(token.start[0], token.end[0] + 1))
    except (tokenize.TokenError, SyntaxError):  # a file that does not parse was refused before
        return
    yield from ((number, lines[number - 1]) for number in sorted(numbers) if number <= len(lines))
    for number in sorted(numbers & {n - 1 for n in numbers}):  # a sentence may go on in the next line
        if not lines[number - 1].rstrip().endswith((".", '"')) and "#" not in lines[number - 1]:
            yield number, f"{lines[number - 1]} {lines[number].strip()}"


def _meaning(text: str) -> str | None:
    """keep, drop or additive, if the line says so and nothing else."""
    meanings = set()
    for value, negated, verb in PHRASE.findall(text.replace("`", "").replace("*", "")):
        visible = bool(re.fullmatch(SEEN, verb, re.IGNORECASE)) != bool(negated.strip())
        on = bool(re.fullmatch(ON, value, re.IGNORECASE))
        added = visible and not on and ADDED.search(text) is not None  # 0 keeps, a negative number hides
        meanings.add("additive" if added else "keep" if visible == on else "drop")
    return meanings.pop() if len(meanings) == 1 else None
