"""The asking side of a challenge: confirms a verdict with values that the judged code cannot predict.

This process never loads the judged file. It sends fresh random values to the process that did (`challenge.py`), reads
the attention from the answers as the checker reads a trace, and compares with the reference in float64. An item of the
certificate that is not confirmed here is marked as the word of the other process.
"""

import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from headwise import reference
from headwise.check import wire
from headwise.check.arguments import Built
from headwise.check.binding import Bound
from headwise.check.calls import OTHERS, PLAIN, CallForm, Inputs, leaves, make_inputs
from headwise.check.code.case import Case
from headwise.check.code.source import read_source
from headwise.check.configuration import StandInConfig
from headwise.check.environment import Repaired
from headwise.check.faults import CERTIFICATE, behavior, masks, sizes, stages
from headwise.check.faults.mask_meaning import IDS, LENGTHS, MaskArgument, MaskTrial, TriedMask, of_prefix, shaped_masks
from headwise.check.faults.scores import is_of_distance
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import random_weight, tensors
from headwise.check.proof import TOLERANCE, expected_output, prediction_error
from headwise.check.reading import AttentionReading, read
from headwise.check.report import Item, Report
from headwise.check.sizes import CallSizes
from headwise.check.trace import RANDOM, Node, Trace
from headwise.errors import HeadwiseError

ATTEMPTS = 2  # random numbers may be unlucky once
WIDEST = 1 << 14  # of any one size that is offered
LARGEST = 1 << 24  # numbers in one input
ROUNDED = 1e-4  # largest difference of a class that computes in single precision
STEP = 1e-4  # of finite differences, of fourth order
FRESH = "matches the reference on fresh inputs"
SIZES = "matches the reference at three sizes"
TOKENS = "every output depends on exactly the tokens it may see"
MASKS = "masks, for every head, query and key"
GRADIENTS = "gradients reach every weight"
WEIGHTS = "returned weights are the ones that were used"
AGAIN = "a second call gives the same result, and inputs are not modified"
LENGTHS_AND_BATCHES = "other lengths and batch sizes"
ESSENTIAL = (FRESH, SIZES, TOKENS)  # without these confirmed, nothing is called right


class UnconfirmedError(HeadwiseError):
    """An answer that is not that of attention, or not that of the class that was described."""


class UnansweredError(HeadwiseError):
    """A question that the class does not answer: it raised, or has another form."""


def confirmed(report: Report, path: Path, answers: IO[bytes], requests: IO[bytes]) -> Report:
    """The report with only those claims as verified that answers to fresh questions confirm."""
    try:
        with _one_thread():
            return _confirmed(report, wire.receive(answers), path, JudgedProcess(answers, requests))
    except (wire.WireError, UnconfirmedError, UnansweredError, OSError) as error:
        return unconfirmed(report, str(error))
    except Exception as error:  # data that a hostile process sends may break any step
        return unconfirmed(report, f"its answers could not be read ({type(error).__name__})")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Too little work to share: on a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def unconfirmed(report: Report, reason: str) -> Report:
    """A positive report that nobody but the judged process vouches for."""
    words = f"its own process says that it is right, but answers to new questions do not confirm it: {reason}"
    return Report("unknown", report.subject, report.call, doubts=[words], file=report.file, others=report.others)


def _confirmed(report: Report, offer: dict[str, Any], path: Path, peer: "JudgedProcess") -> Report:
    if [item.name for item in report.certificate] != list(CERTIFICATE):
        raise UnconfirmedError("its certificate has other items")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            found = Verification(offer, path, peer, {item.name for item in report.certificate if _is_claimed(item)})
            found.run()
            break
        except (UnconfirmedError, UnansweredError):
            if attempt == ATTEMPTS:
                raise
    return found.written_into(report)


def _is_claimed(item: Item) -> bool:
    return item.status in ("verified", "does not apply")


# The other process as an object that can be called.


@dataclass
class JudgedProcess:
    """The pipe to the judged process."""

    answers: IO[bytes]
    requests: IO[bytes]

    def ask(self, setting: int, inputs: Inputs, **more: Any) -> dict[str, Any]:
        request = {
            "setting": setting,
            "inputs": list(inputs),
            "masks": {},
            "weights": {},
            "trace": False,
            "slope": None,
        }
        wire.send(self.requests, request | more)
        told = wire.receive(self.answers)
        if not isinstance(told, dict) or "error" in told:
            raise UnansweredError(str(told["error"])[:200] if isinstance(told, dict) else "no answer")
        return told


@dataclass
class SourceCase(Case):
    """The file as text: none of it was run here, and no line of it is blamed."""

    path: str = ""
    written: str = ""

    @property
    def filename(self) -> str | None:
        """The file."""
        return self.path

    @property
    def source(self) -> str:
        """Its text."""
        return self.written

    def line_with(self, pattern: str) -> int | None:
        """No line."""
        return None


@dataclass
class RemoteBound(Bound):
    """An object in another process: called with our weights and inputs, it returns tensors and traces."""

    peer: JudgedProcess = field(kw_only=True)
    setting: int = field(kw_only=True)
    sent: dict[str, Tensor] = field(default_factory=dict)  # weights that the other process has already

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing runs here."""
        yield

    def call(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Any:
        """The tensors that one more call returns."""
        return _listed(self._ask(inputs, masks=masks or {})["returned"])

    def called(self, masks: dict[str, Any] | None = None, **changes: Any) -> "RemoteBound":
        """The same with other inputs, called and traced once more."""
        other = replace(self, **changes)
        told = other._ask(other.inputs, masks=masks or {}, trace=True)
        other.returned = _listed(told["returned"])
        other.trace = _trace(told, other.inputs)
        other.output = other.form.result(other.returned, other.inputs)
        return other

    def slopes(self, slope: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Gradients with respect to every input and every trained weight."""
        told = self._ask(self.inputs, slope=slope)
        return _listed(told["inputs"]), {str(k): v for k, v in told["weights"].items() if isinstance(v, Tensor)}

    def after(self, inputs: Inputs) -> list[Tensor]:
        """The inputs as a call leaves them."""
        return _listed(self._ask(inputs)["inputs"])

    def _ask(self, inputs: Inputs, **more: Any) -> dict[str, Any]:
        changed = {n: t.detach() for n, t in tensors(self.thing).items() if not _is_same(t, self.sent.get(n))}
        self.sent.update({n: t.clone() for n, t in changed.items()})
        return self.peer.ask(self.setting, inputs, weights=changed, **more)


def _is_same(now: Tensor, sent: Tensor | None) -> bool:
    return sent is not None and torch.equal(now, sent)


def _listed(found: Any) -> list[Tensor]:
    if not isinstance(found, list) or not all(isinstance(t, Tensor) for t in found):
        raise wire.WireError("an answer that is no list of tensors")
    return found


def _trace(told: dict[str, Any], inputs: Inputs) -> Trace:
    """The trace that another process recorded; every operation refers to earlier ones only."""
    trace = Trace()
    for index, (op, parents, value, numbers, operands, sources) in enumerate(told["nodes"]):
        refers = [*parents, *(s for s in sources if s is not None)]
        if any(type(p) is not int or not 0 <= p < index for p in refers) or not isinstance(value, Tensor):
            raise wire.WireError(f"operation {index} of a trace refers to one that does not exist")
        node = Node(index, str(op), parents, value, [float(n) for n in numbers], (), _listed(operands), sources)
        trace.nodes.append(node)
    ends = told["sources"]
    if any(end is not None and (type(end) is not int or not 0 <= end < len(trace.nodes)) for end in ends):
        raise wire.WireError("a trace that ends nowhere")
    trace.returned, trace.tokens = ends, (inputs.query.shape[1], inputs.key.shape[1])
    return trace


# What is offered, made into such an object with weights and inputs of ours.


def _remote(offered: dict[str, Any], setting: int, peer: JudgedProcess, path: Path) -> RemoteBound:
    """The object of one setting, with new random weights, called and traced with new random inputs."""
    if offered["layout"] not in (PLAIN, *OTHERS):
        raise UnconfirmedError("a layout that does not exist")
    roles = {str(k): str(v) for k, v in offered["roles"].items()}
    form = CallForm(roles, {}, tuple(map(str, offered["masks"])), layout=offered["layout"], secret=secrets.randbits(48))
    asked = _sizes(offered["sizes"])
    inputs = make_inputs(form, asked)
    bound = RemoteBound(
        _weights(offered["weights"]), _built(offered, asked), asked, Repaired(), _case(offered, path), form, inputs,
        Trace(), None, None, peer=peer, setting=setting,
    )  # fmt: skip
    return bound.called()


def _sizes(offered: dict[str, Any]) -> CallSizes:
    values = {f.name: offered[f.name] for f in fields(CallSizes)}
    if any(type(n) is not int or not 0 <= n <= WIDEST for n in values.values()):
        raise UnconfirmedError("sizes that are no sizes")
    made = CallSizes(**values)
    if min(made.B, made.T, made.S, made.H, made.E) < 1 or made.B * max(made.T, made.S) * made.E > LARGEST:
        raise UnconfirmedError("sizes that are no sizes")
    return made


def _weights(offered: dict[str, Any]) -> SimpleNamespace:
    """Weights of these names and shapes, with values that only this process knows."""
    generator = torch.Generator().manual_seed(secrets.randbits(48))
    made = {}
    for name, weight in offered.items():
        value = weight["value"] if weight["kind"] == "constant" else None
        value = random_weight(weight["shape"], weight["kind"], generator) if value is None else value.clone()
        made[name] = nn.Parameter(value, requires_grad=bool(weight["trained"]))
    return SimpleNamespace(**made)


def _built(offered: dict[str, Any], asked: CallSizes) -> Built:
    config = StandInConfig(asked) if offered["configured"] else None
    if config is not None:
        config.asked.update(map(str, offered["arguments"]))
    return Built(lambda: None, "", dict(offered["arguments"]), config, natural=bool(offered["certain"]))


def _case(offered: dict[str, Any], path: Path) -> SourceCase:
    """The class by name, with the parameters that it is said to have."""
    names = dict.fromkeys(name for name in offered["parameters"] if str(name).isidentifier())
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    given = [inspect.Parameter(n, kind, default=offered["defaults"].get(n, empty)) for n in names]
    target = type(str(offered["name"]), (), {"__signature__": inspect.Signature(given)})
    text = read_source(path).text
    return SourceCase(str(offered["name"]), target, {}, thorough=False, text_only=True, path=str(path), written=text)


# Questions.


class Verification:
    """Asks for every item of the certificate that can be asked for, and remembers what was confirmed."""

    def __init__(self, offer: dict[str, Any], path: Path, peer: JudgedProcess, claimed: set[str]) -> None:
        self.offer, self.path, self.peer, self.claimed = offer, path, peer, claimed
        self.confirmed: dict[str, str] = {}  # item → words
        self.variants: list[str] = []
        self.masks: list[str] = []

    def run(self) -> None:
        """Ask everything. Raises `UnconfirmedError` where an answer contradicts what is claimed."""
        self.bound = _remote(self.offer["settings"][0], 0, self.peer, self.path)
        self.reading = self._attention(self.bound)
        questions: dict[str, Callable[[], str | None]] = {
            FRESH: self._fresh, SIZES: self._sizes, TOKENS: self._tokens, MASKS: self._masks,
            GRADIENTS: self._gradients, WEIGHTS: self._returned, AGAIN: self._again,
            LENGTHS_AND_BATCHES: self._lengths,
        }  # fmt: skip
        for name, question in questions.items():
            words = question() if name in self.claimed else None
            if words is not None:
                self.confirmed[name] = words

    def written_into(self, report: Report) -> Report:
        """The report in the words of this process, where it has confirmed something."""
        missing = [name for name in ESSENTIAL if name not in self.confirmed]
        if report.verdict != "partial" and (missing or self.claimed != set(CERTIFICATE)):
            raise UnconfirmedError(f"{missing[0]!r} could not be asked" if missing else "its certificate has gaps")
        report.certificate = [self._item(item) for item in report.certificate]
        own = [words for words in report.variants if words not in self.variants]
        report.variants = [*self.variants, *own]
        report.own_variants = own
        report.masks = self.masks or report.masks
        if report.verdict != "partial":
            report.verdict = "variant" if report.variants else "right"
        return report

    def _item(self, item: Item) -> Item:
        if item.name in self.confirmed and _is_claimed(item):
            return Item(item.name, item.status, self.confirmed[item.name])
        return replace(item, own=_is_claimed(item))

    def _attention(self, bound: RemoteBound) -> AttentionReading:
        """What is read from the answers, which must be attention in every stage."""
        reading = read(bound)
        notes = _asked(stages.STAGES, bound, reading)
        if reading is None or reading.understood < 5 or bound.output is None:
            raise UnconfirmedError("no attention could be read from them")
        _compare_core(reading)
        self.variants = list(dict.fromkeys([*self.variants, *(n.words for n in notes if n.kind == "variant")]))
        return reading

    def _fresh(self) -> str:
        error = _difference(self.bound, self.reading)
        if error is not None:
            return f"largest difference {error:.0e}"
        return _good(_asked([stages.fresh_inputs], self.bound, self.reading))

    def _sizes(self) -> str | None:
        """The same at every other setting that was offered: three in all, of which no two are alike."""
        seen = [(self.bound, self.reading)]
        for number, offered in enumerate(self.offer["settings"][1:3], 1):
            other = _remote(offered, number, self.peer, self.path)
            reading = self._attention(other)
            _difference(other, reading)
            seen.append((other, reading))
        widths = [(b.inputs.query.shape[-1], r.core.heads.shape[1]) for b, r in seen]
        if len(set(widths)) < 3:
            return None
        (width, heads), *others = widths
        plural = "heads" if heads > 1 else "head"
        return ", ".join([f"{width} wide with {heads} {plural}", *(f"{w} wide with {h}" for w, h in others)])

    def _tokens(self) -> str:
        return _good(_asked([behavior.influence, behavior.batch_leak], self.bound, self.reading))

    def _masks(self) -> str | None:
        """Masks of our own in every shape that is said to work, in one meaning."""
        arguments = [self._measured(offered) for offered in self.offer["masks"]]
        if not arguments or not all(argument.meaning for argument in arguments):
            return None
        self.masks = [argument.words() for argument in arguments]
        return ", ".join(self.masks)

    def _measured(self, offered: dict[str, Any]) -> MaskArgument:
        """What an argument does to masks of every shape: those that are said to work must, no other may be misused."""
        name, meaning, shapes = str(offered["name"]), str(offered["meaning"]), dict(offered["shapes"])
        argument = MaskArgument(name, self.bound.form.layout)
        trial = MaskTrial(self.bound, self.reading, name)
        usual = next(iter(shapes.values()), "bool")
        for shape, (mask, meant) in _our_masks(self.reading, meaning).items():
            if (shape in (LENGTHS, IDS) or IDS in shapes) and shape not in shapes:
                continue
            kind = wire.DTYPES[shapes.get(shape, usual)]
            tried: TriedMask = trial(shape, mask if mask.is_floating_point() else mask.to(kind), meant)
            if shape == LENGTHS:
                tried.meaning = of_prefix(tried, mask, self.reading, name) or tried.meaning
            if shape in shapes and tried.meaning != meaning:
                raise UnconfirmedError(f"a mask of shape {shape} does not do what its own process says")
            if not meaning and tried.meaning not in ("", "none"):
                raise UnconfirmedError(f"its mask argument {name} does something other than hide keys")
            argument.tried.append(tried)
        astray = [finding.title for finding in masks.misused(argument, self.bound, self.reading)]
        if astray or not shapes.keys() <= {tried.shape for tried in argument.tried}:
            raise UnconfirmedError(astray[0] if astray else "a mask of a shape that does not exist")
        return argument

    def _gradients(self) -> str | None:
        """Along one direction in all weights and inputs, the gradients must give the slope of finite differences."""
        if not any(tensor.requires_grad for tensor in tensors(self.bound.thing).values()):
            return None
        if _is_rounded(self.bound) or any(n.op in RANDOM for n in self.bound.trace.nodes) or self.bound.output is None:
            return None  # finite differences would only measure rounding
        line = Line.through(self.bound)
        try:
            found = line.slope()
        except UnansweredError:
            if "inference_mode" in self.bound.case.source:
                return None  # made for inference, as the report says
            raise
        expected = line.difference(STEP)
        if abs(found - expected) <= 1e-5 * (abs(found) + abs(expected)) + 1e-7:
            return "equal to finite differences"
        closer = line.difference(STEP / 8)
        if abs(expected - closer) > 0.1 * abs(found - expected):
            return None  # a kink, as of a relu, has no slope
        raise UnconfirmedError(
            f"the gradient is {found:.4g} along one direction, finite differences give {expected:.4g}"
        )

    def _returned(self) -> str | None:
        """Every returned table of queries × keys must be the weights that were used."""
        tables = behavior.returned_tables(self.bound, self.reading)
        if not tables:
            return "none are returned" if len(leaves(self.bound.returned)) == 1 else None
        found = [table for _, table in tables]
        is_used = all(behavior.are_used(table, self.reading) for table in found)
        return behavior.used_words(found, self.reading) if is_used else None

    def _again(self) -> str:
        other = make_inputs(self.bound.form, self.bound.sizes, seed=17)
        kept = other.copied()
        after = self.bound.after(other)
        if len(after) != 3 or not all(torch.equal(a, b) for a, b in zip(after, kept, strict=True)):
            raise UnconfirmedError("a call changes its inputs")
        second = self.bound.output_of(self.bound.inputs)
        if not self.bound.gives(second):
            raise UnconfirmedError("a second call gives a different result")
        return ""

    def _lengths(self) -> str | None:
        """Other lengths against the reference, where it predicts them, and batches of one and two."""
        words = _good(_asked([sizes.small_batch], self.bound, self.reading))
        lengths = (1, 2, self.bound.sizes.context)
        for length in lengths:
            inputs = make_inputs(self.bound.form, replace(self.bound.sizes, T=length, S=length), seed=9)
            expected = expected_output(self.reading, inputs) if self.reading.pattern in ("full", "causal") else None
            if expected is None:
                return None
            try:
                output = self.bound.form.result(self.bound.call(inputs), inputs)
            except UnansweredError:
                return None  # it takes one length only
            if output is None or not (same(expected, output, 1e-6) or self._sees_a_window(inputs)):
                raise UnconfirmedError(f"with {length} tokens, the output is not that of the reference")
        return f"{words}, 1, 2 and {lengths[-1]} tokens".removeprefix(", ")

    def _sees_a_window(self, inputs: Inputs) -> bool:
        """Whether it is attention with a window for these inputs, which were too short to show it before."""
        length = inputs.query.shape[1]
        other = self.bound.called(inputs=inputs, sizes=replace(self.bound.sizes, T=length, S=length))
        reading = self._attention(other)
        _difference(other, reading)
        table = reading.visible[0, 0]
        return bool((reading.visible == table).all()) and is_of_distance(table)


def _asked(questions: Iterable[Any], bound: RemoteBound, reading: AttentionReading | None) -> list[Note]:
    """The notes of these faults; a finding or a doubt contradicts a positive verdict."""
    found = [result for question in questions for result in _answers(question(bound, reading))]
    bad = [r.title if isinstance(r, Finding) else r.words for r in found if _contradicts(r)]
    if bad:
        raise UnconfirmedError(bad[0])
    return [result for result in found if isinstance(result, Note)]


def _answers(found: Found) -> list[Finding | Note]:
    return list(found)


def _contradicts(result: Finding | Note) -> bool:
    return result.severity == "wrong" if isinstance(result, Finding) else result.kind == "doubt"


def _good(notes: list[Note]) -> str:
    return ", ".join(dict.fromkeys(n.words for n in notes if n.kind == "good"))


def _difference(bound: RemoteBound, reading: AttentionReading) -> float | None:
    """How far the output is from the reference on new inputs; None where the reference predicts none."""
    error = prediction_error(bound, reading)
    if error is not None and not error < (ROUNDED if _is_rounded(bound) else TOLERANCE):
        raise UnconfirmedError(f"on new inputs the output differs by {error:.2g} from that of the reference")
    return error


def _is_rounded(bound: RemoteBound) -> bool:
    """Whether it computes in less than double precision."""
    return any(n.value.dtype in (torch.float32, torch.float16, torch.bfloat16) for n in bound.trace.nodes)


def _compare_core(reading: AttentionReading) -> None:
    """What the heads read must be what the reference gives for these queries, keys and values."""
    core, scores = reading.core, reading.scores
    if scores is None or scores.axis != "keys":
        raise UnconfirmedError("no softmax over keys could be read from them")
    query, key, value = (x.double() for x in (core.query, core.key, core.value))
    rows = torch.isfinite(core.weights).all(-1) & scores.visible.any(-1)
    expected = core.weights.double().nan_to_num() @ value
    if not scores.relative and not scores.by_head:  # otherwise the scores are more than a product
        scale, cap = scores.factor, scores.cap or None
        expected, _ = reference.attend(
            query, key, value, visible=scores.visible, bias=scores.bias, scale=scale, softcap=cap
        )
    if not bool(rows.any()) or not same(expected[rows], core.heads.double()[rows], 1e-6):
        raise UnconfirmedError("what the heads read is not the average of the values under a softmax of the scores")


def _our_masks(reading: AttentionReading, meaning: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Masks of every shape, which nobody can predict, and what they should mean as (B, H, T, S)."""
    B, H, T, S = reading.core.weights.shape
    generator = torch.Generator().manual_seed(secrets.randbits(48))
    made = {shape: (mask, meant) for shape, mask, meant in shaped_masks(B, H, T, S, generator)}
    if meaning == "additive":
        noise = {n: torch.randn(m.shape, generator=generator, dtype=torch.float64) for n, (m, _) in made.items()}
        return {shape: (noise[shape], meant) for shape, (_, meant) in made.items()}
    lengths = torch.randint(1, S, (B,), generator=generator)
    made[LENGTHS] = lengths, (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, H, T, S)
    if T == S:
        ids = torch.randint(0, 2, (B, T), generator=generator).cumsum(1)
        made[IDS] = ids, (ids[:, :, None] == ids[:, None])[:, None].expand(B, H, T, S)
    return made


@dataclass
class Line:
    """A straight line through the weights and inputs of an object, along which its output is summed."""

    bound: RemoteBound
    steps: dict[str, Tensor]  # of every trained weight
    inputs: list[Tensor]  # of every input that is a tensor of its own
    slopes: Tensor

    @classmethod
    def through(cls, bound: RemoteBound) -> "Line":
        """Random directions."""
        generator = torch.Generator().manual_seed(secrets.randbits(48))

        def draw(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        assert bound.output is not None  # noqa: S101 - callers have an output
        own = {id(x): x for x in bound.inputs}
        trained = {name: draw(tensor) for name, tensor in tensors(bound.thing).items() if tensor.requires_grad}
        return cls(bound, trained, [draw(x) for x in own.values()], draw(bound.output))

    def slope(self) -> float:
        """By the gradients that the other process computes."""
        inputs, weights = self.bound.slopes(self.slopes)
        total = sum(float((a * b).sum()) for a, b in zip(inputs, self.inputs, strict=True))
        return total + sum(float((weights[name] * step).sum()) for name, step in self.steps.items())

    def difference(self, step: float) -> float:
        """By the outputs at four points nearby."""
        moved = [self._summed(times * step) for times in (1, -1, 2, -2)]
        return (8 * (moved[0] - moved[1]) - (moved[2] - moved[3])) / 12 / step

    def _summed(self, times: float) -> float:
        held, bound = tensors(self.bound.thing), self.bound
        kept = {name: held[name].data.clone() for name in self.steps}
        own = {id(x): x for x in bound.inputs}
        moved = {key: x + times * step for (key, x), step in zip(own.items(), self.inputs, strict=True)}
        inputs = Inputs(*(moved[id(x)] for x in bound.inputs))
        try:
            for name, step in self.steps.items():
                held[name].data.add_(times * step)
            output = bound.form.result(bound.call(inputs), inputs)
        finally:
            for name, value in kept.items():
                held[name].data.copy_(value)
        if output is None or output.shape != self.slopes.shape:
            raise UnansweredError("no output")
        return float((output * self.slopes).sum())
