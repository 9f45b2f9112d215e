"""The timeline as linear maps in (max, +): the state is when each queue is free, a chain maps one to the next.

The state after some tensors is a vector: when the GPU's backward pass, the CPU queues, the links and the
decompression queue are free, and how long the GPU is busy in all. What a tensor does is a matrix: entry (out, in) is
the least time between "in is free" and "out is free again", minus infinity if out does not depend on in. Two facts
make exact planning cheap:

- a chain whose matrix is nowhere larger than another's is never worse, whatever the other tensors do;
- the same holds for states: no future is worse for the smaller one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .timeline import Place, Resource, places

Array = NDArray[np.float64]

GPU, BUSY, CPU, CPU_LATE, INTRA, INTER, DECODE = range(7)
WIDTH = 7
NEVER = -np.inf
_FEW = 64


@dataclass(frozen=True, slots=True)
class Operators:
    """What a chain does to the state, for each of many tensors.

    Attributes:
        matrices: (tensors, 7, 7).
        ready: When its first communication is ready to run, given the state before (tensors, 7).
    """

    matrices: Array
    ready: Array


def compute(states: Array, seconds: float) -> Array:
    """Return the states after so much backward computation."""
    after = states.copy()
    after[..., GPU] += seconds
    after[..., BUSY] += seconds
    return after


def operators(chain: Sequence[Resource], seconds: Array, *, overlap: bool) -> Operators:
    """Return what a chain does.

    Args:
        chain: What its steps occupy.
        seconds: How long each step takes for each tensor (steps, tensors).
        overlap: The links have a queue each.
    """
    count = seconds.shape[1]
    matrix = np.full((count, WIDTH, WIDTH), NEVER)
    matrix[:, range(WIDTH), range(WIDTH)] = 0.0
    ready = np.full((count, WIDTH), NEVER)
    now = matrix[:, GPU].copy()
    communicates = False
    for resource, place, taken in zip(chain, places(chain), seconds[:, :, None], strict=True):
        if resource is Resource.GPU:
            matrix[:, BUSY] += taken
            if place is Place.LAST:
                now = np.maximum(now, matrix[:, DECODE]) + taken
                matrix[:, DECODE] = now
            else:
                matrix[:, GPU] += taken
                now = now + taken
            continue
        if resource.link and not communicates:
            ready, communicates = now.copy(), True
        queue = _queue(resource, place, overlap)
        now = np.maximum(now, matrix[:, queue]) + taken
        matrix[:, queue] = now
    return Operators(matrices=matrix, ready=ready)


def _queue(resource: Resource, place: Place, overlap: bool) -> int:
    if resource is Resource.CPU:
        return CPU if place is Place.EARLY else CPU_LATE
    return INTRA if overlap and resource is Resource.INTRA else INTER


def apply(states: Array, matrices: Array) -> Array:
    """Return each state after each chain: (states, 7) and (chains, 7, 7) make (states, chains, 7)."""
    after: Array = (states[:, None, None, :] + matrices[None, :, :, :]).max(axis=3)
    return after


def before(bound: Array, matrix: Array) -> Array:
    """Return the bound on the future that holds before a chain, given the one that holds after it.

    A bound gives, for each queue, how much later than that queue's time the iteration ends at least.
    """
    earlier: Array = (bound[:, None] + matrix).max(axis=0)
    return earlier


def pareto(points: Array) -> NDArray[np.intp]:
    """Return the indices of the points that no other one is nowhere larger than; of equal ones the first."""
    finite = np.isfinite(points)
    # What depends on fewest queues and takes least is not dominated by anything behind it in this order.
    left = np.lexsort((np.where(finite, points, 0.0).sum(axis=1), finite.sum(axis=1)))
    if len(points) <= _FEW:
        ordered = points[left]
        no_larger = (ordered[:, None, :] <= ordered[None, :, :]).all(axis=2)
        return np.sort(left[~np.triu(no_larger, 1).any(axis=0)])
    kept: list[int] = []
    while len(left):
        first = left[0]
        kept.append(int(first))
        left = left[(points[left] < points[first]).any(axis=1)]
    return np.array(sorted(kept), dtype=np.intp)
