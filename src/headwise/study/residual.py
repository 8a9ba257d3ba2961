"""The residual stream taken apart: what every head and feed-forward network adds to logits and to later scores.

>>> from headwise import load_builtin, logit_attribution
>>> model = load_builtin()
>>> found = logit_attribution(model.gpt, model.tokens("The captain looked at the sea, and the sea looked at the"))
>>> found.heads["blocks.6.attention"].shape  # what each head adds to the logit of the likeliest next token
torch.Size([1, 8])

Everything that writes into the stream is a *source*: embeddings, heads and other nonlinear modules, which are mostly
feed-forward networks. Norms are frozen: each divides by the same number as in this run. What follows is then affine in
the sources, however the model adds, scales and normalizes them: before a block (GPT-2, Llama, ours), after it (BERT),
or both (Gemma 2). So a number that the model computes is the sum of one part for each source, ⟨∂number/∂source,
source⟩, and a constant from the biases. Nothing is looked up by name. The model runs three times: to see which modules
are norms and which are nonlinear, to differentiate, and with all sources at zero. The last run must give the constant;
a model for which it does not is refused.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.study.importance import logits_of
from headwise.study.interventions import Intervention, checked_layers
from headwise.study.passes import call_name, split_name
from headwise.study.samples import Inputs, check_tokens, closeness, run, samples_of, taken
from headwise.study.watch import watch
from headwise.weights import AttentionMap

NUMBERS = 2**26  # in the gradients of one backward pass


# Norms, frozen -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FrozenNorm:
    """A norm as the linear map it was in one call: scale · gain · (x − mean), or without the mean, plus a bias."""

    gain: Tensor  # (E,)
    bias: Tensor  # (E,)
    scale: Tensor  # (..., 1)
    centers: bool

    @classmethod
    def of(cls, module: nn.Module, x: Tensor, y: Tensor) -> "FrozenNorm | None":
        """What `module` did when it made `y` of `x`, both (..., E); None if that is no norm."""
        try:
            with torch.no_grad():
                made = cls._fitted(module, x, y)
        except (RuntimeError, TypeError, ValueError):  # it takes other inputs
            return None
        return made if (made(x) + made.bias - y).abs().max() <= closeness(y) * y.abs().max() else None

    @classmethod
    def _fitted(cls, module: nn.Module, x: Tensor, y: Tensor) -> "FrozenNorm":
        probe = torch.ones(1, 1, x.shape[-1]).to(x)
        probe[..., ::2] = -1
        if not torch.allclose(module.forward(3 * probe), module.forward(probe), rtol=1e-2, atol=1e-2):
            raise ValueError("its output grows with its input")
        bias = module.forward(torch.zeros_like(probe))[0, 0]
        centers = torch.allclose(module.forward(probe + 5), module.forward(probe), rtol=1e-2, atol=1e-2)
        gain = (module.forward(probe)[0, 0] - bias) / (probe - probe.mean() if centers else probe)[0, 0]
        turned = gain * (x - x.mean(-1, keepdim=True) if centers else x)
        size = (turned * turned).sum(-1, keepdim=True)
        scale = (turned * (y - bias)).sum(-1, keepdim=True) / torch.where(size > 0, size, 1.0)
        return cls(gain, bias, scale, centers)

    def __call__(self, part: Tensor) -> Tensor:
        """What becomes of a part of the stream, (..., E)."""
        return self.scale * self.gain * (part - part.mean(-1, keepdim=True) if self.centers else part)


# A model whose stream is cut into sources ---------------------------------------------------------------------------


class Stream:
    """A model whose residual stream is cut into sources; `parts` splits numbers that it computes over them.

    Args:
        model: the model.
        inputs: one sample, (1, T), or keyword arguments of the model.
        inside: an attention layer that is followed further, to its queries and keys; others end at what heads read.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, inside: str | None = None) -> None:
        self.model, self.inputs = model, inputs
        self.layers = checked_layers(model, "residual stream")
        self.inside = None if inside is None else self.layers[inside]
        self.sources: dict[str, Tensor] = {}  # by name; those of heads are (1, H, T, Dv)
        self.names: list[str] = []  # of the sources that heads wrote
        self._calls: dict[str, int] = {}
        self._norms: dict[nn.Module, list[FrozenNorm]] = {}
        with torch.no_grad():
            self.norms, self.cut = self._classified()

    def parts(self, read: Callable[[Any, Mapping[str, Any]], Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Numbers of this run, what each source adds to them, and the constant: (n,), (n,) or (n, H) for heads, (n,).

        Args:
            read: the numbers, (n,), in what the model returned and the maps that were seen.
        """
        numbers, nothing = self._run(read, zero=False), self._run(read, zero=True)
        found = self._split(numbers)
        numbers = numbers.detach()
        flat = [x.reshape(len(numbers), -1) for x in found.values()]
        total = sum((x.sum(1) for x in flat), torch.zeros_like(numbers))
        size = sum((x.abs().sum(1) for x in flat), nothing.abs()).max()
        self._check(numbers - total - nothing, size)
        return numbers, found, numbers - total

    def _run(self, read: Callable[[Any, Mapping[str, Any]], Tensor], *, zero: bool) -> Tensor:
        self._calls = {}
        with torch.set_grad_enabled(not zero), self._hooks(zero), self._cut_heads(zero), watch(self.model) as seen:
            return read(run(self.model, self.inputs), seen)

    def _split(self, numbers: Tensor) -> dict[str, Tensor]:
        """What each source adds to each number."""
        leaves = list(self.sources.values())
        if not numbers.requires_grad:
            return {}
        step = max(1, NUMBERS // max(1, sum(x.numel() for x in leaves)))
        rows: dict[str, list[Tensor]] = {}
        for which in torch.eye(len(numbers)).to(numbers).split(step):
            slopes = torch.autograd.grad(
                numbers, leaves, which, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
            for name, leaf, slope in zip(self.sources, leaves, slopes, strict=True):
                if slope is not None:
                    product = (slope * leaf.detach()).double()
                    kept = product.sum((1, 3, 4)) if name in self.names else product.flatten(1).sum(1)
                    rows.setdefault(name, []).append(kept.to(numbers.dtype))
        return {name: torch.cat(x) for name, x in rows.items()}

    def _check(self, error: Tensor, size: Tensor) -> None:
        exact = {torch.float64: 1e-6, torch.float32: 1e-4}.get(error.dtype, 3e-2)
        if not error.abs().max() <= exact * size:
            raise OptionError(
                f"{type(self.model).__name__}: with its norms frozen, this number is still not a sum of what heads and "
                f"other modules write. The model may apply a function to it (Gemma 2 caps its logits), multiply parts "
                f"of the stream with each other, or draw random numbers (use model.eval())."
            )

    # Which modules are norms, and which are nonlinear.

    def _classified(self) -> tuple[set[nn.Module], dict[nn.Module, str]]:
        """The norms, and by module the names of those whose outputs are sources."""
        calls: dict[nn.Module, tuple[Any, Any, Any]] = {}
        attending = set(self.layers.values())
        inner = {part for layer in attending for part in layer.modules()}

        def remember(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.setdefault(module, (args, kwargs, output))

        with ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_hook(remember, with_kwargs=True).remove)
            run(self.model, self.inputs)
        norms = {module for module, call in calls.items() if _is_norm(module, *call)}
        embeddings = {module for module, call in calls.items() if module not in inner and _is_embedding(module, *call)}
        whole = attending | norms | embeddings
        cut = {module: name for name, module in self.model.named_modules() if module in embeddings}
        for name, module in _candidates(self.model, "", whole, set(calls)):
            if module not in inner and not _is_affine(module, *calls[module]):
                cut[module] = name
        for name, module in _around(self.model, norms, attending):  # inner ones first
            if module in calls and module not in inner and not _is_sum(module, calls, norms, cut):
                cut = {part: x for part, x in cut.items() if part not in set(module.modules())} | {module: name}
        return norms, cut

    # Hooks.

    @contextmanager
    def _hooks(self, zero: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.norms:
                stack.callback(module.register_forward_hook(self._freeze(zero)).remove)
            for module, name in self.cut.items():
                stack.callback(module.register_forward_hook(self._leaf_of(name, zero)).remove)
            for layer in self.layers.values():
                if layer is not self.inside:
                    stack.callback(layer.register_forward_pre_hook(_detached, with_kwargs=True).remove)
            yield

    def _cut_heads(self, zero: bool) -> Intervention:
        """A context in which what heads read is a source."""

        def made(name: str) -> tuple[Any, ...]:
            return (lambda read: self._leaf(name, read, zero, heads=True),)

        return Intervention(self.model, self.layers, made, dict.fromkeys(self.layers))

    def _leaf(self, name: str, x: Tensor, zero: bool, *, heads: bool = False) -> Tensor:
        """A source in the place of `x`, or zeros."""
        if zero:
            return torch.zeros_like(x)
        number = self._calls[name] = self._calls.get(name, -1) + 1
        if number == 1:  # it turns out that there are several calls
            self._rename(name, call_name(name, 0))
        name = name if number == 0 else call_name(name, number)
        self.sources[name] = x.detach().clone().requires_grad_()
        if heads:
            self.names.append(name)
        return self.sources[name].clone()  # which the model may change in place

    def _rename(self, old: str, new: str) -> None:
        self.sources = {new if name == old else name: x for name, x in self.sources.items()}
        self.names = [new if name == old else name for name in self.names]

    def _leaf_of(self, name: str, zero: bool) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            leaf = self._leaf(name, first, zero)
            return (leaf, *output[1:]) if isinstance(output, tuple) else leaf

        return hook

    def _freeze(self, zero: bool) -> Callable[..., Any]:
        turn: dict[nn.Module, int] = {}

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            x: Tensor = args[0]
            if zero:
                frozen = self._norms[module][turn.setdefault(module, 0)]
                turn[module] += 1
                return frozen(x) + frozen.bias
            if module not in turn:
                self._norms[module], turn[module] = [], 0
            with torch.no_grad():
                frozen = FrozenNorm._fitted(module, x, output)
            self._norms[module].append(frozen)
            linear = frozen(x)
            return output.detach() + (linear - linear.detach())

        return hook


def _detached(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def cut(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}


def _is_norm(module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    x = args[0] if args else None
    if any(True for _ in module.children()) or kwargs or len(args) != 1:
        return False
    if not (isinstance(x, Tensor) and isinstance(output, Tensor)) or x.shape != output.shape or x.dim() < 2:
        return False
    return x.is_floating_point() and FrozenNorm.of(module, x, output) is not None


def _is_embedding(module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module without parts makes vectors of integers."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    integers = bool(given) and not any(x.is_floating_point() for x in given)
    floats = isinstance(output, Tensor) and output.is_floating_point()
    return integers and floats and not any(True for _ in module.children())


def _candidates(
    module: nn.Module, name: str, whole: set[nn.Module], called: set[nn.Module]
) -> Iterable[tuple[str, nn.Module]]:
    """The largest modules with none of `whole` inside that were called; a list of modules is not."""
    if module in whole:
        return
    if module in called and whole.isdisjoint(module.modules()):
        yield name, module
        return
    for child, part in module.named_children():
        yield from _candidates(part, f"{name}.{child}" if name else child, whole, called)


def _around(model: nn.Module, norms: set[nn.Module], attending: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules that have norms inside and no attention, inner ones first."""
    found = []
    for name, module in model.named_modules():
        parts = set(module.modules())
        if module not in norms and not parts.isdisjoint(norms) and parts.isdisjoint(attending):
            found.append((name, module))
    return found[::-1]


def _is_sum(
    module: nn.Module,
    calls: Mapping[nn.Module, tuple[Any, Any, Any]],
    norms: set[nn.Module],
    cut: Mapping[nn.Module, str],
) -> bool:
    """Whether a module, its norms frozen, adds up what it gets and what nonlinear modules inside write.

    Twice as much of all of them must change its output twice as much. A module that multiplies them (BitNet normalizes
    inside its feed-forward networks) is nonlinear as a whole.
    """
    args, kwargs, _ = calls[module]

    def scaled(x: Any, by: float) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(scaled(part, by) for part in x)
        return x * by if isinstance(x, Tensor) and x.is_floating_point() else x

    def at(by: float) -> Tensor:
        with ExitStack() as stack:
            for part in module.modules():
                if part in norms and part in calls:
                    norm = FrozenNorm._fitted(part, calls[part][0][0], calls[part][2])
                    hook: Any = lambda m, a, o, norm=norm: norm(a[0]) + norm.bias  # noqa: E731
                elif part in cut and part in calls:
                    hook = lambda m, a, o, made=calls[part][2]: scaled(made, by)  # noqa: E731
                else:
                    continue
                stack.callback(part.register_forward_hook(hook).remove)
            found = module.forward(*scaled(args, by), **{name: scaled(x, by) for name, x in kwargs.items()})
        first: Tensor = found[0] if isinstance(found, tuple | list) else found
        return first

    nothing, once, twice = at(0.0), at(1.0), at(2.0)
    return bool((twice - 2 * once + nothing).abs().max() <= closeness(once) * (once.abs().max() + nothing.abs().max()))


def _is_affine(module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module's output is linear in its input, up to a constant; tried with random inputs."""
    x = args[0] if args else next((x for x in kwargs.values() if isinstance(x, Tensor)), None)
    if not isinstance(x, Tensor) or not x.is_floating_point() or output is None:
        return True  # it reads nothing of the stream

    def at(new: Tensor) -> Tensor:
        found = module.forward(
            *(new if y is x else y for y in args), **{n: new if y is x else y for n, y in kwargs.items()}
        )
        first: Tensor = found[0] if isinstance(found, tuple | list) else found
        return first

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(x.shape, generator=generator).to(x) for _ in range(2))
    nothing = at(torch.zeros_like(x))
    once, other, both = at(a) - nothing, at(b) - nothing, at(a - 2 * b) - nothing
    return bool((both - (once - 2 * other)).abs().max() <= closeness(x) * (once.abs().max() + nothing.abs().max()))


# Direct logit attribution ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What each part of the residual stream adds to a logit, or to a difference of two, directly.

    heads: by layer, (B, H).
    rest: by part, (B,): embeddings, feed-forward networks, and "constant", what biases add.
    total: the logit, (B,): the sum of all parts.
    target: the tokens, (B,).
    """

    heads: dict[str, Tensor]
    rest: dict[str, Tensor]
    total: Tensor
    target: Tensor

    def table(self, count: int = 10) -> str:
        """The `count` heads that add or take most, in the mean over samples; 5.4 is head 4 of layer 5."""
        rows = [
            (f"{number}.{head}", x[:, head].mean().item(), name)
            for number, (name, x) in enumerate(self.heads.items())
            for head in range(x.shape[1])
        ]
        rows = sorted(rows, key=lambda row: -abs(row[1]))[:count]
        return "\n".join(["head       logit  layer", *(f"{head:<6} {x:>+9.4f}  {name}" for head, x, name in rows)])

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers and lists."""
        return {
            "target": self.target.tolist(),
            "total": self.total.tolist(),
            "heads": {name: x.tolist() for name, x in self.heads.items()},
            "rest": {name: x.tolist() for name, x in self.rest.items()},
        }


def logit_attribution(
    model: nn.Module,
    tokens: Inputs,
    target: Tensor | int | None = None,
    *,
    against: Tensor | int | None = None,
    position: int = -1,
) -> LogitAttribution:
    """What every head adds directly to the logit of a token, norms frozen; the parts sum to the logit.

    Args:
        model: a model that gives logits (B, T, V) which are linear in its residual stream.
        tokens: (B, T), or keyword arguments of the model.
        target: the token, or one for each sample, (B,); by default the likeliest.
        against: another token, to take the difference of the two logits.
        position: which token's prediction; the last by default.
    """
    checked_layers(model, "logit_attribution")
    count = samples_of(tokens, "logit_attribution")
    check_tokens(model, tokens, "logit_attribution")
    targets, others = _tokens_of(target, count, "target"), _tokens_of(against, count, "against")
    each = [
        _attribution(model, taken(tokens, torch.tensor([i]), count), targets[i], others[i], position)
        for i in range(count)
    ]
    first = each[0]
    return LogitAttribution(
        {name: torch.cat([x.heads[name] for x in each]) for name in first.heads},
        {name: torch.cat([x.rest[name] for x in each]) for name in first.rest},
        torch.cat([x.total for x in each]),
        torch.cat([x.target for x in each]),
    )


def _tokens_of(given: Tensor | int | None, count: int, word: str) -> Sequence[int | None]:
    """One token for each sample."""
    if given is None:
        return [None] * count
    found = torch.as_tensor(given).flatten().tolist()
    if len(found) not in (1, count):
        raise OptionError(f"logit_attribution({word}=...): {len(found)} tokens for {count} samples; expected one each.")
    return found * (count if len(found) == 1 else 1)


def _attribution(
    model: nn.Module, inputs: Inputs, target: int | None, against: int | None, position: int
) -> LogitAttribution:
    stream = Stream(model, inputs)
    chosen = target

    def read(output: Any, seen: Any) -> Tensor:
        nonlocal chosen
        logits = _logits_at(model, output, position)
        chosen = int(logits.argmax()) if chosen is None else _checked_token(chosen, len(logits))
        other = 0 if against is None else logits[_checked_token(against, len(logits))]
        return (logits[chosen] - other)[None]

    total, parts, constant = stream.parts(read)
    heads = {
        name: parts.pop(name) if name in parts else total.new_zeros(1, stream.sources[name].shape[1])
        for name in stream.names
    }
    if not any(x.any() for x in heads.values()):
        last = list(parts)[-1] if parts else "a module"
        raise OptionError(
            f"{type(model).__name__}: {last!r} is nonlinear and comes between the residual stream and the logits, so "
            f"no head adds to a logit directly. Use importance(...) or patch(...), which follow heads through it."
        )
    return LogitAttribution(heads, {**parts, "constant": constant}, total, torch.tensor([chosen]))


def _logits_at(model: nn.Module, output: Any, position: int) -> Tensor:
    """The logits (V,) at a position."""
    logits = logits_of(output)
    if logits is None:
        raise OptionError(f"logit_attribution: {type(model).__name__} gives no logits (B, T, V).")
    T = logits.shape[1]
    if not -T <= position < T:
        raise OptionError(f"logit_attribution(position={position}): the text has {T} tokens, from 0.")
    return logits[0, position]


def _checked_token(token: int, size: int) -> int:
    if not 0 <= token < size:
        raise OptionError(f"logit_attribution: token {token} is not in the vocabulary, from 0 to {size - 1}.")
    return token


# Why a query attends to a key --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Why:
    """The score of one query and one key, split over the parts of the residual stream that each was made from.

    parts: the names of the parts, "layer:head" for heads; the last is "constant", what biases add.
    matrix: (parts, parts), the score of each part of the query's token with each part of the key's; it sums to `dot`.
    score: the score before the softmax: `dot` plus what positions and biases add.
    weight: the attention weight.
    """

    parts: list[str]
    matrix: Tensor
    dot: float
    score: float
    weight: float

    @property
    def query(self) -> dict[str, float]:
        """What each part of the query's token adds, over all parts of the key's."""
        return dict(zip(self.parts, self.matrix.sum(1).tolist(), strict=True))

    @property
    def key(self) -> dict[str, float]:
        """What each part of the key's token adds, over all parts of the query's."""
        return dict(zip(self.parts, self.matrix.sum(0).tolist(), strict=True))

    def table(self, count: int = 10) -> str:
        """The `count` pairs of parts that add or take most."""
        order = self.matrix.abs().flatten().argsort(descending=True)[:count].tolist()
        size, width = len(self.parts), max(len(part) for part in self.parts)
        lines = [
            f"score {self.score:+.4f}, weight {self.weight:.4f}; norms frozen",
            f"{'query part':<{width}}  key part",
        ]
        for place in order:
            a, b = divmod(place, size)
            lines.append(f"{self.parts[a]:<{width}}  {self.parts[b]:<{width}}  {self.matrix[a, b].item():+.4f}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Everything as numbers and lists."""
        return dataclasses.asdict(self) | {"matrix": self.matrix.tolist()}


def why(model: nn.Module, tokens: Inputs, layer: str, head: int, query: int, key: int) -> Why:
    """Why a head's query attends to a key: its score, split over what wrote both tokens' residual streams.

    Args:
        model: a model that `headwise.watch` can see.
        tokens: (1, T), or keyword arguments of the model; one sample.
        layer: the name of the attention layer, or of one of its calls, as `watch` gives it.
        head: the head.
        query: the position of the query.
        key: the position of the key.
    """
    layers = checked_layers(model, "why")
    count = samples_of(tokens, "why")
    check_tokens(model, tokens, "why")
    if count != 1:
        raise OptionError(f"why: {count} samples are given; expected one, (1, T).")
    base, index = split_name(layer, layers)
    return why_of(model, tokens, (base, index), (0, head, query, key))


def why_of(model: nn.Module, inputs: Inputs, call: tuple[str, int | None], pair: tuple[int, int, int, int]) -> Why:
    """Why a query attends to a key.

    Args:
        model: the model.
        inputs: samples.
        call: the layer, and which of its calls in a pass; None for the last.
        pair: sample, head, query and key.
    """
    sample, head, query, key = pair
    inputs = taken(inputs, torch.tensor([sample]), samples_of(inputs, "why"))
    with torch.no_grad(), watch(model) as seen:
        run(model, inputs)
    layer, index = call
    name = layer if index is None or layer in seen.calls else call_name(layer, index)
    if name not in seen:
        raise OptionError(f"why({name!r}): not a headwise layer of this model; there are {list(seen)}.")
    weights: AttentionMap = seen[name]
    _check_pair(weights, name, head, query, key)
    group, D = weights._source().group, weights._query.shape[3]

    def read(output: Any, maps: Mapping[str, Any]) -> Tensor:
        return torch.cat([maps[name]._query[0, head, query], maps[name]._key[0, head // group, key]])

    stream = Stream(model, inputs, inside=layer)
    _, parts, constant = stream.parts(read)
    named = _by_head(parts, stream.names) | {"constant": constant}
    both = torch.stack(list(named.values())).double()  # (parts, 2 D)
    matrix = weights._scoring.scale_for(D) * (both[:, :D] @ both[:, D:].T)
    with torch.no_grad():
        score = weights._source().scores(slice(query, query + 1), torch.tensor([key]))[0, head, 0, 0].item()
        weight = weights[0, head, query, key].item()
    return Why(list(named), matrix, matrix.sum().item(), score, weight)


def _by_head(parts: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Parts with one entry for each head."""
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if name in names:
            found |= {f"{name}:{head}": part[:, head] for head in range(part.shape[1])}
        else:
            found[name] = part
    return found


def _check_pair(weights: AttentionMap, layer: str, head: int, query: int, key: int) -> None:
    """Raise unless the score of this query and key is a sum of products."""
    if not (0 <= head < weights.shape[1] and 0 <= key < weights.shape[3] and 0 <= query < weights.shape[2]):
        raise OptionError(
            f"why(head={head}, query={query}, key={key}): the map is (B, H, T, S) = {tuple(weights.shape)}."
        )
    pair = weights._source().scores(slice(query, query + 1), slice(key, key + 1))[0, head]
    if bool(pair.isneginf().all()):
        raise OptionError(
            f"why(query={query}, key={key}): this query may not attend to this key, so there is no score."
        )
    if weights._scoring.softcap is not None or weights._scoring.score is not None:
        raise OptionError(f"why({layer!r}): this layer caps or changes its scores, so they are not sums of parts.")
