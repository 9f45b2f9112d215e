"""What each collective sends: rounds of messages, which the run-time carries out and from which planners derive costs.

A tensor is cut into blocks. What a rank distributes reaches the others in the same rounds, turned round, in which a sum
of theirs would reach it: a reduction is a distribution in reverse order, with senders and receivers changed over. In no
round does a rank send or receive more than one message.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tree import Routine

Places = NDArray[np.intp]

MOST_AT_ONCE_BYTES = 256 << 10
_LEAST_AT_ONCE_BYTES = 16 << 10
_AT_ONCE_S = 0.008
_AT_ONCE_STARTUPS = 4


class Hop(NamedTuple):
    """A message from one rank to another one, with the blocks that it carries.

    The root of rooted collectives is rank 0 here.
    """

    sender: int
    receiver: int
    blocks: tuple[int, ...]


Turn = tuple[Hop | None, Hop | None]
"""What a rank sends and receives in one round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a collective asks of the network.

    Attributes:
        startups: Messages each of which waits for the one before it. What goes at once has one.
        further: Messages of a rank that go at once with the first one.
        rank: Bytes that go through the busiest rank, one direction, round by round, for each byte that a rank holds.
        adapter: The same of the busiest adapter, which the ranks of a host share.
    """

    startups: int
    rank: float
    adapter: float
    further: int = 0


@cache
def turns(routine: Routine, ranks: int, rank: int) -> tuple[Turn, ...]:
    """Return what a rank sends and receives in each round, of collectives in which ranks pass on what they received."""
    match routine:
        case Routine.ALL_GATHER:
            return tuple(_all_gather(ranks, rank))
        case Routine.BROADCAST:
            return tuple(_tree(ranks, rank))
        case Routine.REDUCE_SCATTER:
            return _reversed(turns(Routine.ALL_GATHER, ranks, rank))
        case Routine.REDUCE:
            return _reversed(turns(Routine.BROADCAST, ranks, rank))
    raise AssertionError(f"nobody carries out the rounds of {routine}")


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


def is_short(routine: Routine, ranks: int, size_bytes: Any, most_bytes: float = MOST_AT_ONCE_BYTES) -> Any:
    """Tell whether all messages of a collective go at once: a bool, or one for each size in an array.

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
def load(routine: Routine, hosts: int, per_host: int = 1, short: bool = False) -> Load:
    """Return what a collective of all ranks asks of the network; those of a host are next to each other.

    Rounds are not written out: of thousands of ranks they have millions of messages.

    Args:
        routine: The collective.
        hosts: As many as take part.
        per_host: Ranks on each.
        short: What `is_short` says.
    """
    ranks = hosts * per_host
    if short:
        return replace(load(routine, hosts, per_host), startups=1, further=ranks - 2)
    # Of each kind of round: how many, the blocks that a rank moves in one, and the ranks of a host that leave it.
    kinds: list[tuple[int, int, int]]
    places = np.arange(ranks)
    match routine:
        case Routine.ALL_REDUCE:  # the library's own, which pipelines a ring
            kinds = [(2 * (ranks - 1), 1, _shifted(1, ranks, per_host))]
        case Routine.ALL_TO_ALL:
            kinds = [(1, 1, _shifted(distance, ranks, per_host)) for distance in range(1, ranks)]
        case Routine.GATHER:
            return Load(startups=ranks - 1, rank=ranks - 1, adapter=ranks - per_host)
        case Routine.ALL_GATHER | Routine.REDUCE_SCATTER:
            stride = ranks & -ranks
            kinds = [(ranks // stride - 1, 1, _shifted(stride, ranks, per_host))]
            for distance in _halves(stride):
                kinds.append((1, ranks // (2 * distance), _crossing(places, places ^ distance, per_host)))
        case _:
            senders = {distance: places[: ranks - distance : 2 * distance] for distance in _halves(2 * ranks - 1)}
            kinds = [(1, 1, _crossing(each, each + distance, per_host)) for distance, each in senders.items()]
    whole = 1 if routine.rooted or routine is Routine.ALL_GATHER else ranks
    return Load(
        startups=sum(count for count, _, _ in kinds),
        rank=sum(count * moved for count, moved, _ in kinds) / whole,
        adapter=sum(count * moved * crossing for count, moved, crossing in kinds) / whole,
    )


def _shifted(distance: int, ranks: int, per_host: int) -> int:
    """Return how many ranks of a host send to another host if all send to the one that far ahead, less than `ranks`."""
    return per_host - max(0, per_host - distance) - max(0, per_host - (ranks - distance))


def _crossing(senders: Places, receivers: Places, per_host: int) -> int:
    """Return how many messages between these ranks leave or enter the host where most do."""
    hosts = np.stack([senders, receivers]) // per_host
    crossing = hosts[:, hosts[0] != hosts[1]]
    return max(int(np.bincount(ends, minlength=1).max()) for ends in crossing)


def _halves(whole: int) -> list[int]:
    """Return the powers of two below `whole`'s greatest one, the greatest first."""
    return [1 << power for power in reversed(range(whole.bit_length() - 1))]


def _all_gather(ranks: int, rank: int) -> Iterator[Turn]:
    """All-gather in as few rounds as there are, but for an odd factor: whatever is far goes first, while it is little.

    A ring of every 2^j-th rank, and then partners that exchange all they have, at half of the distance each time.
    """
    stride = ranks & -ranks
    to, source = (rank + stride) % ranks, (rank - stride) % ranks
    for passed in range(0, ranks - stride, stride):
        yield Hop(rank, to, ((rank - passed) % ranks,)), Hop(source, rank, ((source - passed) % ranks,))
    for distance in _halves(stride):
        own, other = (tuple(range(each % (2 * distance), ranks, 2 * distance)) for each in (rank, rank ^ distance))
        yield Hop(rank, rank ^ distance, own), Hop(rank ^ distance, rank, other)


def _tree(ranks: int, rank: int) -> Iterator[Turn]:
    """Broadcast of one block: who has it sends it to the middle of the ranks that it serves."""
    for distance in _halves(2 * ranks - 1):
        sends, receives = rank % (2 * distance) == 0 and rank + distance < ranks, rank % (2 * distance) == distance
        yield (
            Hop(rank, rank + distance, (0,)) if sends else None,
            Hop(rank - distance, rank, (0,)) if receives else None,
        )


def _reversed(distribution: tuple[Turn, ...]) -> tuple[Turn, ...]:
    def turned(hop: Hop | None) -> Hop | None:
        return hop and Hop(hop.receiver, hop.sender, hop.blocks)

    return tuple((turned(received), turned(sent)) for sent, received in reversed(distribution))
