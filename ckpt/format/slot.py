"""Slot files: one capture of one rank in a memory-mapped file that outlives the processes which wrote it.

A slot is EMPTY, WRITING or COMPLETE. The header, with a checksum of itself, of the manifest and of the
table of chunk checksums, is published last, and its state word is the last of its bytes. So whoever dies at
whatever moment leaves a slot that reads as complete or is refused, never a mixture. Readers trust no byte:
a slot may come from another host.
"""

import contextlib
import errno
import math
import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import SlotError
from .pair import Pair

CHUNK_BYTES: Final = 1 << 20
"""Payload bytes that share one checksum."""

HEADER_BYTES: Final = 4096
"""Size of the header page, and the alignment of the payload."""

MAX_RUN_ID_BYTES: Final = 200

_WASTED_BYTES: Final = 1 << 20

State = Literal["EMPTY", "WRITING", "COMPLETE"]

MAGIC: Final = b"RRSLOT\x00\x01"  # The last byte is the version of the format.
_STATES: Final[dict[int, State]] = {
    0x59_54_50_4D_45: "EMPTY",
    0x47_4E_49_54_52_57: "WRITING",
    0x45_4E_4F_44: "COMPLETE",
}
_WORDS: Final[dict[State, int]] = {state: word for word, state in _STATES.items()}

# magic, state word, header checksum, payload offset: readable in every state.
_PREFIX: Final = struct.Struct("<8sQQQ")
# _NUMBERS, then the run id with its length.
_FIELDS: Final = struct.Struct(f"<QIIQQQQQQH{MAX_RUN_ID_BYTES}s")
_NUMBERS: Final = (
    "topology", "rank", "world_size", "generation", "step",
    "manifest_bytes", "payload_bytes", "manifest_checksum", "table_checksum",
)  # fmt: skip
_STATE_AT: Final = slice(8, 16)
_APART: Final = re.compile(r"/proc/\d+/fd/\d+")
_CHECKSUM_AT: Final = slice(16, 24)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotHeader:
    """What a complete slot holds: the state of `rank` after `step` optimizer steps, made in `generation`."""

    run_id: str
    topology: int
    rank: int
    world_size: int
    generation: int
    step: int
    manifest_bytes: int
    manifest_checksum: int
    table_checksum: int
    payload_offset: int
    payload_bytes: int

    @property
    def pair(self) -> Pair:
        """Generation and step."""
        return Pair(self.generation, self.step)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that belong to this capture, from its start."""
        return self.payload_offset + self.payload_bytes

    @property
    def chunk_count(self) -> int:
        """Number of payload chunks, and of entries in the checksum table."""
        return chunk_count(self.payload_bytes)

    @property
    def checksums_offset(self) -> int:
        """Where the checksum table begins, right behind the manifest."""
        return _round_up(HEADER_BYTES + self.manifest_bytes, 8)


def chunk_count(payload_bytes: int) -> int:
    """Return how many chunks a payload of `payload_bytes` has."""
    return math.ceil(payload_bytes / CHUNK_BYTES)


def plan_layout(manifest_bytes: int, payload_bytes: int, *, preferred_offset: int = 0) -> tuple[int, int]:
    """Return `(payload_offset, capacity_bytes)` for such a capture; its manifest may grow by half.

    Args:
        manifest_bytes: Length of the manifest now.
        payload_bytes: Length of the payload.
        preferred_offset: Taken as the payload's offset if the capture as it is now fits before it.
    """
    needed_bytes = _round_up(HEADER_BYTES + manifest_bytes, 8) + 8 * chunk_count(payload_bytes)
    payload_offset = _round_up(needed_bytes + manifest_bytes // 2 + HEADER_BYTES, HEADER_BYTES)
    if needed_bytes <= preferred_offset:
        payload_offset = preferred_offset
    return payload_offset, _round_up(payload_offset + payload_bytes, HEADER_BYTES)


def is_wasteful(capacity_bytes: int, needed_bytes: int) -> bool:
    """Tell whether a slot takes much more memory than what is to be in it needs."""
    return capacity_bytes > 2 * needed_bytes + _WASTED_BYTES


def slot_head(*, manifest: bytes, table: bytes, payload_bytes: int, **fields: Any) -> bytes:
    """Return what a file that is a complete slot has before its payload; `fields` are those of `SlotHeader`.

    Raises:
        SlotError: A field is out of range.
    """
    payload_offset, capacity_bytes = plan_layout(len(manifest), payload_bytes)
    header = _header(manifest, table, payload_bytes=payload_bytes, payload_offset=payload_offset, **fields)
    _check_fits(header, capacity_bytes)
    manifest = manifest.ljust(header.checksums_offset - HEADER_BYTES, b"\0")
    return (_pack_header(header) + manifest + table).ljust(payload_offset, b"\0")


def parse_header(page: bytes | bytearray | memoryview, capacity_bytes: int) -> SlotHeader:
    """Return the header in `page`, the first 4096 bytes of a complete slot in a file of `capacity_bytes`.

    Raises:
        SlotError: The page is not the header of a complete slot, or announces bytes beyond the file.
    """
    page = bytes(page)
    if len(page) != HEADER_BYTES:
        raise SlotError(f"slot header has {len(page)} bytes, not {HEADER_BYTES}")
    state, payload_offset = _read_prefix(page, capacity_bytes)
    if state != "COMPLETE":
        raise SlotError(f"slot is {state}, not COMPLETE")
    if int.from_bytes(page[_CHECKSUM_AT], "little") != _header_checksum(page):
        raise SlotError("slot header does not match its checksum: it is torn or corrupt")
    *numbers, run_id_bytes, run_id = _FIELDS.unpack_from(page, _PREFIX.size)
    header = SlotHeader(
        run_id=_decode_run_id(run_id, run_id_bytes),
        payload_offset=payload_offset,
        **dict(zip(_NUMBERS, numbers, strict=True)),
    )
    _check_fits(header, capacity_bytes)
    return header


class Slot:
    """One mapped slot file, made by `create`, `open` or `of`; it has one writer at a time and many readers.

    Attributes:
        path: The file.
        capacity_bytes: Size of the whole file.
        payload_offset: Where tensor bytes begin; page aligned and the same for every capture in this file.
        buffer: The whole file; writable if the slot is.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, payload_offset: int) -> None:
        """Wrap `mapping`; use `create`, `open` or `of` instead."""
        self.path = path
        self.capacity_bytes = len(mapping)
        self.payload_offset = payload_offset
        self.buffer = memoryview(mapping)
        self._mapping = mapping
        self._release: Callable[[], object] | None = None

    @classmethod
    def create(cls, path: Path | str, *, capacity_bytes: int, payload_offset: int, apart: bool = False) -> Self:
        """Return a new EMPTY slot at `path`, every byte allocated now so that no later write can fail.

        Args:
            path: The file.
            capacity_bytes: Size of the whole file.
            payload_offset: Where tensor bytes begin.
            apart: Make it in memory outside of any file system, and `path` a link by which `open_file` finds it while
                this process has the slot open; others that have mapped it keep it longer.

        Raises:
            OSError: The file exists already, or there is no room for it (then nothing is left behind).
            ValueError: `payload_offset` is not a page boundary inside the file.
        """
        path = Path(path)
        if payload_offset % HEADER_BYTES or not HEADER_BYTES < payload_offset <= capacity_bytes:
            raise ValueError(f"payload_offset {payload_offset} is not a page boundary inside {capacity_bytes} bytes")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.memfd_create(path.name) if apart else os.open(path, flags, 0o600)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                os.posix_fallocate(descriptor, 0, capacity_bytes)
                mapping = _map(descriptor, writable=True)
                if apart:
                    path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
            except OSError:
                if not apart:
                    path.unlink()
                raise
            mapping[: _PREFIX.size] = _PREFIX.pack(MAGIC, _WORDS["EMPTY"], 0, payload_offset)
            slot = cls(path, mapping, payload_offset)
            if apart:
                slot._release = weakref.finalize(slot, stack.pop_all().close)
        return slot

    @classmethod
    def open(cls, path: Path | str, *, writable: bool = False) -> Self:
        """Return the slot in the file `path`, in whatever state it is.

        Raises:
            OSError: The file cannot be opened.
            SlotError: The file is not a slot of this format, or another user's.
        """
        descriptor = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls.of(descriptor, path, writable=writable)
        finally:
            os.close(descriptor)

    @classmethod
    def of(cls, descriptor: int, path: Path | str, *, writable: bool = False) -> Self:
        """Return the slot in the open file `descriptor`, which the caller may close; messages call it `path`.

        Raises:
            OSError: The file cannot be mapped.
            SlotError: The file is not a slot of this format, or another user's.
        """
        try:
            about = os.fstat(descriptor)
            # Where the vault was removed under the run, as at a logout, its name is free for everybody.
            if about.st_uid != os.geteuid():
                raise SlotError(f"it belongs to uid {about.st_uid}, not to uid {os.geteuid()}")
            _, payload_offset = _read_prefix(os.pread(descriptor, HEADER_BYTES, 0), about.st_size)
            mapping = _map(descriptor, writable=writable)
        except SlotError as error:
            raise SlotError(f"{path}: {error}") from None
        return cls(Path(path), mapping, payload_offset)

    def state(self) -> State:
        """Return the state word; COMPLETE says nothing yet about checksums.

        Raises:
            SlotError: The file is not a slot of this format.
        """
        return _read_prefix(bytes(self.buffer[:HEADER_BYTES]), self.capacity_bytes)[0]

    def header(self) -> SlotHeader:
        """Return the header of a COMPLETE slot, its checksum and bounds verified.

        Raises:
            SlotError: The slot is not COMPLETE, or the header is corrupt.
        """
        return parse_header(self.buffer[:HEADER_BYTES], self.capacity_bytes)

    def header_or_none(self) -> SlotHeader | None:
        """Return what `header` does, None where it raises."""
        try:
            return self.header()
        except SlotError:
            return None

    def begin(self) -> None:
        """Mark the slot WRITING: from here until `publish` or `adopt` no reader accepts it."""
        self._set_state("WRITING")

    def clear(self) -> None:
        """Mark the slot EMPTY: what it held is gone."""
        self._set_state("EMPTY")

    def publish(
        self,
        *,
        run_id: str,
        topology: int,
        rank: int,
        world_size: int,
        generation: int,
        step: int,
        payload_bytes: int,
        manifest: bytes,
        checksums: npt.NDArray[np.uint64] | bytes,
    ) -> SlotHeader:
        """Complete the slot: write `manifest`, `checksums` (one XXH3-64 per payload chunk), then the header.

        Raises:
            SlotError: Manifest, checksums and payload do not fit into this file, or a field is out of range.
        """
        table = checksums if isinstance(checksums, bytes) else checksums.astype("<u8", copy=False).tobytes()
        header = _header(
            manifest,
            table,
            run_id=run_id,
            topology=topology,
            rank=rank,
            world_size=world_size,
            generation=generation,
            step=step,
            payload_offset=self.payload_offset,
            payload_bytes=payload_bytes,
        )
        _check_fits(header, self.capacity_bytes)
        if len(table) != 8 * header.chunk_count:
            raise SlotError(f"{len(table) // 8} checksums for {header.chunk_count} chunks of {payload_bytes} bytes")
        page = _pack_header(header)
        self.begin()
        self.buffer[HEADER_BYTES : HEADER_BYTES + len(manifest)] = manifest
        self.buffer[header.checksums_offset : header.checksums_offset + len(table)] = table
        self._write_header(page)
        return header

    def expect(self, header_page: bytes | bytearray | memoryview) -> tuple[SlotHeader, npt.NDArray[np.uint64]]:
        """Return the header and the checksum table of a capture whose head, all before the payload, was copied here.

        Raises:
            SlotError: The header does not fit this file, or manifest or table do not match it.
        """
        header = parse_header(header_page, self.capacity_bytes)
        if header.payload_offset != self.payload_offset:
            raise SlotError(f"payload at {header.payload_offset} does not fit a file with {self.payload_offset}")
        self._read_manifest(header)
        return header, self._read_table(header)

    def adopt(self, header_page: bytes | bytearray | memoryview, *, verified: bool = False) -> SlotHeader:
        """Complete a slot whose bytes from 4096 on were copied, once all are verified; `verified`: all chunks are.

        Raises:
            SlotError: The header does not fit this file, or the bytes do not match it; nothing is changed.
        """
        page = bytes(header_page)
        header, _ = self.expect(page)
        if not verified:
            self._verify(header)
        self.begin()
        self._write_header(page)
        return header

    def manifest(self) -> bytes:
        """Return the manifest of a COMPLETE slot, its checksum verified.

        Raises:
            SlotError: The slot is not COMPLETE, or the manifest is corrupt.
        """
        return self._read_manifest(self.header())

    def verify(self) -> SlotHeader:
        """Verify every checksum of a COMPLETE slot and return its header.

        Raises:
            SlotError: The slot is not COMPLETE, is corrupt (says where), or was rewritten meanwhile.
        """
        header = self.header()
        self._verify(header)
        if self.header() != header:
            raise SlotError(f"rank {header.rank} step {header.step}: slot was rewritten while it was verified")
        return header

    def verify_chunk(self, header: SlotHeader, table: npt.NDArray[np.uint64], index: int) -> None:
        """Verify payload chunk `index` against what `expect` returned; SlotError when it is corrupt."""
        start = header.payload_offset + index * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, header.used_bytes)
        if xxhash.xxh3_64_intdigest(self.buffer[start:end]) != int(table[index]):
            raise SlotError(f"rank {header.rank} step {header.step}: chunk {index} does not match its checksum")

    def close(self) -> None:
        """Unmap the file; views that are still in use keep the mapping alive until they are gone."""
        if self._release is not None:
            self._release()
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._mapping.close()

    def _verify(self, header: SlotHeader) -> None:
        self._read_manifest(header)
        table = self._read_table(header)
        for index in range(header.chunk_count):
            self.verify_chunk(header, table, index)

    def _read_manifest(self, header: SlotHeader) -> bytes:
        manifest = bytes(self.buffer[HEADER_BYTES : HEADER_BYTES + header.manifest_bytes])
        if xxhash.xxh3_64_intdigest(manifest) != header.manifest_checksum:
            raise SlotError(f"rank {header.rank} step {header.step}: manifest does not match its checksum")
        return manifest

    def _read_table(self, header: SlotHeader) -> npt.NDArray[np.uint64]:
        table = bytes(self.buffer[header.checksums_offset : header.checksums_offset + 8 * header.chunk_count])
        if xxhash.xxh3_64_intdigest(table) != header.table_checksum:
            raise SlotError(f"rank {header.rank} step {header.step}: checksum table does not match its checksum")
        return np.frombuffer(table, dtype="<u8")

    def _set_state(self, state: State) -> None:
        self.buffer[_STATE_AT] = _WORDS[state].to_bytes(8, "little")

    def _write_header(self, page: bytes) -> None:
        self.buffer[_STATE_AT.stop : HEADER_BYTES] = page[_STATE_AT.stop :]
        self._set_state("COMPLETE")


def open_file(path: Path | str, flags: int) -> int:
    """Return a descriptor of the slot file `path`, which may be a link only if `Slot.create` made it.

    Raises:
        OSError: The file cannot be opened, or is another link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP or not _APART.fullmatch(target := os.readlink(path)):
            raise
    return os.open(target, flags | os.O_CLOEXEC)


def _map(descriptor: int, *, writable: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)


def _read_prefix(page: bytes, capacity_bytes: int) -> tuple[State, int]:
    if len(page) < HEADER_BYTES:
        raise SlotError(f"file of {len(page)} bytes is too short for a slot")
    magic, word, _, payload_offset = _PREFIX.unpack_from(page)
    if magic != MAGIC:
        raise SlotError(f"not a slot of this format: it begins with {magic.hex()}, not {MAGIC.hex()}")
    if word not in _STATES:
        raise SlotError(f"slot has the unknown state {word:#x}")
    if payload_offset % HEADER_BYTES or not HEADER_BYTES < payload_offset <= capacity_bytes:
        raise SlotError(f"slot of {capacity_bytes} bytes announces its payload at {payload_offset}")
    return _STATES[word], payload_offset


def _header(manifest: bytes, table: bytes, **fields: Any) -> SlotHeader:
    return SlotHeader(
        manifest_bytes=len(manifest),
        manifest_checksum=xxhash.xxh3_64_intdigest(manifest),
        table_checksum=xxhash.xxh3_64_intdigest(table),
        **fields,
    )


def _pack_header(header: SlotHeader) -> bytes:
    run_id = header.run_id.encode()
    try:
        fields = _FIELDS.pack(*(getattr(header, name) for name in _NUMBERS), len(run_id), run_id)
    except struct.error as error:
        raise SlotError(f"slot header out of range: {header}: {error}") from None
    prefix = _PREFIX.pack(MAGIC, _WORDS["COMPLETE"], 0, header.payload_offset)
    page = bytearray((prefix + fields).ljust(HEADER_BYTES, b"\0"))
    page[_CHECKSUM_AT] = _header_checksum(page).to_bytes(8, "little")
    return bytes(page)


def _header_checksum(page: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(page[: _CHECKSUM_AT.start] + page[_CHECKSUM_AT.stop :])


def _decode_run_id(run_id: bytes, size: int) -> str:
    if size > MAX_RUN_ID_BYTES:
        raise SlotError(f"slot announces a run id of {size} bytes, more than {MAX_RUN_ID_BYTES}")
    try:
        return run_id[:size].decode()
    except UnicodeDecodeError as error:
        raise SlotError(f"slot has a run id that is not UTF-8: {error}") from None


def _check_fits(header: SlotHeader, capacity_bytes: int) -> None:
    if len(header.run_id.encode()) > MAX_RUN_ID_BYTES:
        raise SlotError(f"run id {header.run_id!r} is longer than {MAX_RUN_ID_BYTES} bytes")
    if header.rank >= header.world_size:
        raise SlotError(f"rank {header.rank} is not below the world size {header.world_size}")
    if header.checksums_offset + 8 * header.chunk_count > header.payload_offset:
        raise SlotError(
            f"manifest of {header.manifest_bytes} bytes and {header.chunk_count} checksums do not fit before "
            f"the payload at {header.payload_offset}"
        )
    if header.used_bytes > capacity_bytes:
        raise SlotError(f"payload of {header.payload_bytes} bytes does not fit in a slot of {capacity_bytes} bytes")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
