"""A private copy of a slot, made at the speed of memory, for work that takes longer than the slot keeps its content."""

import numpy as np

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, SlotHeader

from .slots import JobSlots, in_thread

_PIECE_BYTES = 64 << 20


class Snapshot:
    """What one slot held at one moment, in an unlinked file in memory that the memory budget counts.

    Attributes:
        rank: Whose capture.
        pair: Which one.
    """

    def __init__(self, slots: JobSlots, slot: Slot, page: bytes, *, rank: int, pair: Pair) -> None:
        self.rank = rank
        self.pair = pair
        self._slots = slots
        self._slot = slot
        self._page = page
        self._size_bytes = slot.capacity_bytes
        self._closed = False

    @classmethod
    async def take(cls, slots: JobSlots, rank: int, pair: Pair) -> "Snapshot":
        """Return a copy of what the slots hold of `rank` at `pair`, not verified yet.

        Raises:
            SlotError: They do not hold it.
            MemoryBudgetError: The copy does not fit.
            OSError: There is no room for it.
        """
        file = slots.find(rank, pair)
        if file is None:
            raise SlotError(f"rank {rank}: no slot holds generation {pair[0]} step {pair[1]} any more")
        header = file.slot.header()
        page, size_bytes = bytes(file.slot.buffer[:HEADER_BYTES]), file.slot.capacity_bytes
        apart = slots.budget.allocate(slots.key, size_bytes)
        try:
            # A slice keeps the mapping alive, whatever becomes of the slot meanwhile.
            copy = await in_thread(_copy, slots, rank, header, file.slot.buffer[: header.used_bytes], size_bytes, apart)
        except BaseException:
            slots.budget.free(slots.key, size_bytes)
            raise
        return cls(slots, copy, page, rank=rank, pair=pair)

    async def verify(self) -> SlotHeader:
        """Verify every checksum and return the header.

        Raises:
            SlotError: The slot was overwritten while it was copied, or it was corrupt.
        """
        header = await in_thread(self._slot.adopt, self._page)
        if (header.rank, header.pair) != (self.rank, self.pair):
            raise SlotError(f"rank {self.rank}: the slot changed to {header.pair} meanwhile")
        return header

    @property
    def buffer(self) -> memoryview:
        """The slot file's bytes; verified, they are those of a complete slot."""
        return self._slot.buffer

    def close(self) -> None:
        """Give the memory back, as soon as no thread reads it any more; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._slot.close()
            self._slots.budget.free(self._slots.key, self._size_bytes)


def _copy(slots: JobSlots, rank: int, header: SlotHeader, source: memoryview, size_bytes: int, apart: bool) -> Slot:
    # Not named as a slot is, so that no later daemon adopts what a killed one left; the next snapshot removes it.
    path = slots.directory / f"rank{rank}.snapshot"
    path.unlink(missing_ok=True)
    copy = Slot.create(path, capacity_bytes=size_bytes, payload_offset=header.payload_offset, apart=apart)
    path.unlink()
    # numpy copies without the interpreter lock, a memoryview does not.
    target, data = np.frombuffer(copy.buffer, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8)
    for start in range(HEADER_BYTES, len(data), _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, len(data))
        np.copyto(target[start:end], data[start:end])
    return copy
