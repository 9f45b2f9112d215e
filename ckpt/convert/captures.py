"""The slots of all ranks that captured one step, read in ranges: whatever is used of them is verified here."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import RestoreError, SlotError
from ..format import digests
from ..format.manifest import Manifest, is_large, leaf_parts, leaf_paths, parse
from ..format.pair import Pair
from ..format.slot import CHUNK_BYTES, HEADER_BYTES, Slot, SlotHeader, parse_header

BATCH_BYTES: Final = 64 << 20
"""About as much is read together."""

_BATCH_RANGES: Final = 1024
_RUN_CHUNKS: Final = 32
_KEPT_CHUNKS: Final = 256
_MAX_BYTES: Final = 1 << 44


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was read: the ranges one after the other, who had those of each rank, and which of them is this host."""

    data: memoryview
    sources: list[str]
    host: str


Ask = Callable[[list[dict[str, Any]]], Answer]
"""Reads `[{"rank", "ranges": [offset, size…], "avoid": [name…]}…]` of slots, verified by nobody.

The daemon's `read` does, of slots on this host, on its peers and of files of the persistent tier; `only` does of one
source, such as slots on this host or files of the tier.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What is known of one rank's slot without its payload.

    Attributes:
        header: Its header.
        manifest: Its manifest.
        table: The XXH3-64 of each chunk.
        digests: Of leaves that have one, by index: what two must have in common to be compared, the digest, and
            whether it is of that leaf alone.
    """

    header: SlotHeader
    manifest: Manifest
    table: npt.NDArray[np.uint64]
    digests: dict[int, tuple[Hashable, int, bool]]


def only(read: Callable[[int, list[tuple[int, int]]], bytes | bytearray], damaged: str) -> Ask:
    """Return what asks one source.

    Args:
        read: Returns ranges (offset and size) of the slot of a rank, one after the other.
        damaged: What to say when that is not what was captured.
    """

    def ask(wanted: list[dict[str, Any]]) -> Answer:
        data = bytearray()
        for each in wanted:
            if each["avoid"]:
                raise RestoreError(f"rank {each['rank']}: {damaged}")
            data += read(each["rank"], list(zip(each["ranges"][::2], each["ranges"][1::2], strict=True)))
        return Answer(data=memoryview(data), sources=[""] * len(wanted), host="")

    return ask


def of_slots(slots: Sequence[Slot]) -> "Captures":
    """Return what is in slots of all ranks, of the step that the first one has; they may be written meanwhile.

    Raises:
        SlotError: One is not complete, or a rank is missing.
        RestoreError: One has something else.
    """
    first, held = slots[0].header(), {slot.header().rank: slot.buffer for slot in slots}
    if missing := sorted(set(range(first.world_size)) - held.keys()):
        raise SlotError(f"rank(s) {missing} of {first.world_size} are missing")
    return in_memory(held, first)


def in_memory(held: Mapping[int, memoryview], header: SlotHeader) -> "Captures":
    """Return what is in these files of ranks, of one of which `header` is."""

    def read(rank: int, ranges: list[tuple[int, int]]) -> bytes:
        return b"".join(held[rank][offset : offset + size] for offset, size in ranges)

    damaged = (
        f"training has overwritten step {header.step} (generation {header.generation}), or it is damaged; try again"
    )
    pair, world_size = header.pair, header.world_size
    return Captures(only(read, damaged), run_id=header.run_id, pair=pair, world_size=world_size, of=held)


class Captures:
    """All ranks of one step, by rank.

    Attributes:
        pair: Generation and step.
        ranks: What is known of each.
        local: The ranks whose slots this host has.
        read_bytes: How much was read so far.
    """

    def __init__(
        self, ask: Ask, *, run_id: str, pair: Pair, world_size: int, of: Collection[int] | None = None
    ) -> None:
        """Read the heads of all slots, or of the ranks `of`.

        Raises:
            RestoreError: Nobody has a verified copy of one.
            SlotError: One does not hold the state of this version.
        """
        self.read_bytes = 0
        self.local: set[int] = set()
        self.pair = pair
        self._ask = ask
        self._avoid: dict[int, set[str]] = {}
        self._chunks: dict[tuple[int, int], memoryview] = {}
        self._wanted: set[tuple[int, int]] = set()
        self.ranks: dict[int, Captured] = {}
        headers: dict[int, SlotHeader] = {}

        def take_header(rank: int, data: memoryview) -> None:
            header = parse_header(data, _MAX_BYTES)
            if (header.run_id, header.rank, header.pair, header.world_size) != (run_id, rank, pair, world_size):
                raise SlotError(f"another capture came in place of rank {rank} {pair}")
            headers[rank] = header

        def take_head(rank: int, data: memoryview) -> None:
            header = headers[rank]
            raw, table = data[: header.manifest_bytes], data[header.checksums_offset - HEADER_BYTES :]
            sums = xxhash.xxh3_64_intdigest(raw), xxhash.xxh3_64_intdigest(table)
            if sums != (header.manifest_checksum, header.table_checksum):
                raise SlotError(f"rank {rank} step {pair[1]}: manifest or checksums do not match the header")
            manifest = parse(bytes(raw), header.payload_bytes)
            self.ranks[rank] = Captured(
                header=header,
                manifest=manifest,
                table=np.frombuffer(bytes(table), dtype="<u8"),
                digests=_digests(bytes(raw), manifest),
            )

        self._read([_Item(rank, 0, HEADER_BYTES, partial(take_header, rank)) for rank in of or range(world_size)])
        self._read(
            [
                _Item(rank, HEADER_BYTES, header.checksums_offset + 8 * header.chunk_count, partial(take_head, rank))
                for rank, header in sorted(headers.items())
            ]
        )

    def want(self, rank: int, start: int, end: int) -> None:
        """Let the next `fetch` read bytes of the payload of `rank`."""
        self._wanted.update((rank, chunk) for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))

    def data(self, rank: int, start: int, end: int) -> bytes:
        """Return bytes of the payload of `rank`, which are read now with all that is wanted if they are not here.

        Raises:
            RestoreError: Nobody has a verified copy of it.
        """
        chunks = range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        if any((rank, chunk) not in self._chunks for chunk in chunks):
            self.want(rank, start, end)
            self.fetch()
        return b"".join(
            self._chunks[rank, chunk][max(0, start - chunk * CHUNK_BYTES) : end - chunk * CHUNK_BYTES]
            for chunk in chunks
        )

    def fetch(self, *, keep: bool = True) -> None:
        """Read and verify what is wanted and not here; without `keep`, or if it is much, forget the rest.

        Raises:
            RestoreError: Nobody has a verified copy of it.
        """
        wanted, self._wanted = self._wanted, set()
        if not keep or len(self._chunks) > _KEPT_CHUNKS:
            self._chunks = {each: data for each, data in self._chunks.items() if each in wanted}
        wanted -= self._chunks.keys()
        runs: list[tuple[int, range]] = []
        for rank, chunk in sorted(wanted):
            last_rank, last = runs[-1] if runs else (-1, range(0))
            if (last_rank, last.stop) == (rank, chunk) and len(last) < _RUN_CHUNKS:
                runs[-1] = rank, range(last.start, chunk + 1)
            else:
                runs.append((rank, range(chunk, chunk + 1)))
        self._read([self._item(rank, run) for rank, run in runs])

    def _item(self, rank: int, run: range) -> "_Item":
        captured = self.ranks[rank]
        header = captured.header

        def take(data: memoryview) -> None:
            for chunk in run:
                at = (chunk - run.start) * CHUNK_BYTES
                piece = data[at : at + CHUNK_BYTES]
                if xxhash.xxh3_64_intdigest(piece) != int(captured.table[chunk]):
                    raise SlotError(f"rank {rank}: chunk {chunk} does not match its checksum")
                self._chunks[rank, chunk] = piece

        start, end = (header.payload_offset + number * CHUNK_BYTES for number in (run.start, run.stop))
        return _Item(rank, start, min(end, header.used_bytes), take)

    def _read(self, items: Sequence["_Item"]) -> None:
        """Read `items`, again from somebody else what is not as it was; in the end the daemon says that nobody has it.

        Raises:
            RestoreError: Nobody has a verified copy.
        """
        left = deque(items)
        while left:
            batch, size_bytes = [left.popleft()], 0
            while left and len(batch) < _BATCH_RANGES and (size_bytes := size_bytes + batch[-1].size) < BATCH_BYTES:
                batch.append(left.popleft())
            asked: dict[int, list[_Item]] = {}
            for item in batch:
                asked.setdefault(item.rank, []).append(item)
            answer = self._ask(
                [
                    {
                        "rank": rank,
                        "ranges": [number for item in several for number in (item.start, item.size)],
                        "avoid": sorted(self._avoid.get(rank, ())),
                    }
                    for rank, several in asked.items()
                ]
            )
            at = 0
            for (rank, several), source in zip(asked.items(), answer.sources, strict=True):
                for item in several:
                    self.read_bytes += item.size
                    try:
                        item.take(answer.data[at : at + item.size])
                    except SlotError:
                        self._avoid.setdefault(rank, set()).add(source)
                        left.append(item)
                    else:
                        self.local.update([rank] if source == answer.host else ())
                    at += item.size


@dataclass(frozen=True, slots=True)
class _Item:
    """A range of the slot of `rank`, in bytes, and what takes it; SlotError if it is not what was captured."""

    rank: int
    start: int
    end: int
    take: Callable[[memoryview], None]

    @property
    def size(self) -> int:
        return self.end - self.start


def _digests(raw: bytes, manifest: Manifest) -> dict[int, tuple[Hashable, int, bool]]:
    """Return the digests of leaves by index, as `Captured` has them: those of one leaf are of its bytes alone."""
    found: dict[int, tuple[Hashable, int, bool]] = {}
    try:
        by_structure = digests.parse(raw)
        parts = leaf_parts(leaf_paths(manifest.tree))
        for (structure, values), (name, (together, *starts)) in zip(
            by_structure.items(), manifest.compared.items(), strict=True
        ):
            cut = is_large(manifest.tensors, parts[name])
            groups = {index: number for number, index in enumerate(starts)}
            number = -1
            for index in parts[name]:
                number = groups.get(index, number)
                spec = manifest.tensors[index]
                if together == 1 and index in groups:
                    first_bytes = CHUNK_BYTES - manifest.offsets[index] % CHUNK_BYTES if cut else spec.nbytes
                    found[index] = (min(first_bytes, spec.nbytes), spec.nbytes), int(values[number]), True
                # Whether an integer tensor was compared nobody knows here.
                elif together > 1 and number >= 0 and spec.kind == "torch" and spec.nbytes and "float" in spec.dtype:
                    found[index] = (structure, number), int(values[number]), False
    except (SlotError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return found
