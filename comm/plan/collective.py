"""What each collective sends: rounds of messages, which the run-time carries out and from which planners derive costs.

A tensor is cut into blocks. What a rank distributes reaches the others in the same rounds, turned round, in which a sum
of theirs would reach it: a reduction is a distribution in reverse order, with senders and receivers changed over. In no
round does a rank send or receive more than one message.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from .tree import Routine

MOST_AT_ONCE_BYTES = 256 << 10
_LEAST_AT_ONCE_BYTES = 16 << 10
_AT_ONCE_S = 0.008
_AT_ONCE_STARTUPS = 4

_LEAST_SEGMENT_BYTES = 128 << 10
_MOST_SEGMENTS_PER_RANK = 8


class Hop(NamedTuple):
    """A message from one rank to another one, with the blocks that it carries.

    The root of rooted collectives is rank 0 here; of an all-to-all, block r is the one for rank r.
    """

    sender: int
    receiver: int
    blocks: tuple[int, ...]


Round = tuple[Hop, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a collective asks of the network.

    Attributes:
        startups: Messages each of which waits for the one before it. The blocks of a chain follow each other while
            those before them are on their way, so only the way of the first one counts. What goes at once has one.
        further: Messages of a rank that go at once with the first one.
        rank: Bytes that go through the busiest rank, one direction, round by round, for each byte that a rank holds.
        adapter: The same of the busiest adapter, which the ranks of a host share.
    """

    startups: int
    rank: float
    adapter: float
    further: int = 0


def segments(routine: Routine, ranks: int, size_bytes: float) -> int:
    """Return into how many blocks a rooted collective cuts a tensor, for a pipeline along a chain; 1 goes by a tree."""
    if routine not in (Routine.REDUCE, Routine.BROADCAST) or ranks == 2:
        return 1
    most = min(size_bytes / _LEAST_SEGMENT_BYTES, _MOST_SEGMENTS_PER_RANK * ranks)
    count = 1 << max(0, int(most).bit_length() - 1)
    return count if count >= ranks else 1


def blocks(routine: Routine, ranks: int, cut: int = 1) -> int:
    """Return how many blocks make what a rank holds before a collective."""
    match routine:
        case Routine.REDUCE | Routine.BROADCAST:
            return cut
        case Routine.GATHER | Routine.ALL_GATHER:
            return 1
        case _:
            return ranks


@cache
def rounds(routine: Routine, ranks: int, cut: int = 1) -> tuple[Round, ...]:
    """Return the rounds of a collective; `cut` is what `segments` says."""
    match routine:
        case Routine.ALL_REDUCE:
            # The library's own, which pipelines a ring.
            return (*_reversed(_ring(ranks)), *_ring(ranks))
        case Routine.ALL_GATHER:
            return _all_gather(ranks)
        case Routine.REDUCE_SCATTER:
            return _reversed(_all_gather(ranks))
        case Routine.BROADCAST:
            return _tree(ranks) if cut == 1 else _chain(ranks, cut)
        case Routine.REDUCE:
            return _reversed(rounds(Routine.BROADCAST, ranks, cut))
        case Routine.GATHER:
            return tuple((Hop(rank, 0, (rank,)),) for rank in range(1, ranks))
        case Routine.ALL_TO_ALL:
            targets = [[(rank + distance) % ranks for rank in range(ranks)] for distance in range(1, ranks)]
            return tuple(tuple(Hop(rank, to, (to,)) for rank, to in enumerate(each)) for each in targets)


@cache
def turns(routine: Routine, ranks: int, rank: int, cut: int = 1) -> tuple[tuple[Hop | None, Hop | None], ...]:
    """Return what a rank sends and receives in the rounds in which it does either."""
    if routine is Routine.ALL_TO_ALL:
        return tuple(
            (Hop(rank, to, (to,)), Hop(source, rank, (rank,)))
            for to, source in (((rank + d) % ranks, (rank - d) % ranks) for d in range(1, ranks))
        )
    found = []
    for hops in rounds(routine, ranks, cut):
        sent = next((hop for hop in hops if hop.sender == rank), None)
        received = next((hop for hop in hops if hop.receiver == rank), None)
        if sent or received:
            found.append((sent, received))
    return tuple(found)


def at_once_bytes(startup_s: float, byte_s: float) -> float:
    """Return how many bytes may be on their way to a rank at once.

    What waits in front of a slow link holds up what its receivers ask others for, and messages of several senders get
    in each other's way. But with too little on the way a link waits for the next start-up (`benchmarks/at_once.py`).

    Args:
        startup_s: Seconds of a message next to its bytes.
        byte_s: Seconds of each byte for a rank.
    """
    if byte_s <= 0:
        return MOST_AT_ONCE_BYTES
    return min(MOST_AT_ONCE_BYTES, max(_LEAST_AT_ONCE_BYTES, max(_AT_ONCE_S, _AT_ONCE_STARTUPS * startup_s) / byte_s))


def is_short(routine: Routine, ranks: int, size_bytes: float, most_bytes: float = MOST_AT_ONCE_BYTES) -> bool:
    """Tell whether all messages of a collective go at once.

    Args:
        routine: The collective.
        ranks: That take part.
        size_bytes: What a rank holds before it.
        most_bytes: What `at_once_bytes` says.
    """
    match routine:
        case Routine.GATHER:
            return (ranks - 1) * size_bytes <= most_bytes
        case Routine.ALL_TO_ALL:
            return (ranks - 1) / ranks * size_bytes <= most_bytes
        case _:
            return False


@cache
def load(routine: Routine, hosts: int, per_host: int = 1, cut: int = 1, short: bool = False) -> Load:
    """Return what a collective of all ranks asks of the network; those of a host are next to each other.

    Args:
        routine: The collective.
        hosts: As many as take part.
        per_host: Ranks on each.
        cut: What `segments` says.
        short: What `is_short` says.
    """
    ranks = hosts * per_host
    if short:
        return replace(load(routine, hosts, per_host), startups=1, further=ranks - 2)
    if cut > ranks:
        # Each further block takes one more round like those in the middle, in which all are at work.
        most, more = load(routine, hosts, per_host, ranks), cut - ranks
        moved, crossed = (round(share * ranks) + more for share in (most.rank, most.adapter))
        return Load(startups=most.startups, rank=moved / cut, adapter=crossed / cut if hosts > 1 else 0.0)
    moved, crossed, startups = _moved(routine, ranks, per_host, cut)
    whole = blocks(routine, ranks, cut)
    return Load(startups=startups if cut == 1 else ranks - 1, rank=moved / whole, adapter=crossed / whole)


def _moved(routine: Routine, ranks: int, per_host: int, cut: int) -> tuple[int, int, int]:
    """Return the blocks that `rounds` moves through the busiest rank and adapter, and the number of rounds.

    Without writing the rounds out: of thousands of ranks they have millions of messages.
    """
    match routine:
        case Routine.ALL_REDUCE:
            count = 2 * (ranks - 1)
            return count, count * _crossing(1, ranks, per_host), count
        case Routine.ALL_TO_ALL:
            crossed = sum(_crossing(distance, ranks, per_host) for distance in range(1, ranks))
            return ranks - 1, crossed, ranks - 1
        case Routine.ALL_GATHER | Routine.REDUCE_SCATTER:
            stride = ranks & -ranks
            moved = startups = ranks // stride - 1
            crossed = startups * _crossing(stride, ranks, per_host)
            while stride > 1:
                stride //= 2
                count = ranks // (2 * stride)
                places = np.arange(ranks)
                leaving = places // per_host != (places ^ stride) // per_host
                crossed += count * int(np.bincount(places[leaving] // per_host, minlength=1).max())
                moved, startups = moved + count, startups + 1
            return moved, crossed, startups
        case Routine.GATHER:
            return ranks - 1, ranks - per_host, ranks - 1
        case Routine.BROADCAST | Routine.REDUCE if cut > 1:
            # In each round of a chain at most one message leaves a host, and one enters it: those between two hosts.
            steps = range(cut + ranks - 2)
            spans = ((max(0, step - cut + 1) // per_host, min(step + 1, ranks - 1) // per_host) for step in steps)
            return len(steps), sum(first < last for first, last in spans), len(steps)
        case _:
            return _counted(rounds(routine, ranks, cut), per_host)


def _crossing(distance: int, ranks: int, per_host: int) -> int:
    """Return how many ranks of a host send to another host if all send to the one that far ahead, less than `ranks`."""
    return per_host - max(0, per_host - distance) - max(0, per_host - (ranks - distance))


def _counted(found: tuple[Round, ...], per_host: int) -> tuple[int, int, int]:
    moved = crossed = 0
    for hops in found:
        moved += max(len(hop.blocks) for hop in hops)
        leaving: Counter[int] = Counter()
        entering: Counter[int] = Counter()
        for hop in hops:
            source, target = hop.sender // per_host, hop.receiver // per_host
            if source != target:
                leaving[source] += len(hop.blocks)
                entering[target] += len(hop.blocks)
        crossed += max((*leaving.values(), *entering.values()), default=0)
    return moved, crossed, len(found)


def _all_gather(ranks: int) -> tuple[Round, ...]:
    """All-gather in as few rounds as there are, but for an odd factor: whatever is far goes first, while it is little.

    A ring of every 2^j-th rank, and then partners that exchange all they have, at half of the distance each time.
    """
    stride = ranks & -ranks
    found = list(_ring(ranks, stride))
    distance = stride // 2
    while distance:
        held = [tuple(range(rank % (2 * distance), ranks, 2 * distance)) for rank in range(ranks)]
        found.append(tuple(Hop(rank, rank ^ distance, held[rank]) for rank in range(ranks)))
        distance //= 2
    return tuple(found)


def _ring(ranks: int, stride: int = 1) -> tuple[Round, ...]:
    """All-gather among every so many ranks: each passes on what it got last."""
    return tuple(
        tuple(Hop(rank, (rank + stride) % ranks, ((rank - step * stride) % ranks,)) for rank in range(ranks))
        for step in range(ranks // stride - 1)
    )


def _tree(ranks: int) -> tuple[Round, ...]:
    """Broadcast of one block: who has it sends it to the middle of the ranks that it serves."""
    found = []
    distance = 1 << max(0, (ranks - 1).bit_length() - 1)
    while distance and ranks > 1:
        senders = range(0, ranks - distance, 2 * distance)
        found.append(tuple(Hop(rank, rank + distance, (0,)) for rank in senders))
        distance //= 2
    return tuple(found)


def _chain(ranks: int, cut: int) -> tuple[Round, ...]:
    """Broadcast of many blocks: each rank passes on one while it receives the next one."""
    return tuple(
        tuple(Hop(rank, rank + 1, (step - rank,)) for rank in range(max(0, step - cut + 1), min(step + 1, ranks - 1)))
        for step in range(cut + ranks - 2)
    )


def _reversed(distribution: tuple[Round, ...]) -> tuple[Round, ...]:
    return tuple(tuple(Hop(to, source, carried) for source, to, carried in hops) for hops in reversed(distribution))
