"""Sums of a gradient in one piece: gathered by all ranks, or made along a hypercube."""

from collections.abc import Sequence

from torch import Tensor

from ..net.rounds import Messages, Rounds, all_to_all, idle, swap
from ..ops.op import Finding
from .formats import ALL, Format, decode, encode
from .sparse import Sparse, merge


def sum_by_gathering(rank: int, ranks: int, own: Sparse, *, formats: Sequence[Format] = ALL) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one, added in the order of ranks."""
    messages = yield from all_to_all(rank, encode([own], formats) * ranks)
    lists = yield from decode.finding(messages, [own.length] * ranks, width=own.width, dtype=own.values.dtype)
    return (yield from merge.finding(lists))


def sum_by_doubling(
    rank: int, ranks: int, own: Sparse, *, formats: Sequence[Format] = ALL
) -> Rounds[tuple[Sparse, list[Tensor]]]:
    """Return the sum over all `ranks`, of which `rank` is this one, and the indices that this one has sent in each of
    the ⌊log2 n⌋ rounds."""
    levels = ranks.bit_length() - 1
    power = 1 << levels
    extra = ranks - power

    def read(message: Tensor) -> Finding[Sparse]:
        lists = yield from decode.finding([message], [own.length], width=own.width, dtype=own.values.dtype)
        return lists[0]

    def send(to: int) -> Rounds[None]:
        yield Messages(outgoing={to: encode([own], formats)[0]}, sources=[], sizes_bytes=None)

    def receive(source: int) -> Rounds[Sparse]:
        received = yield Messages(outgoing={}, sources=[source], sizes_bytes=None)
        return (yield from read(received[source]))

    if rank >= power:
        host = rank - power
        yield from send(host)
        yield from idle(levels)
        total = yield from receive(host)
        return total, []
    if rank < extra:
        folded = yield from receive(rank + power)
        own = yield from merge.finding([own, folded])
    elif extra:
        yield from idle(1)
    sent = list[Tensor]()
    for level in range(levels):
        partner = rank ^ (1 << level)
        sent.append(own.indices)
        message = yield from swap(encode([own], formats)[0], to=partner, source=partner)
        # Both partners add the same two numbers, and a + b is b + a to the last bit: all ranks end equal.
        theirs = yield from read(message)
        own = yield from merge.finding([own, theirs])
    if rank < extra:
        yield from send(rank + power)
    elif extra:
        yield from idle(1)
    return own, sent
