"""Every kernel once, in several shapes of its code: for compiling without a GPU and for comparing with tiles."""

import torch

from headwise import causal, documents, padding, prefix, window
from headwise.masks.probes import induction, same_token
from headwise.weights import Scoring
from headwise.weights.kernels import launch
from headwise.weights.source import Source
from headwise.weights.structure import structure_of

MASKS = {
    "nothing": lambda B, T, S: None,
    "causal": lambda B, T, S: causal(),
    "window": lambda B, T, S: causal() & window(9),
    "padding": lambda B, T, S: causal() & padding([max(1, S - 7 * b) for b in range(B)]),
    "documents": lambda B, T, S: causal() & documents(lengths=[S // 3, S - S // 3]),
    "prefix": lambda B, T, S: causal() | prefix(5),
}


def source(B=1, H=2, Hkv=1, T=64, S=64, D=64, mask=None, dtype=torch.bfloat16, softcap=None, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(B, H, T, D, generator=generator, device=device).to(dtype)
    key = torch.randn(B, Hkv, S, D, generator=generator, device=device).to(dtype)
    return Source.whole(query, key, Scoring(mask, softcap=softcap))


def launches(made, lse):
    """Run each kernel on a source, through the functions that launch them."""
    structure = structure_of(made.mask, made)
    S = made.shape[3]
    ids = torch.arange(S, device=made.query.device) % 5
    launch.log_sum_exp(made, structure)
    launch.rows(made, structure, lse, entropy=True, peak=True, distance=True)
    bands = ((0, 0, 0, S), (3, 5, 0, S), (2**30, 2**30, 0, 4))
    launch.rows(made, structure, lse, entropy=True, received=True, size=(1, 4))
    launch.rows(made, structure, lse, entropy=True, peak=True, received=True, size=(16, 16))
    launch.columns(made, structure, lse)
    launch.columns(made, structure, lse, (16, 16))
    launch.columns(made, structure, lse, (3, 5))
    launch.columns(made, structure, lse, (3, 5), peaks=True)
    launch.bands(made, structure, lse, bands)
    launch.histogram(made, structure, lse, 9)
    launch.weights(made, structure, lse, range(3, S - 2), made.query.dtype)
    launch.top_keys(made, structure, lse, 3)
    for probe in (prefix(2), same_token(ids), induction(ids), window(3, 3)):
        launch.mass(made, structure, lse, structure_of(probe, made), (0, S))
