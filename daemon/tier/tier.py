"""The persistent tier: committed pairs in storage that outlives the hosts, through fsspec.

A pair is a directory `<target>/<run id>/<generation>-<step>` with a file for each rank, and it is published by
`manifest.json`, which is written last. A rank's file is the slot file itself, cut into compressed frames. Reading
trusts no byte; what comes out is verified as any slot is. Every call here may block for as long as the storage does.
"""

import re
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import quote

import xxhash
import zstandard

from resilient_run.ckpt.errors import CheckpointError, DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair, is_import

from .files import (
    FileWriter,
    fsync_directory,
    is_local,
    is_there,
    make_directories,
    names_in,
    planted_by,
    write_small,
)
from .manifest import Persisted
from .offload import offload

_T = TypeVar("_T")

FRAME_BYTES = 4 << 20
"""Bytes of a slot file that are compressed together; the last frame is shorter."""

MANIFEST = "manifest.json"
REFUSED_MANIFEST = "manifest.refused.json"

_MAGIC = b"RRTIER\x00\x01"
_FRAME = struct.Struct("<IIQ")
"""Stored bytes, bytes once decompressed, XXH3-64 of the stored bytes."""

_STALL_S = 120.0
_MAX_STORED_BYTES = FRAME_BYTES + (FRAME_BYTES >> 8) + 1024
_MAX_MANIFEST_BYTES = 64 << 20
_PAIR_NAME = re.compile(r"(0|[1-9]\d{0,18})-(\d{1,19})")


class TierError(CheckpointError):
    """The storage cannot be reached or refuses; trying again later may help."""


class IncompleteError(TierError):
    """A pair lacks what it cannot be published without."""


class RankWriter:
    """Writes one rank's slot file, range by range from byte 0; `finish` or `abandon` ends it.

    Every call raises `TierError` when the storage refuses.

    Args:
        file: Where to.
        guarded: Turns what the storage raises into a `TierError`.
        level: zstandard's compression level.
    """

    def __init__(self, file: FileWriter, guarded: Callable[[], AbstractContextManager[None]], level: int) -> None:
        self._file = file
        self._guarded = guarded
        self._compressor = zstandard.ZstdCompressor(level=level)
        self._stored_bytes = 0
        self._append(_MAGIC)

    def write(self, data: memoryview) -> None:
        """Append the next `FRAME_BYTES` bytes of the slot file, at its end what is left."""
        frame = self._compressor.compress(data)
        self._append(_FRAME.pack(len(frame), len(data), xxhash.xxh3_64_intdigest(frame)))
        self._append(frame)

    def _append(self, data: bytes) -> None:
        with self._guarded():
            self._file.write(data)
        self._stored_bytes += len(data)

    def finish(self) -> int:
        """Make the file durable, give it its name, and return its size in bytes."""
        with self._guarded():
            self._file.finish()
        return self._stored_bytes

    def abandon(self) -> None:
        """Give up, leaving nothing behind where the storage allows that."""
        with self._guarded():
            self._file.abandon()


class Tier:
    """The published pairs of one run id below one target; any thread may use it.

    Every call but `check` raises `TierError` when the storage refuses or does not answer.

    Args:
        target: A directory or an fsspec URL.
        run_id: The run.
        level: zstandard's compression level.
        host: The host that writes; "" outside of daemons.
        of_others: Whether pairs may be another user's, for who reads what they have named. Else what a stranger has
            made there, in a directory where others may write, is a TierError.
    """

    def __init__(self, target: str, run_id: str, *, level: int = 1, host: str = "", of_others: bool = False) -> None:
        self._target = target
        self._run_id = run_id
        self._level = level
        # Two hosts that write the same rank must not take each other's parts for their own.
        self._part = f".{xxhash.xxh3_64_hexdigest(host.encode())}.part" if host else ".part"
        self._of_others = of_others
        self._opening = threading.Lock()
        self._manifests: dict[Pair, Persisted] = {}
        self._begins: dict[tuple[Pair, int], list[int]] = {}
        self._attempts: dict[Pair, object] = {}
        self.shown = _without_password(target)
        """The target, for people."""

    def check(self) -> None:
        """Check, without asking the storage, that the target can be used.

        Raises:
            DaemonError: The URL's scheme is unknown, or the package that serves it is not installed.
        """
        import fsspec

        protocol = re.split(r"::|://", self._target)[0] if re.search(r"::|://", self._target) else "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            raise DaemonError(
                f"persist.target {self.shown}: {error}; install the fsspec package of that storage where resilientd "
                "runs, or name a directory that all hosts share"
            ) from error

    def published(self) -> list[Pair]:
        """Return the published pairs, newest last; an import is before all others."""
        return _published(self._found())

    def manifest(self, pair: Pair) -> Persisted:
        """Return the manifest of a published pair.

        Raises:
            SlotError: The pair is not published, or its manifest is damaged.
        """
        if pair not in self._manifests:
            where, what = f"{self._directory(pair)}/{MANIFEST}", f"generation {pair[0]} step {pair[1]}"
            with self._storage(f"read {MANIFEST} of {pair}"):
                self._refuse_planted(pair)
                if not is_there(self._fs, where):
                    raise SlotError(f"{what} is not published in {self.shown}")
                data = self._fs.cat_file(where, start=0, end=_MAX_MANIFEST_BYTES)
            try:
                self._manifests = {pair: Persisted.load(data, run_id=self._run_id, pair=pair)}
                self._begins = {}
            except SlotError as error:
                raise SlotError(f"{MANIFEST} of {what} in {self.shown}: {error}") from error
        return self._manifests[pair]

    def check_whole(self, pair: Pair) -> None:
        """Check that each file of a published pair has the size that it was written with.

        Raises:
            SlotError: One has not, or the pair is not published, or its manifest is damaged.
        """
        # Somebody may have imported anew.
        self._manifests.pop(pair, None)
        for rank, file in self.manifest(pair).ranks.items():
            path = f"{self._directory(pair)}/{_rank_name(rank)}"
            with self._storage(f"look at {path}"):
                found = self._fs.size(path) if is_there(self._fs, path) else 0
            if found != file.stored_bytes:
                raise SlotError(f"{path} has {found} bytes, not {file.stored_bytes}")

    def shown_pair(self, pair: Pair) -> str:
        """Return the directory or URL of `pair`, for people."""
        return f"{self.shown.rstrip('/')}/{self._name}/{_name_of(pair)}"

    def write(self, pair: Pair, rank: int) -> RankWriter:
        """Begin the file of `rank`; what an earlier attempt left of it is replaced."""
        guarded = partial(self._storage, f"write {_rank_name(rank)} of {pair}")
        with guarded():
            self._refuse_planted(pair)
            if is_local(self._fs):
                make_directories(self._place or "/", (self._name, _name_of(pair)))
            else:
                self._fs.makedirs(self._directory(pair), exist_ok=True)
            # Somebody may have been faster.
            self._refuse_planted(pair)
            file = FileWriter(self._fs, f"{self._directory(pair)}/{_rank_name(rank)}", self._part)
        return RankWriter(file, guarded, self._level)

    def read(self, pair: Pair, rank: int, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield number and content of the frames `wanted` of the slot file of `rank`, in their order.

        The caller verifies the whole. Where frames begin is found by going through the file, and remembered.

        Raises:
            SlotError: The pair is not published, or the file is damaged.
        """
        manifest = self.manifest(pair)
        if rank not in manifest.ranks:
            raise SlotError(f"{self.shown} has ranks 0 to {manifest.world_size - 1} of {pair}, not rank {rank}")
        used_bytes, what = manifest.ranks[rank].capacity_bytes, f"rank {rank} of {pair} in {self.shown}"
        begins, count = [*self._begins.get((pair, rank), [len(_MAGIC)])], -(-used_bytes // FRAME_BYTES)
        with self._storage(f"read rank {rank} of {pair}"), self._open(pair, rank, what) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise SlotError(f"{what} is not a file of this format")
            decompressor = zstandard.ZstdDecompressor()
            for number in sorted(wanted):
                if number >= count:
                    raise SlotError(f"{what} has {used_bytes} bytes, less than were asked for")
                known = -1
                while known < number:
                    known = min(number, len(begins) - 1)
                    file.seek(begins[known])
                    size = min(FRAME_BYTES, used_bytes - known * FRAME_BYTES)
                    stored_bytes, checksum = _read_prefix(file, size, what)
                    begins[known + 1 :] = begins[known + 1 :] or [begins[known] + _FRAME.size + stored_bytes]
                yield number, _read_frame(file, decompressor, stored_bytes, size, checksum, what)
        self._begins[pair, rank] = begins

    def read_ranges(self, pair: Pair, rank: int, ranges: Sequence[tuple[int, int]]) -> bytes:
        """Return ranges (offset and size) of the slot file of `rank`, one after the other; nothing is verified yet.

        Raises:
            SlotError: The pair is not published, or the file is damaged.
        """
        data, cut = [bytearray(size) for _, size in ranges], cuts(ranges)
        for frame, content in self.read(pair, rank, cut):
            for number, at, start, end in cut[frame]:
                data[number][at : at + end - start] = content[start:end]
        return b"".join(data)

    def publish(self, persisted: Persisted) -> None:
        """Publish a pair whose files are all written.

        Raises:
            TierError: One of them is gone, or the storage refuses; the pair is not published then, as far as possible.
        """
        pair = persisted.pair
        attempt = self._attempts[pair] = object()
        with self._storage(f"publish {pair}"):
            self._refuse_planted(pair)
            self._refuse_incomplete(persisted)
            manifest = f"{self._directory(pair)}/{MANIFEST}"
            write_small(self._fs, manifest, persisted.dump(), self._part)
            if is_local(self._fs):
                fsync_directory(self._root)
            try:
                # Another host, which takes itself for the root, may have removed them meanwhile.
                self._refuse_incomplete(persisted, MANIFEST)
            except IncompleteError:
                # An attempt that hung must not take back what the next one has published.
                if self._attempts.get(pair) is attempt:
                    with suppress(Exception):
                        self._fs.rm_file(manifest)
                raise
            self._attempts.pop(pair, None)

    def refuse(self, pair: Pair) -> None:
        """Take back the publication of a pair that turned out to be damaged; its files stay until they are pruned."""
        directory = self._directory(pair)
        self._manifests.pop(pair, None)
        with self._storage(f"refuse {pair}"):
            self._refuse_planted(pair)
            if is_there(self._fs, f"{directory}/{MANIFEST}"):
                self._fs.mv(f"{directory}/{MANIFEST}", f"{directory}/{REFUSED_MANIFEST}")

    def prune(self, keep: int, before: Pair | None = None) -> list[Pair]:
        """Delete what `superfluous` names, and return the pairs that are still published, newest last.

        Raises:
            TierError: Something cannot be deleted; the rest is.
        """
        found = self._found()
        failed: TierError | None = None
        for pair in superfluous(found, keep, before):
            try:
                # Another host may have been the root, and published it, since it was listed.
                if MANIFEST not in found[pair] and self._is_published(pair):
                    found[pair] = (MANIFEST,)
                    continue
                self._delete(pair)
                del found[pair]
            except TierError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return _published(found)

    def _is_published(self, pair: Pair) -> bool:
        with self._storage(f"look at {pair}"):
            return is_there(self._fs, f"{self._directory(pair)}/{MANIFEST}")

    def _delete(self, pair: Pair) -> None:
        with self._storage(f"delete {pair}"):
            self._refuse_planted(pair)
            # First, so that nobody takes a half deleted pair for a published one.
            self._unpublish(pair)
            try:
                with suppress(FileNotFoundError):
                    self._fs.rm(self._directory(pair), recursive=True)
            finally:
                # A host that was the root before may have published it meanwhile.
                self._unpublish(pair)

    def _unpublish(self, pair: Pair) -> None:
        self._manifests.pop(pair, None)
        manifest = f"{self._directory(pair)}/{MANIFEST}"
        if is_there(self._fs, manifest):
            self._fs.rm_file(manifest)

    def _refuse_incomplete(self, persisted: Persisted, *others: str) -> None:
        """Raise a TierError if a rank's file of a pair is gone, or one of `others`."""
        expected = {*map(_rank_name, persisted.ranks), *others}
        if missing := sorted(expected - names_in(self._fs, self._directory(persisted.pair))):
            raise IncompleteError(f"{self.shown}: gone from {persisted.pair}: {', '.join(missing[:10])}")

    @contextmanager
    def _open(self, pair: Pair, rank: int, what: str) -> Iterator[Any]:
        directory, name = self._directory(pair), _rank_name(rank)
        self._fs.invalidate_cache()
        try:
            file = self._fs.open(f"{directory}/{name}", "rb")
        except FileNotFoundError:
            names = names_in(self._fs, directory)
            # Without its manifest, the storage is not there, or the pair was deleted.
            if MANIFEST in names and name not in names:
                raise SlotError(f"{what} is gone") from None
            raise
        with file:
            yield file

    def _found(self) -> dict[Pair, Collection[str]]:
        """Return every pair that has a directory, and the names in that."""
        with self._storage("list"):
            self._refuse_planted()
            matches = filter(None, map(_PAIR_NAME.fullmatch, names_in(self._fs, self._root)))
            pairs = [Pair(int(match[1]), int(match[2])) for match in matches]
            return {pair: names_in(self._fs, self._directory(pair)) for pair in pairs}

    def _refuse_planted(self, pair: Pair | None = None) -> None:
        """Raise a TierError if a stranger has made the run's directory, or that of `pair`."""
        if self._of_others or not is_local(self._fs):
            return
        names = [self._name] if pair is None else [self._name, _name_of(pair)]
        if (found := planted_by(self._place or "/", names)) is not None:
            path, uid = found
            raise TierError(
                f"{path} belongs to uid {uid}, in a directory where others may write: remove it, or choose another "
                "target, of your own"
            )

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        import fsspec.core

        fs, path = fsspec.core.url_to_fs(self._target)
        return fs, path.rstrip("/")

    @property
    def _fs(self) -> Any:
        with self._opening:
            return self._opened[0]

    @property
    def _place(self) -> str:
        with self._opening:
            return self._opened[1]

    @property
    def _name(self) -> str:
        name = quote(self._run_id, safe="")
        # A run id may be "..", a directory must not.
        return f"%2E{name[1:]}" if name.startswith(".") else name

    @property
    def _root(self) -> str:
        return f"{self._place}/{self._name}"

    def _directory(self, pair: Pair) -> str:
        return f"{self._root}/{_name_of(pair)}"

    @contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        """Turn whatever a storage library raises into a `TierError`."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # the boundary to libraries that raise classes of their own
            raise TierError(
                f"{self.shown}: cannot {doing}: {type(error).__name__}: {_without_password(str(error))}"
            ) from error


async def call(tier: Tier, function: Callable[..., _T], *args: Any, background: bool = False) -> _T:
    """Return `function(*args)`, a call of the storage of `tier`, without blocking the event loop.

    Raises:
        TierError: The storage refuses, or took longer than 120 s.
        SlotError: What it holds is damaged.
    """
    try:
        return await offload(function, *args, timeout_s=_STALL_S, background=background)
    except TimeoutError as error:
        raise TierError(f"{tier.shown}: no answer within {_STALL_S:.0f} s") from error
    except OSError as error:
        raise TierError(f"{tier.shown}: {error}") from error


def superfluous(found: Mapping[Pair, Collection[str]], keep: int, before: Pair | None = None) -> list[Pair]:
    """Return the pairs to delete, oldest first: published ones but the newest `keep`, and dead attempts.

    A pair older than the newest published one is dead, whatever became of it. So is an unfinished one before `before`,
    but for an import, which no root asks for.

    Args:
        found: Every pair that has a directory → the names in that.
        keep: At least 1, so that the newest published pair always stays.
        before: The only unpublished pair that may still be published, or a newer one.
    """
    kept = _published(found)[-keep:]

    def is_dead(pair: Pair, names: Collection[str]) -> bool:
        if pair in kept:
            return False
        is_unfinished = MANIFEST not in names and REFUSED_MANIFEST not in names and not is_import(pair)
        return bool(kept and pair < kept[-1]) or (before is not None and pair < before and is_unfinished)

    return sorted(pair for pair, names in found.items() if is_dead(pair, names))


def _published(found: Mapping[Pair, Collection[str]]) -> list[Pair]:
    return sorted(pair for pair, names in found.items() if MANIFEST in names)


def _rank_name(rank: int) -> str:
    return f"rank{rank}.zst"


def _without_password(text: str) -> str:
    """Return what may be logged of text with URLs in it."""
    return re.sub(r"://[^/\s]*@", "://…@", text)


def _name_of(pair: Pair) -> str:
    return f"{pair[0]}-{pair[1]}"


def cuts(ranges: Sequence[tuple[int, int]]) -> dict[int, list[tuple[int, int, int, int]]]:
    """Return what frames have of `ranges` (offset and size) of a slot file, by the frame's number.

    That is the number of the range, where in it a piece goes, and where the piece begins and ends in the frame.
    """
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, (offset, size) in enumerate(ranges):
        at = 0
        while at < size:
            frame, start = divmod(offset + at, FRAME_BYTES)
            end = min(FRAME_BYTES, start + size - at)
            found.setdefault(frame, []).append((number, at, start, end))
            at += end - start
    return found


def _read_prefix(file: Any, size: int, what: str) -> tuple[int, int]:
    """Return stored bytes and checksum of the frame of `size` bytes that begins here."""
    prefix = file.read(_FRAME.size)
    if len(prefix) != _FRAME.size:
        raise SlotError(f"{what} is cut short")
    stored_bytes, raw_bytes, checksum = _FRAME.unpack(prefix)
    if raw_bytes != size or stored_bytes > _MAX_STORED_BYTES:
        raise SlotError(f"{what} announces {stored_bytes} bytes for {raw_bytes} where {size} are due")
    return stored_bytes, checksum


def _read_frame(
    file: Any, decompressor: zstandard.ZstdDecompressor, stored_bytes: int, size: int, checksum: int, what: str
) -> bytes:
    """Return the content of the frame of which `_read_prefix` has been read, `size` bytes."""
    frame = file.read(stored_bytes)
    if len(frame) != stored_bytes or xxhash.xxh3_64_intdigest(frame) != checksum:
        raise SlotError(f"{what} does not match its checksums")
    try:
        if zstandard.frame_content_size(frame) != size:
            raise SlotError(f"{what} has a frame of another size than it announces")
        return decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SlotError(f"{what} has a malformed frame: {error}") from error
