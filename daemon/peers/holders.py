"""The hosts that hold one replica, asked and fetched from all at once."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import Slot

from ..slots.slots import Geometry
from .download import Download
from .fetch import OfferPace, Peer, PeerError

log = logging.getLogger(__name__)

_JOIN_S = 0.1
_LOOK_S = 0.1
_PATIENCE_S = 1.0


class Holders:
    """Hosts that may hold the same replica; all copies of a capture are bit-identical, so ranges may come from any.

    Args:
        peers: Their daemons, at least one.
        pace: How an offered capture is sent, None for one that is sent as fast as can be.
    """

    kind = "peer"
    verifies = True

    def __init__(self, peers: Sequence[Peer], *, pace: OfferPace | None = None) -> None:
        self.name = f"host{'s' if len(peers) > 1 else ''} {', '.join(peer.host for peer in peers)}"
        self._peers = tuple(peers)
        self._pace = pace

    async def have(self, rank: int, pair: Pair) -> Geometry | None:
        """Return the geometry of `pair` of `rank`, None when nobody has it.

        Whoever answers much later than the first that has it takes no part in `fetch`.

        Raises:
            PeerError: Nobody who could be asked has it, and somebody could not be asked.
        """
        asked = {asyncio.create_task(peer.have(rank, pair)): peer for peer in self._peers}
        try:
            done, waiting = set[asyncio.Task[Geometry | None]](), set(asked)
            while waiting and not any(_answer(task) for task in done):
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done |= ended
            if waiting:
                ended, waiting = await asyncio.wait(waiting, timeout=_JOIN_S)
                done |= ended
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        answers = {peer: _answer(task) for task, peer in asked.items() if task in done}
        geometry = next((answer for answer in answers.values() if answer is not None), None)
        failures = [str(error) for task in done if (error := task.exception()) is not None]
        if geometry is None and failures:
            raise PeerError("; ".join(failures))
        self._peers = tuple(peer for peer, answer in answers.items() if answer == geometry)
        return geometry

    async def fetch(self, rank: int, pair: Pair, slot: Slot, used_bytes: int) -> bytes:
        """Copy the replica into `slot` from byte 4096 on and return its header page; every checksum was right.

        A holder that fails, or that keeps the others waiting, loses its part to them.

        Args:
            rank: Whose replica.
            pair: Which capture.
            slot: A WRITING slot with room for `used_bytes`.
            used_bytes: Size that was announced.

        Raises:
            SlotError: Nobody has the replica any more, or what came is corrupt.
            PeerError: No connection lasted, or somebody did not keep to the protocol.
        """
        download = Download(slot, used_bytes)
        workers = {asyncio.create_task(self._work(peer, rank, pair, download)): peer for peer in self._peers}
        try:
            failures = await self._watch(workers, download)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if download.is_complete:
            return bytes(download.page)
        kind = PeerError if any(isinstance(error, PeerError) for error in failures) else SlotError
        raise kind("; ".join(map(str, failures)))

    async def _work(self, peer: Peer, rank: int, pair: Pair, download: Download) -> PeerError | SlotError | None:
        try:
            await peer.fetch(rank, pair, download, self._pace)
        except (PeerError, SlotError) as error:
            log.info("host %s delivers no more of rank %d %s: %s", peer.host, rank, pair, error)
            return error
        finally:
            download.give_back(peer.host)
        return None

    async def _watch(
        self, workers: dict[asyncio.Task[PeerError | SlotError | None], Peer], download: Download
    ) -> list[PeerError | SlotError]:
        """Wait for all workers, end those that keep idle ones waiting, and return why each that failed did so."""
        clock = asyncio.get_running_loop().time
        began_s, running = clock(), set(workers)
        idle_since_s: float | None = None
        while running:
            _, running = await asyncio.wait(
                running, timeout=_LOOK_S if len(running) > 1 else None, return_when=asyncio.FIRST_COMPLETED
            )
            owing = {task: parts for task in running if (parts := download.outstanding(workers[task].host))}
            if not 0 < len(owing) < len(running):
                idle_since_s = None
                continue
            idle_since_s = idle_since_s or clock()
            best = max(download.delivered(workers[task].host) for task in running)
            part_s = (idle_since_s - began_s) / best if best else 0.0
            for task, parts in owing.items():
                late, reason = too_late(waited_s=clock() - idle_since_s, outstanding=parts, part_s=part_s)
                if late:
                    log.info("host %s is left out: %s", workers[task].host, reason)
                    task.cancel()
        return [error for task in workers if not task.cancelled() and (error := task.result()) is not None]


def attempts(placed: Sequence[str], known: Mapping[str, Peer]) -> Iterator[Holders]:
    """Yield whom to fetch from until it works: all that should hold it together, then every known host alone."""
    together = [known[host] for host in placed if host in known]
    if len(together) > 1:
        yield Holders(together)
    for peer in known.values():
        yield Holders([peer])


def too_late(*, waited_s: float, outstanding: int, part_s: float) -> tuple[bool, str]:
    """Decide whether others take over what a holder owes, and why.

    Args:
        waited_s: How long others have had nothing to do.
        outstanding: Parts that it owes.
        part_s: Seconds that the best holder takes for one.
    """
    patience_s = _PATIENCE_S + 2 * outstanding * part_s
    return waited_s > patience_s, f"{outstanding} parts late, others idle for {waited_s:.1f} of {patience_s:.1f} s"


def _answer(task: "asyncio.Task[Geometry | None]") -> Geometry | None:
    return None if task.cancelled() or not task.done() or task.exception() is not None else task.result()
