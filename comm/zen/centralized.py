"""Schemes that keep a gradient in one piece: gathered by all ranks, or summed along a hypercube."""

from collections.abc import Sequence

from torch import Tensor

from ..net.scheme import Scheme
from ..net.transport import Transport
from .formats import ALL, Format, decode, encode
from .sparse import Sparse, compress, expand, merge, row_width


class RowScheme(Scheme):
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

    def _rows(self, gradient: Tensor) -> Sparse:
        return compress(gradient, row_width(gradient.shape, self._row))


class AGsparse(RowScheme):
    """Every rank gathers the coordinates of all others and adds them up (one-shot, centralization; thesis 3.2.5)."""

    name = "agsparse"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks, added in the order of ranks."""
        own = self._rows(gradient)
        return expand(sum_by_gathering(self.transport, own, formats=self._formats), gradient)


class RecursiveDoubling(RowScheme):
    """Partners at distance 1, 2, 4, … swap what they have summed so far: SSAR of SparCML, Hierarchical Centralization.

    With n ranks, n no power of two, the last n - 2^⌊log2 n⌋ first give theirs to a partner and get the sum from it.
    """

    name = "sparcml"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        own = self._rows(gradient)
        return expand(sum_by_doubling(self.transport, own, formats=self._formats)[0], gradient)


def sum_by_gathering(transport: Transport, own: Sparse, *, formats: Sequence[Format] = ALL) -> Sparse:
    """Return the sum over all ranks, added in the order of ranks."""
    messages = transport.send_to_all(*encode([own], formats))
    return merge(decode(messages, [own.length] * len(messages), width=own.width, dtype=own.values.dtype))


def sum_by_doubling(
    transport: Transport, own: Sparse, *, formats: Sequence[Format] = ALL
) -> tuple[Sparse, list[Tensor]]:
    """Return the sum over all ranks, and the indices that this rank has sent in each of the ⌊log2 n⌋ rounds."""
    rank, power = transport.rank, 1 << (transport.size.bit_length() - 1)
    extra = transport.size - power

    def read(message: Tensor) -> Sparse:
        return decode([message], [own.length], width=own.width, dtype=own.values.dtype)[0]

    def write() -> Tensor:
        return encode([own], formats)[0]

    if rank >= power:
        host = rank - power
        transport.exchange({host: write()}, [])
        return read(transport.exchange({}, [host])[host]), []
    if rank < extra:
        own = merge([own, read(transport.exchange({}, [rank + power])[rank + power])])
    sent, distance = list[Tensor](), 1
    while distance < power:
        partner = rank ^ distance
        sent.append(own.indices)
        # Both partners add the same two numbers, and a + b is b + a to the last bit: all ranks end equal.
        own = merge([own, read(transport.swap(write(), to=partner, source=partner))])
        distance *= 2
    if rank < extra:
        transport.exchange({rank + power: write()}, [])
    return own, sent
