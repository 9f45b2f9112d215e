"""Whether the daemons of the placement peers answer, asked again and again while etcd has them registered."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ..peers.fetch import PeerError
from ..run.view import JobView
from .threshold import Measure

log = logging.getLogger(__name__)

_ASKS_PER_LIMIT = 4


class Reach:
    """Remembers when each placement peer answered last.

    A peer that etcd has not registered is lost, not unreachable: that is the rendezvous' business.

    Args:
        view: What is known of the job.
        ask: Returns once the daemon of a host has answered; raises `PeerError`.
        limit_s: How long a peer may be silent, 0 for ever.
    """

    def __init__(self, view: JobView, ask: Callable[[str], Awaitable[None]], limit_s: float) -> None:
        self._view = view
        self._ask = ask
        self._limit_s = limit_s
        self._heard_s: dict[str, float] = {}

    async def ask_all(self) -> None:
        """Ask every placement peer once; takes at most a quarter of the limit."""
        peers = self._peers()
        self._heard_s = {host: self._heard_s.get(host, time.monotonic()) for host in peers}
        await asyncio.gather(*(self._ask_one(host) for host in peers))

    @property
    def pause_s(self) -> float:
        """How long to wait between two questions."""
        return self._limit_s / _ASKS_PER_LIMIT

    def measure(self) -> list[Measure]:
        """Return how long each peer has been silent."""
        measures = []
        for host, heard_s in self._heard_s.items():
            silent_s, (addr, port) = time.monotonic() - heard_s, self._view.addresses.get(host, ("?", 0))
            measures.append(
                Measure(
                    name=host,
                    kind="peer_unreachable",
                    value=silent_s,
                    warn=self._limit_s,
                    message=f"the daemon of host {host} at {addr}:{port} is registered, but has not answered for "
                    f"{silent_s:.1f} s",
                )
            )
        return measures

    def _peers(self) -> set[str]:
        view = self._view
        peers = {host for rank in view.own_ranks for host in view.holders(rank)}
        peers |= {view.holders(rank)[0] for rank in view.kept_ranks}
        return (peers - {view.host}) & view.addresses.keys()

    async def _ask_one(self, host: str) -> None:
        try:
            async with asyncio.timeout(self.pause_s):
                await self._ask(host)
        except (PeerError, TimeoutError) as error:
            log.debug("host %s does not answer: %s", host, error or "too late")
        else:
            self._heard_s[host] = time.monotonic()
