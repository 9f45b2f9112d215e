"""Which rank sums which row of a gradient, and where a row stands among those of its rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..ops.spread import Spread
from .hash import HashMemory, hierarchical_hash
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
    def _spread(self) -> Spread:
        return Spread(numel=self.length, parts=self.servers, seed=self.seed)

    def size(self, server: int) -> int:
        """Return the rows of a server."""
        return self._spread.size(server)

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Return for each server its rows, counted from its first one."""
        if sparse.width == 1 and self.how == "exact":
            found = partition(sparse.indices, sparse.values.view(-1), self._spread)
            values = found.values.view(-1, 1)
        else:
            rows = torch.arange(sparse.count, dtype=torch.int32, device=sparse.indices.device)
            if self.how == "hash":
                found = self._hash(sparse.indices, rows)
            else:
                found = partition(sparse.indices, rows, self._spread)
            values = sparse.values.index_select(0, found.values)
        places = torch.split(found.places, found.counts)
        return [
            Sparse(indices=place, values=part, length=self.size(server))
            for server, (place, part) in enumerate(zip(places, torch.split(values, found.counts), strict=True))
        ]

    def indices(self, server: int, places: Tensor) -> Tensor:
        """Return which rows of the whole stand at `places` of a server."""
        return indices_at(places, self._spread, server)

    def servers_of(self, indices: Tensor) -> Tensor:
        """Return the server of each row."""
        return self._spread.owners(indices)

    def _hash(self, indices: Tensor, rows: Tensor) -> Parts:
        """Return `rows` by server, ascending within each."""
        numbers = torch.zeros(self.length, dtype=torch.float64, device=indices.device)
        numbers[indices] = rows.double()
        memory = HashMemory.of(self._spread, indices.numel() / max(1, self.length))
        found = hierarchical_hash(numbers, indices, self._spread, memory).parts
        ordered = torch.cat([part.sort().values for part in torch.split(found.values.int(), found.counts)])
        return Parts(self._spread.positions(indices.index_select(0, ordered)), ordered, found.counts)
