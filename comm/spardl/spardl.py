"""SparDL: sparse all-reduce for any number of ranks, with all that is discarded kept for later steps."""

from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import add_to, copied, from_message, joined, kept_count, size_bytes, to_message
from ..net.rounds import Rounds, bruck_gather
from ..net.transport import Transport
from ..ops.coo import Coo
from .sparse_scheme import SparseScheme, Synchronized
from .srs import TeamBlocks, spar_reduce_scatter
from .teams import Gather, Teams, Width, default_gather, gather_bruck, gather_recursive


class SparDL(SparseScheme):
    """Spar-Reduce-Scatter in teams, Spar-All-Gather between them, Bruck all-gather in teams (Zhao et al., SparDL).

    Without teams a rank receives 4·k·(n-1)/n words in 2·⌈log2 n⌉ rounds. In the first step of a gradient, also after
    `load_state_dict`, ranks tell each other what they do.

    Args:
        transport: Of n ranks, one or more.
        density: k / numel.
        teams: d, a divisor of n; None for 2, or 1 where n is odd.
        gather: How teams agree; None for "recursive" if d is a power of two and "bruck" otherwise.

    Raises:
        CommError: The arguments do not fit together; of `reduce`, they are not the same on all ranks.
    """

    name = "spardl"

    differs = frozenset({"_teams"})
    """Attributes in which ranks differ."""

    def __init__(
        self,
        transport: Transport,
        *,
        density: float = 0.01,
        teams: int | None = None,
        gather: Gather | None = None,
    ) -> None:
        super().__init__(transport, density=density)
        ranks = transport.size
        teams = (1 if ranks % 2 else 2) if teams is None else teams
        self._teams = Teams.of(transport.rank, ranks=ranks, count=teams)
        self._gather: Gather = gather or default_gather(teams)
        if gather == "recursive" and default_gather(teams) != "recursive":
            raise CommError(f'recursive doubling needs a power of two of teams, not {teams}; gather with "bruck"')
        if self._gather not in get_args(Gather):
            raise CommError(f"teams cannot gather {gather!r}; choose one of {get_args(Gather)}")
        self._setup = {"ranks": ranks, "teams": teams, "gather": self._gather}
        self._agreed: set[str] = set()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank; all ranks do so.

        Raises:
            CommError: It is not of this scheme.
        """
        super().load_state_dict(state)
        self._agreed.clear()

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        numel, dtype = accumulated.numel(), total.dtype
        kept = kept_count(numel, self.density)
        rank, members, peers = self.transport.rank, self._teams.members, self._teams.peers
        blocks = TeamBlocks(numel=numel, count=len(members), kept=kept)
        own = members.index(rank)
        quota = blocks.quota(own)
        width = None if self._gather == "recursive" else self._width(key, quota)
        sent = quota if width is None else min(quota, round(width.h))
        if key not in self._agreed:
            self._check_agreed(key, kept, sent)
            self._agreed.add(key)

        work = copied(accumulated, total)  # what this rank has of each element: at last, what it discarded
        selected = yield from spar_reduce_scatter(rank, members, work, blocks, dtype)
        mine = blocks.take(work, own, dtype, count=sent)
        selected.append(mine)
        if width is None:
            mine = yield from gather_recursive(rank, peers, mine, quota, work)
        else:
            mine, union = yield from gather_bruck(rank, peers, mine, quota, work)
            width = width.after(union, quota, len(peers))
        final = yield from self._gather_blocks(mine, blocks, dtype)

        residual = self._residual(accumulated, work, selected, final)
        add_to(total.zero_(), final)
        memory = self._setup | {"width": None if width is None else asdict(width)}
        return Synchronized(values=final.values, residual=residual, memory=memory)

    def _check_agreed(self, key: str, kept: int, sent: int) -> None:
        """Raise CommError on all ranks unless their messages fit: of one setup, and of one length between peers."""
        own = [kept, len(self._teams.peers), get_args(Gather).index(self._gather), sent]
        said: list[list[int]] = self.transport.gather_numbers(torch.tensor(own)).tolist()
        for rank, numbers in enumerate(said):
            first = rank % len(self._teams.members) if numbers[:-1] == said[0][:-1] else 0
            if numbers != said[first]:
                raise CommError(
                    f"{key}: rank {first} says {said[first]} and rank {rank} {numbers} (elements kept, teams, place of "
                    f"`gather` in {get_args(Gather)}, elements sent): give all ranks the same arguments and restore "
                    f"all from one checkpoint"
                )

    def _width(self, key: str, quota: int) -> Width:
        memory = self._memories.get(key)
        if memory is not None and self._setup.items() <= memory.items():
            return Width(**memory["width"])
        return Width.first(quota, len(self._teams.peers))

    def _gather_blocks(self, mine: Coo, blocks: TeamBlocks, dtype: torch.dtype) -> Rounds[Coo]:
        """Return the elements of all blocks; after B-SAG only their owners know how many a block has."""
        sizes = None
        if self._gather == "recursive":
            sizes = [size_bytes(blocks.quota(block), dtype) for block in range(blocks.count)]
        messages = yield from bruck_gather(
            self.transport.rank, self._teams.members, to_message(mine), sizes_bytes=sizes
        )
        spans = map(blocks.span, range(blocks.count))
        return joined(
            [
                from_message(message, dtype, start=start, end=end)
                for message, (start, end) in zip(messages, spans, strict=True)
            ]
        )

    def _residual(self, accumulated: Tensor, work: Tensor, selected: list[Coo], final: Coo) -> Tensor:
        """Return what is kept for the next step, in place of `accumulated`: all that was discarded (Section 3.2).

        Of what is in no rank's result that is this rank's own part, and of what is, whatever it discarded itself.
        """
        accumulated[final.indices] = work[final.indices]
        return accumulated
