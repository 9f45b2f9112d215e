"""Schemes that keep a gradient in one piece: gathered by all ranks, or summed along a hypercube."""

from collections.abc import Sequence

from torch import Tensor

from ..net.rounds import Messages, Rounds, RoundScheme, all_to_all, idle, swap
from ..net.transport import Transport
from ..ops.op import Finding
from .formats import ALL, Format, decode, encode
from .sparse import Sparse, compress, expand, merge, row_width


class RowScheme(RoundScheme):
    """A scheme of the thesis' comparison that sends the rows which have a non-zero.

    Args:
        transport: The ranks.
        row: Greatest number of consecutive elements that are sent under one index.
        formats: What messages may be written in; as published these schemes have COO only.
    """

    def __init__(self, transport: Transport, *, row: int = 1, formats: Sequence[Format] = (Format.COO,)) -> None:
        super().__init__(transport)
        self._row = row
        self._formats = tuple(formats)

    def _rows(self, gradient: Tensor) -> Finding[Sparse]:
        return compress.finding(gradient, row_width(gradient.shape, self._row))


class AGsparse(RowScheme):
    """Every rank gathers the coordinates of all others and adds them up (one-shot, centralization; thesis 3.2.5)."""

    name = "agsparse"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks, in the order of ranks."""
        own = yield from self._rows(gradient)
        total = yield from sum_by_gathering(self.transport.rank, self.transport.size, own, formats=self._formats)
        return expand(total, gradient)


class RecursiveDoubling(RowScheme):
    """Partners at distance 1, 2, 4, … swap what they have summed so far: SSAR of SparCML, Hierarchical Centralization.

    With n ranks, n no power of two, the last n - 2^⌊log2 n⌋ first give theirs to a partner and get the sum from it.
    """

    name = "sparcml"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks."""
        own = yield from self._rows(gradient)
        total, _ = yield from sum_by_doubling(self.transport.rank, self.transport.size, own, formats=self._formats)
        return expand(total, gradient)


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
