"""What good answers in the interview say, and how to recognize it in the words of a candidate."""

import dataclasses
import re
from typing import NamedTuple


class PointFound(NamedTuple):
    """Whether an answer makes a point: "said", "perhaps", "wrong" or "missing", and the sentence that decides it."""

    state: str
    sentence: str = ""


@dataclasses.dataclass(frozen=True)
class Point:
    """Something that a good answer says.

    Patterns cannot understand a sentence, so they only call a point said if one sentence has all its ideas; a sentence
    that merely touches it is shown to the candidate, who decides.

    Args:
        name: what it is.
        ideas: regular expressions that one sentence must all match.
        topic: a regular expression of the words that touch it.
        unless: words that turn it around.
        number: the number that it is about; a number is judged exactly.
    """

    name: str
    ideas: tuple[str, ...]
    topic: str
    unless: str = r"(?!)"
    number: int | None = None

    def found_in(self, answer: str) -> PointFound:
        """Whether an answer makes this point."""
        sentences = re.split(r"(?<=[.!?;])\s+|\n+", answer)
        for sentence in sentences:
            if self._said(sentence):
                return PointFound("said", sentence)
        if self.number is not None and _numbers(answer):
            return PointFound("wrong", next(sentence for sentence in reversed(sentences) if _numbers(sentence)))
        for pattern in (self.unless, self.topic):
            for sentence in sentences:
                if re.search(pattern, sentence, re.IGNORECASE):
                    return PointFound("perhaps", sentence)
        return PointFound("missing")

    def _said(self, sentence: str) -> bool:
        if self.number is not None:
            return self.number in _numbers(sentence)
        if re.search(self.unless, sentence, re.IGNORECASE):
            return False
        return all(re.search(idea, sentence, re.IGNORECASE) for idea in self.ideas)


def _numbers(sentence: str) -> set[int]:
    """The whole numbers from 1,000 on, however their digits are grouped; "1.05 M" is none.

    >>> sorted(_numbers("4 * 512 + 1,048,576 = 1 050 624, or 1.05 million"))
    [1048576, 1050624]
    """
    found = re.findall(r"(?<![\d.])\d{1,3}(?:[,_ ]\d{3})+(?!\d)|(?<![\d.])\d{4,}(?!\d)", sentence)
    return {int(re.sub(r"\D", "", text)) for text in found}


POINTS = {
    "several-heads": (
        Point(
            "each head has weights of its own, so a token attends in several ways at once",
            (
                r"head|distribution|specialist",
                r"\b(own|different(ly)?|separate|distinct|several|multiple|many|eight|8|each|instead of)\b",
                r"weights|matri|projection|pattern|thing|relation|subspace|distribution|\bways\b|aspect|of them",
            ),
            r"head|pattern|relation|parallel",
            unless=r"\bshare|same (set|pattern|weights)|times the|rank",
        ),
        Point(
            "the cost is the same: parameters and operations do not grow",
            (
                r"\bsame\b|no (extra|more|additional)|nothing (extra|more)|unchanged|equal|as (many|much)|"
                r"constant|not (grow|increase|change)|free",
                r"cost|param|flop|comput|operation|budget",
            ),
            r"cost|param|flop|comput|operation",
            unless=r"times the|times as|grows with|pay for",
        ),
        Point(
            "the price: every head works in fewer dimensions",
            (
                r"head|each|dimension|width|scores",
                r"narrow|\brank|small|fewer dim|low(er)?[- ]dim|subspace|thin|less (width|room|capacity)|"
                r"64[- ]dim|bottleneck",
            ),
            r"dimension|downside|price|trade|width|wide",
            unless=r"no (downside|price|drawback)|\bfull\b|always better",
        ),
    ),
    "complexity": (
        Point(
            "the scores are quadratic in the length",
            (
                r"quadratic|quadruple|T ?(\^|\*\*) ?2|T²|n ?(\^|\*\*) ?2|n²|L ?(\^|\*\*) ?2|L²|seq\w*( ?(\^|"
                r"\*\*) ?2|²)|square|four times|every (other )?(token|pair|key)",
                r".",
            ),
            r"length|linear|token|context|\bn\b|\bT\b",
            unless=r"\bnot quadratic|width|d_model squared",
        ),
        Point(
            "the projections are quadratic in the width",
            (
                r"project|linear layer|matri|W_|weights",
                r"E²|d²|[dE] ?(\^|\*\*) ?2|d_model ?(\^2|²|\*\*2|squared)|width squared|"
                r"squared?( of)?( the)? (width|dimension|d_model)|quadratic in (the )?(width|d|E|dim)",
            ),
            r"project|width|d_model|linear layer",
        ),
        Point(
            "which of the two dominates depends on the length",
            (
                r"domina|\bwins?\b|larger|equal|cross|outweigh|overtake|bigger|matters more|takes over",
                r"short|long|beyond|depends|until|above|below|whether|equal at|tokens|from .* on",
            ),
            r"domina|larger|longer|length",
            unless=r"\balways\b",
        ),
    ),
    "grouped": (
        Point(
            "several query heads share a key/value head",
            (
                r"quer",
                r"\bshare|fewer|only \d+ (kv|key)|reuse|serv|same (keys|k\b|kv|key)|common|one key",
            ),
            r"share|group|GQA|fewer",
            unless=r"quer\w+ (are|is) shared|shared quer|tokens together|own keys",
        ),
        Point(
            "the cache shrinks",
            (
                r"cache|stor|keys and values|memory|bandwidth",
                r"small|shrink|less|fewer|reduc|down|divid|cut|lower|save|1/\d|\d\d?%|quarter|half",
            ),
            r"cache|memory|stor|bandwidth",
            unless=r"large|not change|grow|unchanged|same (cache|memory)",
        ),
        Point(
            "the scores cost the same",
            (
                r"score|qk|flop|comput|arithmetic",
                r"\bsame\b|unchanged|not (change|reduce|save|fewer)|still|equal|as (many|much)",
            ),
            r"score|flop|comput|cost",
            unless=r"cheaper|reduc\w+ the comp|linear",
        ),
        Point(
            "with one key/value head it is multi-query attention",
            (
                r"multi-?query|MQA",
                r"\bone\b|single|\b1\b|extreme",
            ),
            r"multi-?query|MQA|one (key|kv)",
            unless=r"many more|ordinary|multi-head attention",
        ),
    ),
    "parameters": (
        Point(
            "four matrices of d_model × d_model",
            (
                r"\bfour\b|\b4\b|W_?q\b.*W_?k\b.*W_?v\b.*W_?o\b|Q, K, V,? and (O|out)",
                r"matri|512|d_model|weights|project|linear|E",
            ),
            r"matri|project|linear",
        ),
        Point(
            "and four biases",
            (
                r"bias",
                r"\bfour\b|\b4\b|each|plus|add|2,?048|512|and",
            ),
            r"bias",
            unless=r"\bno bias|without bias|not param|ignor",
        ),
        Point("together 1,050,624", (), r"\d[\d,._]{3,}|million|1\.05|\bM\b", number=1_050_624),
        Point(
            "the number of heads does not change it",
            (
                r"head",
                r"not (depend|change|matter|affect)|n't (depend|change|matter|affect)|regardless|independent|"
                r"\bsame\b|irrelevant|only (a )?reshap|whatever",
            ),
            r"head",
            unless=r"multiply by|more param|eight times|times 8",
        ),
    ),
    "flops": (
        Point(
            "the projections: 8·T·E²",
            (
                r"project|linear|matri",
                r"8 ?[·*x]? ?T ?[·*x]? ?E ?(²|\^2|\*\*2)|8 ?n ?d|2 ?[·*x]? ?T ?[·*x]? ?E ?(²|\^2|\*\*2)|"
                r"[TnL] ?[·*x]? ?[Ed]\w* ?(²|\^2|\*\*2|squared)",
            ),
            r"project|linear layer",
        ),
        Point(
            "the scores and weighted values: 4·T²·E",
            (
                r"score|QK|attention|weighted|values",
                r"T ?(²|\^2|\*\*2)|n ?(²|\^2|\*\*2)|T ?[·*x] ?T|quadratic|L²",
            ),
            r"score|QK|attention|weights",
        ),
        Point(
            "a multiply-add counts as two",
            (
                r"multiply-?add|multiplication|MAC|FMA|mul|multiply",
                r"\btwo\b|\b2\b|twice|double|addition",
            ),
            r"multiply|addition|factor 2|MAC|FMA",
            unless=r"\bone operation|as one|ignore|single",
        ),
    ),
    "memory": (
        Point(
            "T² numbers for every head",
            (
                r"T ?(²|\^2|\*\*2)|n ?(²|\^2|\*\*2)|T ?[×x·*] ?T|n ?[×x·*] ?n|quadratic|1024 ?[×x·*] ?1024|"
                r"square|seq\w* ?[×x·*] ?seq",
            ),
            r"number|matrix|length|memory|\bT\b|float",
            unless=r"O\(T\), not|d_model squared",
        ),
        Point(
            "training keeps them for the backward pass",
            (
                r"backward|gradient|train|autograd",
                r"keep|kept|sav|stor|need|hold|remember",
            ),
            r"backward|gradient|train|autograd",
            unless=r"thrown|not need|inference only|discard",
        ),
        Point(
            "a fused kernel works in tiles and never stores them",
            (
                r"tile|block|chunk|online|recomput|piece",
                r"kernel|flash|never|without|instead|not (store|material)|fused|only|O\(T\)|O\(n\)|SRAM|softmax",
            ),
            r"kernel|flash|fused",
            unless=r"compress|disk|stores the matrix",
        ),
    ),
    "root": (
        Point(
            "a dot product of d terms spreads like √d",
            (
                r"varian|standard dev|spread|magnitude|size|large|grow|increas|bigger",
                r"dot product|score|sum|product|logit|q\W",
                r"\bd\b|dim|√|root|width|terms|d_k|\bD\b",
            ),
            r"dot product|score|varian|magnitude",
            unless=r"smaller|sum to one",
        ),
        Point(
            "large scores saturate the softmax",
            (
                r"saturat|one-?hot|extreme|peaked|spiky|sharp|almost 1|nearly 1|close to 1|winner|"
                r"all the (mass|weight)|single (key|token)|dominates?",
            ),
            r"softmax|weight",
            unless=r"uniform|negative",
        ),
        Point(
            "then the gradients vanish",
            (
                r"gradient|derivative|learning|training|signal",
                r"vanish|tiny|small|\bzero\b|\b0\b|stall|disappear|die|stop|flat|slow",
            ),
            r"gradient|derivative|learn",
            unless=r"not affect|explod|no effect",
        ),
        Point(
            "d is the width of a head",
            (
                r"head|d_k|\bper head",
                r"head[_ -]?(dim|size|width)|(dim\w*|width|size) of (a|one|each|the) (single )?head|d_k|"
                r"divided|per head|d_model ?/|64",
            ),
            r"head|d_model|width|dim",
            unless=r"number of tokens|is d_model,|√512|sqrt\(512\)|d_model, so",
        ),
    ),
    "cache": (
        Point(
            "keys and values of the past are kept, because they never change",
            (
                r"key|\bK\b|\bKV?\b",
                r"value|\bV\b|\bKV\b",
                r"keep|kept|stor|reus|sav|cach|remember|never change|stay the same",
            ),
            r"stor|keep|cach|past|previous",
            unless=r"stor\w+ the quer|generated text",
        ),
        Point(
            "a new token costs O(T) instead of O(T²)",
            (
                r"O\((T|n)\)|linear|one row|reprocess|recomput|instead of|from scratch|again and again|"
                r"only the new",
                r"token|step|prefix|row|quadratic|T²|n²",
            ),
            r"token|O\(|step|quadratic",
            unless=r"O\((T²|T\^2|n²|n\^2)\) with|constant time",
        ),
        Point(
            "its size: 2 · layers · key/value heads · width per token",
            (
                r"\b2\b|two|twice|keys? and (a )?values?|both",
                r"layer",
                r"head|Hkv|width|dim|D\b|d_model",
            ),
            r"size|layer|bytes|memory|numbers|GiB|MiB",
            unless=r"not depend|T²|T\^2",
        ),
        Point(
            "reading it limits the speed",
            (
                r"bandwidth|memory[- ]bound|read|HBM|load|memory traffic|mov",
                r"bound|limit|bottleneck|speed|slow|dominat|time",
            ),
            r"bandwidth|read|bottleneck|speed|limit",
            unless=r"no time|matrix multipl|compute[- ]bound",
        ),
    ),
    "mask": (
        Point(
            "after the softmax, rows no longer sum to 1",
            (
                r"sum|add up|normali[sz]|share|mass|total",
                r"no longer|not|n't|break|lose|lost|already|less than|below|destroy|wrong|violat",
            ),
            r"sum|normali|after the softmax",
            unless=r"still sums? to (one|1)\.?$|same thing",
        ),
        Point(
            "exp(−∞) is exactly 0",
            (
                r"exp|e to the|e\^|\bsoftmax",
                r"inf|∞",
                r"\b0\b|zero|no weight|nothing|vanish",
            ),
            r"exp|zero|inf|∞",
            unless=r"score of 0|is minus inf|is -inf",
        ),
        Point(
            "−1e9 does not fit into float16",
            (
                r"float16|fp16|half|16[- ]?bit|low(er)? precision",
                r"overflow|not|n't|cannot|limit|65|range|too (large|big)|-inf|out of|largest",
            ),
            r"float16|fp16|half|1e9",
            unless=r"more precise|is fine|works fine|no problem",
        ),
        Point(
            "a row without a visible key becomes NaN",
            (
                r"nan",
                r"row|all|every|fully|complete|quer|nothing|no key|padd|empty",
            ),
            r"nan|fully|all masked",
            unless=r"cannot happen|never|no nan",
        ),
    ),
    "contiguous": (
        Point(
            "transpose changes strides, not memory",
            (
                r"transpos|permut",
                r"stride|view|metadata|no number|not (move|copy|touch|change)|n't (move|copy|touch|change)|"
                r"layout|stays? where|in place|order of",
            ),
            r"transpos|stride|memory",
            unless=r"moves the data|sorts|\bmoves data",
        ),
        Point(
            "view cannot join axes that are not adjacent",
            (
                r"view|join|merge|flatten",
                r"error|raise|throw|fail|cannot|can't|can not|need|requires?|compatible|refuse|adjacent|crash|"
                r"only works",
            ),
            r"view|adjacent|contiguous",
            unless=r"silently|works on every|any tensor",
        ),
        Point(
            "contiguous (or reshape) copies",
            (
                r"contiguous|reshape|it |clone",
                r"cop(y|ies|ied)|rewrit|new (memory|tensor|storage)|rearrang|lays? out",
            ),
            r"contiguous|copy|reshape",
            unless=r"nothing|flag|no copy|GPU|without cop",
        ),
    ),
    "output-projection": (
        Point(
            "it mixes the heads",
            (
                r"head",
                r"mix|combin|interact|blend|across|together|exchang|fus(e|ing)|talk|communicat|merge|integrat",
            ),
            r"mix|combin|project|W_o|output",
            unless=r"normaliz|probabilit|would (just|only|simply) be conc",
        ),
        Point(
            "without it each output number belongs to one head",
            (
                r"head",
                r"\b(one|single|own|only|alone|its|separate|independent|just)\b|side by side",
                r"slice|number|feature|output|concat|dimension|part|channel|block|segment|come",
            ),
            r"without|concat|lost|slice",
            unless=r"wrong shape|nothing would",
        ),
    ),
}
