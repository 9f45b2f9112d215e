"""The transport by daemons: the owner's offers a capture to that of a placement peer, which fetches it over TCP."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from resilient_run.ckpt.errors import MemoryBudgetError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import SlotHeader

from ..base.codec import Record, limited
from ..run.commit import Agreed, Missed
from ..run.observation import Observation
from ..run.view import JobView
from ..slots.slots import Geometry, JobSlots, SlotFile
from .fetch import OfferPace, PeerError
from .holders import Holders
from .pacing import Pacer
from .sources import Sources

log = logging.getLogger(__name__)

_MAX_PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer(Record):
    """A capture that a peer is to hold.

    Attributes:
        rank: Whose state.
        pair: Which capture.
        geometry: Of a slot that can hold it.
        agreed: What the owner's host knows to be agreed.
        patience_s: How much longer than usual each range may take, because the owner waits for idle spans.
    """

    rank: int
    pair: Pair = limited(inline=True)
    geometry: Geometry = limited(inline=True)
    agreed: Agreed = limited(inline=True)
    patience_s: float = limited(high=_MAX_PATIENCE_S)

    @classmethod
    def of(cls, header: SlotHeader, *, agreed: Agreed, patience_s: float) -> Self:
        """Return the offer of the capture with this header."""
        return cls(
            rank=header.rank,
            pair=header.pair,
            geometry=Geometry(capacity_bytes=header.used_bytes, payload_offset=header.payload_offset),
            agreed=agreed,
            patience_s=min(patience_s, _MAX_PATIENCE_S),
        )


@dataclass(kw_only=True, slots=True, eq=False)
class DaemonTransport:
    """Offers captures to the daemons of other hosts, and fetches what they offer: it needs no trainer.

    Attributes:
        view: What is known of the job.
        slots: What this host holds.
        sources: Knows the peers, and fetches.
        pacer: Says how patient receivers must be.
        in_flight: Ranges of an offered capture that are asked for ahead.
        spawn: Runs a named task that ends with the generation.
        supersede: Ends what comes here of a rank by another transport.
        observe: Takes why a replica cannot be kept here.
    """

    view: JobView
    slots: JobSlots
    sources: Sources
    pacer: Pacer
    in_flight: int
    spawn: Callable[[str, Callable[[], Awaitable[None]]], None]
    supersede: Callable[[int], None]
    observe: Callable[[Mapping[str, Observation]], None]
    _offering: set[tuple[str, int]] = field(default_factory=set)
    _offered: dict[int, Pair] = field(default_factory=dict)
    _no_room: dict[str, Observation] = field(default_factory=dict)

    @property
    def reach(self) -> object:
        """Where daemons listen."""
        return self.view.addresses

    def bring(self, host: str, rank: int, file: SlotFile) -> bool:
        """Offer the capture of `rank` in `file` to `host`; always True."""
        if (host, rank) not in self._offering:
            log.debug("rank %d %s is offered to host %s", rank, file.pair, host)
            self._offering.add((host, rank))
            self.spawn("offer", partial(self._offer, host, rank, file))
        return True

    def offered(self, host: str, offer: Offer) -> None:
        """Fetch what `host` offers if it runs that rank, and it is this generation's and ours to keep."""
        rank, pair, round_ = offer.rank, offer.pair, self.view.round
        if round_ is None or pair[0] != round_.generation or self.slots.find(rank, pair) is not None:
            return
        holders = self.view.holders(rank)
        if holders[:1] != (host,) or self.view.host not in holders[1:] or self._offered.get(rank) == pair:
            return
        self._offered[rank] = pair
        # The owner's daemon offers only what no other transport brings.
        self.supersede(rank)
        self.spawn("accept offer", partial(self._accept_offer, host, offer))

    def end(self) -> None:
        """Forget every offer: the generation is over."""
        self._offering.clear()
        self._offered.clear()
        self._no_room.clear()
        self.observe({})

    async def _offer(self, host: str, rank: int, file: SlotFile) -> None:
        """Send one offer; at most one is on its way to each host for each rank."""
        try:
            peer = await self.sources.peer(host)
            if peer is None or file.pair is None:
                return
            offer = Offer.of(file.slot.header(), agreed=self.view.agreed, patience_s=self.pacer.patience_s)
            await peer.offer(offer.to_value())
        except (PeerError, SlotError) as error:
            log.info("offer of rank %d to host %s failed, it will be repeated: %s", rank, host, error)
        finally:
            self._offering.discard((host, rank))

    async def _accept_offer(self, host: str, offer: Offer) -> None:
        rank, pair, geometry = offer.rank, offer.pair, offer.geometry
        agreed = offer.agreed.or_later(self.view.agreed)
        pace = OfferPace(in_flight=self.in_flight, patience_s=offer.patience_s)
        try:
            async with self.slots.receiving[rank]:
                peer = await self.sources.peer(host)
                if peer is None or self._offered.get(rank) != pair or self.slots.find(rank, pair) is not None:
                    return
                if await self.sources.fetch(Holders([peer], pace=pace), rank, pair, geometry, agreed):
                    self._find_room(rank, None)
        except (PeerError, SlotError) as error:
            log.info("offer of rank %d %s failed, it will be repeated: %s", rank, pair, error)
        except MemoryBudgetError as error:
            self._find_room(rank, error)
            if self.view.own_ranks and pair >= self.view.agreed.next:  # all capture a later step, which may be smaller
                self.view.miss(Missed(next=self.view.agreed.next, step=pair.step, late=False))
        finally:
            if self._offered.get(rank) == pair:
                del self._offered[rank]

    def _find_room(self, rank: int, error: MemoryBudgetError | None) -> None:
        """Show why the replica of `rank` cannot be kept, None: it can."""
        name = f"rank {rank}"
        self._no_room.pop(name, None)
        if error is not None:
            message = f"cannot keep the replica of rank {rank}: {error}"
            self._no_room[name] = Observation(
                kind="memory", severity="warn", rank=rank, value=0, limit=0, message=message, unix_s=time.time()
            )
        self.observe(dict(self._no_room))
