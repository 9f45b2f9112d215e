"""What nothing else beats: the Pareto front of times."""

import numpy as np
from numpy.typing import NDArray


def pareto(points: NDArray[np.float64], tolerance: float = 0.0) -> NDArray[np.intp]:
    """Return the indices, ascending, of the points that no other one is nowhere larger than.

    Args:
        points: Rows; minus infinity is possible.
        tolerance: By how much a point must be less than those before it; of points that are equal the first is kept.
    """
    finite = np.isfinite(points)
    # What depends on fewest coordinates and has the least sum is not dominated by anything behind it in this order.
    left = np.lexsort((np.where(finite, points, 0.0).sum(axis=1), finite.sum(axis=1)))
    points = points[left]
    found: list[int] = []
    while len(left):
        found.append(int(left[0]))
        open_ = (points < points[0] - tolerance).any(axis=1)
        left, points = left[open_], points[open_]
    return np.sort(np.array(found, dtype=np.intp))
