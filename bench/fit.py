"""How a time grows: the exponent of the power law through the points of a curve.

Rule: times have a constant part (the call itself), which at small sizes hides the growth, so the exponent is read where it would
show: over the upper half of the points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Slope of log(time) over log(size) by least squares: 0 constant, 1 linear. Needs two different sizes, all values positive."""
    if len(sizes) != len(times) or len(set(sizes)) < 2:
        raise ValueError(f"a fit needs as many times as sizes, and two different sizes; got {list(sizes)} and {list(times)}")
    if min(*sizes, *times) <= 0:
        raise ValueError(f"a power law has positive values only; got {list(sizes)} and {list(times)}")
    x = [math.log(size) for size in sizes]
    y = [math.log(time) for time in times]
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    covariance = sum([(a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)])
    return covariance / sum([(a - mean_x) ** 2 for a in x])


def final_exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The exponent over the upper half of the points, three at least if there are as many."""
    count = max(min(3, len(sizes)), -(-len(sizes) // 2))
    return exponent(sizes[-count:], times[-count:])
