"""The residual stream taken apart: which head wrote what, and what that does to logits and to later scores.

>>> from headwise import load_builtin, logit_attribution
>>> model = load_builtin()
>>> found = logit_attribution(model.gpt, model.tokens("The captain looked at the sea, and the sea looked at the"))
>>> found.heads["blocks.6.attention"].shape  # what each head adds to the logit of the likeliest next token
torch.Size([1, 8])

In a model whose blocks add to a stream (pre-norm: GPT-2, Llama, ours), the stream at a token is the embedding plus what
every head and every feed-forward network of earlier layers wrote. Norms are frozen: each divides by the same number
as in this run, so that what follows is linear and parts sum to the whole. Nothing is looked up by name: running the
model shows whether blocks add, what a norm does and which matrix makes the logits. Models that do not fit are refused.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.study.importance import logits_of
from headwise.study.interventions import checked_layers
from headwise.study.outputs import Outputs
from headwise.study.watch import watch
from headwise.weights import AttentionMap

Inputs = Tensor | Mapping[str, Any]


class Stream:
    """The residual stream of one run at some positions, in parts.

    parts: by name, what was added to the stream, (B, positions, E): "embedding", "blocks.0.attention:3" for a head,
        "blocks.0.attention:bias", and "blocks.0:rest" for all else that a block adds, its feed-forward network.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, positions: list[int]) -> None:
        self.model, self.positions = model, positions
        layers = checked_layers(model, "residual stream")
        self.blocks = _blocks_of(model, layers)
        self.block_inputs: dict[str, Tensor] = {}
        self.block_outputs: dict[str, Tensor] = {}
        self.inner: dict[str, list[Tensor]] = {name: [] for name in self.blocks}  # what modules of a block returned
        self.norms: list[tuple[nn.Module, Tensor, Tensor, Any]] = []  # modules that keep a shape, with input and output
        self.given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of attention modules
        with torch.no_grad(), watch(model, outputs=True) as self.seen, self._recording(layers):
            self.output = run(model, inputs)
        odd = {*layers} ^ {*self.outputs}
        if odd:
            raise OptionError(
                f"{min(odd)!r} was not called exactly once in this run, so the residual stream is not a plain sum."
            )

    @property
    def outputs(self) -> Outputs:
        """What heads read and write."""
        return self.seen.outputs

    def parts_before(self, stop: str | None = None) -> dict[str, Tensor]:
        """The parts of the stream that enters the block `stop`, or leaves the last; an error unless they sum up."""
        first = next(iter(self.blocks))
        found, before = {"embedding": self.block_inputs[first]}, self.block_inputs[first]
        for block, attentions in self.blocks.items():
            if block == stop:
                break
            self._check_close(before, self.block_inputs[block], f"something happens between blocks, before {block!r}")
            rest = self.block_outputs[block] - self.block_inputs[block]
            for name in attentions:
                for part, written in self._written(name):
                    found[part] = written
                    rest = rest - written
            self._check_added(block, rest)
            found[f"{block}:rest"] = rest
            before = self.block_outputs[block]
        return found

    def _written(self, name: str) -> Iterator[tuple[str, Tensor]]:
        layer = self.outputs[name]
        for head in range(layer.shape[1]):
            yield f"{name}:{head}", layer.written(heads=head, rows=self.positions)[:, 0]
        yield f"{name}:bias", layer.bias.expand(layer.shape[0], len(self.positions), -1)

    def _check_added(self, block: str, rest: Tensor) -> None:
        """Raise unless what heads do not explain is the output of some module: then the block adds both."""
        size = self.block_outputs[block].abs().max()
        close = 1e-3 if rest.dtype not in (torch.bfloat16, torch.float16) else 3e-2
        for output in self.inner[block]:
            if output.shape == rest.shape and (output - rest).abs().max() <= close * size:
                return
        if rest.abs().max() > close * size:
            raise OptionError(
                f"{type(self.model).__name__}: block {block!r} does not add what its heads write to its input as it is "
                f"(it may scale or normalize it, as post-norm models do), so its residual stream has no such parts."
            )

    def _check_close(self, a: Tensor, b: Tensor, problem: str) -> None:
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())):
            raise OptionError(f"{type(self.model).__name__}: {problem}, so the residual stream is not a sum of parts.")

    @contextmanager
    def _recording(self, layers: Mapping[str, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            named = dict(self.model.named_modules())
            for name, module in named.items():
                block = next((x for x in self.blocks if name == x or name.startswith(f"{x}.")), None)
                stack.callback(module.register_forward_hook(self._hook(name, block), with_kwargs=True).remove)
            for name in self.blocks:
                hook = named[name].register_forward_pre_hook(self._enter(name), with_kwargs=True)
                stack.callback(hook.remove)
            for name, layer in layers.items():
                stack.callback(layer.register_forward_pre_hook(self._asked(name), with_kwargs=True).remove)
            yield

    def _at(self, x: Tensor) -> Tensor:
        if not all(-x.shape[1] <= position < x.shape[1] for position in self.positions):
            raise OptionError(f"positions {self.positions}: the text has {x.shape[1]} tokens, from 0.")
        return x.detach()[:, self.positions]

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.block_inputs[name] = self._at(_state(args, kwargs))

        return hook

    def _asked(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.given[name] = (args, dict(kwargs))

        return hook

    def _hook(self, name: str, block: str | None) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            result = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(result, Tensor) or result.dim() != 3:
                return
            if name == block:
                self.block_outputs[name] = self._at(result)
            elif block is not None:
                self.inner[block].append(self._at(result))
            given = args[0] if args else None
            if not list(module.children()) and isinstance(given, Tensor) and given.shape == result.shape:
                self.norms.append((module, self._at(given), self._at(result), result))

        return hook


def run(model: nn.Module, inputs: Inputs, **options: Any) -> Any:
    """What the model makes of the inputs, without a cache if it would keep one."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False
    return model(inputs, **options) if isinstance(inputs, Tensor) else model(**inputs, **options)


def _blocks_of(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, list[str]]:
    """The blocks of a model, elements of a list of modules, with the attention layers inside each."""
    named, found = dict(model.named_modules()), {}  # type: ignore[var-annotated]
    for name in layers:
        parts = name.split(".")
        prefixes = [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]
        block = next((x for x in prefixes if isinstance(named.get(x.rpartition(".")[0]), nn.ModuleList)), None)
        if block is None:
            raise OptionError(
                f"{name!r} is in no list of blocks, so the residual stream cannot be followed through it."
            )
        found.setdefault(block, []).append(name)
    return found


def _state(args: Any, kwargs: Any) -> Tensor:
    """The hidden states (B, T, E) among the arguments of a block."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point():
            return x
    raise OptionError("a block received no hidden states (B, T, E), so the residual stream cannot be followed.")


# Norms, frozen -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FrozenNorm:
    """A norm as the linear map it was in one call: scale · gain · (x − mean), or without the mean, plus a bias."""

    gain: Tensor  # (E,)
    bias: Tensor  # (E,)
    scale: Tensor  # (B, positions, 1)
    centers: bool

    @classmethod
    def of(cls, module: nn.Module, x: Tensor, y: Tensor) -> "FrozenNorm | None":
        """What `module` did when it made `y` of `x`, both (B, positions, E); None if that is no norm."""
        try:
            with torch.no_grad():
                made = cls._fitted(module, x, y)
        except (RuntimeError, TypeError, ValueError):  # it takes other inputs
            return None
        close = 1e-3 if y.dtype not in (torch.bfloat16, torch.float16) else 3e-2
        return made if (made(x) + made.bias - y).abs().max() <= close * y.abs().max() else None

    @classmethod
    def _fitted(cls, module: nn.Module, x: Tensor, y: Tensor) -> "FrozenNorm":
        E = x.shape[-1]
        probe = torch.ones(1, 1, E).to(x)
        probe[..., ::2] = -1
        bias = module.forward(torch.zeros_like(probe))[0, 0]
        centers = torch.allclose(module.forward(probe + 5), module.forward(probe), rtol=1e-2, atol=1e-2)
        gain = (module.forward(probe)[0, 0] - bias) / (probe - probe.mean() if centers else probe)[0, 0]
        turned = gain * (x - x.mean(-1, keepdim=True) if centers else x)
        size = (turned * turned).sum(-1, keepdim=True)
        scale = (turned * (y - bias)).sum(-1, keepdim=True) / torch.where(size > 0, size, 1.0)
        return cls(gain, bias, scale, centers)

    def __call__(self, part: Tensor) -> Tensor:
        """What becomes of a part of the stream, (B, positions, E)."""
        return self.scale * self.gain * (part - part.mean(-1, keepdim=True) if self.centers else part)


# Direct logit attribution ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What each part of the residual stream adds to a logit, or to a difference of two, directly.

    heads: by layer, (B, H).
    rest: by part, (B,): the embedding, what feed-forward networks and biases add, and "constant".
    total: the logit, (B,): the sum of all parts.
    target: the tokens, (B,).
    """

    heads: dict[str, Tensor]
    rest: dict[str, Tensor]
    total: Tensor
    target: Tensor

    def table(self, count: int = 10) -> str:
        """The `count` heads that add or take most, in the mean over samples."""
        rows = [(name, head, x[:, head].mean().item()) for name, x in self.heads.items() for head in range(x.shape[1])]
        rows = sorted(rows, key=lambda row: -abs(row[2]))[:count]
        width = max(5, *(len(name) for name in self.heads))
        return "\n".join(
            [f"{'layer':<{width}} head     logit", *(f"{n:<{width}} {h:>4}  {x:+8.4f}" for n, h, x in rows)]
        )

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
        model: a model whose blocks add to a residual stream, and which gives logits (B, T, V).
        tokens: (B, T), or keyword arguments of the model.
        target: the token, or one for each sample, (B,); by default the likeliest.
        against: another token, to take the difference of the two logits.
        position: which token's prediction; the last by default.
    """
    stream = Stream(model, tokens, [position])
    logits = logits_of(stream.output)
    if logits is None:
        raise OptionError(f"logit_attribution: {type(model).__name__} gives no logits (B, T, V).")
    logits = logits[:, [position]] if position < 0 or logits.shape[1] > position else logits[:, -1:]
    norm, matrix, constant = _unembedding(stream, logits)
    chosen = logits[:, 0].argmax(-1) if target is None else torch.as_tensor(target, device=logits.device)
    chosen = chosen.expand(len(logits))
    rows = matrix[chosen] - (0 if against is None else matrix[torch.as_tensor(against).expand(len(logits))])  # (B, E)
    amounts = {name: (norm(part)[:, 0] * rows).sum(-1) for name, part in stream.parts_before().items()}
    fixed = (norm.bias * rows).sum(-1) + constant[chosen]
    total = logits[:, 0].gather(1, chosen[:, None])[:, 0]
    if against is not None:
        other = torch.as_tensor(against, device=logits.device).expand(len(logits))
        fixed, total = fixed - constant[other], total - logits[:, 0].gather(1, other[:, None])[:, 0]
    heads = {
        name: torch.stack([amounts.pop(f"{name}:{head}") for head in range(layer.shape[1])], 1)
        for name, layer in stream.outputs.items()
    }
    return LogitAttribution(heads, {**amounts, "constant": fixed}, total, chosen)


def _unembedding(stream: Stream, logits: Tensor) -> tuple[FrozenNorm, Tensor, Tensor]:
    """The last norm as it was, the matrix (V, E) that makes logits of what it returns, and a constant (V,)."""
    V = logits.shape[-1]
    constants = [x.detach() for x in stream.model.parameters() if x.shape == (V,)]
    constants.append(logits.new_zeros(V))
    for module, x, y, _ in reversed(stream.norms):
        for weight in stream.model.parameters():
            if weight.shape != (V, y.shape[-1]):
                continue
            plain = y @ weight.detach().T
            for constant in constants:
                factor = float((plain * (logits - constant)).sum() / (plain * plain).sum())
                if (factor * plain + constant - logits).abs().max() <= 2e-3 * logits.abs().max():
                    norm = FrozenNorm.of(module, x, y)
                    if norm is not None:
                        return norm, factor * weight.detach(), constant
    raise OptionError(
        f"{type(stream.model).__name__}: no matrix of the model makes its logits from the output of a norm (it may cap "
        f"them, or transform the stream first), so what heads add to them directly is not known."
    )


# Why a query attends to a key --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Why:
    """The score of one query and one key, split over the parts of the residual stream that each was made from.

    parts: the names of the parts; the last is "constant", what biases of the layer add.
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
        model: a model whose blocks add to a residual stream.
        tokens: (1, T), or keyword arguments of the model; one sample.
        layer: the name of the attention layer.
        head: the head.
        query: the position of the query.
        key: the position of the key.
    """
    stream = Stream(model, tokens, [query, key])
    if layer not in stream.outputs:
        raise OptionError(f"why({layer!r}): not a headwise layer of this model; there are {list(stream.outputs)}.")
    weights: AttentionMap = stream.seen[layer]
    if weights.shape[0] != 1:
        raise OptionError(f"why: {weights.shape[0]} samples are given; expected one, (1, T).")
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
    block = next(name for name, inside in stream.blocks.items() if layer in inside)
    norm = _norm_before(stream, layer)
    parts = {name: norm(part) for name, part in stream.parts_before(block).items()}
    constant = norm.bias.expand(1, 2, -1)
    q, k = _heads_of(
        stream, layer, torch.cat([*parts.values(), constant, torch.zeros_like(constant)]), head, query, key
    )
    q, k = _with_constant(q), _with_constant(k)
    whole = weights._source()
    group = whole.group
    actual_q, actual_k = whole.query[0, head, query].double(), whole.key[0, head // group, key].double()
    for name, sum_, actual in (("queries", q.sum(0), actual_q), ("keys", k.sum(0), actual_k)):
        if (sum_ - actual).abs().max() > 1e-2 * actual.abs().max():
            raise OptionError(
                f"why({layer!r}): its {name} are not linear in its input (it may normalize them), so scores are no "
                f"sums of parts."
            )
    matrix = whole.scoring.scale_for(whole.query.shape[3]) * (q @ k.T)
    with torch.no_grad():
        score = whole.scores(slice(query, query + 1), torch.tensor([key]))[0, head, 0, 0].item()
        weight = weights[0, head, query, key].item()
    return Why([*parts, "constant"], matrix, matrix.sum().item(), score, weight)


def _with_constant(parts: Tensor) -> Tensor:
    """Parts without what the layer makes of nothing, and the constant with it: (parts, D) from (parts + 1, D)."""
    nothing = parts[-1]
    found = parts[:-1] - nothing
    found[-1] += nothing
    return found


def _norm_before(stream: Stream, layer: str) -> FrozenNorm:
    """The norm whose output the layer received."""
    args, kwargs = stream.given[layer]
    state = _state(args, kwargs)
    for module, x, y, result in reversed(stream.norms):
        if result is state or (result.shape == state.shape and result.data_ptr() == state.data_ptr()):
            norm = FrozenNorm.of(module, x, y)
            if norm is not None:
                return norm
    raise OptionError(f"why({layer!r}): its input is not the output of a norm, so parts of the stream do not reach it.")


def _heads_of(stream: Stream, layer: str, parts: Tensor, head: int, query: int, key: int) -> tuple[Tensor, Tensor]:
    """The query and key heads (parts, D) that the layer makes of each part, (parts, 2, E), at the two positions."""
    module = dict(stream.model.named_modules())[layer]
    args, kwargs = stream.given[layer]
    state = _state(args, kwargs)
    queries, keys = [], []
    for chunk in parts.split(max(1, 2**22 // max(1, state.shape[1] * state.shape[2]))):
        x = state.new_zeros(len(chunk), *state.shape[1:])
        x[:, query], x[:, key] = chunk[:, 0], chunk[:, 1]
        with torch.no_grad(), watch(module) as seen:
            module(*(x if y is state else y for y in args), **{n: x if y is state else y for n, y in kwargs.items()})
        made = next(iter(seen.values()))
        queries.append(made._query[:, head, query].double())
        keys.append(made._key[:, head // (made._query.shape[1] // made._key.shape[1]), key].double())
    return torch.cat(queries), torch.cat(keys)
