"""Schemes that the thesis compares Zen with: all of them send the rows that have a non-zero (3.2.5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resilient_run.comm.net.rounds import Rounds, RoundScheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.block import BLOCK
from resilient_run.comm.zen.formats import Format
from resilient_run.comm.zen.routes import push_and_pull, sum_by_doubling, sum_by_gathering
from resilient_run.comm.zen.sparse import Sparse, compress, expand, row_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Even:
    """Each server has a range of consecutive rows: as unbalanced as the gradient is skewed.

    Attributes:
        length: Rows.
        servers: How many.
    """

    length: int
    servers: int

    def size(self, server: int) -> int:
        """Return the rows of a server."""
        return self._start(server + 1) - self._start(server)

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Return for each server its rows, counted from its first one."""
        servers = torch.arange(self.servers + 1, device=sparse.indices.device)
        bounds = torch.searchsorted(sparse.indices, (servers * self.length // self.servers).int()).tolist()
        return [
            Sparse(
                indices=sparse.indices[bounds[server] : bounds[server + 1]] - self._start(server),
                values=sparse.values[bounds[server] : bounds[server + 1]],
                length=self.size(server),
            )
            for server in range(self.servers)
        ]

    def indices(self, server: int, places: Tensor) -> Tensor:
        """Return which rows of the whole stand at `places` of a server."""
        return places + self._start(server)

    def _start(self, server: int) -> int:
        return server * self.length // self.servers


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

    def _rows(self, gradient: Tensor) -> Sparse:
        return compress(gradient, row_width(gradient.shape, self._row))


class AGsparse(RowScheme):
    """Every rank gathers the coordinates of all others and adds them up (one-shot, centralization; thesis 3.2.5)."""

    name = "agsparse"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks, in the order of ranks."""
        own = self._rows(gradient)
        total = yield from sum_by_gathering(self.transport.rank, self.transport.size, own, formats=self._formats)
        return expand(total, gradient)


class RecursiveDoubling(RowScheme):
    """Partners at distance 1, 2, 4, … swap what they have summed so far: SSAR of SparCML, Hierarchical Centralization.

    With n ranks, n no power of two, the last n - 2^⌊log2 n⌋ first give theirs to a partner and get the sum from it.
    """

    name = "sparcml"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks."""
        own = self._rows(gradient)
        total, _ = yield from sum_by_doubling(self.transport.rank, self.transport.size, own, formats=self._formats)
        return expand(total, gradient)


class SparsePS(RowScheme):
    """A parameter server on every rank for an even range of the gradient, coordinates both ways (thesis 3.2.5)."""

    name = "sparse-ps"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks, in the order of ranks."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        own, ranks = self._rows(dense), self.transport.size
        cut = Even(length=own.length, servers=ranks)
        summed = yield from push_and_pull(self.transport.rank, ranks, own, cut, formats=self._formats)
        total = expand(summed, dense)
        return total.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else total


class OmniReduce(SparsePS):
    """The same with blocks of 256 elements, of which those that are all zero are left out (thesis 3.2.5)."""

    name = "omnireduce"

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)

    def _rows(self, gradient: Tensor) -> Sparse:
        return compress(gradient, BLOCK)
