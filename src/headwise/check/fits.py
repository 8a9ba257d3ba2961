"""Solves for the linear map between two tensors, and recognizes the parameter it is made of.

Every projection can be read this way, however its weights are stored.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EXACT = 1e-7  # relative residual of a solved map in float64: rounding gives 1e-12, a wrong model gives 1e-1
WIDE = 128  # for wider inputs, solving takes noticeable time
NARROW = 64  # up to this width, solving by singular values is cheap
ALIKE = 1 - 1e-9  # cosine of two rows that are multiples of each other


class Fit(NamedTuple):
    """`y = x @ weight.T + bias` up to a relative residual."""

    weight: Tensor  # (out, in)
    bias: Tensor
    residual: float

    @property
    def exact(self) -> bool:
        """Whether it is the same map for every token, to rounding."""
        return self.residual < EXACT


def fit(x: Tensor, y: Tensor) -> Fit:
    """The least-squares affine map from tokens x (n, in) to tokens y (n, out)."""
    x, y = x.double(), y.double()  # some classes compute in float32 whatever the input is
    if not torch.isfinite(y).all() or not torch.isfinite(x).all() or len(x) <= x.shape[1] + 1:
        return Fit(y.new_zeros(y.shape[1], x.shape[1]), y.new_zeros(y.shape[1]), float("inf"))
    design = torch.cat([x, x.new_ones(len(x), 1)], 1)
    rows = min(len(x), x.shape[1] + 64) if x.shape[1] > WIDE else len(x)  # the other rows only test the solution
    solved, spans = _solved(design, y, rows, "gelsy")
    # Where inputs do not span their space, as after a norm or with equal heads, what gelsy finds depends on the order
    # in which it takes the columns, and that order is not the same in every run.
    if solved.residual >= EXACT and (x.shape[1] <= NARROW or not spans):
        solved, _ = _solved(design, y, rows, "gelsd")
    return solved


def _solved(design: Tensor, y: Tensor, rows: int, driver: str) -> tuple[Fit, bool]:
    """The solution, and whether the inputs span their space."""
    solution, _, rank, _ = torch.linalg.lstsq(design[:rows], y[:rows], rcond=1e-11, driver=driver)
    error = (design @ solution - y).norm() / y.norm().clamp_min(1e-300)
    return Fit(solution[:-1].T, solution[-1], float(error)), int(rank) == design.shape[1]


def undetermined(x: Tensor) -> Tensor | None:
    """The direction (in) along which tokens do not vary, as after a layer norm; a fit cannot know weights along it."""
    if len(x) <= x.shape[1] or not torch.isfinite(x).all():
        return None
    _, sizes, directions = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return directions[-1] if float(sizes[-1]) < 1e-9 * float(sizes[0]) < float(sizes[-2]) else None


def tokens(x: Tensor) -> Tensor:
    """(B, T, E) as (B·T, E)."""
    return x.reshape(-1, x.shape[-1])


def side_by_side(heads: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H·D)."""
    return heads.transpose(1, 2).flatten(2)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> bool:
    """Whether two finite tensors are equal to rounding, relative to their norms."""
    if a.shape != b.shape or not torch.isfinite(a).all() or not torch.isfinite(b).all():
        return False
    return bool((a - b).norm() <= tolerance * (a.norm() + b.norm() + 1e-300))


@dataclass
class Role:
    """Rows of a solved map recognized among the parameters."""

    names: list[str]
    factor: float | None  # map = factor · parameter; None where rows differ in it or are not found
    plain: bool  # the map only copies its input: no parameter is involved
    sliced: bool  # every row reads only one head's slice of the input
    found: bool
    own_bias: bool = True  # what is added to a row is zero or that row's entry in a parameter


def role(
    solved: Fit,
    parameters: dict[str, Tensor],
    head_width: int,
    free: Tensor | None = None,
    any_bias: bool = False,
) -> Role:
    """The role of a solved map, whose weight (out, in) is not determined along the direction `free` (in).

    Rows are compared with rows of every parameter, so the layout of the parameters does not have to be known. With
    `any_bias`, the bias may be anything, as where a norm comes first.
    """
    weight = solved.weight
    if _copies(weight):
        return Role([], float(weight.abs().max()), True, False, True)
    nonzero = weight.abs() > 1e-9 * weight.abs().max()
    sliced = bool((nonzero.sum(1) <= head_width).all()) and weight.shape[1] > head_width
    best = Role([], None, False, sliced, False)
    for rows, times in _arrangements(weight, nonzero, head_width, sliced):
        loose = free if not sliced and free is not None and len(free) == rows.shape[1] else None
        matches = {name: _match(rows, p.detach(), loose) for name, p in parameters.items()}
        matches = {name: match for name, match in matches.items() if match.hits.any()}
        if not matches:
            continue
        complete = bool(torch.stack([match.hits for match in matches.values()]).any(0).all())
        factors = torch.cat([match.factors[match.hits] for match in matches.values()])
        uniform = complete and bool((factors - factors[0]).abs().max() <= 1e-6 * factors[0].abs())
        bias = solved.bias.repeat(times)
        known = any_bias or not complete or _own_bias(bias, list(matches.values()), parameters)
        found = Role(list(matches), float(factors[0]) if uniform else None, False, sliced, complete, known)
        if complete:
            return found
        best = best if best.names else found
    return best


def _arrangements(weight: Tensor, nonzero: Tensor, width: int, sliced: bool) -> Iterator[tuple[Tensor, int]]:
    """Rows as parameters may hold them, and how many there are of each: whole, or cut into one piece for every head."""
    yield (_packed(weight, nonzero, width) if sliced else weight), 1
    heads = weight.shape[1] // width if width and weight.shape[1] % width == 0 else 1
    if heads > 1 and not sliced:
        cut = weight.unflatten(1, (heads, width))
        yield cut.transpose(1, 2).flatten(1), 1  # a token's numbers as (width, heads)
        yield cut.transpose(0, 1).flatten(0, 1), heads  # a projection for every head


def _own_bias(bias: Tensor, matches: list["RowMatch"], parameters: dict[str, Tensor]) -> bool:
    """Whether every entry is zero, or the entry of parameters (a bias, a learned position) that belongs to its row."""
    explained = bias.abs() <= 1e-7 * bias.abs().max().clamp_min(1e-3)
    for match in matches:
        held = [p.detach().double().flatten()[match.rows] for p in parameters.values() if p.numel() == match.total]
        scaled = [h * match.factors for h in held]
        for entries in [*scaled, *held, *(a + b for a in scaled for b in held)]:
            explained = explained | (match.hits & ((bias - entries).abs() <= 1e-6 * (1 + entries.abs())))
    for summed in _summed_biases(len(matches), matches, parameters):
        explained = explained | ((bias - summed).abs() <= 1e-6 * (1 + summed.abs()))
    return bool(explained.all())


def _summed_biases(count: int, matches: list["RowMatch"], parameters: dict[str, Tensor]) -> Iterator[Tensor]:
    """The biases of several layers added up, where every head has an output projection of its own."""
    total = matches[0].total
    biases = [p.detach().double() for p in parameters.values() if p.dim() == 1 and len(p) == total]
    if count > 1 and len(biases) > 1 and len(matches[0].hits) % total == 0:
        yield torch.stack(biases[-count:]).sum(0).repeat(len(matches[0].hits) // total)


def unused_rows(weights: list[Tensor], parameter: Tensor) -> list[int]:
    """The rows of a matrix that are in none of these maps."""
    used = [
        match.rows[match.hits]
        for w in weights
        if (match := _match(w, parameter.detach(), None)).total == len(parameter)
    ]
    return sorted(set(range(len(parameter))) - {int(row) for rows in used for row in rows})


def _copies(weight: Tensor) -> bool:
    """Whether every row is a row of the identity, up to one common factor."""
    largest = weight.abs().max()
    ones = (weight.abs() > 1e-9 * largest).sum(1)
    return bool((ones == 1).all()) and bool(torch.isclose(weight.abs().max(1).values, largest).all())


def _packed(weight: Tensor, nonzero: Tensor, width: int) -> Tensor:
    """The nonzero part of every row, which starts at a multiple of the head width."""
    start = nonzero.float().argmax(1) // width * width
    columns = start[:, None] + torch.arange(width)
    return weight.gather(1, columns.clamp_max(weight.shape[1] - 1))


def _as_rows(parameter: Tensor, size: int) -> Iterator[Tensor]:
    """A parameter as rows of this size, along any axis or any two neighboring axes."""
    shapes = [parameter, *(parameter.flatten(i, i + 1) for i in range(parameter.dim() - 1) if parameter.dim() > 2)]
    for shaped in shapes:
        for axis, length in enumerate(shaped.shape):
            if length == size:
                yield shaped.movedim(axis, -1).reshape(-1, size).double()


class RowMatch(NamedTuple):
    """Which rows are multiples of rows of one parameter, by what factor, and which rows those are, of how many."""

    hits: Tensor
    factors: Tensor
    rows: Tensor
    total: int


def _match(rows: Tensor, parameter: Tensor, free: Tensor | None) -> RowMatch:
    """The rows that are multiples of rows of the parameter, along any of its axes."""
    hits = torch.zeros(len(rows), dtype=torch.bool)
    factors, found = torch.zeros(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.int64)
    count = 0
    if not parameter.is_floating_point() or parameter.dim() < 2:
        return RowMatch(hits, factors, found, count)
    for candidates in _as_rows(parameter, rows.shape[1]):
        if free is not None:
            rows, candidates = (m - (m @ free)[:, None] * free for m in (rows, candidates))
        norms = candidates.norm(dim=1).clamp_min(1e-300)
        cosine = (rows @ candidates.T) / (rows.norm(dim=1).clamp_min(1e-300)[:, None] * norms)
        best, which = cosine.abs().max(1)
        new = (best > ALIKE) & ~hits
        signed = rows.norm(dim=1) / norms[which] * cosine.gather(1, which[:, None])[:, 0].sign()
        factors, found = torch.where(new, signed, factors), torch.where(new, which, found)
        count = len(candidates) if new.any() else count
        hits = hits | new
    return RowMatch(hits, factors, found, count)
