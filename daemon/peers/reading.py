"""Ranges of what another number of ranks captured, or of an import, for trainers that make a state of them."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError, RestoreError, SlotError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.slot import Slot

from ..base.fields import Fields
from ..run.view import JobView
from ..slots.slots import JobSlots, in_thread
from ..tier.fetch import TierSource
from ..tier.tier import TierError
from .download import RANGE_BYTES, Part
from .fetch import PeerError
from .sources import RESTORE_PATIENCE_S, RETRY_S, Sources

MAX_READ_BYTES = 128 << 20
"""What one request may ask for; a trainer that needs more asks again."""
MAX_RANGES = 1 << 14

_RANKS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a trainer wants of the slot of one rank.

    Attributes:
        rank: One of those that captured what the round restores.
        ranges: Offset in the slot file and size of each range, in bytes.
        avoid: Who has sent something else than was captured (`SlotReader.read` says who sent what).
    """

    rank: int
    ranges: tuple[tuple[int, int], ...]
    avoid: frozenset[str]

    @classmethod
    def parse(cls, fields: Fields, made_by: int) -> list[Self]:
        """Return what a trainer asks for.

        Raises:
            DaemonError: It is malformed, too much, or of a rank that there was not.
        """
        found = []
        for number, each in enumerate(fields.objects("wanted")):
            one = Fields(each, f"read, wanted {number}")
            numbers = one.integers("ranges")
            pairs = tuple(zip(numbers[::2], numbers[1::2], strict=False))
            if len(numbers) % 2 or not all(size for _, size in pairs):
                raise DaemonError(f"field 'ranges' must have an offset and a size above 0 for each range: {numbers}")
            avoid = each.get("avoid", [])
            if not isinstance(avoid, list) or not all(isinstance(name, str) for name in avoid):
                raise DaemonError(f"field 'avoid' must be a list of names, got {avoid!r:.200}")
            found.append(cls(rank=one.integer("rank", high=made_by - 1), ranges=pairs, avoid=frozenset(avoid)))
        count, size_bytes = sum(len(each.ranges) for each in found), sum(each.size_bytes for each in found)
        if not count or count > MAX_RANGES or size_bytes > MAX_READ_BYTES:
            raise DaemonError(
                f"{count} ranges of {size_bytes} bytes: ask for 1 to {MAX_RANGES}, of up to {MAX_READ_BYTES} bytes"
            )
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranges together."""
        return sum(size for _, size in self.ranges)


class SlotReader:
    """Reads for the trainers of one job; each has one file with what it asked for last.

    Args:
        view: What is known of the job.
        slots: What this host holds of it.
        sources: The other hosts.
        tier: The last place to look, None without one.
    """

    def __init__(self, *, view: JobView, slots: JobSlots, sources: Sources, tier: TierSource | None) -> None:
        self._view = view
        self._slots = slots
        self._sources = sources
        self._tier = tier
        self._lent: dict[int, Slot] = {}
        self._holders: dict[int, str] = {}
        self._at_once = asyncio.Semaphore(_RANKS_AT_ONCE)

    async def read(self, reader: int, pair: Pair, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Return the path of a slot file whose payload has the ranges in their order, and who had those of each rank.

        Nothing is verified: checksums that are among the ranges tell the trainer. It has the file until it asks again.

        Args:
            reader: The rank that asks.
            pair: What the round restores.
            wanted: What of it; a rank occurs once.

        Raises:
            RestoreError: Nobody who can be asked, and is not to be avoided, has a slot.
            MemoryBudgetError: The file does not fit.
            DaemonError: A range is beyond the end of its slot.
        """
        self.end(reader)
        slot = await self._slots.lend_scratch(reader, sum(each.size_bytes for each in wanted))
        self._lent[reader] = slot
        at, tasks = slot.payload_offset, []
        for each in wanted:
            target = slot.buffer[at : at + each.size_bytes]
            tasks.append(asyncio.create_task(self._read(each, pair, target)))
            at += each.size_bytes
        try:
            names = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.end(reader)
            raise
        return {"path": str(slot.path), "sources": names, "host": self._view.host}

    def end(self, reader: int | None = None) -> None:
        """Remove the file that `reader` was given, of all without one; what has it open keeps it."""
        for rank in list(self._lent) if reader is None else [reader] if reader in self._lent else []:
            self._slots.return_scratch(self._lent.pop(rank))
        if reader is None:
            self._holders.clear()

    @property
    def source(self) -> str:
        """From how far what was read in this generation came: "local", "peer", "persisted" or "imported"."""
        origins = set(self._holders.values())
        if self._view.round is not None and is_import(self._view.round.restore):
            return "imported"
        if self._tier is not None and self._tier.name in origins:
            return self._tier.kind
        return "local" if origins <= {self._view.host} else "peer"

    async def _read(self, wanted: Wanted, pair: Pair, target: memoryview) -> str:
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + RESTORE_PATIENCE_S, RETRY_S[0]
        while True:
            late, again, tried = loop.time() > deadline, False, list[str]()
            for name in self._order(wanted.rank, pair):
                if name in wanted.avoid:
                    tried.append(f"{name}: its copy is damaged")
                    continue
                if self._tier is not None and name == self._tier.name and again and not late:
                    continue
                try:
                    async with self._at_once:
                        if await self._read_from(name, wanted, pair, target):
                            self._holders[wanted.rank] = name
                            return name
                    tried.append(f"{name}: does not hold it")
                except (PeerError, TierError) as error:
                    tried.append(f"{name}: {error}")
                    again = True
                except SlotError as error:
                    tried.append(f"{name}: {error}")
            if (late or not again) and is_import(pair):
                why = "; ".join(tried) or "it is in the persistent tier, and the run has no --rr-persist"
                raise RestoreError(
                    f"this run begins with the import of step {pair[1]}, which cannot be read: {why}; import it again"
                )
            if late or not again:
                raise RestoreError(
                    f"no verified copy of rank {wanted.rank} at step {pair[1]} (generation {pair[0]}) is left: "
                    f"{'; '.join(tried)}. Start a new run id"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    def _order(self, rank: int, pair: Pair) -> list[str]:
        """Return whom to ask, first who had this rank or the one before: the ranks of a host follow each other."""
        hosts = [] if is_import(pair) else [self._view.host, *sorted(self._view.addresses.keys() - {self._view.host})]
        known = self._holders.get(rank) or self._holders.get(rank - 1)
        if self._slots.find(rank, pair) is None and known in hosts:
            at = hosts.index(known)
            hosts = [*hosts[at:], *hosts[:at]]
        return hosts if self._tier is None else [*hosts, self._tier.name]

    async def _read_from(self, name: str, wanted: Wanted, pair: Pair, target: memoryview) -> bool:
        """Fill `target` from the slot that `name` holds; False if it holds none.

        Raises:
            PeerError, TierError: It cannot be asked.
            SlotError: It gave the slot up, or the file is damaged.
            DaemonError: A range is beyond the end of the slot.
        """
        if name == self._view.host:
            file = self._slots.find(wanted.rank, pair)
            if file is None:
                return False
            used_bytes = file.slot.header().used_bytes
            _check(wanted, used_bytes)
            # One view of all, so that the file stays mapped until the thread is done.
            await in_thread(_copy, file.slot.buffer[:used_bytes], wanted.ranges, target)
            return True
        if self._tier is not None and name == self._tier.name:
            geometry = await self._tier.have(wanted.rank, pair)
            if geometry is not None:
                _check(wanted, geometry.capacity_bytes)
                parts = _parts(wanted.ranges, target)
                await self._tier.read(wanted.rank, pair, [(part.offset, part.target) for part in parts])
            return geometry is not None
        peer = await self._sources.peer(name)
        if peer is None:
            raise PeerError(f"the daemon of host {name} is not registered")
        geometry = await peer.have(wanted.rank, pair)
        if geometry is not None:
            _check(wanted, geometry.capacity_bytes)
            await peer.fetch(wanted.rank, pair, _Ranges(wanted.ranges, target))
        return geometry is not None


class _Ranges:
    """Hands out ranges to one holder; whoever asked for them verifies what lands."""

    def __init__(self, ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
        self._parts = deque(_parts(ranges, target))
        self._left = len(self._parts)

    @property
    def is_complete(self) -> bool:
        return not self._left

    def take(self, holder: str) -> Part | None:
        return self._parts.popleft() if self._parts else None

    def landed(self, holder: str, part: Part) -> None:
        self._left -= 1

    async def changed(self) -> None:
        raise AssertionError("there is one holder, which asks for all parts")


def _parts(ranges: Sequence[tuple[int, int]], target: memoryview) -> Iterator[Part]:
    at = 0
    for offset, size in ranges:
        for start in range(0, size, RANGE_BYTES):
            length = min(RANGE_BYTES, size - start)
            yield Part(offset=offset + start, target=target[at : at + length])
            at += length


def _copy(source: memoryview, ranges: Sequence[tuple[int, int]], target: memoryview) -> None:
    for part in _parts(ranges, target):
        part.target[:] = source[part.offset : part.offset + len(part.target)]


def _check(wanted: Wanted, used_bytes: int) -> None:
    for offset, size in wanted.ranges:
        if offset + size > used_bytes:
            raise DaemonError(
                f"rank {wanted.rank} has {used_bytes} bytes, none at {offset} to {offset + size} can be read"
            )
