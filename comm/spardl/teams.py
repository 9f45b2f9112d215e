"""Spar-All-Gather: teams that have each summed a block of their gradients agree on its sum (SparDL, Section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import add_to, added, from_message, rounded, size_bytes, to_message, top_k
from ..net.rounds import Rounds, bruck_gather, swap
from ..ops.coo import Coo

Gather = Literal["recursive", "bruck"]
"""R-SAG, for a power of two of teams, or B-SAG, for any number."""


def default_gather(teams: int) -> Gather:
    """Return R-SAG where the number of teams allows it, else B-SAG."""
    return "bruck" if teams & (teams - 1) else "recursive"


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """Where a rank is among `count` teams of equal size; consecutive ranks are a team.

    Attributes:
        members: Ranks of its team, each with the block of its place.
        peers: Ranks at its place in every team, in the order of teams.
    """

    members: range
    peers: range

    @classmethod
    def of(cls, rank: int, *, ranks: int, count: int) -> Self:
        """Return the place of `rank`.

        Raises:
            CommError: The ranks cannot form so many equal teams.
        """
        if count < 1 or ranks % count:
            fitting = [teams for teams in range(1, ranks + 1) if ranks % teams == 0]
            raise CommError(f"{ranks} ranks cannot form {count} equal teams; choose one of {fitting}")
        size = ranks // count
        first = rank - rank % size
        return cls(members=range(first, first + size), peers=range(rank % size, ranks, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """How many elements of its block each team sends in B-SAG: h of Algorithm 2, with its step and flag.

    It is adapted so that the union of what the teams send has about as many elements as may be kept. Other than
    printed: the first union is counted before h changes; h stays within what the block keeps and a team's share of it;
    the step is a float of at least 1 and at most that range, so that it neither sticks at 0 nor grows for ever.

    Attributes:
        h: Elements, to be rounded.
        step: What h changed by last, or will at first.
        again: The last change was in the direction of the one before.
        union: How many elements the teams sent together in the last step, each index counted once.
    """

    h: float
    step: float
    again: bool = False
    union: int = 0

    @classmethod
    def first(cls, quota: int, teams: int) -> Self:
        """Return where Algorithm 2 begins: a team's share, growing by 1 % of the range."""
        return cls(h=max(1.0, quota / teams), step=max(1.0, 0.01 * quota * (teams - 1) / teams))

    def after(self, union: int, quota: int, teams: int) -> "Width":
        """Return the width for the next step when this one gave `union` elements, of which `quota` are kept."""
        step, again = self.step, False
        if (union > quota) != (step > 0):
            step, again = (2 * step, False) if self.again else (step, True)
        else:
            step = -step / 2
        least = max(1.0, quota / teams)
        size = min(max(abs(step), 1.0), max(quota - least, 1.0))
        step = size if step > 0 else -size
        return replace(
            self, h=min(max(self.h + step, least), float(max(quota, 1))), step=step, again=again, union=union
        )


def gather_recursive(rank: int, peers: Sequence[int], mine: Coo, quota: int, work: Tensor) -> Rounds[Coo]:
    """R-SAG: add up the lists of all peers by recursive doubling, keeping `quota` elements after each round.

    log2 d rounds, in which each rank receives 2·(d·k/P)·log2 d words. After round t all 2^(t+1) ranks that took part
    in a sum discard the same elements, so each keeps 1/2^(t+1) of them (with the paper's 1/2 some count
    twice from d = 8 on).

    Args:
        rank: This one, which is a peer.
        peers: Ranks, a power of two of them.
        mine: `quota` elements of one block; its values have the dtype that travels.
        quota: The same on all peers.
        work: Flat; receives this rank's share of what is discarded and rounded.

    Returns:
        The elements kept, the same on all peers.
    """
    own, dtype = peers.index(rank), mine.values.dtype
    distance = 1
    while distance < len(peers):
        partner = peers[own ^ distance]
        quota_bytes = size_bytes(quota, dtype)
        message = yield from swap(to_message(mine), to=partner, source=partner, size_bytes=quota_bytes)
        distance *= 2
        received = from_message(message, dtype, end=work.numel())
        both = added([mine, received], work.dtype)
        mine = _keep(both, quota, dtype, work, share=1 / distance)
    return mine


def gather_bruck(rank: int, peers: Sequence[int], mine: Coo, quota: int, work: Tensor) -> Rounds[tuple[Coo, int]]:
    """B-SAG: gather the lists of all peers, add them up in the order of peers and keep `quota` elements.

    ⌈log2 d⌉ rounds, in which each rank receives 2·h·(d-1) words. What is discarded at the end is not in the result, so
    each rank still has its own part of it (adding a share as in the paper would count it twice).

    Args:
        rank: This one, which is a peer.
        peers: Ranks.
        mine: h elements of one block; its values have the dtype that travels.
        quota: The same on all peers.
        work: Flat; receives this rank's share of what is rounded.

    Returns:
        The elements kept, the same on all peers, and how many the lists have together, each index counted once.
    """
    dtype = mine.values.dtype
    sizes = [to_message(mine).numel()] * len(peers)
    messages = yield from bruck_gather(rank, peers, to_message(mine), sizes_bytes=sizes)
    lists = [from_message(message, dtype, end=work.numel()) for message in messages]
    union = added(lists, work.dtype)
    return _keep(union, quota, dtype, work, share=1 / len(peers)), union.indices.numel()


def _keep(entries: Coo, quota: int, dtype: torch.dtype, work: Tensor, *, share: float) -> Coo:
    """Return the greatest `quota` entries rounded to `dtype`; `share` of all that this loses goes to `work`."""
    chosen = top_k(entries.values, quota)
    values = rounded(entries.values[chosen], dtype)
    lost = entries.values.clone()
    lost[chosen] -= values
    add_to(work, Coo(indices=entries.indices, values=share * lost))
    return Coo(indices=entries.indices[chosen], values=values)
