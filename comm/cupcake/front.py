"""What nothing else beats: the Pareto front of times."""

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 64


def pareto(points: NDArray[np.float64], tolerance: float = 0.0) -> NDArray[np.intp]:
    """Return the indices, ascending, of the points that no other one is nowhere larger than; of equal ones one.

    Args:
        points: Rows; minus infinity is possible.
        tolerance: What is larger by no more than this is not larger.
    """
    points = points[:, (points != points[:1]).any(axis=0)]
    finite = np.isfinite(points)
    # What depends on fewest coordinates and has the least sum is not dominated by anything behind it in this order, but
    # for the rounding of sums.
    left = np.lexsort((np.where(finite, points, 0.0).sum(axis=1), finite.sum(axis=1)))
    found = [left[:0]]
    while len(left):
        head, left = left[:_AT_ONCE], left[_AT_ONCE:]
        no_larger = _no_larger(points[head], points[head], tolerance)
        dominated = (no_larger & ~np.tril(no_larger.T)).any(axis=0)
        head = head[~dominated]
        left = left[~_no_larger(points[head], points[left], tolerance).any(axis=0)]
        found.append(head)
    return np.sort(np.concatenate(found))


def _no_larger(left: NDArray[np.float64], right: NDArray[np.float64], tolerance: float) -> NDArray[np.bool_]:
    """Return for each pair of a left and a right point whether the left one is nowhere larger."""
    found = np.ones((len(left), len(right)), dtype=bool)
    for lefts, rights in zip(left.T.copy(), right.T + tolerance, strict=True):
        found &= lefts[:, None] <= rights
    return found
