"""Letting go of a replica that a new round gave to other hosts: only once each of them holds it, verified."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from resilient_run.ckpt.format.pair import Pair

from ..run.view import JobView
from ..slots.slots import JobSlots
from .fetch import Peer, PeerError

log = logging.getLogger(__name__)

_PAUSE_S = (0.1, 5.0)


async def hand_over(
    rank: int,
    pair: Pair,
    *,
    view: JobView,
    slots: JobSlots,
    find_peer: Callable[[str], Awaitable[Peer | None]],
) -> None:
    """Remove what this host has of `rank`, which it need not keep any more, once all who must hold `pair` of it do.

    Until then its copy may be the only one; afterwards it only takes memory that the new replicas need. Ends when a
    newer pair is committed: then all that need not be kept goes anyway.
    """
    waiting = list(view.holders(rank))
    pause_s = _PAUSE_S[0]
    while waiting and view.committed == pair:
        waiting = [host for host in waiting if not await _holds(await find_peer(host), rank, pair)]
        if not waiting:
            log.info("rank %d is kept by other hosts now; its replica here is removed", rank)
            slots.surrender(rank)
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])


async def _holds(peer: Peer | None, rank: int, pair: Pair) -> bool:
    try:
        return peer is not None and await peer.have(rank, pair) is not None
    except PeerError:
        return False
