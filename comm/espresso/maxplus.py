"""The iteration time F(S) of a strategy (Section 4.3) as linear maps in (max, +), of the times when queues are free.

Tensors become ready one after the other in the backward pass. Each then goes through its own chain of steps, each
step on one resource:

- **GPU.** What a tensor does on the GPU before its first communication runs right after its backward computation and
  delays that of the tensors behind it. A GPU step between two communications runs when the first one ends, and takes
  its time from the backward computation behind its tensor as well. A GPU step after the last communication, a
  decompression that nobody but the optimizer waits for, yields to the backward pass: it runs when that has ended.
- **CPU.** One set of cores compresses what becomes ready, another does what follows a communication.
- **Links**, in a host and between hosts: one queue for both.

Queues serve tensors in ready order and never change a turn: collectives must be called in the same order by all
workers. So a tensor is never delayed by one behind it. `benchmarks/baselines/timeline.py` simulates the same.

The state after some tensors is a vector: when the GPU's backward pass, the CPU queues, the links and the
decompression queue are free, and how long the GPU is busy in all. What a tensor does is a matrix: entry (out, in) is
the least time between "in is free" and "out is free again", minus infinity if out does not depend on in. Two facts
make exact planning cheap:

- a chain whose matrix is nowhere larger than another's is never worse, whatever the other tensors do;
- the same holds for states: no future is worse for the smaller one.
"""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Resource(StrEnum):
    """What a step of a chain occupies."""

    GPU = "gpu"
    CPU = "cpu"
    INTRA = "intra"
    INTER = "inter"


Array = NDArray[np.float64]

GPU, BUSY, CPU, CPU_LATE, LINK, DECODE = range(6)
WIDTH = 6
COMPUTING = slice(GPU, BUSY + 1)
NEVER = -np.inf
RESOURCES = tuple(Resource)
_GPU, _CPU, _INTRA = (RESOURCES.index(resource) for resource in (Resource.GPU, Resource.CPU, Resource.INTRA))


def compute(states: Array, seconds: float | Array) -> Array:
    """Return the states after so much backward computation."""
    after = states.copy()
    after[..., COMPUTING] += seconds
    return after


class Chains:
    """Chains of steps, which become matrices once it is known how long the steps take.

    No chain waits twice for the same queue, so entry (out, in) is how long it takes from its first step on the queue
    `in` to its last step on the queue `out`.

    Args:
        resources: What each step of each chain occupies, as places in `RESOURCES` (steps, chains); behind the end of
            a chain -1.
    """

    def __init__(self, resources: NDArray[np.int8]) -> None:
        self._served = _queues(resources)
        steps, self._count = resources.shape
        serves = self._served == np.arange(WIDTH, dtype=np.int8)[:, None, None]
        used = serves.any(axis=1)
        first, behind = (np.where(used, place, 0) for place in (serves.argmax(1), steps - serves[:, ::-1].argmax(1)))
        depends = used[:, None] & used & (first < behind[:, None])
        depends[:, GPU] = used
        depends[COMPUTING] = False
        depends[range(WIDTH), range(WIDTH)] = True
        self._outs, self._ins = np.nonzero(depends.any(axis=2))
        self._lacks = ~depends[self._outs, self._ins]
        self._begin, self._end = (place * self._count + np.arange(self._count) for place in (first, behind))

    def entries(self, seconds: Array) -> Array:
        """Return the entries that not all matrices lack; `seconds`: of each step, 0 behind the end (steps, chains)."""
        until = np.zeros((len(seconds) + 1, self._count))
        np.cumsum(seconds, axis=0, out=until[1:])
        begin, end = until.take(self._begin), until.take(self._end)
        begin[COMPUTING] = 0.0
        end[GPU] = (seconds * (self._served == GPU)).sum(axis=0)
        end[BUSY] = end[GPU] + (seconds * (self._served == DECODE)).sum(axis=0)
        found: Array = end[self._outs] - begin[self._ins]
        np.copyto(found, NEVER, where=self._lacks)
        return found.T

    def matrices(self, seconds: Array) -> Array:
        """Return the matrices (chains, 6, 6)."""
        made = np.full((self._count, WIDTH, WIDTH), NEVER)
        made[:, self._outs, self._ins] = self.entries(seconds)
        return made

    def ready(self, seconds: Array) -> Array:
        """Return when the first communication is ready to run, given the state before (chains, 6)."""
        links = self._served == LINK
        before = np.where(np.logical_or.accumulate(links), 0.0, seconds)
        compressed = np.logical_or.accumulate(self._served == CPU)
        found = np.full((self._count, WIDTH), NEVER)
        found[:, GPU] = before.sum(axis=0)
        found[:, CPU] = np.where(compressed[-1], (before * compressed).sum(axis=0), NEVER)
        found[~links.any(axis=0)] = NEVER
        return found


def _queues(resources: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return which queue serves each step, -1 behind the end of a chain."""
    gpu, other = resources == _GPU, resources > _GPU
    linked = np.logical_or.accumulate(resources >= _INTRA)
    leads_on = np.logical_or.accumulate(other[::-1])[::-1] | ~other.any(axis=0)
    served = np.full(resources.shape, LINK, dtype=np.int8)
    served[gpu] = np.where(leads_on, GPU, DECODE)[gpu]
    cpu = resources == _CPU
    served[cpu] = np.where(linked, CPU_LATE, CPU)[cpu]
    served[resources < 0] = -1
    return served


def apply(states: Array, matrices: Array) -> Array:
    """Return each state after each chain: (states, 6) and (chains, 6, 6) make (states, chains, 6)."""
    return compose(matrices[None], states[:, None, :, None])[..., 0]


def compose(second: Array, first: Array) -> Array:
    """Return the products of matrices: what is done by the first and then by the second, of each pair."""
    product: Array = second[..., :, 0, None] + first[..., None, 0, :]
    for between in range(1, second.shape[-1]):
        np.maximum(product, second[..., :, between, None] + first[..., None, between, :], out=product)
    return product
