"""The persistent tier as a place to fetch replicas from, with the calls of a peer daemon."""

from collections.abc import Awaitable, Callable, Sequence

from resilient_run.ckpt.errors import SlotError, TopologyError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot

from ..run.view import JobView
from ..slots.slots import Geometry
from .tier import Tier, call, cuts


class TierSource:
    """The published pairs of one job.

    Args:
        tier: Where they are.
        view: What is known of the job.
        refuse: Hears of a published pair that turned out to be damaged (`Persister.refuse`).
    """

    kind = "persisted"
    verifies = False
    name = "persistent tier"

    def __init__(self, tier: Tier, view: JobView, refuse: Callable[[Pair, str], Awaitable[None]]) -> None:
        self._tier = tier
        self._view = view
        self._refuse = refuse
        self._refused: dict[Pair, str] = {}

    async def have(self, rank: int, pair: Pair) -> Geometry | None:
        """Return the geometry of `rank` at `pair`, None when that is not published.

        Raises:
            TopologyError: It is of another world size than the round says.
            SlotError: It was found damaged before.
            TierError: The storage does not answer.
        """
        if pair in self._refused:
            raise SlotError(self._refused[pair])
        try:
            manifest = await call(self._tier, self._tier.manifest, pair)
        except SlotError:
            return None
        round_ = self._view.round
        expected = manifest.world_size if round_ is None else round_.made_by or round_.world_size
        if manifest.world_size != expected and not is_import(pair):
            raise TopologyError(
                f"step {pair[1]} in {self._tier.shown} was saved by {manifest.world_size} ranks, this run has "
                f"{expected}: start as many workers as before, or turn it into a DCP checkpoint, which loads into any "
                "world size (resilientctl export), and start a new run id"
            )
        return manifest.ranks[rank]

    async def fetch(self, rank: int, pair: Pair, slot: Slot, used_bytes: int) -> bytes:
        """Do what `read` says of the whole file, from byte 4096 on into `slot`, and return its header page."""
        page = bytearray(HEADER_BYTES)
        await self.read(rank, pair, [(0, memoryview(page)), (HEADER_BYTES, slot.buffer[HEADER_BYTES:used_bytes])])
        return bytes(page)

    async def read(self, rank: int, pair: Pair, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each of `ranges` with what the slot file of `rank` has from an offset on; nothing is verified yet.

        Raises:
            SlotError: The file is damaged.
            TierError: The storage does not answer.
        """
        cut = cuts([(offset, len(target)) for offset, target in ranges])
        frames = self._tier.read(pair, rank, cut)
        # The thread never sees a slot: one that hangs may wake up when the slot holds something else.
        while (frame := await call(self._tier, next, frames, None)) is not None:
            for number, at, start, end in cut[frame[0]]:
                ranges[number][1][at : at + end - start] = frame[1][start:end]

    async def refuse(self, pair: Pair, reason: str) -> None:
        """Take back the publication of `pair`: it is damaged."""
        if pair not in self._refused:
            self._refused[pair] = reason
            await self._refuse(pair, reason)
