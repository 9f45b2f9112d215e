"""The three ways to sum a sparse gradient: by servers of equal shares, along a hypercube, or gathered by all ranks."""

from collections.abc import Sequence

from torch import Tensor

from ..net.rounds import Messages, Rounds, all_to_all, idle, swap
from .formats import ALL, Format, decode, encode
from .partition import Balanced, join
from .sparse import Sparse, merge


def push_and_pull(
    rank: int, ranks: int, own: Sparse, cut: Balanced, *, formats: Sequence[Format] = ALL
) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one: balanced parallelism (Algorithm 3.1).

    Every rank pushes each server its rows; a server adds its share in the order of ranks, and all pull the shares.
    """
    width, dtype = own.width, own.values.dtype
    lengths = [cut.size(server) for server in range(ranks)]
    messages = yield from all_to_all(rank, encode(cut.split(own), formats))
    share = merge(decode(messages, [lengths[rank]] * ranks, width=width, dtype=dtype))
    messages = yield from all_to_all(rank, encode([share], formats) * ranks)
    return join(cut, decode(messages, lengths, width=width, dtype=dtype), own.length)


def sum_by_gathering(rank: int, ranks: int, own: Sparse, *, formats: Sequence[Format] = ALL) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one, added in the order of ranks."""
    messages = yield from all_to_all(rank, encode([own], formats) * ranks)
    return merge(decode(messages, [own.length] * ranks, width=own.width, dtype=own.values.dtype))


def sum_by_doubling(
    rank: int, ranks: int, own: Sparse, *, formats: Sequence[Format] = ALL
) -> Rounds[tuple[Sparse, list[Tensor]]]:
    """Return the sum over all `ranks`, of which `rank` is this one, and the indices that this one has sent in each of
    the ⌊log2 n⌋ rounds."""
    levels = ranks.bit_length() - 1
    power = 1 << levels
    extra = ranks - power

    def read(message: Tensor) -> Sparse:
        return decode([message], [own.length], width=own.width, dtype=own.values.dtype)[0]

    def send(to: int) -> Rounds[None]:
        yield Messages(outgoing={to: encode([own], formats)[0]}, sources=[], sizes_bytes=None)

    def receive(source: int) -> Rounds[Sparse]:
        received = yield Messages(outgoing={}, sources=[source], sizes_bytes=None)
        return read(received[source])

    if rank >= power:
        host = rank - power
        yield from send(host)
        yield from idle(levels)
        total = yield from receive(host)
        return total, []
    if rank < extra:
        folded = yield from receive(rank + power)
        own = merge([own, folded])
    elif extra:
        yield from idle(1)
    sent = list[Tensor]()
    for level in range(levels):
        partner = rank ^ (1 << level)
        sent.append(own.indices)
        message = yield from swap(encode([own], formats)[0], to=partner, source=partner)
        # Both partners add the same two numbers, and a + b is b + a to the last bit: all ranks end equal.
        own = merge([own, read(message)])
    if rank < extra:
        yield from send(rank + power)
    elif extra:
        yield from idle(1)
    return own, sent
