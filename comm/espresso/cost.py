"""What each step of an option costs: the rounds of its collectives on links, curves for the compressor (Section 4.3).

A participant holds a *region* of the tensor: all of it, or its part after a reduce-scatter or all-to-all. Compressed
data cannot be summed in the network, so an all-gather, all-to-all or gather of it leaves as many *messages* of that
region as there were participants, and these travel on together until a decompression sums them. The GPUs of a host
share its adapter; after a rooted collective in the host only the root sends.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..plan.cluster import Cluster, LinkCost
from ..plan.collective import at_once_bytes, is_short, load
from ..plan.curve import Affine, Curve, Table
from ..plan.tree import Comm, Comp, Decomp, Device, Option, Phase, Role, Routine, Step
from .maxplus import Resource
from .strategy import KINDS, Choice, CostedStep

Array = NDArray[np.float64]

_KINDS = dict(zip((Comp, Comm, Decomp), KINDS, strict=True))
_FURTHER = 1 / 4
_MOST_FURTHER_S = 1e-4
"""What a message costs that goes at once with another one: of a start-up, but no more than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a participant holds between two steps.

    Attributes:
        region: Its part of the tensor's elements.
        messages: How many compressed messages of the region it holds; 0 when it is dense.
        pieces: How many parts of the region are compressed by themselves, because they go different ways.
        senders: GPUs of a host that hold something and share the adapter.
    """

    region: float = 1.0
    messages: int = 0
    pieces: int = 1
    senders: int = 1


class Costs:
    """What the steps of options take for tensors of some sizes on a cluster; a tensor of no bytes needs no step.

    Args:
        cluster: Links and compressor.
        sizes_bytes: Dense bytes of the tensors, which are the kinds of the costed steps.
    """

    def __init__(self, cluster: Cluster, sizes_bytes: Sequence[float] | Array) -> None:
        self._cluster = cluster
        self._sizes_bytes = np.array(sizes_bytes, dtype=np.float64)

    def options(self, options: Iterable[Option]) -> list[tuple[Option, Choice]]:
        """Return the options that the compressor's devices allow, with their steps.

        Collectives of one participant are left out. Steps that cost the same are the same objects.
        """
        devices = frozenset(self._cluster.compressor.coders)
        start = Holding(senders=self._cluster.gpus_per_host)
        holdings = {start: start}
        # Thousands of options share a few steps, which are kept alive by the options: their identity is a quick key.
        known: dict[tuple[int, tuple[Phase, ...], int], tuple[CostedStep | None, Holding]] = {}
        found = []
        for option in options:
            if not option.devices <= devices:
                continue
            holding, steps = start, []
            for step, ways in zip(option.steps, option.ways, strict=True):
                key = id(step), ways, id(holding)
                made = known.get(key)
                if made is None:
                    costed, after = self._costed(step, ways, holding)
                    made = known[key] = costed, holdings.setdefault(after, after)
                costed, holding = made
                if costed is not None:
                    steps.append(costed)
            found.append((option, tuple(steps)))
        return found

    def _costed(self, step: Step, ways: tuple[Phase, ...], holding: Holding) -> tuple[CostedStep | None, Holding]:
        if isinstance(step, Comp):
            holding = replace(holding, messages=1, pieces=math.prod(map(self._participants, ways)))
        resource, seconds, after = self._cost(step, holding)
        costed = CostedStep(resource=resource, seconds=seconds, kind=_KINDS[type(step)]) if resource else None
        return costed, after

    def _cost(self, step: Step, holding: Holding) -> tuple[Resource | None, Array, Holding]:
        if isinstance(step, Comm):
            resource, taken = self._comm(step, holding)
            after = held_after(step, holding, self._participants(step.phase))
        else:
            resource, taken = Resource(step.device.value), self._code(step, holding)
            after = holding if isinstance(step, Comp) else replace(holding, messages=0, pieces=1)
        return resource, np.where(self._sizes_bytes > 0, taken, 0.0), after

    def _code(self, step: Comp | Decomp, holding: Holding) -> Array:
        coder = self._cluster.compressor.coders[Device(step.device)]
        calls = 1 if self._cluster.compressor.batched else holding.pieces
        call_bytes = holding.region * self._sizes_bytes / calls
        if isinstance(step, Comp):
            return calls * coder.compress(call_bytes)
        if self._cluster.compressor.batched:
            return coder.decompress(call_bytes) + coder.accumulate((holding.messages - 1) * call_bytes)
        further = (holding.messages - 1) * coder.accumulate(call_bytes)
        return calls * (coder.decompress(call_bytes) + further)

    def _comm(self, step: Comm, holding: Holding) -> tuple[Resource | None, Array]:
        cluster, participants = self._cluster, self._participants(step.phase)
        if participants == 1:
            return None, np.zeros_like(self._sizes_bytes)
        held_bytes = holding.region * self._sizes_bytes
        if step.compressed:
            held_bytes = held_bytes * (holding.messages * cluster.compressor.ratio)
        between = step.phase is Phase.INTER or (step.phase is Phase.FLAT and cluster.hosts > 1)
        resource, link = (Resource.INTER, cluster.inter) if between else (Resource.INTRA, cluster.intra)
        if step.phase is Phase.FLAT and between:
            link = cluster.flat or link
        cost, sharing = self._of(link, step), holding.senders if step.phase is Phase.INTER else 1
        if isinstance(cost, Table):
            return resource, cost(sharing * held_bytes)
        short = is_short(step.routine, participants, held_bytes, self._at_once_bytes(step, link))
        costs = zip(self._load(step, link, short=True), self._load(step, link, short=False), strict=True)
        startups_s, s_per_byte = (np.where(short, *each) for each in costs)
        if step.compressed and step.routine is Routine.BROADCAST:
            # All sizes are announced at once.
            startups_s = startups_s + _startups_s(cost, 1, participants - 2)
        return resource, startups_s + s_per_byte * sharing * held_bytes

    def _at_once_bytes(self, step: Comm, link: LinkCost) -> float:
        """Return what may come at once, as ranks find out: by an all-to-all in which all GPUs of a host take part."""
        cluster, cost = self._cluster, self._of(link, step)
        assert isinstance(cost, Affine)
        byte_s = cost.beta_s_per_byte * (cluster.gpus_per_host if step.phase is Phase.INTER else 1)
        if self._derived(step, link):
            within = self._of(cluster.intra, step)
            assert isinstance(within, Affine)
            exchanged = load(Routine.ALL_TO_ALL, cluster.hosts, cluster.gpus_per_host)
            byte_s = max(byte_s * exchanged.adapter / exchanged.rank, within.beta_s_per_byte)
        return at_once_bytes(cost.alpha_s, byte_s)

    def _load(self, step: Comm, link: LinkCost, *, short: bool) -> tuple[float, float]:
        """Return what all start-ups of a collective cost, and what each byte costs that a rank holds."""
        cluster, cost = self._cluster, self._of(link, step)
        assert isinstance(cost, Affine)
        if not self._derived(step, link):
            found = load(step.routine, self._participants(step.phase), short=short)
            return _startups_s(cost, found.startups, found.further), cost.beta_s_per_byte * found.rank
        # Rounds wait for the link between hosts, and bytes pass at the slower one's pace.
        within = self._of(cluster.intra, step)
        assert isinstance(within, Affine)
        found = load(step.routine, cluster.hosts, cluster.gpus_per_host, short)
        s_per_byte = max(cost.beta_s_per_byte * found.adapter, within.beta_s_per_byte * found.rank)
        return _startups_s(cost, found.startups, found.further), s_per_byte

    def _derived(self, step: Comm, link: LinkCost) -> bool:
        """Tell whether what collectives of all GPUs cost is derived from both links."""
        return step.phase is Phase.FLAT and link is self._cluster.inter and self._cluster.gpus_per_host > 1

    def _of(self, link: LinkCost, step: Comm) -> Curve:
        return link.of(step.routine, compressed=step.compressed)

    def _participants(self, phase: Phase) -> int:
        if phase is Phase.FLAT:
            return self._cluster.hosts * self._cluster.gpus_per_host
        return self._cluster.hosts if phase is Phase.INTER else self._cluster.gpus_per_host


def _startups_s(cost: Affine, startups: int, further: int) -> float:
    # What goes at once still takes a processor's time, message by message: an assumption, for files do not say it.
    return startups * cost.alpha_s + further * min(_FURTHER * cost.alpha_s, _MOST_FURTHER_S)


def held_after(step: Comm, holding: Holding, participants: int) -> Holding:
    """Return what a participant holds after a collective."""
    region, messages, pieces, senders = holding.region, holding.messages, holding.pieces, holding.senders
    match step.routine:
        case Routine.REDUCE_SCATTER:
            region /= participants
        case Routine.ALL_TO_ALL:
            region, messages, pieces = region / participants, messages * participants, pieces // participants
        case Routine.GATHER:
            messages *= participants
        case Routine.ALL_GATHER if step.role is Role.WHOLE:
            messages *= participants
        case Routine.ALL_GATHER:
            region *= participants
            pieces *= participants if step.compressed else 1
        case _:
            pass
    if step.phase is Phase.INTRA1 and step.routine.rooted:
        senders = 1
    return Holding(region=region, messages=messages, pieces=pieces, senders=senders)
