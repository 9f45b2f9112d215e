"""One replica on its way into a slot: which ranges who fetches, and whether what arrived is what was captured."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.slot import CHUNK_BYTES, HEADER_BYTES, Slot, SlotHeader, chunk_count

RANGE_BYTES = 4 * CHUNK_BYTES
"""Most bytes that one `get` asks for: whole chunks, so that each range of the payload can be verified by itself."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """One range of the slot file, and where it goes."""

    offset: int
    target: memoryview


class PartQueue(Protocol):
    """What hands parts out to holders, and hears what became of them."""

    @property
    def is_complete(self) -> bool:
        """Tell whether everything has landed."""

    def take(self, holder: str) -> Part | None:
        """Hand the next part to `holder`; None when there is none for it now."""

    def landed(self, holder: str, part: Part) -> None:
        """Take a part that `holder` delivered; SlotError if it is not what it should be."""

    async def changed(self) -> None:
        """Return when there may be another part, or everything has landed."""


class Download:
    """Shares the ranges of one replica out among its holders.

    The head (header, manifest, checksum table) comes from one holder and is verified first; with it each range of the
    payload is verified when it has landed. What a holder took and did not deliver is handed out again.

    Args:
        slot: A WRITING slot with room for `used_bytes`.
        used_bytes: Size that was announced.
    """

    def __init__(self, slot: Slot, used_bytes: int) -> None:
        self.page = bytearray(HEADER_BYTES)
        """The header page; it is not written to the slot."""
        self._slot = slot
        self._used_bytes = used_bytes
        self._expected: tuple[SlotHeader, npt.NDArray[np.uint64]] | None = None
        self._head_from: str | None = None
        self._head = deque(self._head_parts())
        self._head_left = len(self._head)
        self._body = deque(_parts(slot, slot.payload_offset, used_bytes))
        self._body_left = len(self._body)
        self._taken: defaultdict[str, list[Part]] = defaultdict(list)
        self._delivered: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Tell whether everything has landed and is verified."""
        return self._expected is not None and self._body_left == 0

    def outstanding(self, holder: str) -> int:
        """Return how many parts `holder` has taken and not delivered yet."""
        return len(self._taken[holder])

    def delivered(self, holder: str) -> int:
        """Return how many parts `holder` has delivered."""
        return self._delivered[holder]

    def take(self, holder: str) -> Part | None:
        """Hand the next part to `holder`; None when there is none for it now.

        Until the head is verified only who fetches that gets parts of the payload.
        """
        queue = self._body
        if self._expected is None:
            if self._head_from not in (None, holder):
                return None
            self._head_from = holder
            queue = self._head or self._body
        if not queue:
            return None
        part = queue.popleft()
        self._taken[holder].append(part)
        return part

    def landed(self, holder: str, part: Part) -> None:
        """Verify a part that `holder` delivered.

        Raises:
            SlotError: It is corrupt, or not of the capture that was announced.
        """
        if part.offset < self._slot.payload_offset:
            self._head_left -= 1
            if self._head_left == 0:
                self._verify_head()
        else:
            assert self._expected is not None, "the head lands before what its holder delivers after it"
            header, table = self._expected
            first = (part.offset - header.payload_offset) // CHUNK_BYTES
            for index in range(first, first + chunk_count(len(part.target))):
                self._slot.verify_chunk(header, table, index)
            self._body_left -= 1
        self._taken[holder].remove(part)
        self._delivered[holder] += 1
        self._notify()

    def give_back(self, holder: str) -> None:
        """Hand out again what `holder` took and did not deliver."""
        taken = self._taken.pop(holder, [])
        self._body.extendleft(reversed([part for part in taken if part.offset >= self._slot.payload_offset]))
        if self._head_from == holder and self._expected is None:
            self._head, self._head_from = deque(self._head_parts()), None
            self._head_left = len(self._head)
        self._notify()

    async def changed(self) -> None:
        """Return after the next part has landed or was given back."""
        await self._changed.wait()

    def _verify_head(self) -> None:
        header, table = self._slot.expect(self.page)
        if header.used_bytes != self._used_bytes:
            raise SlotError(f"a capture of {header.used_bytes} bytes was announced with {self._used_bytes}")
        self._expected = header, table

    def _head_parts(self) -> Iterator[Part]:
        yield Part(offset=0, target=memoryview(self.page))
        yield from _parts(self._slot, HEADER_BYTES, self._slot.payload_offset)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _parts(slot: Slot, start: int, end: int) -> Iterator[Part]:
    for offset in range(start, end, RANGE_BYTES):
        yield Part(offset=offset, target=slot.buffer[offset : min(offset + RANGE_BYTES, end)])
