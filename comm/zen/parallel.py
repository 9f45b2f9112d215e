"""Schemes in which every rank sums its part of a gradient: push to the part's server, sum at once, pull from all."""

from collections.abc import Sequence

from torch import Tensor

from ..net.rounds import Rounds, all_to_all
from ..net.transport import Transport
from ..ops.block import BLOCK
from ..ops.op import Finding
from .centralized import RowScheme
from .formats import ALL, Format, decode, encode
from .partition import Even, Partition, join
from .sparse import Sparse, compress, expand, merge


def push_and_pull(
    rank: int, ranks: int, own: Sparse, cut: Partition, *, formats: Sequence[Format] = ALL
) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one; each server adds in the order of ranks."""
    width, dtype = own.width, own.values.dtype
    lengths = [cut.size(server) for server in range(ranks)]
    parts = yield from cut.split(own)
    messages = yield from all_to_all(rank, encode(parts, formats))
    pushed = yield from decode.finding(messages, [lengths[rank]] * ranks, width=width, dtype=dtype)
    share = yield from merge.finding(pushed)
    messages = yield from all_to_all(rank, encode([share], formats) * ranks)
    pulled = yield from decode.finding(messages, lengths, width=width, dtype=dtype)
    return join(cut, pulled, own.length)


class SparsePS(RowScheme):
    """A parameter server on every rank for an even range of the gradient, coordinates both ways (thesis 3.2.5)."""

    name = "sparse-ps"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks, in the order of ranks."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        own, ranks = (yield from self._rows(dense)), self.transport.size
        cut = Even(length=own.length, servers=ranks)
        summed = yield from push_and_pull(self.transport.rank, ranks, own, cut, formats=self._formats)
        total = expand(summed, dense)
        return total.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else total


class OmniReduce(SparsePS):
    """The same with blocks of 256 elements, of which those that are all zero are left out (thesis 3.2.5)."""

    name = "omnireduce"

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)

    def _rows(self, gradient: Tensor) -> Finding[Sparse]:
        return compress.finding(gradient, BLOCK)
