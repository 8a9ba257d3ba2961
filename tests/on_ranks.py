"""What the tests of `headwise.parallel` do on every rank: compare with the same thing on one process, in float64."""

import copy
import dataclasses
import functools

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint as again

import headwise
from headwise import (
    MultiHeadAttention,
    Norms,
    RelativeBias,
    Scoring,
    alibi,
    causal,
    cosine,
    documents,
    longrope,
    padding,
    rotary,
    temperature,
    window,
)
from headwise.attention.backends import Call
from headwise.masks import Extent, Mask
from headwise.models import GPT, GPTConfig
from headwise.parallel import context_parallel, shard_sequence, tensor_parallel, unshard_sequence
from headwise.parallel.ring import Order, RingWalk
from headwise.weights import Reading, Relative, Statistic
from headwise.weights.readings import unflat, zeros

close = functools.partial(assert_close, rtol=1e-9, atol=1e-10)
B = 2


@functools.cache
def mesh(*shape):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=("a", "b")[: len(shape) or 1])


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def layer_of(heads=8, kv=None, **options):
    """A layer with 11-wide heads whose every parameter has its own number."""
    torch.manual_seed(1)
    layer = MultiHeadAttention(heads * 6, heads, num_kv_heads=kv, head_dim=6, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


LAYERS = {
    "plain": {},
    "grouped": {"kv": 4, "causal": True},
    "rotary": {"causal": True, "position": rotary(), "bias": False},
    "apart": {"bias": {"q", "v", "out"}, "causal": True},
    "window": {"causal": True, "mask": window(5), "kv": 4},
    "alibi": {"causal": True, "position": alibi(8)},
    "sinks": {"causal": True, "sinks": True, "kv": 4},
    "softcap": {"softcap": 3.0, "scale": 0.7, "causal": True},
    "qk_norm": {"qk_norm": "head", "position": rotary(), "kv": 4, "causal": True},
    "own norm": {"qk_norm": torch.nn.LayerNorm},
    "gate": {"gate": "element", "kv": 4, "causal": True, "position": temperature(0.3, 4)},
    "gate per head": {"gate": "head", "bias": False, "position": rotary() + temperature(0.2, 3), "causal": True},
    "cosine": {"qk_norm": cosine(2.0), "scale": 1.0, "kv": 4},
    "norms": {"qk_norm": Norms("head", "unweighted", value="head", after=True), "position": rotary()},
}


def make(name):
    if name == "relative":
        torch.manual_seed(2)
        return layer_of(position=RelativeBias(8, num_buckets=8, max_distance=17, dtype=torch.float64), kv=4)
    if name == "latent":
        rule = headwise.latent(10, nope_dim=4, rotary_dim=2, value_dim=5, q_rank=7)
        return layer_of(causal=True, position=rotary(), projections=rule)
    return layer_of(**LAYERS[name])


NAMES = [*LAYERS, "relative"]


def heads_are_shared_out(name):
    """Forward, backward and one step of an optimiser; one all-reduce each way."""
    one = make(name)
    many = tensor_parallel(copy.deepcopy(one), mesh())
    x = torch.randn(B, 13, one.d_in, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    optimisers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (one, many)]
    expected = one(a)
    with CommDebugMode() as forward:
        found = many(b)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    with CommDebugMode() as backward:
        (found * weight).sum().backward()
    close(found, expected)
    close(b.grad, a.grad)
    gradients_agree(one, many)
    for optimiser in optimisers:
        optimiser.step()
    for (place, ours), theirs in zip(many.named_parameters(), one.parameters(), strict=True):
        close(whole(ours), theirs, msg=lambda m, place=place: f"{place}: {m}")
    norms = [norm for norm in (one.q_norm, one.k_norm, one.v_norm) if norm is not None]
    small = sum(1 for norm in norms for name, _ in norm.named_parameters() if name not in getattr(norm, "sharded", ()))
    return forward.get_total_counts(), backward.get_total_counts() - small


def gradients_agree(one, many):
    for (name, ours), theirs in zip(many.named_parameters(), one.parameters(), strict=True):
        close(whole(ours.grad), theirs.grad, msg=lambda m, name=name: f"{name}: {m}")


def maps_cover_the_heads_of_a_rank(name):
    """A rank's map is the part of the whole map that has its heads; gathered, it is the whole."""
    one = make(name)
    many = tensor_parallel(copy.deepcopy(one), mesh())
    x = torch.randn(B, 13, one.d_in, dtype=torch.float64)
    _, expected = one(x, return_weights=True)
    _, found = many(x, return_weights=True)
    count = 8 // dist.get_world_size()
    mine = range(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    close(found[:], expected[:, list(mine)])
    close(found.entropy(), expected.entropy()[:, list(mine)])
    assert [head.head for head in found.summary()] == list(mine)
    all_heads = found.gather()
    close(all_heads[:], expected[:])
    close(all_heads.received().total, expected.received().total)
    every_second = found.select(heads=slice(0, None, 2)).gather()
    close(every_second[:], expected[:, 0::2])
    assert all_heads.gather() is all_heads
    leaves, spec = torch.utils._pytree.tree_flatten(found)  # as FSDP's hooks do with what a layer returns
    close(torch.utils._pytree.tree_unflatten(leaves, spec).gather()[:], expected[:])


def masks_and_biases_of_all_heads_are_cut():
    one = layer_of(kv=4)
    many = tensor_parallel(copy.deepcopy(one), mesh())
    x, memory = (torch.randn(B, n, one.d_in, dtype=torch.float64) for n in (7, 5))
    mask, bias = torch.rand(B, 8, 7, 7) > 0.3, torch.randn(B, 8, 7, 7, dtype=torch.float64)
    close(many(x, mask=mask, attn_bias=bias), one(x, mask=mask, attn_bias=bias))
    close(many(x, mask=padding([7, 3])), one(x, mask=padding([7, 3])))
    close(many(x, memory, memory), one(x, memory, memory))
    close(many(x, many.remember(memory)), one(x, one.remember(memory)))
    _, found = many(x, mask=mask, attn_bias=bias, return_weights=True)
    close(found.gather()[:], one(x, mask=mask, attn_bias=bias, return_weights=True)[1][:])


def gpt(**options):
    torch.manual_seed(3)
    sizes = {"vocab_size": 31, "d_model": 48, "num_heads": 8, "num_layers": 2, "context_length": 64}
    return GPT(GPTConfig(**sizes | options)).double()


def a_model_generates_with_its_cache_shared_out():
    one = gpt()
    many = tensor_parallel(copy.deepcopy(one), mesh())
    expected = one.generate([0, 5, 7], 20, temperature=0)
    assert torch.equal(many.generate([0, 5, 7], 20, temperature=0), expected)
    cache = many.make_caches(B)[0]
    assert cache._storage.read(1)[0].shape[1] == 8 // dist.get_world_size()
    assert torch.equal(many.generate([0, 5, 7], 80, temperature=0), one.generate([0, 5, 7], 80, temperature=0))


def a_model_without_a_seed_draws_the_same_tokens_on_every_rank():
    many = tensor_parallel(gpt(), mesh())
    drawn = [many.generate([0, 5, 7], 20, temperature=2.0) for _ in range(2)]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, drawn)
    assert all(torch.equal(a, b) for other in told for a, b in zip(other, drawn, strict=True))
    assert not torch.equal(*drawn)


def the_rest_of_a_model_is_cut_by_torchs_own_plans():
    """The feed-forward part by column and row; gradients of DTensors and others are clipped together."""
    one = gpt()
    many = tensor_parallel(copy.deepcopy(one), mesh())
    for block in many.blocks:
        plan = {"feed_forward.up": ColwiseParallel(), "feed_forward.down": RowwiseParallel()}
        parallelize_module(block, mesh(), plan)
    for model in (one, many):
        loss_of(model, tokens_of()).backward()
    gradients_agree(one, many)
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    with implicit_replication():
        found = torch.nn.utils.clip_grad_norm_(many.parameters(), 0.1)
    close(whole(found), expected)
    gradients_agree(one, many)


class Adapter(torch.nn.Linear):
    pass


def refused(name):
    """What tensor_parallel says of a model it cannot cut, which is then as it was."""
    twice = tensor_parallel(layer_of(), mesh()) if name == "twice" else None
    adapted = layer_of()
    adapted.qkv_proj = Adapter(48, 144)
    models = {
        "five": (torch.nn.Sequential(layer_of(), layer_of(kv=2)), mesh()),
        "width": (layer_of(qk_norm="width"), mesh()),
        "open": (layer_of(out_proj=False), mesh()),
        "adapter": (adapted, mesh()),
        "gate": (layer_of(gate=torch.nn.Linear(48, 48)), mesh()),
        "latent": (layer_of(projections=headwise.latent(6, nope_dim=6)), mesh()),
        "twice": (twice, mesh()),
        "none": (torch.nn.Linear(3, 5), mesh()),
        "mesh": (layer_of(), mesh(2, 2)),
        "no mesh": (layer_of(), 4),
    }
    model, over = models[name]
    before = str(model)
    try:
        tensor_parallel(model, over)
    except headwise.HeadwiseError as error:
        assert str(model) == before
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def paths_are_explained():
    x = torch.randn(B, 10, 48, dtype=torch.float64)
    ring = headwise.explain(context_parallel(layer_of(causal=True), mesh()), x)
    assert ring.path == "ring"
    assert "around 2 ranks" in ring.summary
    assert ring.mask == "causal()"
    assert headwise.explain(tensor_parallel(layer_of(causal=True), mesh()), x).path == "sdpa"


# Context parallel.

MASKS = {
    "plain": lambda T: None,
    "causal": lambda T: causal(),
    "window": lambda T: causal() & window(5),
    "ahead": lambda T: window(3, 7),
    "documents": lambda T: causal() & documents(lengths=[7, T - 20, 13]),
    "samples": lambda T: documents(torch.arange(2 * T).view(2, T) // 11) & padding([T - 3, T - 9]),
    "empty rows": lambda T: causal() & ~headwise.prefix(6),
    "heads": lambda T: headwise.dense(torch.rand(1, 8, T, T, generator=torch.Generator().manual_seed(5)) > 0.4),
}


def length():
    return 2 * dist.get_world_size() * 5  # chunks of 5


def the_sequence_is_shared_out(name, mask_name):
    """Output, gradients of input and weights, and one step of an optimiser are those of the whole sequence."""
    one = make(name)
    many = context_parallel(copy.deepcopy(one), mesh())
    T = length()
    mask = MASKS[mask_name](T)
    x = torch.randn(B, T, one.d_in, dtype=torch.float64)
    weight = torch.randn(B, T, one.d_out, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), shard_sequence(x, mesh()).requires_grad_()
    expected, found = one(a, mask=mask), many(b, mask=mask)
    close(unshard_sequence(found, mesh()), expected)
    (expected * weight).sum().backward()
    (found * shard_sequence(weight, mesh())).sum().backward()
    close(b.grad, shard_sequence(a.grad, mesh()))
    for (place, ours), theirs in zip(many.named_parameters(), one.named_parameters(), strict=True):
        dist.all_reduce(ours.grad)
        close(ours.grad, theirs[1].grad, msg=lambda m, place=place: f"{place}: {m}")


def scores_under_a_causal_mask():
    """How many scores this rank computes, of a layer's forward pass."""
    heads = torch.empty(1, 1, 10, 6)
    walk = RingWalk(Order(mesh()), Call(heads, heads, heads, Scoring(mask=causal()), 0.0))
    found = [piece for step in range(dist.get_world_size()) for half in (0, 1) for piece, *_ in walk.pieces(step, half)]
    return sum(len(piece.rows) * len(piece.cols) / (2 if piece.kind == "causal" else 1) for piece in found)


def a_bias_is_given_for_the_whole_text():
    one = layer_of(kv=4)
    many = context_parallel(copy.deepcopy(one), mesh())
    T = length()
    x, bias = torch.randn(B, T, one.d_in, dtype=torch.float64), torch.randn(1, 8, T, T, dtype=torch.float64)
    a, b = bias.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = one(x, attn_bias=a)
    found = many(shard_sequence(x, mesh()), attn_bias=b)
    close(unshard_sequence(found, mesh()), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    dist.all_reduce(b.grad)
    close(b.grad, a.grad)


def statistics_of_a_text_no_rank_holds(name, mask_name):
    """Row statistics are those of this rank's rows in the whole map; sums over queries are those of the whole."""
    one = make(name)
    many = context_parallel(copy.deepcopy(one), mesh())
    T = length()
    mask = MASKS[mask_name](T)
    x = torch.randn(B, T, one.d_in, dtype=torch.float64)
    _, expected = one(x, mask=mask, return_weights=True)
    with headwise.watch(many) as seen:
        many(shard_sequence(x, mesh()), mask=mask)
    found = seen[""]
    assert found.shape == (B, 8, T // dist.get_world_size(), T)
    asked = {"entropy": True, "peak": True, "distance": True, "histogram": True, "received": True, "topk": 3}
    asked |= {"pooled": (7, 3), "pooled_peak": (7, 3)}
    asked |= {"masses": {"sink": headwise.sink(2), "previous": headwise.previous_token()}}
    theirs, ours = expected.detach().panel(**asked), found.panel(**asked)
    rows = functools.partial(shard_sequence, mesh=mesh(), dim=2)
    close(ours.entropy, rows(theirs.entropy))
    close(ours.peak.weight, rows(theirs.peak.weight))
    assert torch.equal(ours.peak.key, rows(theirs.peak.key))
    close(ours.distance, rows(theirs.distance))
    close(ours.topk.weights, rows(theirs.topk.weights))
    for probe in theirs.masses:
        close(ours.masses[probe], rows(theirs.masses[probe]))
    for name in ("histogram", "pooled", "pooled_peak"):
        close(getattr(ours, name), getattr(theirs, name), msg=lambda m, name=name: f"{name}: {m}")
    close(ours.received.total, theirs.received.total)
    close(ours.received.count, theirs.received.count)
    close(found.log_sum_exp(), rows(expected.log_sum_exp()))
    close(found.without(headwise.sink(1)).entropy(), rows(expected.without(headwise.sink(1)).entropy()))
    close(found.gather()[:], expected[:])
    close(found.select(heads=[5, 2]).gather()[:], expected[:, [5, 2]])
    close(found.select(heads=[5, 2]).received().total, expected.received().total[:, [5, 2]])
    close(found.sum(-1), rows(expected.sum(-1)))


def what_one_rank_cannot_answer_is_said():
    layer = context_parallel(layer_of(), mesh())
    x = torch.randn(B, 10, 48, dtype=torch.float64)
    found = layer(x, return_weights=True)[1]
    calls = {
        "index": lambda: found[0, 0],
        "element": lambda: found[0, 0, torch.tensor([1]), torch.tensor([2])],
        "dense": lambda: found.to_tensor(),
        "columns": lambda: found.mean(2),
        "kept": lambda: found.kept(),
        "cross": lambda: layer(x, torch.randn(B, 10, 48, dtype=torch.float64)),
        "cache": lambda: layer(x, cache=layer.make_cache(B)),
        "nested": lambda: layer(torch.nested.nested_tensor(list(x), layout=torch.jagged)),
        "dropout": lambda: context_parallel(layer_of(dropout=0.5), mesh())(x),
        "twice": lambda: context_parallel(layer, mesh()),
        "learned": lambda: context_parallel(gpt(position="learned"), mesh()),
        "by length": lambda: context_parallel(
            layer_of(position=rotary(scaling=longrope(4, 8, [1.0] * 3, [2.0] * 3))), mesh()
        ),
        "length": lambda: shard_sequence(torch.zeros(B, 13), mesh()),
        "odd": lambda: layer(x[:, :5]),
        "uneven": lambda: found.select(rows=slice(dist.get_rank(), 4)).gather(),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except headwise.HeadwiseError as error:
            said[name] = str(error)
    return said


def both_at_once():
    """Heads on one axis of a mesh, the sequence on the other."""
    for name in ("grouped", "sinks", "relative", "qk_norm"):
        one = make(name)
        both = mesh(2, 2)
        many = context_parallel(tensor_parallel(copy.deepcopy(one), both["a"]), both["b"])
        T = 20
        x = torch.randn(B, T, one.d_in, dtype=torch.float64)
        a, b = x.clone().requires_grad_(), shard_sequence(x, both["b"]).requires_grad_()
        expected, whole_map = one(a, return_weights=True)
        found, weights = many(b, return_weights=True)
        close(unshard_sequence(found, both["b"]), expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        close(b.grad, shard_sequence(a.grad, both["b"]))
        close(weights.gather()[:], whole_map[:])
        close(weights.gather().entropy(), whole_map.entropy())
        mine = range(4 * both["a"].get_local_rank(), 4 * both["a"].get_local_rank() + 4)
        close(weights.entropy(), shard_sequence(whole_map.entropy(), both["b"], 2)[:, list(mine)])


def a_model_learns_a_text_no_rank_holds():
    """A GPT on packed documents, averaged by DDP, takes the steps of one process."""
    one = gpt()
    many = torch.nn.parallel.DistributedDataParallel(context_parallel(copy.deepcopy(one), mesh()))
    T = length()
    tokens = torch.randint(31, (B, T + 1))
    mask = documents(lengths=[7, T - 7])
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (one, many)]
    for _ in range(2):
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        cross_entropy(one(inputs, mask).flatten(0, 1), labels.flatten()).backward()
        inputs, labels = shard_sequence(inputs, mesh()), shard_sequence(labels, mesh())
        cross_entropy(many(inputs, mask).flatten(0, 1), labels.flatten()).backward()
        for ours, theirs in zip(many.module.parameters(), one.parameters(), strict=True):
            close(ours.grad, theirs.grad)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()


# Masks, positions and statistics that only the tests know.


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSteps(Mask):
    """Head h sees every (h + 1)-th key, counted back from the query, up to a limit of its own."""

    limits: torch.Tensor  # (H,)

    @property
    def extent(self):
        return Extent(heads=len(self.limits))

    def visible(self, grid):
        distance = grid.position - grid.col
        return (distance % (grid.head + 1) == 0) & (distance.abs() <= self.limits[grid.head])


@dataclasses.dataclass(frozen=True, eq=False)
class Wave(Relative):
    """`table` (1, H, 2) and another tensor by head, (H,)."""

    phase: torch.Tensor

    @property
    def num_heads(self):
        return len(self.phase)

    def at(self, grid, dtype):
        height, speed = self.table[0].to(dtype).unbind(1)
        angle = (grid.position - grid.col) * speed[grid.head] + self.phase.to(dtype)[grid.head]
        return height[grid.head] * angle.sin()


class Concentration(Reading):
    """Σ w² of every row."""

    def start(self, source):
        self.source, self.sum = source, zeros(source, source.shape[2])

    def take(self, tile):
        self.sum[tile.heads, tile.rows] += tile.weights.square().sum(-1)

    def finish(self):
        return (unflat(self.sum, self.source),)

    def dense(self, block):
        return (block.weights.square().sum(-1),)


class Total(Concentration):
    """Σ w² of every head, which ranks can add up; `Unmerged` does not say so."""

    by_row = False
    merged = "sum"

    def finish(self):
        return (super().finish()[0].sum(-1),)


class Unmerged(Total):
    merged = None


class Biased(RelativeBias):
    """A learned position whose rule is a class of the tests."""

    def forward(self):
        return Shortened(self.weight, 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Shortened(Relative):
    """`table` (buckets, H), one row for every `step` distances."""

    step: int

    @property
    def num_heads(self):
        return self.table.shape[1]

    def at(self, grid, dtype):
        row = ((grid.position - grid.col).abs() // self.step).clamp(max=self.table.shape[0] - 1)
        return self.table.to(dtype)[row, grid.head]


class Placed(torch.nn.Module):
    """A score function that depends on every number, and hides some keys."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, 41, dtype=torch.float64))

    def forward(self, score, batch, head, query, key):
        changed = score + self.table[head, query] * self.table[head, key] * (1 + batch)
        return torch.where((query + key + head) % 5 == 0, -torch.inf, changed)


def open_layer(name):
    torch.manual_seed(4)
    if name == "score":
        return layer_of(kv=4, score=Placed(), sinks=True)
    if name == "learned position":
        return layer_of(kv=4, position=Biased(8, num_buckets=4, max_distance=17, dtype=torch.float64))
    if name == "position":
        return layer_of(kv=4, position=Wave(torch.randn(1, 8, 2, dtype=torch.float64), torch.randn(8).double()))
    return layer_of(kv=4, mask=HeadSteps(torch.arange(3, 11)))


def what_the_tests_define_is_shared_out(name):
    """Output, gradients, maps and statistics over heads, and over the sequence, are those of one process."""
    one = open_layer(name)
    heads, sequence = tensor_parallel(copy.deepcopy(one), mesh()), context_parallel(copy.deepcopy(one), mesh())
    T = length()
    x = torch.randn(B, T, one.d_in, dtype=torch.float64)
    output, expected = one(x, return_weights=True)
    output.square().sum().backward()
    found, weights = heads(x, return_weights=True)
    close(found, output)
    found.square().sum().backward()
    gradients_agree(one, heads)
    count = 8 // dist.get_world_size()
    mine = list(range(dist.get_rank() * count, (dist.get_rank() + 1) * count))
    close(weights[:], expected[:, mine])
    close(weights.read(Concentration())[0], expected.read(Concentration())[0][:, mine])
    close(weights.clone().gather()[:], expected[:])
    close(weights.gather().detach().read(Total())[0], expected.detach().read(Total())[0])
    found, weights = sequence(shard_sequence(x, mesh()), return_weights=True)
    close(unshard_sequence(found, mesh()), output)
    close(weights.read(Concentration())[0], shard_sequence(expected.read(Concentration())[0], mesh(), 2))
    close(weights.read(Total())[0], expected.detach().read(Total())[0])
    statistics_of_a_function_agree(weights.detach(), expected.detach())
    close(weights.gather()[:], expected[:])


def statistics_of_a_function_agree(weights, expected):
    """On ranks that share the queries and the keys."""
    ids = torch.arange(expected.shape[3]) % 3
    options = {"tokens": ids, "where": window(4, 2)}
    for combine in ("sum", "max", "count"):
        near = Statistic(
            lambda pair: (pair.weight > 0.1) * (pair.query_token != pair.key_token), combine=combine, **options
        )
        for mine, theirs in zip(weights.read(near), expected.read(near), strict=True):
            close(mine, shard_sequence(theirs, mesh(), 2))
    squares = Statistic(lambda pair: pair.weight**2 * pair.score, by="key")
    close(weights.read(squares)[0], expected.read(squares)[0])


def what_ranks_cannot_merge():
    weights = context_parallel(layer_of(), mesh())(torch.randn(B, 10, 48).double(), return_weights=True)[1]
    try:
        weights.read(Unmerged())
    except headwise.HeadwiseError as error:
        return str(error)
    return "nothing was refused"


# Data parallel, sharded weights, activation checkpointing, checkpoints.


def tokens_of(T=16):
    return torch.randint(31, (4, T + 1), generator=torch.Generator().manual_seed(7))


def loss_of(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def steps_agree(one, many):
    """Two steps on this rank's part of a batch are the steps of one process on all of it."""
    optimisers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (one, many)]
    part = tokens_of().chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):
        for optimiser, model, tokens in zip(optimisers, (one, many), (tokens_of(), part), strict=True):
            loss_of(model, tokens).backward()
            optimiser.step()
            optimiser.zero_grad()
    for (name, ours), theirs in zip(many.named_parameters(), one.parameters(), strict=True):
        assert_close(whole(ours), theirs, rtol=1e-6, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def batches_are_shared_out():
    one = gpt()
    steps_agree(one, torch.nn.parallel.DistributedDataParallel(copy.deepcopy(one)))


def weights_are_shared_out():
    """FSDP2 over every block and the whole; maps are those of one process."""
    one = gpt()
    many = copy.deepcopy(one)
    for block in many.blocks:
        fully_shard(block, mesh=mesh())
    fully_shard(many, mesh=mesh())
    steps_agree(one, many)
    tokens = tokens_of()[:, :-1]
    with headwise.watch(many) as seen, headwise.watch(one) as expected:
        many(tokens)
        one(tokens)
    found, expected = seen["blocks.1.attention"].entropy(), expected["blocks.1.attention"].entropy()
    assert_close(found, expected, rtol=1e-6, atol=1e-8)


def a_layer_alone_is_sharded_with_its_sinks():
    one = make("sinks")
    many = fully_shard(copy.deepcopy(one), mesh=mesh())
    x = torch.randn(B, 7, 48, dtype=torch.float64)
    expected, found = one(x, return_weights=True), many(x, return_weights=True)
    close(found[0], expected[0])
    close(found[1].entropy(), expected[1].entropy())
    for pair in (expected, found):
        (pair[0].square().sum() + pair[1].entropy().sum()).backward()
    gradients_agree(one, many)


def a_model_made_without_numbers_is_sharded_and_then_filled():
    """FSDP2's recipe: the meta device, then shards, then memory, then numbers."""
    with torch.device("meta"):
        many = torch.nn.Sequential(
            MultiHeadAttention(48, 6, causal=True, position=alibi(6), sinks=True),
            MultiHeadAttention(48, 6, position=RelativeBias(6), qk_norm="head", mask=documents(lengths=[3, 4])),
        )
    for layer in many:
        fully_shard(layer, mesh=mesh())
    fully_shard(many, mesh=mesh())
    many.to_empty(device="cpu")
    for parameter in many.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for module in many.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    many(torch.randn(B, 7, 48)).square().sum().backward()
    for name, parameter in many.named_parameters():
        assert parameter.full_tensor().isfinite().all(), name
        assert parameter.grad.full_tensor().isfinite().all(), name
    assert many[0].sinks.full_tensor().abs().sum() == 0


def heads_and_batches_are_shared_out():
    """FSDP2 over one axis, heads over the other; maps keep their heads through FSDP's hooks."""
    one = gpt()
    both = mesh(2, 2)
    many = tensor_parallel(copy.deepcopy(one), both["b"])
    for block in many.blocks:
        fully_shard(block, mesh=both["a"])
    tokens = tokens_of()
    with headwise.watch(many) as seen, headwise.watch(one) as expected:
        many(tokens[:, :-1])
        one(tokens[:, :-1])
    close(seen["blocks.1.attention"].gather()[:], expected["blocks.1.attention"][:])
    part = tokens.chunk(2)[both["a"].get_local_rank()]
    loss_of(one, tokens).backward()
    loss_of(many, part).backward()
    for name, theirs in one.blocks.named_parameters():
        ours = many.blocks.get_parameter(name).grad
        close(whole(ours), theirs.grad, msg=lambda m, name=name: f"{name}: {m}")


def saved(folder, kind):
    """A checkpoint of a model spread over these ranks, and what it says."""
    model = spread_model(kind)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    return float(loss_of(model, tokens_of()).detach())


def loaded(folder, kind):
    """What a model says once it has read that checkpoint on other ranks."""
    model = spread_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return float(loss_of(model, tokens_of()).detach())


def spread_model(kind):
    model = gpt()
    if kind == "heads":
        return tensor_parallel(model, mesh())
    return fully_shard(model, mesh=mesh()) if kind == "weights" else model


def activations_computed_again_by(use_reentrant):
    """A checkpointed layer is seen once, and learns as without; over ranks, too."""
    one = layer_of(causal=True, position=rotary())
    many = context_parallel(copy.deepcopy(one), mesh())
    x = torch.randn(B, length(), 48, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), shard_sequence(x, mesh()).requires_grad_()
    one(a).square().sum().backward()
    with headwise.watch(many, statistics={"entropy": True}) as seen:
        again(many, b, use_reentrant=use_reentrant).square().sum().backward()
    assert len(seen.calls[""]) == 1
    close(b.grad, shard_sequence(a.grad, mesh()))
