"""The iteration time F(S) of a strategy: when each tensor's steps run (Section 4.3).

Tensors become ready one after the other in the backward pass. Each then goes through its own chain of steps, each
step on one resource:

- **GPU.** What a tensor does on the GPU before its first communication runs right after its backward computation and
  delays that of the tensors behind it. A GPU step between two communications runs when the first one ends, and takes
  its time from the backward computation behind its tensor as well. A GPU step after the last communication, a
  decompression that nobody but the optimizer waits for, yields to the backward pass: it runs when that has ended.
- **CPU.** One set of cores compresses what becomes ready, another does what follows a communication.
- **Links**, in a host and between hosts: one queue for both.

Queues serve tensors in ready order and never change a turn: collectives must be called in the same order by all
workers. So a tensor is never delayed by one behind it, and the whole is linear in (max, +): `maxplus` and the exact
planner rest on that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .plan import BusySpan


class Resource(StrEnum):
    """What a step of a chain occupies."""

    GPU = "gpu"
    CPU = "cpu"
    INTRA = "intra"
    INTER = "inter"

    @property
    def link(self) -> bool:
        """True for the links."""
        return self in (Resource.INTRA, Resource.INTER)


class Queue(StrEnum):
    """A queue that serves tensors in ready order."""

    GPU = "gpu"
    CPU = "cpu"
    CPU_LATE = "cpu late"
    LINK = "link"
    DECODE = "gpu decode"


class Place(StrEnum):
    """Where in a chain a step stands, which decides how it shares its resource."""

    EARLY = "early"
    MIDDLE = "middle"
    LAST = "last"


class Work(NamedTuple):
    """One step of a chain: what it occupies, for how long, and for what (`plan.KINDS`)."""

    resource: Resource
    seconds: float
    kind: str


Chain = tuple[Work, ...]


class TensorChain(NamedTuple):
    """A tensor, or a group of tensors that are treated as one: its backward computation, then its chain."""

    backward_s: float
    chain: Chain = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All steps of an iteration.

    Attributes:
        iteration_s: Backward pass and what follows it.
        spans: Every step, by tensor in ready order; on links, `lane` is the link, else the queue.
    """

    iteration_s: float
    spans: tuple[BusySpan, ...]


def places(chain: Sequence[Resource]) -> tuple[Place, ...]:
    """Return where each step of a chain stands.

    On the GPU, early is what directly follows the backward computation; elsewhere, what precedes communication. The
    last ones are the GPU steps after everything else.
    """
    leading = next((index for index, resource in enumerate(chain) if resource is not Resource.GPU), len(chain))
    first = next((index for index, resource in enumerate(chain) if resource.link), len(chain))
    last = max((index for index, resource in enumerate(chain) if resource is not Resource.GPU), default=len(chain))
    return tuple(
        Place.EARLY
        if index < (leading if resource is Resource.GPU else first)
        else Place.LAST
        if index > last
        else Place.MIDDLE
        for index, resource in enumerate(chain)
    )


def derive(jobs: Sequence[TensorChain]) -> Timeline:
    """Return the timeline of jobs in ready order."""
    spans: list[BusySpan] = []
    free_s = dict.fromkeys(Queue, 0.0)

    def run(lane: str, group: int, kind: str, begin_s: float, seconds: float) -> float:
        spans.append(BusySpan(lane=lane, kind=kind, group=group, begin_s=begin_s, end_s=begin_s + seconds))
        return begin_s + seconds

    def serve(queue: Queue, group: int, work: Work, ready_s: float) -> float:
        lane = work.resource if queue is Queue.LINK else queue
        free_s[queue] = run(lane.value, group, work.kind, max(ready_s, free_s[queue]), work.seconds)
        return free_s[queue]

    decodings = []
    for group, job in enumerate(jobs):
        now_s = serve(Queue.GPU, group, Work(Resource.GPU, job.backward_s, "backward"), 0.0)
        stolen_s = 0.0
        for work, place in zip(job.chain, places([work.resource for work in job.chain]), strict=True):
            if work.resource is not Resource.GPU or place is Place.EARLY:
                now_s = serve(_queue(work.resource, place), group, work, now_s)
            elif place is Place.LAST:
                decodings.append((group, work, now_s))
            else:
                stolen_s += work.seconds
                now_s = run(Queue.GPU.value, group, work.kind, now_s, work.seconds)
        free_s[Queue.GPU] += stolen_s
    free_s[Queue.DECODE] = free_s[Queue.GPU]
    for group, work, ready_s in decodings:
        serve(Queue.DECODE, group, work, ready_s)
    ends = (span.end_s for span in spans)
    return Timeline(iteration_s=max(ends, default=0.0), spans=tuple(sorted(spans, key=lambda span: span.group)))


def _queue(resource: Resource, place: Place) -> Queue:
    if resource.link:
        return Queue.LINK
    if resource is Resource.CPU:
        return Queue.CPU if place is Place.EARLY else Queue.CPU_LATE
    return Queue.GPU
