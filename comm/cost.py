"""What each step of an option costs: alpha-beta models of the collectives, curves for the compressor (Section 4.3).

A participant holds a *region* of the tensor: all of it, or its part after a reduce-scatter or all-to-all. Compressed
data cannot be summed in the network, so an all-gather, all-to-all or gather of it leaves as many *payloads* of that
region as there were participants, and these travel on together until a decompression sums them. The GPUs of a host
share its adapter; after a rooted collective in the host only the root sends.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .cluster import Cluster
from .timeline import Resource
from .tree import Comm, Comp, Decomp, Device, Option, Phase, Role, Routine, Step

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a participant holds between two steps.

    Attributes:
        region: Its part of the tensor's elements.
        payloads: How many compressed payloads of the region it holds; 0 when it is dense.
        pieces: How many parts of the region are compressed by themselves, because they go different ways.
        senders: GPUs of a host that hold something and share the adapter.
    """

    region: float = 1.0
    payloads: int = 0
    pieces: int = 1
    senders: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedOption:
    """An option with what its steps take.

    Attributes:
        option: The path of the tree.
        resources: What the steps occupy; collectives of one participant are left out.
        seconds: How long each step takes for each size (steps, sizes).
        labels: The steps, as they are written.
    """

    option: Option
    resources: tuple[Resource, ...]
    seconds: Array
    labels: tuple[str, ...]


class Costs:
    """What the steps of options take for tensors of some sizes on a cluster; a tensor of no bytes needs no step.

    Args:
        cluster: Links and compressor.
        sizes_bytes: Dense bytes of the tensors.
    """

    def __init__(self, cluster: Cluster, sizes_bytes: Sequence[float]) -> None:
        self._cluster = cluster
        self._sizes_bytes = np.array(sizes_bytes, dtype=np.float64)
        self._known: dict[tuple[Step, Holding], tuple[Resource | None, Array, Holding]] = {}

    def options(self, options: Iterable[Option]) -> tuple[CostedOption, ...]:
        """Return the options that the compressor's devices allow, with their costs."""
        devices = frozenset(self._cluster.compressor.coders)
        return tuple(self._option(option) for option in options if option.devices <= devices)

    def _option(self, option: Option) -> CostedOption:
        holding = Holding(senders=self._cluster.gpus_per_host)
        resources, seconds, labels = [], [], []
        for index, step in enumerate(option.steps):
            if isinstance(step, Comp):
                holding = replace(holding, payloads=1, pieces=self._pieces(option.steps[index + 1 :]))
            resource, taken, holding = self._step(step, holding)
            if resource is not None:
                resources.append(resource)
                seconds.append(taken)
                labels.append(str(step))
        return CostedOption(
            option=option,
            resources=tuple(resources),
            seconds=np.array(seconds).reshape(len(seconds), len(self._sizes_bytes)),
            labels=tuple(labels),
        )

    def _step(self, step: Step, holding: Holding) -> tuple[Resource | None, Array, Holding]:
        known = self._known.get((step, holding))
        if known is None:
            known = self._known[step, holding] = self._cost(step, holding)
        return known

    def _cost(self, step: Step, holding: Holding) -> tuple[Resource | None, Array, Holding]:
        if isinstance(step, Comm):
            resource, taken = self._comm(step, holding)
            after = _after(step, holding, self._participants(step.phase))
        else:
            resource, taken = Resource(step.device.value), self._code(step, holding)
            after = holding if isinstance(step, Comp) else replace(holding, payloads=0, pieces=1)
        return resource, np.where(self._sizes_bytes > 0, taken, 0.0), after

    def _code(self, step: Comp | Decomp, holding: Holding) -> Array:
        coder = self._cluster.compressor.coders[Device(step.device)]
        calls = 1 if self._cluster.compressor.batched else holding.pieces
        call_bytes = holding.region * self._sizes_bytes / calls
        if isinstance(step, Comp):
            return calls * coder.compress.over(call_bytes)
        if self._cluster.compressor.batched:
            return coder.decompress.over(call_bytes) + coder.accumulate.over((holding.payloads - 1) * call_bytes)
        further = (holding.payloads - 1) * coder.accumulate.over(call_bytes)
        return calls * (coder.decompress.over(call_bytes) + further)

    def _pieces(self, steps: Sequence[Step]) -> int:
        """Return how many ways the parts of what is compressed go, until the next decompression."""
        until = next(index for index, step in enumerate(steps) if isinstance(step, Decomp))
        routines = [step for step in steps[:until] if isinstance(step, Comm) and step.routine is Routine.ALL_TO_ALL]
        return math.prod(self._participants(step.phase) for step in routines)

    def _comm(self, step: Comm, holding: Holding) -> tuple[Resource | None, Array]:
        cluster, participants = self._cluster, self._participants(step.phase)
        if participants == 1:
            return None, np.zeros_like(self._sizes_bytes)
        held_bytes = holding.region * self._sizes_bytes
        if step.compressed:
            held_bytes = held_bytes * (holding.payloads * cluster.compressor.ratio)
        rounds, share = traffic(step.routine, participants)
        if step.phase is Phase.FLAT and cluster.hosts > 1:
            intra, inter = cluster.intra.of(step.routine), cluster.inter.of(step.routine)
            adapter = _flat_adapter_share(step, cluster.hosts, cluster.gpus_per_host)
            slower = max(inter.beta_s_per_byte * adapter, intra.beta_s_per_byte * share)
            return Resource.INTER, inter.alpha_s * rounds + slower * held_bytes
        if step.phase is Phase.INTER:
            cost = cluster.inter.of(step.routine)
            return Resource.INTER, cost.alpha_s * rounds + cost.beta_s_per_byte * share * holding.senders * held_bytes
        cost = cluster.intra.of(step.routine)
        return Resource.INTRA, cost.alpha_s * rounds + cost.beta_s_per_byte * share * held_bytes

    def _participants(self, phase: Phase) -> int:
        if phase is Phase.FLAT:
            return self._cluster.hosts * self._cluster.gpus_per_host
        return self._cluster.hosts if phase is Phase.INTER else self._cluster.gpus_per_host


def traffic(routine: Routine, participants: int) -> tuple[int, float]:
    """Return the rounds of a collective, and the bytes that the busiest participant moves for each byte it holds."""
    others, part = participants - 1, (participants - 1) / participants
    match routine:
        case Routine.ALL_REDUCE:
            return 2 * others, 2 * part
        case Routine.REDUCE_SCATTER | Routine.ALL_TO_ALL:
            return others, part
        case Routine.ALL_GATHER | Routine.GATHER:
            return others, float(others)
        case Routine.REDUCE | Routine.BROADCAST:
            return math.ceil(math.log2(participants)), 1.0


def _flat_adapter_share(step: Comm, hosts: int, gpus: int) -> float:
    """Return the bytes that the busiest adapter moves for each byte a GPU holds, when all GPUs take part.

    Rings pass each adapter once; in an all-to-all every GPU of the host sends through it, and a root receives from all
    other hosts.
    """
    participants = hosts * gpus
    match step.routine:
        case Routine.ALL_TO_ALL:
            return gpus * (participants - gpus) / participants
        case Routine.GATHER:
            return float(participants - gpus)
        case _:
            return traffic(step.routine, participants)[1]


def _after(step: Comm, holding: Holding, participants: int) -> Holding:
    """Return what a participant holds after a collective."""
    region, payloads, pieces, senders = holding.region, holding.payloads, holding.pieces, holding.senders
    match step.routine:
        case Routine.REDUCE_SCATTER:
            region /= participants
        case Routine.ALL_TO_ALL:
            region, payloads, pieces = region / participants, payloads * participants, pieces // participants
        case Routine.GATHER:
            payloads *= participants
        case Routine.ALL_GATHER if step.role is Role.WHOLE:
            payloads *= participants
        case Routine.ALL_GATHER:
            region *= participants
            pieces *= participants if step.compressed else 1
        case _:
            pass
    if step.phase is Phase.INTRA1 and step.routine.rooted:
        senders = 1
    return Holding(region=region, payloads=payloads, pieces=pieces, senders=senders)
