"""The persistent tier as a place to fetch replicas from, with the calls of a peer daemon."""

from collections.abc import Awaitable, Callable, Sequence

from resilient_run.ckpt.errors import SlotError, TopologyError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot

from ..run.view import JobView
from ..slots.slots import Geometry
from .tier import FRAME_BYTES, Tier, call


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

    async def imported(self, pair: Pair) -> str:
        """Return where the import `pair` is: trainers read of it what they need.

        Raises:
            SlotError: It is gone or damaged.
            TierError: The storage does not answer.
        """
        await call(self._tier, self._tier.import_manifest, pair)
        return await call(self._tier, self._tier.url, pair)

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
        if manifest.world_size != expected:
            raise TopologyError(
                f"step {pair[1]} in {self._tier.shown} was saved by {manifest.world_size} ranks, this run has "
                f"{expected}: start as many workers as before, or turn it into a DCP checkpoint, which loads into any "
                "world size (resilientctl export), and start a new run id"
            )
        return manifest.ranks[rank].geometry

    async def fetch(self, rank: int, pair: Pair, slot: Slot, used_bytes: int) -> bytes:
        """Copy the file of `rank` into `slot` from byte 4096 on and return its header page; nothing is verified yet.

        Raises:
            SlotError: The file is damaged.
            TierError: The storage does not answer.
        """
        page, start = b"", 0
        frames = self._tier.read(pair, rank)
        while start < used_bytes:
            # The thread never sees the slot: one that hangs may wake up when the slot holds something else.
            data = await call(self._tier, next, frames, b"")
            end = start + len(data)
            if not data or end > used_bytes:
                raise SlotError(f"{self._tier.shown} has rank {rank} of {pair} with another size than its manifest")
            if start == 0:
                page, data, start = data[:HEADER_BYTES], data[HEADER_BYTES:], HEADER_BYTES
            slot.buffer[start:end] = data
            start = end
        return page

    async def read(self, rank: int, pair: Pair, ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
        """Fill `target` with ranges (offset and size) of the file of `rank`; nothing is verified yet.

        Raises:
            SlotError: The file is damaged.
            TierError: The storage does not answer.
        """
        wanted = {
            number
            for offset, size in ranges
            for number in range(offset // FRAME_BYTES, (offset + size - 1) // FRAME_BYTES + 1)
        }
        frames, found = self._tier.read_frames(pair, rank, wanted), dict[int, bytes]()
        while (frame := await call(self._tier, next, frames, None)) is not None:
            found[frame[0]] = frame[1]
        at = 0
        for offset, size in ranges:
            end = offset + size
            while offset < end:
                number, start = divmod(offset, FRAME_BYTES)
                data = memoryview(found[number])[start : start + end - offset]
                target[at : at + len(data)] = data
                at, offset = at + len(data), offset + len(data)

    async def refuse(self, pair: Pair, reason: str) -> None:
        """Take back the publication of `pair`: it is damaged."""
        if pair not in self._refused:
            self._refused[pair] = reason
            await self._refuse(pair, reason)
