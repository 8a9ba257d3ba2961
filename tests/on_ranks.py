"""What the tests of `headwise.parallel` do on every rank: each compares with the same thing on one process, in float64."""

import copy
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import headwise
from headwise import MultiHeadAttention, RelativeBias, Scoring, alibi, causal, documents, padding, rotary, window
from headwise.models import GPT, GPTConfig
from headwise.parallel import context_parallel, shard_sequence, tensor_parallel, unshard_sequence

close = functools.partial(assert_close, rtol=1e-9, atol=1e-11)
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
    "sinks": {"causal": True, "scoring": Scoring(sinks=True), "kv": 4},
    "softcap": {"scoring": Scoring(softcap=3.0, scale=0.7), "causal": True},
    "qk_norm": {"qk_norm": "head", "position": rotary(), "kv": 4, "causal": True},
    "own norm": {"qk_norm": torch.nn.LayerNorm},
}


def make(name):
    if name == "relative":
        torch.manual_seed(2)
        return layer_of(position=RelativeBias(8, num_buckets=8, max_distance=17, dtype=torch.float64), kv=4)
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
    small = 2 * sum(1 for _ in one.q_norm.parameters()) if one.q_norm is not None else 0
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


def masks_and_biases_of_all_heads_are_cut():
    one = layer_of(kv=4)
    many = tensor_parallel(copy.deepcopy(one), mesh())
    x, memory = (torch.randn(B, n, one.d_in, dtype=torch.float64) for n in (7, 5))
    mask, bias = torch.rand(B, 8, 7, 7) > 0.3, torch.randn(B, 8, 7, 7, dtype=torch.float64)
    close(many(x, mask=mask, bias=bias), one(x, mask=mask, bias=bias))
    close(many(x, mask=padding([7, 3])), one(x, mask=padding([7, 3])))
    close(many(x, memory, memory), one(x, memory, memory))
    close(many(x, many.remember(memory)), one(x, one.remember(memory)))
    _, found = many(x, mask=mask, bias=bias, return_weights=True)
    close(found.gather()[:], one(x, mask=mask, bias=bias, return_weights=True)[1][:])


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
    assert cache._key.shape[1] == 8 // dist.get_world_size()
    assert torch.equal(many.generate([0, 5, 7], 80, temperature=0), one.generate([0, 5, 7], 80, temperature=0))


def refusals(make_layer, *options):
    layer = make_layer(*options)
    try:
        tensor_parallel(layer, mesh())
    except headwise.HeadwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
