"""The iteration time F(S) of a strategy: when each tensor's steps run (Section 4.3).

Tensors become ready one after the other in the backward pass. Each then goes through its own chain of steps, each
step on one resource:

- **GPU.** What a tensor does on the GPU before its first communication runs right after its backward computation and
  delays that of the tensors behind it. A GPU step between two communications runs when the first one ends, and takes
  its time from the backward computation behind its tensor as well. A GPU step after the last communication, a
  decompression that nobody but the optimizer waits for, yields to the backward pass: it runs when that has ended.
- **CPU.** One set of cores compresses what becomes ready, another does what follows a communication.
- **Links**, in a host and between hosts. A worker has one queue for both, or, if they *overlap*, one for each.

Queues serve tensors in ready order and never change a turn: collectives must be called in the same order by all
workers. So a tensor is never delayed by one behind it, and the whole is linear in (max, +): `maxplus` and the exact
planner rest on that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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
    INTRA = "intra"
    INTER = "inter"
    DECODE = "gpu decode"


_LINKS = (Queue.INTRA, Queue.INTER)


class Place(StrEnum):
    """Where in a chain a step stands, which decides how it shares its resource."""

    EARLY = "early"
    MIDDLE = "middle"
    LAST = "last"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One step of a chain: what it occupies, and for how long."""

    resource: Resource
    seconds: float
    label: str = ""


Chain = tuple[Work, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChain:
    """A tensor, or a group of tensors that are treated as one: its backward computation, then its chain."""

    name: str
    backward_s: float
    chain: Chain = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """One step where it runs, seconds since the backward pass began.

    Attributes:
        queue: The queue that serves it.
        tensor: The name of the job.
        label: `backward`, or the label of the work.
    """

    queue: Queue
    tensor: str
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All steps of an iteration.

    Attributes:
        iteration_s: Backward pass and what follows it.
        spans: Every step, by tensor in ready order.
    """

    iteration_s: float
    spans: tuple[StepSpan, ...]


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


def derive(jobs: Sequence[TensorChain], *, overlap: bool = False) -> Timeline:
    """Return the timeline of jobs in ready order; `overlap`: the links have a queue each."""
    made = _Derivation(overlap)
    for job in jobs:
        made.add(job)
    made.decode()
    order = {job.name: index for index, job in enumerate(jobs)}
    return Timeline(
        iteration_s=max((span.end_s for span in made.spans), default=0.0),
        spans=tuple(sorted(made.spans, key=lambda span: order[span.tensor])),
    )


class _Derivation:
    """The queues while tensors are added one by one."""

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self.spans: list[StepSpan] = []
        self._free_s: dict[Queue, float] = dict.fromkeys(Queue, 0.0)
        self._decodings: list[tuple[str, Work, float]] = []

    def add(self, job: TensorChain) -> None:
        """Place a job behind those before it."""
        now_s = self._serve(Queue.GPU, job.name, "backward", self._free_s[Queue.GPU], job.backward_s)
        stolen_s = 0.0
        for work, place in zip(job.chain, places([work.resource for work in job.chain]), strict=True):
            if work.resource is Resource.GPU and place is Place.LAST:
                self._decodings.append((job.name, work, now_s))
            elif work.resource is Resource.GPU and place is Place.MIDDLE:
                stolen_s += work.seconds
                end_s = now_s + work.seconds
                self.spans.append(
                    StepSpan(queue=Queue.GPU, tensor=job.name, label=work.label, start_s=now_s, end_s=end_s)
                )
                now_s = end_s
            else:
                now_s = self._serve(_queue(work.resource, place), job.name, work.label, now_s, work.seconds)
        self._free_s[Queue.GPU] += stolen_s

    def decode(self) -> None:
        """Place the last GPU steps, after the backward pass."""
        self._free_s[Queue.DECODE] = self._free_s[Queue.GPU]
        for name, work, ready_s in self._decodings:
            self._serve(Queue.DECODE, name, work.label, ready_s, work.seconds)

    def _serve(self, queue: Queue, name: str, label: str, ready_s: float, seconds: float) -> float:
        start_s = max(ready_s, self._free_s[queue])
        end_s = start_s + seconds
        self.spans.append(StepSpan(queue=queue, tensor=name, label=label, start_s=start_s, end_s=end_s))
        for taken in _LINKS if queue in _LINKS and not self._overlap else (queue,):
            self._free_s[taken] = end_s
        return end_s


def _queue(resource: Resource, place: Place) -> Queue:
    if resource is Resource.CPU and place is not Place.EARLY:
        return Queue.CPU_LATE
    return Queue(resource.value)
