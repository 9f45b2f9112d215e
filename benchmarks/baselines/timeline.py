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
workers. So a tensor is never delayed by one behind it, and the whole is linear in (max, +): the planners calculate with
that (`comm/espresso/maxplus.py`), and this simulation is what they are compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from resilient_run.comm.cupcake.fusion import FusionProblem
from resilient_run.comm.cupcake.fusion import Strategy as Fusion
from resilient_run.comm.espresso.cost import Costs
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.espresso.strategy import Problem, Strategy
from resilient_run.comm.plan.cluster import Cluster
from resilient_run.comm.plan.model import Model
from resilient_run.comm.plan.plan import ALL_REDUCE, COMPRESSED, DENSE, FLAT, Plan
from resilient_run.comm.plan.tree import parse

KINDS = ("backward", "compress", "communicate", "decompress")
LINKS = (Resource.INTRA, Resource.INTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class BusySpan:
    """Something that a lane is busy with, in seconds since the backward pass began.

    Attributes:
        lane: The resource: a device or a network.
        kind: One of `KINDS`.
        group: Index of the group it is for.
        begin_s: Its begin.
        end_s: Its end, no earlier.
    """

    lane: str
    kind: str
    group: int
    begin_s: float
    end_s: float


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
    """One step of a chain: what it occupies, for how long, and for what (`KINDS`)."""

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
    first = next((index for index, resource in enumerate(chain) if resource in LINKS), len(chain))
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
    if resource in LINKS:
        return Queue.LINK
    if resource is Resource.CPU:
        return Queue.CPU if place is Place.EARLY else Queue.CPU_LATE
    return Queue.GPU


def timeline_of(problem: Problem, strategy: Strategy) -> Timeline:
    """Return the timeline of a strategy of Espresso's."""
    jobs = []
    for backward_s, kind, choice in zip(problem.backward_s, problem.kinds, strategy, strict=True):
        steps = problem.choices[choice]
        taken = problem._seconds[kind, problem._places[: len(steps), choice]].tolist()  # rounded
        works = (Work(step.resource, seconds, step.kind) for step, seconds in zip(steps, taken, strict=True))
        jobs.append(TensorChain(backward_s, tuple(works)))
    return derive(jobs)


def fusion_timeline(problem: FusionProblem, strategy: Fusion) -> Timeline:
    """Return the timeline of a fusion."""
    kinds = ((Resource.GPU, "compress"), (Resource.INTER, "communicate"), (Resource.GPU, "decompress"))
    jobs = []
    for group in strategy:
        works = (Work(resource, s, kind) for (resource, kind), s in zip(kinds, problem.costs_s(group), strict=True))
        jobs.append(TensorChain(problem.backward_s[group.end] - problem.backward_s[group.start], tuple(works)))
    return derive(jobs)


def plan_timeline(plan: Plan, model: Model, cluster: Cluster) -> Timeline:
    """Return the timeline of a plan for a model on a cluster."""
    tensors, standing_for = {tensor.name: tensor for tensor in model.tensors}, {DENSE: ALL_REDUCE, COMPRESSED: FLAT}
    jobs = []
    for group in plan.groups:
        numel = sum(tensors[name].numel for name in group.tensors)
        option = parse(standing_for.get(group.option, group.option))
        ((_, steps),) = Costs(cluster, [numel * cluster.bytes_per_element]).options([option])
        chain = tuple(Work(step.resource, float(step.seconds[0]), step.kind) for step in steps)
        jobs.append(TensorChain(sum(tensors[name].backward_s for name in group.tensors), chain))
    return derive(jobs)
