"""SparDL: sparse all-reduce for any number of ranks, with all that is discarded kept for later steps."""

import logging
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import CommError, MessageError
from ..net.entries import copied, from_message, joined, kept_count, size_bytes, to_message, write_dense
from ..net.rounds import Rounds, bruck_gather
from ..net.scheme import Network
from ..net.transport import Transport
from ..ops.coo import Coo
from .cost import choose_teams
from .sparse_scheme import SparseScheme, Synchronized
from .srs import TeamBlocks, spar_reduce_scatter
from .teams import Gather, Teams, Width, default_gather, gather_bruck, gather_recursive

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TeamSetup:
    """How the ranks sum a gradient, the same on all of them.

    Attributes:
        ranks: P.
        teams: d.
        gather: How teams agree.
    """

    ranks: int
    teams: int
    gather: Gather

    @classmethod
    def of(cls, memory: dict[str, Any] | None) -> "_TeamSetup | None":
        """Return the way that a gradient was summed before; None if its memory says nothing of it."""
        if memory is None or "teams" not in memory:
            return None
        return cls(ranks=memory["ranks"], teams=memory["teams"], gather=memory["gather"])

    def __str__(self) -> str:
        return f"{self.teams} teams that gather {self.gather!r}"


class SparDL(SparseScheme):
    """Spar-Reduce-Scatter in teams, Spar-All-Gather between them, Bruck all-gather in teams (Zhao et al., SparDL).

    Without teams a rank receives 4·k·(n-1)/n words in 2·⌈log2 n⌉ rounds; see `spardl_cost` for the rest.

    Where `alpha_s` and `beta_s` are given, the number of teams of a gradient is what `choose_teams` says. That depends
    on arguments and on the gradient's size only, so it is the same on all ranks and in a run that is started again. It
    is part of the state: after `load_state_dict` a gradient keeps its number, also where the arguments of today would
    give another, until the number of ranks changes. `teams` and `gather` go before the state. In the first step of a
    gradient, also after `load_state_dict`, ranks tell each other what they do.

    Args:
        transport: Of n ranks, one or more.
        density: k / numel.
        teams: d, a divisor of n; None for what costs least on the network that `alpha_s` and `beta_s` describe, and
            without them for 2, or 1 where n is odd.
        gather: How teams agree; None for "recursive" if d is a power of two and "bruck" otherwise.
        alpha_s: Latency of one message, seconds; None not to let the cost model choose.
        beta_s: Time of one word of 4 bytes on a link, seconds; given together with `alpha_s`.

    Raises:
        CommError: The arguments do not fit together; of `reduce`, they are not the same on all ranks.
    """

    name = "spardl"

    def __init__(
        self,
        transport: Transport,
        *,
        density: float = 0.01,
        teams: int | None = None,
        gather: Gather | None = None,
        alpha_s: float | None = None,
        beta_s: float | None = None,
    ) -> None:
        super().__init__(transport, density=density)
        if teams is not None:
            Teams.of(transport.rank, ranks=transport.size, count=teams)
            if gather == "recursive" and default_gather(teams) != "recursive":
                raise CommError(f'recursive doubling needs a power of two of teams, not {teams}; gather with "bruck"')
        if gather is not None and gather not in get_args(Gather):
            raise CommError(f"teams cannot gather {gather!r}; choose one of {get_args(Gather)}")
        self._teams = teams
        self._gather = gather
        self._network = Network.given(alpha_s, beta_s)
        self._setups: dict[str, _TeamSetup] = {}
        self._has_warned = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank, with the teams that it names; all ranks do so.

        Raises:
            CommError: It is not of this scheme.
        """
        super().load_state_dict(state)
        self._setups.clear()
        self._has_warned = False

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        numel, dtype = accumulated.numel(), total.dtype
        kept = kept_count(numel, self.density)
        known = self._setups.get(key)
        way = known or self._decided(key, kept)
        rank = self.transport.rank
        teams = Teams.of(rank, ranks=way.ranks, count=way.teams)
        members, peers = teams.members, teams.peers
        blocks = TeamBlocks(numel=numel, count=len(members), kept=kept)
        own = members.index(rank)
        quota = blocks.quota(own)
        width = None if way.gather == "recursive" else self._width(key, way, quota)
        sent = quota if width is None else min(quota, round(width.h))
        if known is None:
            self._check_agreed(key, kept, way, sent)
            self._setups[key] = way

        work = copied(accumulated, total)  # what this rank has of each element: at last, what it discarded
        selected = yield from spar_reduce_scatter(rank, members, work, blocks, dtype)
        mine = blocks.take(work, own, dtype, count=sent)
        selected.append(mine)
        if width is None:
            mine = yield from gather_recursive(rank, peers, mine, quota, work)
        else:
            mine, union = yield from gather_bruck(rank, peers, mine, quota, work)
            width = width.after(union, quota, len(peers))
        final = yield from self._gather_blocks(mine, blocks, members, way.gather, dtype)

        residual = self._residual(accumulated, work, selected, final)
        write_dense(final, total)
        memory = asdict(way) | {"width": None if width is None else asdict(width)}
        return Synchronized(values=final.values, residual=residual, memory=memory)

    def _decided(self, key: str, kept: int) -> _TeamSetup:
        """Return how to sum a gradient of which `kept` elements are kept."""
        before, way = _TeamSetup.of(self._memories.get(key)), self._given_or_chosen(kept)
        if before is None or before == way:
            return way
        keeps = self._teams is None and before.ranks == way.ranks and self._gather in (None, before.gather)
        if not self._has_warned:
            said = "keeps them, though it would begin with" if keeps else "goes on with"
            log.warning("%s, for one, had %s among %d ranks and %s %s", key, before, before.ranks, said, way)
            self._has_warned = True
        return before if keeps else way

    def _given_or_chosen(self, kept: int) -> _TeamSetup:
        ranks, teams = self.transport.size, self._teams
        if teams is None and self._network is not None:
            alpha_s, beta_s = self._network.alpha_s, self._network.beta_s
            choice = choose_teams(ranks, kept, alpha_s=alpha_s, beta_s=beta_s, gather=self._gather)
            return _TeamSetup(ranks=ranks, teams=choice.teams, gather=choice.gather)
        teams = teams or (1 if ranks % 2 else 2)
        return _TeamSetup(ranks=ranks, teams=teams, gather=self._gather or default_gather(teams))

    def _check_agreed(self, key: str, kept: int, way: _TeamSetup, sent: int) -> None:
        """Raise CommError on all ranks unless their messages fit: of one way, and of one length between peers."""
        gathers = get_args(Gather)
        own = torch.tensor([sent, kept, way.teams, gathers.index(way.gather)])
        said: list[list[int]] = self.transport.gather_numbers(own).tolist()
        for rank, (_, _, teams, gather) in enumerate(said):
            if teams < 1 or way.ranks % teams or not 0 <= gather < len(gathers):
                raise MessageError(
                    f"{key}: rank {rank} says that it has {teams} teams and gathers in way {gather}; run the same "
                    f"version on all ranks"
                )
        for rank, (_, *rest) in enumerate(said):
            first = rank % (way.ranks // said[0][2]) if rest == said[0][1:] else 0
            if said[rank] != said[first]:
                both = (
                    f"rank {each} sends {said[each][0]} elements of its block and {said[each][1]} in all, with "
                    f"{said[each][2]} teams that gather {gathers[said[each][3]]!r}"
                    for each in (first, rank)
                )
                raise CommError(
                    f"{key}: {'; '.join(both)}: give all ranks the same arguments and restore all from one checkpoint"
                )

    def _width(self, key: str, way: _TeamSetup, quota: int) -> Width:
        memory = self._memories.get(key)
        if memory is not None and _TeamSetup.of(memory) == way:
            return Width(**memory["width"])
        return Width.first(quota, way.teams)

    def _gather_blocks(
        self, mine: Coo, blocks: TeamBlocks, members: range, gather: Gather, dtype: torch.dtype
    ) -> Rounds[Coo]:
        """Return the elements of all blocks; after B-SAG only their owners know how many a block has."""
        sizes = None
        if gather == "recursive":
            sizes = [size_bytes(blocks.quota(block), dtype) for block in range(blocks.count)]
        messages = yield from bruck_gather(self.transport.rank, members, to_message(mine), sizes_bytes=sizes)
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
