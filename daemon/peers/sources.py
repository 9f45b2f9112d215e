"""Where a replica can be had: from the peers' memory, and at last from the persistent tier."""

from collections.abc import Callable

from resilient_run.ckpt.errors import MemoryBudgetError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import parse_header

from ..run.commit import Agreed
from ..run.view import JobView
from ..slots.slots import Geometry, JobSlots
from ..tier.fetch import TierSource
from ..tier.tier import TierError
from ..trust.identity import Identity
from ..trust.secure import SecureSocket
from .fetch import Peer, PeerError, connect
from .holders import Holders, attempts

RESTORE_PATIENCE_S = 20.0
"""How long a restore waits for peers that should hold the step but cannot be reached."""

RETRY_S = (0.1, 5.0)
"""The first pause before asking again, and the longest."""


class Sources:
    """Fetches replicas of one job into its slots; the caller sees to it that there is one fetch per rank at a time.

    Args:
        run_id: The job.
        view: What is known of it.
        slots: What this host holds of it.
        tier: The persistent tier, None without one.
        identity: Returns who this host is to the others, None while it is not known.

    Attributes:
        origins: Rank and pair of what was fetched in this generation → "peer" or "persisted".
    """

    def __init__(
        self,
        *,
        run_id: str,
        view: JobView,
        slots: JobSlots,
        tier: TierSource | None,
        identity: Callable[[], Identity | None],
    ) -> None:
        self.origins: dict[tuple[int, Pair], str] = {}
        self._run_id = run_id
        self._view = view
        self._slots = slots
        self._tier = tier
        self._identity = identity
        self._peers: dict[str, Peer] = {}

    async def peer(self, host: str) -> Peer | None:
        """Return the peer daemon of `host`, None while its address or the run's secret is not known."""
        address, identity = self._view.addresses.get(host), self._identity()
        if address is None or identity is None:
            return None
        peer = self._peers.get(host)
        if peer is None or (peer.address, peer.identity) != (address, identity):
            self._peers[host] = Peer(host=host, address=address, identity=identity)
            if peer is not None:
                await peer.close()
        return self._peers[host]

    async def dial(self, host: str) -> SecureSocket:
        """Return a connection of its own to the daemon of `host`, once its address and the run's secret are known.

        Raises:
            PeerError: It cannot be reached.
        """
        await self._view.wait_for(lambda: host in self._view.addresses and self._identity() is not None)
        identity = self._identity()
        assert identity is not None
        return await connect(host, self._view.addresses[host], identity)

    async def ask(self, host: str) -> None:
        """Return once the daemon of `host` has answered.

        Raises:
            PeerError: It does not, or is not registered.
        """
        peer = await self.peer(host)
        if peer is None:
            raise PeerError(f"the daemon of host {host} is not registered")
        await peer.ask()

    async def fetch_from_any(self, rank: int, pair: Pair, *, insist: bool = False) -> tuple[list[str], bool]:
        """Fetch from all hosts that should hold `pair` at once, else from any, and at last from the persistent tier.

        Args:
            rank: Whose replica.
            pair: Which capture.
            insist: Whether to ask the persistent tier even if a host could not be asked.

        Returns:
            What was tried without success, and whether it may succeed later because somebody could not be asked.

        Raises:
            TopologyError: The persistent tier has it of another world size.
        """
        tried: list[str] = []
        again = False
        placed = self._view.holders(rank)
        others = [host for host in sorted(self._view.addresses) if host not in placed]
        known: dict[str, Peer] = {}
        for host in [*placed, *others]:
            if host == self._view.host:
                continue
            if (peer := await self.peer(host)) is not None:
                known[host] = peer
            else:
                tried.append(f"host {host}: its daemon is not registered")
                again = True
        for source in (*attempts(placed, known), self._tier):
            if source is None or (source is self._tier and again and not insist):
                continue
            if (failure := await self._fetch_from(source, rank, pair)) is None:
                return tried, False
            tried.append(failure[0])
            again = again or failure[1]
        return tried, again

    async def _fetch_from(self, source: Holders | TierSource, rank: int, pair: Pair) -> tuple[str, bool] | None:
        """Fetch `pair` of `rank` from `source`; return None, or why it failed and whether it may succeed later."""
        try:
            geometry = await source.have(rank, pair)
            if geometry is None:
                return f"{source.name}: does not hold it", False
            if await self.fetch(source, rank, pair, geometry, self._view.agreed):
                self.origins[rank, pair] = source.kind
                return None
            return f"{source.name}: holds it, but no local slot is free", False
        except (PeerError, TierError) as error:
            return f"{source.name}: {error}", True
        except SlotError as error:
            if isinstance(source, TierSource):
                await source.refuse(pair, str(error))
            return f"{source.name}: {error}", False
        except MemoryBudgetError as error:
            return f"{source.name}: {error}", False

    async def fetch(
        self,
        source: Holders | TierSource,
        rank: int,
        pair: Pair,
        geometry: Geometry,
        agreed: Agreed,
    ) -> bool:
        """Fetch one replica into a slot that may be overwritten, verify and hold it; False when no slot is free.

        Raises:
            PeerError: No holder can be reached.
            TierError: The storage of the persistent tier does not answer.
            SlotError: What came is not what was announced.
            MemoryBudgetError: There is no room for a slot.
        """
        await self._slots.make_room(rank, geometry, view=self._view)
        file = await self._slots.place(rank, geometry, agreed=agreed.or_later(self._view.agreed))
        if file is None:
            return False
        try:
            page = await source.fetch(rank, pair, file.slot, geometry.capacity_bytes)
            header = parse_header(page, file.slot.capacity_bytes)
            if (header.run_id, header.rank, header.pair) != (self._run_id, rank, pair):
                raise SlotError(f"{source.name} sent another capture than rank {rank} {pair} of {self._run_id!r}")
            await self._slots.accept(file, page, verified=source.verifies)
        finally:
            file.busy = False
            if file.pair is None:
                file.slot.clear()
        self._view.notify()
        return True

    async def close(self) -> None:
        """Close the connections to peers."""
        for peer in self._peers.values():
            await peer.close()
