"""Which rank sums which row of a gradient, and where a row stands among those of its rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..ops.spread import Spread
from .hash import hierarchical_hash
from .histogram import Parts, indices_at, partition
from .sparse import Sparse


def join(cut: "Balanced", parts: Sequence[Sparse], length: int) -> Sparse:
    """Return the matrix that was split into `parts`; its indices are ascending only within those of a server."""
    indices = [cut.indices(server, part.indices) for server, part in enumerate(parts)]
    return Sparse(indices=torch.cat(indices), values=torch.cat([part.values for part in parts]), length=length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balanced:
    """Each server has an equal share of any pattern of rows (`Spread`), computed in both directions without tables.

    Attributes:
        length: Rows.
        servers: How many.
        seed: The same on all ranks.
        how: Find the rows of each server in two passes, or by the hierarchical hash of the thesis (Algorithm 3.2),
            which gives the same.
    """

    length: int
    servers: int
    seed: int = 0
    how: Literal["exact", "hash"] = "exact"

    @property
    def spread(self) -> Spread:
        """How rows are shared among servers."""
        return Spread(numel=self.length, parts=self.servers, seed=self.seed)

    def size(self, server: int) -> int:
        """Return the rows of a server."""
        return self.spread.size(server)

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Return for each server its rows, counted from its first one."""
        if sparse.width == 1 and self.how == "exact":
            found = partition(sparse.indices, sparse.values.view(-1), self.spread)
            values = found.values.view(-1, 1)
        else:
            found = self._hashed(sparse.indices) if self.how == "hash" else self._partition(sparse.indices)
            values = sparse.values.index_select(0, found.values)
        places = torch.split(found.places, found.counts)
        return [
            Sparse(indices=place, values=part, length=self.size(server))
            for server, (place, part) in enumerate(zip(places, torch.split(values, found.counts), strict=True))
        ]

    def indices(self, server: int, places: Tensor) -> Tensor:
        """Return which rows of the whole stand at `places` of a server."""
        return indices_at(places, self.spread, server)

    def _partition(self, indices: Tensor) -> Parts:
        """Return where each index stands among these, by server."""
        return partition(indices, torch.arange(indices.numel(), dtype=torch.int32, device=indices.device), self.spread)

    def _hashed(self, indices: Tensor) -> Parts:
        """Return the same, of indices that ascend."""
        found = hierarchical_hash(indices, self.spread, max(1, -(-2 * indices.numel() // self.servers)))
        ordered = torch.cat(found)
        places = torch.searchsorted(indices, ordered, out_int32=True)
        return Parts(self.spread.positions(ordered), places, [part.numel() for part in found])
