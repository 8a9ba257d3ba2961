"""What good answers in the interview say, and how to recognize it in the words of a candidate."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from headwise.learn.course.formula import FEWEST_DIGITS, TRIALS, Expression, Formula, expressions

ROUNDED = 5  # digits of a number that says less than the exact one
SMALLEST_CLAIM = 1000  # smaller numbers are sizes and counts
NOT = r"\b(not|never|no|isn't|don't|doesn't|instead of|rather than|without)\b"


BYTES = re.compile(r"(\d[\d,_]*(?:\.\d+)?)\s?(kilo|mega|giga|[kmg]?)i?(?:b|bytes?)\b", re.IGNORECASE)
CLAUSES = re.compile(r"[,;:]\s|\b(?:and|but|while|so)\b|(?<=[.!?])\s+|\n+")
PIECES = re.compile(CLAUSES.pattern + r"|\bplus\b|\s\+\s")
SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n+")
SWAPPED = (  # an amount right beside the subject that it does not belong to, in one clause
    r"(score|attention)\w*( (cost|take|need|are|is|\w+ing))?:? (O\()?[TnNL]? ?[·*]? ?[dE](²|\^2|\*\*2)|"
    r"O\([TnNL]? ?[·*]? ?[dE](²|\^2|\*\*2)\) (for|in) (the )?(attention )?scores?|"
    r"project\w*( (cost|take|need|are|is|\w+ing))?:? (O\()?[TnNL](²|\^2|\*\*2)|"
    r"O\([TnNL](²|\^2|\*\*2) ?[·*]? ?[dE]?\) (for|in) (the )?project"
)
IN_PAIRS = re.compile(r"MAC|FMA|multipl", re.IGNORECASE)
RESULT = re.compile(r"=|\b(?:so|therefore|thus|hence|that is|altogether|in total)\b|→|⇒")
ENTRIES = r"\b(numbers?|elements?|entries|values|floats|scalars)\b"
WHOLE = r"\b(1024|1,024|all|T|n|whole|total)\b(?! (numbers|elements|entries|values|heads))"
EACH = r"\b(each|every|four|4|two|twice|per|both|again|same for|likewise)\b"
OF_ONE = r"\b(per|each|every|a|one) (new |past |single )?token"
SHARES = r"\b(heads?|layers?|keys?|values?|K|V|each|both|other|if|for)\b"  # of a part, or of another layer
DTYPES = {  # bytes of a number, and how one names it
    2: r"float16|fp16|bf16|\bhalf\b|16[- ]?bit|\b2 bytes|two bytes",
    4: r"\bfloats?(32)?\b|fp32|32[- ]?bit|single precision|\b4 bytes|four bytes",
}


class PointFound(NamedTuple):
    """Whether an answer makes a point: "said", "rounded", "wrong" or "missing"; the words that decide it; a remark."""

    state: str
    words: str = ""
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Point:
    """Something that a good answer says.

    Patterns cannot understand a sentence. A point is called said only if one sentence has all its ideas, or arithmetic
    that computes it, and wrong only if a number or the named opposite is certain; everything else is missing.

    Args:
        name: what it is.
        ideas: regular expressions that one sentence must all match.
        unless: words that turn it around.
        against: words that are certainly its opposite, unless they are negated.
        formulas: arithmetic that says it, in numbers or letters.
        subject: of what a bare number must be said to count as the first of the formulas; without it, none does.
        total: the number that the whole question is about, which must be in the answer as a number.
        exact: whether the total must have all its digits; otherwise it may be rounded to two or more.
        if_half: what to remark on half of the total.
        parts: numbers that belong to the way to the total.
        shares: what the total is the sum of; numbers said of two such parts are added up.
        items: how many numbers are stored, and of what that is not the size; an answer may give their bytes. If the
            point has no ideas, it must.
    """

    name: str
    ideas: tuple[str, ...] = ()
    unless: str = r"(?!)"
    against: str = r"(?!)"
    formulas: tuple[Formula, ...] = ()
    subject: str = r"(?!)"
    total: int | None = None
    exact: bool = True
    if_half: str = ""
    parts: tuple[int, ...] = ()
    shares: str = r"(?!)"
    items: tuple[tuple[int, str], ...] = ()

    def found_in(self, answer: str) -> PointFound:
        """Whether an answer makes this point."""
        sentences = SENTENCES.split(answer)
        if self.items and (stored := self._stored(answer)) is not None:
            return stored
        for sentence in sentences:
            if self._said(sentence):
                return PointFound("said", sentence)
        if self.total is not None:
            return self._claimed(sentences, self.total)
        return next(
            (PointFound("wrong", sentence) for sentence in sentences if self._denied(sentence)), PointFound("missing")
        )

    def _stored(self, answer: str) -> PointFound | None:
        """What the last number of bytes in an answer says, for the dtype that it names; None if that is nothing."""
        named = [size for size, words in DTYPES.items() if re.search(words, answer, re.IGNORECASE)] or [*DTYPES]
        if any(self._miscounted(clause) for clause in CLAUSES.split(answer)):
            return None
        claims = [claim for claim in _bytes(answer) if max(claim.values) >= SMALLEST_CLAIM]
        if not claims:
            clauses = CLAUSES.split(answer)
            return PointFound("said", answer) if any(self._counted(clause, named) for clause in clauses) else None
        written, values, around = claims[-1]
        wanted = [size * count for size in named for count in self._items_of(around)]
        if any(abs(value - total) <= 0.005 * total for value in values for total in wanted):
            return PointFound("said", written)
        sentence = next((s for s in reversed(SENTENCES.split(answer)) if written in s), answer)
        is_of_one = re.search(OF_ONE, around, re.IGNORECASE) and not re.search(SHARES, sentence, re.IGNORECASE)
        return None if "head" in answer or (self.ideas and not is_of_one) else PointFound("wrong", written)

    def _counted(self, clause: str, sizes: list[int]) -> bool:
        """Whether a clause has the number of what is stored, or of its bytes if it does not say of what."""
        counts = self._items_of(clause)
        wanted = counts if re.search(ENTRIES, clause, re.IGNORECASE) else [size * n for size in sizes for n in counts]
        return bool({number.value({}) for number in expressions(clause) if not number.letters} & {*wanted})

    def _miscounted(self, clause: str) -> bool:
        """Whether a clause has a number of entries for one token that is not that of this point."""
        if not (self.ideas and re.search(ENTRIES, clause, re.IGNORECASE) and re.search(OF_ONE, clause, re.IGNORECASE)):
            return False
        claimed = [number.value({}) for number in expressions(clause) if not number.letters]
        counts = {*self._items_of(clause)}
        large = [value for value in claimed if value >= SMALLEST_CLAIM]
        return bool(large) and not counts & {*claimed} and not re.search(SHARES, clause, re.IGNORECASE)

    def _items_of(self, clause: str) -> list[int]:
        return [count for count, other in self.items if not re.search(other, clause, re.IGNORECASE)]

    def _said(self, sentence: str) -> bool:
        found = expressions(sentence)
        if self.total is not None:
            return self._says_total(sentence, self.total)
        if self._denied(sentence):
            return False
        if any(_computes(found, formula, sentence) for formula in self.formulas) or self._numbered(sentence):
            return True
        if any(_is_multiple(expression, formula) for expression in found for formula in self.formulas):
            return False
        if not self.ideas or re.search(self.unless, sentence, re.IGNORECASE):
            return False
        return all(re.search(idea, sentence, re.IGNORECASE) for idea in self.ideas)

    def _numbered(self, sentence: str) -> bool:
        """Whether a clause on the subject of this point has the value of one of its formulas."""
        clauses = [clause for clause in PIECES.split(sentence) if re.search(self.subject, clause, re.IGNORECASE)]
        numbers = [number for clause in clauses for number in expressions(clause) if number.is_number]
        return any(number.equals(formula) for number in numbers for formula in self.formulas[:1])

    def _says_total(self, sentence: str, total: int) -> bool:
        """Whether the last claim of a chain of equations is the total: a right formula with a wrong result is not."""
        if (added := self._added(sentence)) is not None:
            return added.equals(lambda T, E, H: total)
        links = RESULT.split(sentence)
        chain = [[number for number in expressions(link) if self._is_claim(number)] for link in links]
        last = next((claims for claims in reversed(chain) if claims), [])
        return any(self._is_total(number, total) for number in last)

    def _added(self, sentence: str) -> Expression | None:
        """The sum of what a sentence says of two parts; None if it says fewer, or has a number of the whole."""
        claims: list[Expression] = []
        for piece in PIECES.split(sentence):
            found = [number for number in expressions(piece) if number.is_number and number.value({}) >= SMALLEST_CLAIM]
            if found and not re.search(self.shares, piece, re.IGNORECASE):
                return None
            claims += found[-1:]
        if len(claims) < 2 or RESULT.search(sentence):
            return None
        paired = [IN_PAIRS.search(number.text) is not None for number in claims]
        twice = [2.0 if any(paired) and not is_paired else 1.0 for is_paired in paired]
        value = sum(number.value({}) * times for number, times in zip(claims, twice, strict=True))
        slack = sum(number.slack * times for number, times in zip(claims, twice, strict=True))
        return Expression(sentence, ast.Constant(value), slack)

    def _is_claim(self, number: Expression) -> bool:
        return not number.letters and number.value({}) >= SMALLEST_CLAIM and number.value({}) not in self.parts

    def _is_total(self, number: Expression, total: int) -> bool:
        if number.letters or not number.equals(lambda T, E, H: total):
            return False
        return number.digits > ROUNDED if self.exact else number.digits >= FEWEST_DIGITS

    def _denied(self, sentence: str) -> bool:
        against = re.search(self.against, sentence, re.IGNORECASE)
        return against is not None and not re.search(NOT, sentence[: against.start()][-25:], re.IGNORECASE)

    def _claimed(self, sentences: list[str], total: int) -> PointFound:
        """The last number that is neither a size nor a step on the way is what the candidate takes for the total."""
        for sentence in reversed(sentences):
            if self._added(sentence) is not None:
                return PointFound("wrong", sentence)
            for number in reversed([] if re.search(self.unless, sentence, re.IGNORECASE) else expressions(sentence)):
                if self._is_claim(number):
                    is_near = number.equals(lambda T, E, H: total)
                    is_half = bool(self.if_half) and number.equals(lambda T, E, H: total / 2)
                    return PointFound("rounded" if is_near else "wrong", number.text, self.if_half if is_half else "")
        return PointFound("missing")


class BytesClaim(NamedTuple):
    """A number of bytes: as written, in decimal and binary units, which people mix up, and the clause that it is in."""

    written: str
    values: tuple[float, float]
    clause: str


def _bytes(text: str) -> Iterator[BytesClaim]:
    """The numbers of bytes in a text.

    >>> list(_bytes("2 KiB for each"))
    [BytesClaim(written='2 KiB', values=(2000.0, 2048.0), clause='2 KiB for each')]
    """
    for clause in CLAUSES.split(text):
        for found in BYTES.finditer(clause):
            number, power = float(re.sub("[,_]", "", found[1])), " kmg".index(found[2][:1].lower() or " ")
            yield BytesClaim(found[0], (number * 1000**power, number * 1024**power), clause)


def _computes(found: list[Expression], formula: Formula, sentence: str) -> bool:
    """Whether arithmetic computes a formula: in one piece, as a summand, twice the half, or a quarter for each."""
    pieces = [piece for whole in found if not whole.is_number for piece in whole.summands()]

    def count(share: int) -> int:
        def wanted(T: float, E: float, H: float) -> float:
            return formula(T, E, H) / share

        return sum(piece.equals(wanted) and _same_way(piece, wanted) for piece in pieces)

    for piece in pieces:  # their factors are no words
        sentence = sentence.replace(piece.text, "")
    is_each = re.search(EACH, sentence, re.IGNORECASE)
    return count(1) > 0 or count(2) > 1 or (is_each is not None and count(PARTS.get(formula, 4)) > 0)


def _is_multiple(found: Expression, formula: Formula) -> bool:
    """Whether arithmetic with numbers is a formula several times, as if every head had it."""
    times = found.value({}) / formula(*TRIALS[0])
    return not (found.letters or found.is_number) and times == TRIALS[0][2]


def _same_way(piece: Expression, formula: Formula) -> bool:
    """Whether numbers compute a formula in the way it does: 4·1024²·512 is not 8·1024·512², though it is equal."""
    depends = formula(1.0, 1.0, 1.0) != formula(2.0, 1.0, 1.0)
    spelled = piece.spelled()
    return not depends or bool(piece.letters) or "T" not in spelled.letters or spelled.equals(formula)


def projections(T: float, E: float, H: float) -> float:
    """The operations of the four projections; a multiply-add counts as two."""
    return 8 * T * E * E


def of_width(T: float, E: float, H: float) -> float:
    """How their number grows."""
    return T * E * E


def attention(T: float, E: float, H: float) -> float:
    """The operations of the scores and the weighted values."""
    return 4 * T * T * E


def all_operations(T: float, E: float, H: float) -> float:
    """The operations of one forward pass."""
    return projections(T, E, H) + attention(T, E, H)


def matrices(T: float, E: float, H: float) -> float:
    """The weights of the four projections."""
    return 4 * E * E


def biases(T: float, E: float, H: float) -> float:
    """Their biases."""
    return 4 * E


def parameters(T: float, E: float, H: float) -> float:
    """The weights and the biases."""
    return matrices(T, E, H) + biases(T, E, H)


def weights(T: float, E: float, H: float) -> float:
    """The attention weights of all heads."""
    return H * T * T


SQUARE = r"( ?(\^|\*\*) ?2|²| squared)"
LENGTH = r"(sequence|seq(_?len)?|length|tokens?|context|\bn\b|\bT\b|\bL\b)"
MORE = (
    r"((eight|8|h|n|\d+|many|several) times|twice|h-fold|\dx) "
    r"(as many|as much|more|the|larger|slower|(as )?(expensive|costly))"
)

WIDTH = r"(d_model(?! ?(/|over|divided))|(embedding|model|hidden) (dim\w*|width|size))"
NO_CHANGE = r"(\bnot|\bnever|n't)( \w+)? (depend|change|matter|affect|grow|increase|reduce|save|rise|blow up)"
MODEL_WIDTH = (
    rf"(sqrt|root|√)( of)?( the)? ?\(?{WIDTH}(?!.{{0,20}}\b(would|wrong|too|instead)\b)|^(it is )?the {WIDTH}\W*$"
)
QUERIES_TOO = (
    r"(\b(Q|quer\w+)( vectors?)?,? (and )?(the )?(K|keys?)( vectors?)?,? (and|&) (the )?(V|values?)\b|"
    r"\b(K|keys?)( vectors?)?,? (and )?(the )?(V|values?)( vectors?)?,? (and|&) (the )?(Q|quer\w+)\b)"
)

GROWTH = r"(O\((T|n)\)|linear)"  # in the length
ROOM = r"\b(memory|storage|space|size|footprint|bytes|cache|numbers|stor\w+|grow\w*)\b"  # what is not time
WORK = (
    r"(?<!memory )(?<!storage )\b(time|costs?|comput\w*|work|operations|flops|steps?|tokens?|generat\w*|decod\w*|"
    r"attention|attend\w*|latency|speed)\b"
)
WORK_GROWS = (  # within one clause, so that it is not the cache which grows
    rf"{WORK}((?!{ROOM})[^,;:])*{GROWTH}|"
    rf"(^|[,;:])((?!{ROOM})[^,;:])*{GROWTH}(ly)?( in (the )?\w+)? (of )?{WORK}|"
    rf"(^|[,;:])((?!{ROOM})[^,;:])*{GROWTH} (per|for|instead of|not|rather than)\b"
)
ONE_HEAD_ONLY = (
    r"\b(single|one) (attention )?head\b.*\b(only|just|one (type|kind)|has to \w+|must \w+|would have to|cannot)"
)
KEPT_QUERIES = r"quer\w+( vectors)? (are|get) (\w+ )?(stored|cached|kept)"
FEWER_QUERIES = r"(fewer|less) quer\w+(?! heads? (share|per))|" + KEPT_QUERIES
PARTS: dict[Formula, int] = {attention: 2}  # the equal products that a formula adds up; of the others, four
POINTS = {
    "several-heads": (
        Point(
            "each head has weights of its own, so a token attends in several ways at once",
            (
                r"heads?\b|distribution|specialist|different .*subspace|"
                r"\b(several|multiple|many)( of them)? (let|allow|enable|can|give|attend|look|focus|learn)",
                r"\b(own|different(ly)?|separate|distinct|unique|several|multiple|many|eight|8|each|another)\b|"
                r"instead of|\bhead 2\b|" + ONE_HEAD_ONLY,
                r"weights|matri|projection|pattern|thing|relation|dependenc|subspace|distribution|\bways\b|aspect|"
                r"of them|place|position|simultaneous|at once|at the same time|speciali[sz]e|"
                r"\b(track|captur|follow|learn|focus|notic|detect|look|attend)\w*|\b(syntax|grammar|pronoun|verb)",
            ),
            unless=r"\bshare|same (set|pattern|attention|weights)|times the param|faster|narrow|"
            r"(several|other|many) (sentences|texts)|of the batch|averag\w+ (the|over)|learn the same|"
            r"split (up )?(among|between|across)|"
            r"(process|handl|gets?)\w* (a|its|one) (\w+ )?(part|piece|section) of",
            against=r"(all|every) heads? \w+ (the )?same",
        ),
        Point(
            "the cost is the same: parameters and operations do not grow",
            (
                r"\bsame\b|no (extra|more|additional)|nothing (extra|more)|unchanged|equal|identical|"
                r"as (many|much)|constant|" + NO_CHANGE + r"|free",
                r"cost|param|flop|comput|operation|budget|\bpay\b|(many|more|extra|fewer|number of) weights",
            ),
            unless=r"times the|times as|grows with|pay for",
            against=MORE + r"|(cost|param\w*|comput\w*) (grows?|increases?) with|more heads "
            r"(are|is|costs?|needs?|means?|takes?|adds?|have) (slower|more (param|weight|comput|cost|flop|expens))",
        ),
        Point(
            "the price: every head works in fewer dimensions",
            (
                r"head|each|dimension|width|scores",
                r"head.* (in|only|just|with) (d_model|d_out|d|E) ?/|"
                r"narrow|\brank\b|small|fewer dim|low(er)?[- ](dim|rank)|subspace|\bthin(ner)?\b|"
                r"less (width|room|capacity)|"
                r"64[- ]dim|only (1/\d|an? \w+) of|"
                r"(only|just)( has| have| gets?| sees)? (64|(d|d_model|E) ?/)|bottleneck|less expressive",
            ),
            unless=r"no (downside|price|drawback)|\bfull\b|always better",
            against=r"heads? (\w+ ){1,3}(the |in the )?(full|whole|entire|larger) (\d+ )?(dim|width|512)",
        ),
    ),
    "complexity": (
        Point(
            "the scores are quadratic in the length",
            (
                r"quadratic|quadruple|\b[TnLNS]" + SQUARE + r"|O\([TnLNS](²|\^2)|seq\w*" + SQUARE + "|"
                r"squared? (of|in|with)? ?(the )?(sequence|length|context|number of tokens)|four times|"
                r"every (other )?(token|pair|key)",
            ),
            unless=r"\bnot quadratic|(quadratic|squared?) (in|of) (the )?(model )?width|width squared|"
            r"d_model squared|always|^(?!.*(score|attention|QK|pair|map|softmax|[dE]" + SQUARE + r"|d_model)).*project",
            against=SWAPPED
            + r"|linear(ly)? (in|with) (the )?(\w+ )?"
            + LENGTH
            + r"|O\( ?[TnLN] ?\)|O\([TnLN] ?(\^ ?3|³)|"
            r"cubic|\b[TnLN] log|O\(1\)",
        ),
        Point(
            "the projections are quadratic in the width",
            (
                r"project|(linear|dense) layer|matri|W_|weights|O\(|\bQ, ?K",
                r"(?<![A-Za-z])[TnLN]? ?[·*]? ?[dE]" + SQUARE + r"|d_model" + SQUARE + r"|width" + SQUARE + "|"
                r"squared?( of)?( the)? (width|dimension|d_model|model)|(twice|doubl\w+) the (\w+ )?(dim|width).*"
                r"(four times|quadrupl|fourfold)|quadratic in (the )?(width|d|E|dim)",
            ),
            formulas=(of_width, projections),
            against=SWAPPED + r"|O\( ?(d|E|d_model) ?\) in (the )?(model )?(width|dim|d\b)|"
            r"project\w* \w+ (linear in (the )?(model )?(width|d\b|d_model|dim)|free|O\([nT](\^2|²)\))",
        ),
        Point(
            "which of the two dominates depends on the length",
            (
                r"domina|\bwins?\b|larger|equal|balanc|break[- ]?even|cross|outweigh|overtake|bigger|matters more|"
                r"takes over|costs? more|"
                r"bottleneck|\bhurts?\b|expensive|most of the (time|work)|majority",
                r"short|long|beyond|\b[TnLN] ?[=≈] ?\d|depends|until|above|below|whether|equal at|tokens|from .* on|"
                r"\b(once|if|when|for|at)\b.*([<>=≥≤]|exceed|(larger|greater|bigger|more) than)",
            ),
            unless=r"\balways\b|for (any|every|all) (length|T\b|n\b|size)|no matter",
            against=r"always|for (any|every) length|no matter how (short|long)",
        ),
    ),
    "grouped": (
        Point(
            "several query heads share a key/value head",
            (
                r"quer|\bq heads",
                r"quer\w*( heads?)?( \w+){0,4} (share|reuse|use the same)|shared?( \w+){0,4} (by|across|among|between)"
                r"|(fewer|one|single|less|only \d+|common|same|two|\d+) (\w+ ){0,2}(kv|k/v|keys?|k\b|k and v|shared)|"
                r"serv|same (keys|k\b|kv|key)|share (a|one|the same|keys|k)\b|use one k",
            ),
            unless=r"quer\w+ (are|is) shared|shared quer|share (a|one|the same) quer|tokens together|own keys|"
            r"fewer quer|own (key|kv)",
            against=FEWER_QUERIES + r"|quer\w* head (has|gets|keeps) (its|their) own (key|kv|k/v)|"
            r"keys? (heads? )?share (a|one) quer",
        ),
        Point(
            "the cache shrinks",
            (
                r"cache|stor|keys and values|memory|bandwidth",
                r"small|shrink|less|fewer|reduc|down|divid|cut|lower|save|fall|drop|1/\d|\d\d?%|quarter|half|"
                r"times less",
            ),
            unless=r"large|not change|grow|unchanged|same (cache|memory)|" + FEWER_QUERIES,
            against=KEPT_QUERIES + r"|cache (\w+ )?("
            r"(gets|is|becomes|grows) (bigger|larger)|"
            r"grows\b(?! (with|by|lin)))|"
            r"cache (stays|remains) (the )?(same|unchanged)",
        ),
        Point(
            "the scores cost the same",
            (
                r"score|qk|flop|comput|arithmetic|attention matri",
                r"\bsame\b|identical|unchanged|unaffected|(not|n't|no)\b.*(fewer|cheaper)|still|equal|as (many|much)|"
                r"(score|flop|comput)\w* (remain|stay)|" + NO_CHANGE,
            ),
            unless=r"(?<!any )(?<!no )(?<!not )cheaper|reduc\w+ the comp|linear|(key|value|quer)\w* (are|is) still",
            against=r"scores? (\w+ ){1,2}cheaper|(reduces?|fewer|less|saves?) (the )?(score|attention)? ?"
            r"(scores?|comput\w*|flops)\b",
        ),
        Point(
            "with one key/value head it is multi-query attention",
            (r"multi-?query|MQA", r"\bone\b|single|\b1\b|extreme"),
            unless=r"many more|ordinary|multi-head attention",
            against=r"(one|single) quer|(multi-?query|MQA)( attention)? (has|uses|is) (many|several|more)|"
            r"(one|single) (key|kv|k/v)\S* head \w+ \w+ (ordinary|standard|multi-?head)",
        ),
    ),
    "parameters": (
        Point(
            "four matrices of d_model × d_model",
            (
                r"\bfour\b|\b4\b|W_?q\b.*W_?k\b.*W_?v\b.*W_?o\b|Q, K, V,? and (O|out)|"
                r"quer\w*,? (and )?keys?,? (and )?values?,? (and )?(the |an? )?out",
                r"matri|512 ?(x|×|by|\*|\^|²)|d_model|weights|project|linear",
            ),
            unless=r"^(?!.*\b(four|4)\b( \S+){0,3} (matri|project|linear|weight)).*\bbias|"
            r"heads (\w+ )?(with|have|has|times) (\w+ )?(four|4)\b",
            against=r"heads (\w+ )?(with|have|has|times) (\w+ )?(four|4)\b|"
            r"\b(three|3|five|5|two|2) (weight )?(matri|project|linear)",
            formulas=(matrices, parameters),
        ),
        Point(
            "and four biases",
            (r"bias", r"\bfour\b|\b4\b|each|every|2,?048|with (the )?bias|plus|add"),
            unless=r"\bno bias|without bias|not param|ignor|\b(one|two|three|a single) bias",
            against=r"no bias|\b(one|two|three|a single) bias",
            formulas=(biases, parameters),
        ),
        Point(
            "together 1,050,624",
            unless=r"weights|matri|bias(es)? (are|is|add)",
            total=1_050_624,
            parts=(262_144, 262_656, 2_048, 1_024),
        ),
        Point(
            "the number of heads does not change it",
            (
                r"heads?\b|\bh\b",
                NO_CHANGE
                + r"|regardless|independent|\bsame\b|irrelevant|no (influence|effect|difference)|only (a )?reshap|"
                r"whatever",
            ),
            unless=r"multiply by|more param|eight times|times 8",
            against=r"multipl\w+ (\w+ )?by (the )?(\d+|number of|eight) ?heads|times (8|eight) heads|"
            r"more heads (mean|have|need|give) more|"
            r"(doubl|tripl|grow|increas|chang)\w* (if|when|with) (\w+ ){0,4}heads",
        ),
    ),
    "flops": (
        Point(
            "the projections: 8·T·E²",
            formulas=(projections, all_operations),
            subject=r"project|linear layer",
        ),
        Point(
            "the scores and weighted values: 4·T²·E",
            (
                r"score|QK|attention",
                r"2 ?[·*×]? ?T ?[·*×]? ?T ?[·*×]? ?D|two T ?× ?T ?× ?D|(twice|two|both).*T²·?D",
                r"per head|each head|every head|all heads|H heads",
            ),
            formulas=(attention, all_operations),
            subject=r"score|QK|weighted|attention (itself|part|product|matri|map)|for (the )?attention|AV\b",
        ),
        Point(
            "together 4,294,967,296, or 4.29 G",
            unless=r"\b(project\w*|scores?|products?|linear layers?) (take|need|cost|are|require)|"
            r"\b(for|in) (all |the )*(four )?(project\w*|linear layers?|scores?|attention)\W*$",
            total=4_294_967_296,
            exact=False,
            if_half="Yours is right if a multiply-add counts as one",
            parts=(2_147_483_648, 1_073_741_824, 536_870_912, 262_144, 1_048_576, 1_024),
            shares=r"project|linear layer|score|QK|attention|weighted|AV\b",
        ),
        Point(
            "a multiply-add counts as two",
            (
                r"multiply|multiplication|\bMACs?\b|\bFMAs?\b|\bmul\b",
                r"\btwo\b|\b2\b(?![.,^*]\d|\^)|twice|double|separately|multiplication and (one |an )?addition",
            ),
            unless=r"(not|never|n't) (\w+ )?separate|\bone operation|as one|ignore|single|\b1 flop",
            against=r"(multiply-?add|MAC|FMA)s? (counts? as|is|as) (one|1|a single)|\b(1|one) flop per (MAC|multiply)|"
            r"ignore (the )?addition",
            formulas=(projections, attention, all_operations),  # their factors count both
        ),
    ),
    "memory": (
        Point(
            "T² numbers for every head",
            (
                r"\b[TnLS]"
                + SQUARE
                + r"|\b[TnL] ?([×x·*]|by) ?[TnL]\b|quadratic|1024 ?([×x·*]|by) ?1024|seq\w*"
                + SQUARE
                + r"|square matri|seq\w* ?([×x·*]|by) ?seq",
            ),
            unless=r"O\(T\), not|d_model squared",
            formulas=(weights,),
            subject=r"weights|scores|" + ENTRIES,
        ),
        Point("together 16 MiB in bfloat16", items=((8 * 1024 * 1024, r"(per|each|one|a|every) head"),)),
        Point(
            "training keeps them for the backward pass",
            (r"backward|backprop|gradient|train|autograd", r"keep|kept|sav|stor|need|hold|held|remember|stay"),
            unless=r"(flash|kernel|fused)\w* (\w+ ){0,4}(doubl|twice|more memory|stor|keep|sav)|"
            r"^(?!.*(train|autograd|naive|otherwise|without)).*recomput|"
            r"thrown|not need|needs? (no|nothing)|inference only|discard|not (store|keep|save)",
            against=r"training needs no|needs nothing|(not|n't) (stored?|kept|saved?|needed) (for|in) (the )?back",
        ),
        Point(
            "a fused kernel works in tiles and never stores them",
            (
                r"tile|block|chunk|online|recomput|piece|never|not (store|material|writ)|without (stor|material|writ)|"
                r"avoid|stream|O\([TnN]\)|linear memory|memory is linear",
                r"kernel|flash|fused|only|O\(T\)|O\(n\)|SRAM|softmax|matri|materiali",
            ),
            unless=r"compress|disk|stores the (whole |full )?matrix|skips|approximat",
            against=r"(flash|kernel)\w*([- ]?attention)? (still )?"
            r"((stores|writes|keeps) (the|all)|(doubles|needs twice|needs more)\b|"
            r"(is an )?approximat|skips|compresses)",
        ),
    ),
    "root": (
        Point(
            "a dot product of d terms spreads like √d",
            (
                r"varian|\bvar\b|standard dev|\bstd\b|spread|magnitude|size|large|grow|increas|bigger|"
                r"scal\w+.*\b(keeps?|brings?|puts?)\b.*\b(range|size|varian|spread|scale)",
                r"dot product|score|sum|product|logit|q\W|values|numbers",
                r"\bd\b|dim|√|root|width|terms|d_k|d_head|\bD\b|sqrt|\b64\b|reasonable|range|unit|every (head|size)",
            ),
            unless=r"smaller|sum to one|(not|n't) depend|between (0|zero|-1) and (1|one)|"
            r"varian\w* (is |of )?(1\b(?! has)|one\b(?! has)|d squared|d²|d\^2)",
            against=r"varian\w+ (of the (dot )?product )?(is|has|=|of) ?(1\b(?! has)|one\b|d squared|d²|d\^2)\W*$|"
            r"dot product has variance (1|one)",
        ),
        Point(
            "large scores saturate the softmax",
            (
                r"saturat|one-?hot|extreme|peaked|spiky|sharp|almost 1|nearly 1|close to 1|winner|peaky|"
                r"all the (mass|weight)|single (key|token)|dominates?|collaps|argmax|"
                r"(probab|mass|weight)\w* ((?!sum|add)\w+ ){0,3}(on|to) (just )?(one|a single)\b|"
                r"softmax (\w+ )?in (a|the|its) (\w+ )?(region|range|regime)",
            ),
            unless=r"uniform|negative|^((?!large|big|high|unscaled|without|otherwise|else).)*"
            r"\bmak\w+ (the |it |softmax )*(\w+ )?(sharper|peakier|more (peaked|extreme))",
            against=r"softmax (\w+ ){1,3}(uniform|flat|linear)",
        ),
        Point(
            "then the gradients vanish",
            (
                r"gradient|derivative|learn|training|signal|backprop",
                r"vanish|tiny|small|\bzero\b|\b0\b|stall|disappear|\bdies?\b|stops?|flat|slow|"
                r"(almost|nearly) no|hardly any|(nothing|little) (is|gets) learn|"
                r"(region|range|regime) (with|where|that has)",
            ),
            unless=r"not affect|explod|no effect|(larg\w*|big|bigger|huge) (gradient|derivative)|"
            r"(gradient|derivative)s? \w+ (\w+ )?(larg|big)",
            against=r"gradients? (\w+ )?(explode|larger|bigger|grow)",
        ),
        Point(
            "d is the width of a head",
            (
                r"head|d_k|\bper head",
                r"head[_ -]?(dim|size|width)|\bd_head|(dim\w*|width|size) of (a|one|each|the) (single )?head|d_k|"
                r"divided|per head|per-head|d_model ?/|64",
            ),
            unless=r"number of tokens|is d_model,|√512|sqrt\(512\)|d_model, so",
            against=r"\bd (is|=|means) (the )?(d_model(?! ?/)|(embedding|model|hidden) (dim|width|size)|512|"
            r"(sequence )?length|number of)|√512|sqrt\(512\)|heads (divided by|over|/) (the )?(d_model|model|512)|"
            + MODEL_WIDTH,
        ),
    ),
    "cache": (
        Point(
            "keys and values of the past are kept, because they never change",
            (
                r"\bkeys?\b|\bKV?\b",
                r"\bvalues?\b|\bV\b|\bKV\b",
                r"keep|kept|stor|reus|sav|cach|remember|never change|stay the same",
            ),
            unless=r"stor\w+ the quer|generated text",
            against=FEWER_QUERIES
            + r"|(caches?|stores?|keeps?|saves?) (the )?(past |old )?(quer|attention weights|scores|outputs?\b|"
            r"(generated )?text)|(cach|keep|stor|sav)\w* (all of |the )?(past )?"
            + QUERIES_TOO
            + "|"
            + QUERIES_TOO
            + r"( \w+){0,4} (are|get|is) (cached|kept|stored|saved)",
        ),
        Point(
            "a new token costs O(T) instead of O(T²)",
            (
                WORK_GROWS + r"|one row|reprocess|recomput|instead of|from scratch|\bagain\b|only the new",
                r"token|step|prefix|row|quadratic|T²|n²",
            ),
            unless=r"(stor|cach|keep)\w* (the )?(old |past )?quer|"
            r"O\((T²|T\^2|n²|n\^2)\) with|constant time|still quadratic|linear to quadratic",
            against=r"O\(1\)|constant time|still quadratic",
        ),
        Point(
            "its size: 2 · layers · key/value heads · width per token",
            (
                r"\b2\b|two|twice|keys? and (a )?values?|both",
                r"layer",
                r"head|Hkv|width|dim|D\b|d_model",
            ),
            unless=r"not depend|T²|T\^2",
            against=r"(T²|T\^2|n²|n\^2) per|"
            r"^(?!.*per token).*\b(size|memory|cache) (\w+ ){0,2}(not|n't|never) depend\w* on "
            r"(the )?" + LENGTH,
            items=((2 * 512, WHOLE), (2 * 512 * 1024, OF_ONE)),  # of a token, and of 1024
        ),
        Point(
            "reading it limits the speed",
            (
                r"bandwidth|memory[- ]bound|read|HBM|load|fetch|memory traffic|mov",
                r"bound|limit|bottleneck|speed|slow|dominat|time",
            ),
            unless=r"no (time|bandwidth)|\bfree\b|not by (the )?memory|matrix multipl|compute[- ]bound",
            against=r"compute[- ]bound|no bandwidth",
        ),
    ),
    "mask": (
        Point(
            "after the softmax, rows no longer sum to 1",
            (
                r"\bsum|add up|normali[sz]|share|mass|total|denominator",
                r"no longer|not|n't|break|lose|lost|already|less than|below|destroy|wrong|violat",
            ),
            unless=r"still sums? to (one|1)\.?$|same thing",
            against=r"after (the )?softmax (\w+ )*(still sums? to (one|1)|"
            r"(is|be|works?) (\w+ )?(fine|ok|equal|well))",
        ),
        Point(
            "exp(−∞) is exactly 0",
            (
                r"inf|∞",
                r"exp|e to the|e\^|softmax|weight|probab",
                r"\b(?<!\.)0\b(?!\.\d)|zero|no weight|nothing|vanish",
            ),
            unless=r"score of 0|(close|near) to (0|zero)|(almost|nearly|not exactly) (0|zero)|"
            r"clip|is minus inf|is -inf|nan|same (thing )?as (minus |[-−])?(inf|∞)",
            against=r"exp\([-−](inf\w*|∞)\) (is|=) ?(1|one)|inf\w* (becomes|is|gives) (a )?(small|tiny)",
        ),
        Point(
            "−1e9 does not fit into float16",
            (
                r"float16|fp16|half|16[- ]?bit|low(er)? precision",
                r"overflow|\bnot\b|n't|cannot|limit|65|range|too (large|big)|-inf|out of|largest",
            ),
            unless=r"more precise|is fine|works fine|no problem|exactly (0|zero)",
            against=r"1e9 (works|fits|is fine|is ok|is (just |exactly )?(the )?same)",
        ),
        Point(
            "a row without a visible key becomes NaN",
            (r"\bnans?\b", r"row|all|every|fully|complete|quer|nothing|no key|padd|empty"),
            unless=r"cannot happen|never|no nan|everywhere|always",
            against=r"nan (never|cannot|everywhere)|(fully|completely|all) masked( row)? (gives|becomes|returns|is) "
            r"(zeros?|0|uniform)",
        ),
    ),
    "contiguous": (
        Point(
            "transpose changes strides, not memory",
            (
                r"transpos|permut",
                r"stride|\bview\b|metadata|no number|(not|n't)( \w+)? (move|copy|touch|change)|"
                r"layout|stays? where|in place|order of|(not|n't|non-?)( \w+)?[ -]?contiguous",
            ),
            unless=r"moves the data|sorts|\bmoves data|copies",
            against=r"(transpose|it) (copies|moves|sorts) (the )?(data|numbers|memory)",
        ),
        Point(
            "view cannot join axes that are not adjacent",
            (
                r"\bviews?\b|join|merge|flatten",
                r"error|raise|throw|fail|cannot|can't|can not|compatible|refuse|adjacent|crash|only works|"
                r"(needs?|requires?|expects|must be)\b.*(contig|stride|memory|layout|order|block)|"
                r"contiguous.*\b(before|safe|so that|then|for)\b.*view",
            ),
            unless=r"silently|works on every|any tensor|speed|faster|slow",
            against=r"view copies|view works on (every|any)",
        ),
        Point(
            "contiguous (or reshape) copies",
            (
                r"contiguous|reshape|it |clone",
                r"cop(y|ies|ied)|rewrit|(new|fresh) (\w+ of )?(memory|tensor|storage)|rearrang|lays? out|"
                r"mak\w+ (it|the memory|memory|them|the tensor|x) contiguous|reshape (would|will|does|also|works)",
            ),
            unless=r"nothing|flag|no-?op|no copy|GPU|without cop|(not|n't) copy|(transpos\w*|view) (copies|does)",
            against=r"contiguous(\(\))? (does not|doesn't|never) cop|"
            r"contiguous(\(\))? (only )?changes (only )?(the )?stride",
        ),
    ),
    "output-projection": (
        Point(
            "it mixes the heads",
            (
                r"head|everything|specialist",
                r"\bmix|combin|interact|blend|across|between|together|exchang|\bfus(e|ing)|talk|communicat|merge|integrat",
            ),
            unless=r"normaliz|probabilit|would (just|only|simply) be conc|already|"
            r"(keeps?|leaves?) (the )?heads \w*(separate|apart|unmixed)",
            against=r"(it|W_o|projection) splits the heads",
        ),
        Point(
            "without it each output number belongs to one head",
            (
                r"head",
                r"\b(one|single|own|only|alone|its|separate|independent|just|glued|stacked|unmixed)\b|"
                r"side by side|next to|nothing else|(no|without) (interaction|mixing|communication)|"
                r"(never|not|n't)( \w+)? (mix|interact|meet|talk)",
                r"slice|number|feature|output|concat|dimension|part|channel|block|chunk|segment|come|result|vector",
            ),
            unless=r"wrong shape|nothing would|already|softmax",
            against=r"nothing (is|would be) (lost|changed)|nothing (changes|would change)|"
            r"wrong shape|^\W*nothing\b(?! (else|but|mixes))|"
            r"(W_?o|projection|it) (is|would be) (optional|redundant|unnecessary|not needed)",
        ),
    ),
}
