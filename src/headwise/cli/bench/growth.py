"""How time and memory grow with the length: the exponent of a power law, fitted where the curves are long."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Exponent(NamedTuple):
    """The slope of a line through the upper half of the points, in logarithms, and how many points those are."""

    exponent: float
    points: int


def fitted(points: Sequence[tuple[float, float]]) -> Exponent | None:
    """The exponent of y against x by least squares; None where fewer than two positive points are left.

    Short lengths are left out: there, what does not grow at all hides the law. Two points make a line and no evidence.

    >>> fitted([(1, 5), (2, 9), (4, 3.0), (8, 12.0), (16, 48.0)])
    Exponent(exponent=2.0, points=3)
    """
    usable = sorted((x, y) for x, y in points if x > 0 and y > 0)
    upper = usable[-max(2, math.ceil(len(usable) / 2)) :]
    if len({x for x, _ in upper}) < 2:
        return None
    xs, ys = [math.log(x) for x, _ in upper], [math.log(y) for _, y in upper]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return Exponent(round(covariance / sum((x - mean_x) ** 2 for x in xs), 3), len(upper))


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float] | None]]:
    """The exponents of time and memory of every candidate."""
    names = dict.fromkeys(row["name"] for row in rows)
    return {name: {key: _of(rows, name, key) for key in ("ms", "MiB")} for name in names}


def is_doubtful(found: dict[str, float]) -> bool:
    """Whether an exponent comes from two points, through which a line always goes."""
    return found["points"] < 3


def _of(rows: Sequence[dict[str, Any]], name: str, key: str) -> dict[str, float] | None:
    found = fitted([(row["tokens"], row[key]) for row in rows if row["name"] == name])
    return None if found is None else found._asdict()
