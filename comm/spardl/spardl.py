"""SparDL: sparse all-reduce for any number of ranks, with all that is discarded kept for later steps."""

from dataclasses import asdict
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import Entries, joined, kept_of, size_bytes, to_dense
from ..net.transport import Transport
from . import bruck
from .sparse_scheme import SparseScheme, Synchronized
from .srs import TeamBlocks, spar_reduce_scatter
from .teams import Gather, Teams, Width, gather_bruck, gather_recursive

Residuals = Literal["global", "partial", "local"]
"""What a rank keeps of the discarded (Section 3.2).

global: all of it: its own part of what is in no rank's result, and whatever it discarded itself of what is.
partial: its own part of what it did not send itself or is in no rank's result; what others discard of a sum is lost.
local: its own part of what it did not send itself.
"""


class SparDL(SparseScheme):
    """Spar-Reduce-Scatter in teams, Spar-All-Gather between them, Bruck all-gather in teams (Zhao et al., SparDL).

    Without teams a rank receives 4·k·(n-1)/n words in 2·⌈log2 n⌉ rounds; see `spardl_cost` for the rest.

    Args:
        transport: Of n ranks, one or more.
        density: k / numel.
        teams: d, a divisor of n; None for 2 if n is even and 1 otherwise.
        gather: How teams agree; None for "recursive" if d is a power of two and "bruck" otherwise.
        residuals: What is kept of the discarded.

    Raises:
        CommError: The arguments do not fit together.
    """

    name = "spardl"

    def __init__(
        self,
        transport: Transport,
        *,
        density: float = 0.01,
        teams: int | None = None,
        gather: Gather | None = None,
        residuals: Residuals = "global",
    ) -> None:
        super().__init__(transport, density=density)
        count = (1 if transport.size % 2 else 2) if teams is None else teams
        self._teams = Teams.of(transport.rank, ranks=transport.size, count=count)
        power_of_two = count & (count - 1) == 0
        self._gather = gather or ("recursive" if power_of_two else "bruck")
        if self._gather == "recursive" and not power_of_two:
            raise CommError(f'recursive doubling needs a power of two of teams, not {count}; gather with "bruck"')
        if residuals not in get_args(Residuals):
            raise CommError(f"residuals {residuals!r} are not known; choose one of {get_args(Residuals)}")
        self._residual_kind = residuals

    @property
    def teams(self) -> int:
        """Number of teams, d."""
        return len(self._teams.peers)

    def _synchronize(self, key: str, accumulated: Tensor, dtype: torch.dtype) -> Synchronized:
        members, peers = self._teams.members, self._teams.peers
        numel = accumulated.numel()
        blocks = TeamBlocks(numel=numel, count=len(members), kept=kept_of(numel, self.density))
        own = members.index(self.transport.rank)
        quota = blocks.quota(own)

        work = accumulated.clone()  # what this rank has of each element: at last, what it discarded
        selected = spar_reduce_scatter(self.transport, members, work, blocks, dtype)
        width = None
        if self._gather == "recursive":
            mine = blocks.take(work, own, dtype)
            selected.append(mine)
            mine = gather_recursive(self.transport, peers, mine, quota, work)
        else:
            width = self._width(key, quota)
            mine = blocks.take(work, own, dtype, count=min(quota, round(width.h)))
            selected.append(mine)
            mine, union = gather_bruck(self.transport, peers, mine, quota, work)
            width = width.after(union, quota, len(peers))
        final = self._gather_blocks(mine, blocks, dtype)

        return Synchronized(
            total=to_dense(final, numel),
            values=final.values,
            residual=self._residual(accumulated, work, selected, final),
            memory=None if width is None else asdict(width),
        )

    def _width(self, key: str, quota: int) -> Width:
        memory = self._memories.get(key)
        return Width.first(quota, self.teams) if memory is None else Width(**memory)

    def _gather_blocks(self, mine: Entries, blocks: TeamBlocks, dtype: torch.dtype) -> Entries:
        """Return the elements of all blocks; after B-SAG only their owners know how many a block has."""
        sizes = None
        if self._gather == "recursive":
            sizes = [size_bytes(blocks.quota(block), dtype) for block in range(blocks.count)]
        messages = bruck.all_gather(self.transport, self._teams.members, mine.to_message(), sizes_bytes=sizes)
        return joined([Entries.from_message(message, dtype) for message in messages])

    def _residual(self, accumulated: Tensor, work: Tensor, selected: list[Entries], final: Entries) -> Tensor:
        """Return what is kept for the next step, in place of `accumulated`."""
        if self._residual_kind == "global":
            accumulated[final.indices] = work[final.indices]
            return accumulated
        gone = torch.zeros_like(accumulated, dtype=torch.bool)
        for entries in selected:
            gone[entries.indices] = True
        if self._residual_kind == "partial":
            present = torch.zeros_like(gone)
            present[final.indices] = True
            gone &= present
        return accumulated.masked_fill_(gone, 0)
