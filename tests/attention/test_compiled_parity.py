"""One grid for eager and compiled: every dtype and option, output, weights and gradients against the float64 reference.

Every option meets every dtype. Masks, grouped heads, causal and return_weights take turns, so that each meets each
dtype and each option somewhere.
"""

import itertools

import pytest
import torch

from closeness import assert_close_to_truth
from headwise import RelativeBias, alibi, attend, causal, dense, documents, padding, prefix, reference, window
from headwise.weights.scoring import Scoring

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
B, H, T, S, D, DV = 2, 6, 19, 23, 16, 16
SIZES = (1, 4, 30)  # factors of the queries; large activations tell rounded scores from exact ones


def numbers(*shape, seed=5):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def relative_bias(dtype):
    """A learned table, large enough to matter."""
    module = RelativeBias(H, num_buckets=8, max_distance=16, dtype=dtype)
    module.weight.data.copy_(numbers(8, H))
    return module


OPTIONS = {
    "plain": lambda dtype: {},
    "scale": lambda dtype: {"scale": 0.3},
    "softcap": lambda dtype: {"softcap": 5.0},
    "sinks": lambda dtype: {"sinks": numbers(H).to(dtype).requires_grad_()},
    "alibi": lambda dtype: {"relative": alibi(H)},
    "relative": lambda dtype: {"relative": relative_bias(dtype)()},
    "bias": lambda dtype: {"attn_bias": numbers(1, H, T, S).to(dtype).requires_grad_()},
    "bias, sinks": lambda dtype: {
        "attn_bias": numbers(B, 1, T, S).to(dtype).requires_grad_(),
        "sinks": numbers(H).to(dtype).requires_grad_(),
    },
    "softcap, alibi, sinks": lambda dtype: {
        "softcap": 3.0,
        "relative": alibi(H),
        "sinks": numbers(H).to(dtype).requires_grad_(),
    },
    "everything": lambda dtype: {
        "scale": 0.3,
        "softcap": 7.0,
        "attn_bias": numbers(T, S).to(dtype).requires_grad_(),
        "relative": relative_bias(dtype)(),
        "sinks": numbers(H).to(dtype).requires_grad_(),
    },
}
MASKS = {
    "none": lambda: None,
    "window": lambda: window(5, 2),
    "padding": lambda: padding(torch.tensor([S, 7])),
    "empty sample": lambda: padding(torch.tensor([0, S])),
    "documents": lambda: documents(torch.arange(S) // 7),
    "prefix": lambda: causal() | prefix(3),
    "dense": lambda: dense(torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.5),
    "empty rows": lambda: dense((torch.arange(T) % 3 != 1)[:, None].expand(T, S)),
}


def turns(i, j):
    """Two settings (mask, key heads, causal, return_weights) for dtype i and option j."""
    for turn in range(2):
        yield (
            list(MASKS)[(2 * i + j + turn) % len(MASKS)],
            (H, 3)[(i + turn) % 2],
            (i // 2 + j + turn) % 2 == 0,
            (j // 2 + i + turn) % 2 == 0,
        )


CELLS = {
    (dtype, option): list(turns(i, j))
    for (i, dtype), (j, option) in itertools.product(enumerate(DTYPES), enumerate(OPTIONS))
}


def slope(output):
    """A fixed upstream gradient, the same in every dtype."""
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)


def heads(dtype, factor, Hkv):
    shapes = ((B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, DV))
    query, key, value = (numbers(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes))
    return [x.requires_grad_() for x in ((query * factor).detach(), key, value)]


def scoring_of(options):
    return Scoring(**{"bias" if name == "attn_bias" else name: x for name, x in options.items()})


def learned(tensors, options):
    """Whatever has a gradient."""
    scoring = scoring_of(options)
    tables = [x for x in scoring.learnable if x is not None and x.requires_grad]
    return [*tensors, *tables]


def run(function, tensors, options, return_weights):
    """Output, weights (or None) and gradients of everything that learns."""
    found = function(*tensors, **options)
    output, weights = (found[0], found[1][:]) if return_weights else (found, None)
    gradients = torch.autograd.grad((output * slope(output)).sum(), learned(tensors, options), allow_unused=True)
    return output.detach(), None if weights is None else weights.detach(), gradients


def reference_run(tensors, options, mask, dtype):
    """The same by the reference, in `dtype`."""
    found = learned(tensors, options)
    copies = {id(x): x.detach().to(dtype).requires_grad_() for x in found}
    scoring = scoring_of(options).map_tensors(lambda x: copies.get(id(x), x.to(dtype)))
    query, key, value = (copies[id(x)] for x in tensors)
    output, weights = reference.attend(
        query,
        key,
        value,
        visible=None if mask is None else mask.to_tensor(T, S),
        bias=None if (bias := scoring.whole_bias(query, S)) is None else bias.to(dtype),
        scale=scoring.scale,
        softcap=scoring.softcap,
        sinks=scoring.sinks,
    )
    gradients = torch.autograd.grad((output * slope(output)).sum(), list(copies.values()), allow_unused=True)
    return output.detach(), weights.detach(), gradients


def joined(mask, is_causal):
    if not is_causal:
        return mask
    return causal() if mask is None else causal() & mask


def check_cell(dtype, option, turn, backend):
    kind, Hkv, is_causal, return_weights = turn
    mask, options = MASKS[kind](), OPTIONS[option](dtype)

    def call(query, key, value, **options):
        return attend(query, key, value, mask=mask, causal=is_causal, return_weights=return_weights, **options)

    torch.compiler.reset()  # torch counts the graphs of one function
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for factor in SIZES:
        tensors = heads(dtype, factor, Hkv)
        truth, exact, gradients = reference_run(tensors, options, joined(mask, is_causal), torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        plain, rough_weights, plain_gradients = reference_run(tensors, options, joined(mask, is_causal), wide)
        eager = run(call, tensors, options, return_weights)
        again = run(compiled, tensors, options, return_weights)
        for output, weights, found in (eager, again):
            assert output.dtype == dtype
            # Scores of 300 round a log-sum-exp in float32 by 2e-5; rounded to 16 bit they would be off by 0.1 and more.
            assert_close_to_truth(output, truth, plain, factor=32)
            if weights is not None:
                assert_close_to_truth(weights, exact, rough_weights, factor=32)
            for name, ours, true, rough in zip("qkvabc", found, gradients, plain_gradients, strict=False):
                check_gradient(name, ours, true, rough)
        for ours, theirs, true in zip(again[2], eager[2], gradients, strict=True):
            check_gradient("compiled", ours, true, theirs)


def check_gradient(name, ours, true, rough):
    """A gradient is a sum of terms that cancel, so its error is measured against the largest of its entries."""
    if true is None:
        assert ours is None, name
        return
    assert ours.isfinite().all(), name
    eps = torch.finfo(ours.dtype).eps
    allowed = 4 * (rough.double() - true).abs().max() + 4 * eps * true.abs().max() + (1024 if eps < 1e-4 else 2) * eps
    error = (ours.double() - true).abs().max()
    assert error <= allowed, f"gradient {name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("option", OPTIONS)
def test_compiled_attention_is_as_exact_as_eager(option, dtype):
    for turn in CELLS[dtype, option]:
        check_cell(dtype, option, turn, "aot_eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while inductor starts
def test_inductor_is_as_exact_as_eager():
    check_cell(torch.bfloat16, "everything", CELLS[torch.bfloat16, "everything"][0], "inductor")


def test_the_grid_brings_every_pair_together():
    seen = {name: set() for name in ("dtype", "option")}
    for (dtype, option), turns in CELLS.items():
        for number, value in itertools.chain.from_iterable(enumerate(turn) for turn in turns):
            seen["dtype"].add((dtype, number, value))
            seen["option"].add((option, number, value))
    values = len(MASKS) + 2 + 2 + 2
    assert len(seen["dtype"]) == len(DTYPES) * values
    assert len(seen["option"]) == len(OPTIONS) * values
