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
COMPUTING = [GPU, BUSY]
NEVER = -np.inf
_FIRST_AT_ONCE = 8
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Operators:
    """What a chain does to the state, for each of many tensors.

    Attributes:
        matrices: (tensors, 7, 7).
        ready: When its first communication is ready to run, given the state before (tensors, 7).
    """

    matrices: Array
    ready: Array


def compute(states: Array, seconds: float | Array) -> Array:
    """Return the states after so much backward computation."""
    after = states.copy()
    after[..., COMPUTING] += seconds
    return after


def queues(chain: Sequence[Resource], *, overlap: bool) -> tuple[int, ...]:
    """Return which queue serves each step of a chain; `overlap`: the links have a queue each."""
    return tuple(_queue(resource, place, overlap) for resource, place in zip(chain, places(chain), strict=True))


def operators(served: Sequence[int], seconds: Array) -> Operators:
    """Return what a chain does.

    Args:
        served: The queues that serve its steps.
        seconds: How long each step takes for each tensor (steps, tensors).
    """
    count = seconds.shape[1]
    matrix = np.full((count, WIDTH, WIDTH), NEVER)
    matrix[:, range(WIDTH), range(WIDTH)] = 0.0
    ready = np.full((count, WIDTH), NEVER)
    now = matrix[:, GPU].copy()
    communicates = False
    for queue, taken in zip(served, seconds[:, :, None], strict=True):
        if queue in (GPU, DECODE):
            matrix[:, BUSY] += taken
        if queue == GPU:
            matrix[:, GPU] += taken
            now = now + taken
            continue
        if queue in (INTRA, INTER) and not communicates:
            ready, communicates = now.copy(), True
        now = np.maximum(now, matrix[:, queue]) + taken
        matrix[:, queue] = now
    return Operators(matrices=matrix, ready=ready)


def _queue(resource: Resource, place: Place, overlap: bool) -> int:
    match resource:
        case Resource.GPU:
            return DECODE if place is Place.LAST else GPU
        case Resource.CPU:
            return CPU if place is Place.EARLY else CPU_LATE
        case _:
            return INTRA if overlap and resource is Resource.INTRA else INTER


def apply(states: Array, matrices: Array) -> Array:
    """Return each state after each chain: (states, 7) and (chains, 7, 7) make (states, chains, 7)."""
    return compose(matrices[None], states[:, None, :, None])[..., 0]


def compose(second: Array, first: Array) -> Array:
    """Return the products of matrices: what is done by the first and then by the second, of each pair."""
    product: Array = second[..., :, 0, None] + first[..., None, 0, :]
    for between in range(1, second.shape[-1]):
        np.maximum(product, second[..., :, between, None] + first[..., None, between, :], out=product)
    return product


def pareto(points: Array) -> NDArray[np.intp]:
    """Return the indices of the points that no other one is nowhere larger than; of equal ones the first."""
    finite = np.isfinite(points)
    # What depends on fewest queues and takes least is not dominated by anything behind it in this order.
    left = np.lexsort((np.where(finite, points, 0.0).sum(axis=1), finite.sum(axis=1)))
    points = points[:, (points != points[:1]).any(axis=0)]
    kept, count = [], _FIRST_AT_ONCE
    while len(left):
        # The first ones leave few of the others, so that more can be compared at once.
        head, left, count = left[:count], left[count:], min(2 * count, _MOST_AT_ONCE)
        head = head[~np.triu(_no_larger(points[head], points[head]), 1).any(axis=0)]
        kept.append(head)
        left = left[~_no_larger(points[head], points[left]).any(axis=0)]
    return np.sort(np.concatenate(kept))


def _no_larger(left: Array, right: Array) -> NDArray[np.bool_]:
    """Return for each pair of a left and a right point whether the left one is nowhere larger."""
    found = np.ones((len(left), len(right)), dtype=bool)
    for place in range(left.shape[1]):
        found &= left[:, None, place] <= right[None, :, place]
    return found
