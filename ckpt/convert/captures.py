"""The slots of all ranks that captured one step, read in ranges: whatever is used of them is verified here."""

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import SlotError
from ..format import digests
from ..format.manifest import Manifest, is_large, leaf_parts, leaf_paths, parse
from ..format.pair import Pair
from ..format.slot import CHUNK_BYTES, HEADER_BYTES, SlotHeader, parse_header

_BATCH_BYTES: Final = 64 << 20
_BATCH_RANGES: Final = 1024
_RUN_CHUNKS: Final = 32
_MAX_BYTES: Final = 1 << 44

Ranges = list[tuple[int, int]]
"""Offset in a slot file and size of each, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was read: the ranges one after the other, who had those of each rank, and which of them is this host."""

    data: memoryview
    sources: list[str]
    host: str


Ask = Callable[[list[dict[str, Any]]], Answer]
"""Reads `[{"rank", "ranges": [offset, size…], "avoid": [name…]}…]` of slots, verified by nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What is known of one rank's slot without its payload.

    Attributes:
        header: Its header.
        manifest: Its manifest.
        table: The XXH3-64 of each chunk.
        digests: Of leaves that have one, by index: what two must have in common to be compared, and the digest.
    """

    header: SlotHeader
    manifest: Manifest
    table: npt.NDArray[np.uint64]
    digests: dict[int, tuple[Hashable, int]]


class Captures:
    """All ranks of one step, by rank.

    Attributes:
        ranks: What is known of each.
        local: The ranks whose slots this host has.
        read_bytes: How much was read so far.
    """

    def __init__(self, ask: Ask, *, run_id: str, pair: Pair, world_size: int) -> None:
        """Read the heads of all slots.

        Raises:
            RestoreError: Nobody has a verified copy of one.
            SlotError: One does not hold the state of this version.
        """
        self.read_bytes = 0
        self.local: set[int] = set()
        self._ask = ask
        self._avoid: dict[int, set[str]] = {}
        self._chunks: dict[tuple[int, int], memoryview] = {}
        self._wanted: set[tuple[int, int]] = set()
        headers: dict[int, SlotHeader] = {}

        def take_header(rank: int, found: list[memoryview]) -> None:
            header = parse_header(found[0], _MAX_BYTES)
            if (header.run_id, header.rank, header.pair, header.world_size) != (run_id, rank, pair, world_size):
                raise SlotError(f"another capture came in place of rank {rank} {pair}")
            headers[rank] = header

        self.ranks: dict[int, Captured] = {}

        def take_head(rank: int, found: list[memoryview]) -> None:
            header, head = headers[rank], found[0]
            raw, table = head[: header.manifest_bytes], head[header.checksums_offset - HEADER_BYTES :]
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

        self._read({rank: [(0, HEADER_BYTES)] for rank in range(world_size)}, take_header)
        heads = {
            rank: [(HEADER_BYTES, header.checksums_offset + 8 * header.chunk_count - HEADER_BYTES)]
            for rank, header in sorted(headers.items())
        }
        self._read(heads, take_head)

    def want(self, rank: int, start: int, end: int) -> None:
        """Let the next `fetch` bring bytes of the payload of `rank`."""
        self._wanted.update((rank, chunk) for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))

    def data(self, rank: int, start: int, end: int) -> bytes | None:
        """Return bytes of the payload of `rank`; None if they are yet to be fetched, which the next `fetch` does."""
        chunks = range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        if any((rank, chunk) not in self._chunks for chunk in chunks):
            self.want(rank, start, end)
            return None
        return b"".join(
            self._chunks[rank, chunk][max(0, start - chunk * CHUNK_BYTES) : end - chunk * CHUNK_BYTES]
            for chunk in chunks
        )

    def fetch(self, *, keep: bool = True) -> bool:
        """Read and verify what is wanted and not here, and tell whether anything was; without `keep`, forget the rest.

        Raises:
            RestoreError: Nobody has a verified copy of it.
        """
        wanted, self._wanted = self._wanted, set()
        if not keep:
            self._chunks = {each: data for each, data in self._chunks.items() if each in wanted}
        wanted -= self._chunks.keys()
        runs: dict[int, list[range]] = {}
        for rank, chunk in sorted(wanted):
            known = runs.setdefault(rank, [])
            if known and known[-1].stop == chunk and len(known[-1]) < _RUN_CHUNKS:
                known[-1] = range(known[-1].start, chunk + 1)
            else:
                known.append(range(chunk, chunk + 1))

        def take(rank: int, found: list[memoryview]) -> None:
            # In the order in which they were asked for: a rank's runs may be in several answers.
            captured, runs_of = self.ranks[rank], asked[rank]
            for run, data in zip(runs_of, found, strict=True):
                for chunk in run:
                    at = (chunk - run.start) * CHUNK_BYTES
                    piece = data[at : at + CHUNK_BYTES]
                    if xxhash.xxh3_64_intdigest(piece) != int(captured.table[chunk]):
                        raise SlotError(f"rank {rank}: chunk {chunk} does not match its checksum")
                    self._chunks[rank, chunk] = piece

        for asked in _batches(runs):
            ranges = {rank: [self._range(rank, run) for run in several] for rank, several in asked.items()}
            self._read(ranges, take)
        return bool(wanted)

    def _range(self, rank: int, chunks: range) -> tuple[int, int]:
        header = self.ranks[rank].header
        start = header.payload_offset + chunks.start * CHUNK_BYTES
        return start, min(header.payload_offset + chunks.stop * CHUNK_BYTES, header.used_bytes) - start

    def _read(self, wanted: dict[int, Ranges], take: Callable[[int, list[memoryview]], None]) -> None:
        """Read ranges of slots until `take`, which is given those of a rank, has refused none of them."""
        for part in _some_ranks(wanted):
            left = part
            while left:
                answer = self._ask(
                    [
                        {
                            "rank": rank,
                            "ranges": [number for each in ranges for number in each],
                            "avoid": sorted(self._avoid.get(rank, ())),
                        }
                        for rank, ranges in left.items()
                    ]
                )
                at, again = 0, dict[int, Ranges]()
                self.read_bytes += sum(size for ranges in left.values() for _, size in ranges)
                for (rank, ranges), source in zip(left.items(), answer.sources, strict=True):
                    found = []
                    for _, size in ranges:
                        found.append(answer.data[at : at + size])
                        at += size
                    try:
                        take(rank, found)
                    except SlotError:
                        # Somebody else may have it as it was; in the end the daemon says that nobody has.
                        self._avoid.setdefault(rank, set()).add(source)
                        again[rank] = ranges
                    else:
                        if source == answer.host:
                            self.local.add(rank)
                left = again


def _batches(runs: dict[int, list[range]]) -> Iterable[dict[int, list[range]]]:
    batch: dict[int, list[range]] = {}
    chunks = count = 0
    for rank, several in runs.items():
        for run in several:
            if batch and ((chunks + len(run)) * CHUNK_BYTES > _BATCH_BYTES or count >= _BATCH_RANGES):
                yield batch
                batch, chunks, count = {}, 0, 0
            batch.setdefault(rank, []).append(run)
            chunks, count = chunks + len(run), count + 1
    if batch:
        yield batch


def _some_ranks(wanted: dict[int, Ranges]) -> Iterable[dict[int, Ranges]]:
    part: dict[int, Ranges] = {}
    size_bytes = count = 0
    for rank, ranges in wanted.items():
        more = sum(size for _, size in ranges)
        if part and (size_bytes + more > _BATCH_BYTES or count + len(ranges) > _BATCH_RANGES):
            yield part
            part, size_bytes, count = {}, 0, 0
        part[rank] = ranges
        size_bytes, count = size_bytes + more, count + len(ranges)
    if part:
        yield part


def _digests(raw: bytes, manifest: Manifest) -> dict[int, tuple[Hashable, int]]:
    """Return the digests of leaves by index, as `Captured` has them: those of one leaf are of its bytes alone."""
    found: dict[int, tuple[Hashable, int]] = {}
    try:
        by_structure = digests.parse(raw)
        compared = json.loads(raw)["compared"]
    except (SlotError, KeyError, ValueError):
        return found
    parts = leaf_parts(leaf_paths(manifest.tree))
    for (structure, values), (name, (together, *starts)) in zip(by_structure.items(), compared.items(), strict=True):
        cut = is_large(manifest.tensors, parts[name])
        groups = {index: number for number, index in enumerate(starts)}
        number = -1
        for index in parts[name]:
            number = groups.get(index, number)
            spec = manifest.tensors[index]
            if together == 1 and index in groups:
                first_bytes = CHUNK_BYTES - manifest.offsets[index] % CHUNK_BYTES if cut else spec.nbytes
                found[index] = (min(first_bytes, spec.nbytes), spec.nbytes), int(values[number])
            # Whether an integer tensor was compared nobody knows here.
            elif together > 1 and number >= 0 and spec.kind == "torch" and spec.nbytes and "float" in spec.dtype:
                found[index] = (structure, number), int(values[number])
    return found
