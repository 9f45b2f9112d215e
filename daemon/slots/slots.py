"""The slot files of one job on this host: created, lent, received into, verified, given up."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
import resource
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from resilient_run.ckpt.errors import MemoryBudgetError, SlotError, SlotSizeError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, MAGIC, Slot, SlotHeader, is_wasteful

from ..base.codec import Record, limited
from ..base.fields import Fields
from ..base.record import RECORD_NAME, JobRecord
from ..run.commit import Agreed, is_dead
from ..run.rounds import Round
from ..run.view import JobView
from .keeping import is_kept, version_of
from .memory import FEWER, MemoryBudget

log = logging.getLogger(__name__)

MAX_SLOT_BYTES = 1 << 44

_ROOM_S = 10.0
"""Longer than a step waits for its slots, which then go on without."""

_T = TypeVar("_T")
_SLOT_NAME = re.compile(r"rank(\d+)\.\d+\.slot")


def read_size(values: Fields, name: str) -> int:
    """Return the field `name`, the size of a slot whose payload begins at `payload_offset`; both are checked."""
    payload_offset = values.integer("payload_offset", low=2 * HEADER_BYTES, high=MAX_SLOT_BYTES)
    if payload_offset % HEADER_BYTES:
        raise values.wrong("payload_offset", f"a multiple of {HEADER_BYTES}")
    return values.integer(name, low=payload_offset, high=MAX_SLOT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry(Record):
    """Size of a slot file, and where in it the payload begins."""

    capacity_bytes: int = limited(key="used_bytes", read=read_size)
    payload_offset: int


@dataclass(kw_only=True, slots=True, eq=False)
class SlotFile:
    """One slot file and what the daemon knows of it.

    Attributes:
        slot: The mapped file.
        rank: The rank whose state it is for.
        pair: The complete, verified capture in it, None when there is none.
        busy: A fetch is writing into it.
        stray: An earlier daemon left it unfinished: a trainer may still write to it.
    """

    slot: Slot
    rank: int
    pair: Pair | None = None
    busy: bool = False
    stray: bool = False

    def fits(self, geometry: Geometry) -> bool:
        """Tell whether a capture of this geometry can be written here, without much waste."""
        capacity_bytes, needed_bytes = self.slot.capacity_bytes, geometry.capacity_bytes
        is_large = capacity_bytes >= needed_bytes and not is_wasteful(capacity_bytes, needed_bytes)
        return is_large and self.slot.payload_offset == geometry.payload_offset

    def describe(self) -> dict[str, Any]:
        """Return what `resilientctl status` shows of it."""
        return {
            "rank": self.rank,
            "file": self.slot.path.name,
            "bytes": self.slot.capacity_bytes,
            "state": self.slot.state(),
            "generation": self.pair and self.pair[0],
            "step": self.pair and self.pair[1],
        }


@dataclass(kw_only=True, slots=True, eq=False)
class JobSlots:
    """The slot files of one job on this host, for each rank that it holds one more than committed steps stay in memory.

    While a rank's geometry changes, files of the old one that hold what is committed are among these until they may
    be overwritten. Where not all steps have room that should stay, the root hears for how many there is (`keep`).
    """

    directory: Path
    record: JobRecord
    budget: MemoryBudget
    adopted: bool = False
    lost: dict[int, str] = field(default_factory=dict)
    """Rank → what became of its slot that was last lost."""
    received_bytes: int = 0
    """Of replicas that came from other hosts, or from the persistent tier."""
    receiving: defaultdict[int, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Rank → the lock of whoever receives a replica of it: one at a time."""
    copied_ranks: int = 0
    """So many are copied while they are persisted."""
    _room: int | None = None
    """For how many committed steps there was room when that was looked at last, 0: not for one."""
    _lent: dict[int, list[SlotFile]] = field(default_factory=dict)
    _files: dict[int, list[SlotFile]] = field(default_factory=dict)
    _geometries: dict[int, Geometry] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_kept(self) -> bool:
        """Tell whether these slots must be kept although no launcher holds the job open."""
        return is_kept(self.directory, self.record)

    @property
    def keep(self) -> int:
        """How many committed steps stay here: as many as should, or as there is room for.

        If there is no room for one, no older one need go: that would not help.
        """
        return self._room or self.record.keep

    @property
    def key(self) -> str:
        """Name of the job in the memory budget."""
        return self.directory.name

    def files(self) -> Iterator[SlotFile]:
        """Return every file, by rank."""
        for rank in sorted(self._files):
            yield from self._files[rank]

    def held(self) -> dict[int, set[Pair]]:
        """Return rank → pairs of the complete, verified replicas."""
        return {
            rank: pairs
            for rank, files in self._files.items()
            if (pairs := {file.pair for file in files if file.pair is not None})
        }

    def newest(self, rank: int) -> SlotFile | None:
        """Return the file with the newest capture of `rank`."""
        complete = [file for file in self._files.get(rank, ()) if file.pair is not None]
        return max(complete, key=lambda file: file.pair or Pair(0, 0), default=None)

    def find(self, rank: int, pair: Pair) -> SlotFile | None:
        """Return the file that holds `pair` of `rank`."""
        return next((file for file in self._files.get(rank, ()) if file.pair == pair), None)

    def at(self, rank: int, path: str) -> SlotFile | None:
        """Return the file of `rank` whose path is `path`."""
        return next((file for file in self._files.get(rank, ()) if str(file.slot.path) == path), None)

    def update_record(self, **changes: Any) -> None:
        """Change fields of the record and write it."""
        record = replace(self.record, **changes)
        if record != self.record:
            self.record = record
            record.save(self.directory)

    async def adopt(self) -> None:
        """Take over the files that an earlier daemon left, once; what does not verify is cleared and reported."""
        async with self._changing:
            if self.adopted:
                return
            found = []
            for path in sorted(self.directory.glob("*.slot")):
                match, version = _SLOT_NAME.fullmatch(path.name), version_of(path)
                file = await in_thread(self._adopt, path, int(match[1])) if match and version == MAGIC else None
                if file is not None:
                    found.append(file)
                elif match and path.is_symlink():
                    log.warning("%s was in the memory of a daemon that has ended", path)
                    self.lost[int(match[1])] = "it was in the memory of a daemon that has ended"
                    _remove(path)
                elif version in (b"", MAGIC):
                    log.error("removing %s, which is damaged or was never finished", path)
                    _remove(path)
                else:
                    log.error("%s is of another version (%s) and is left alone", path, version.hex())
                    self.budget.found(self.key, path.stat().st_size)
            # All at once: a caller that was cancelled before this leaves nothing half adopted.
            for file in found:
                self._files.setdefault(file.rank, []).append(file)
                self.budget.found(self.key, file.slot.capacity_bytes)
            self.adopted = True

    async def make_room(self, rank: int, geometry: Geometry, *, view: JobView) -> None:
        """Wait for room for a file of `rank`, if what holds it is older, or being committed, and so may go soon."""
        self._geometries[rank] = geometry
        self._look_for_room(view.kept_ranks)
        view.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROOM_S):
                await view.wait_for(lambda: self._room == 0 or self._has_room(rank, geometry, view.agreed))

    async def allocate(self, rank: int, geometry: Geometry, *, agreed: Agreed) -> list[SlotFile]:
        """Return files of `rank` that have room for `geometry`; who asked before has only these from now on.

        While pairs stay in files of another size there are fewer, at least one that may be overwritten: more once those
        may go.

        Raises:
            MemoryBudgetError: New files do not fit.
        """
        async with self._changing:
            # Before the first is made: meanwhile others of them may be trimmed, not these.
            self._lent[rank] = fitting = self._fitting(rank, geometry, agreed)
            while len(fitting) <= self.keep:
                free, count = _free(fitting, agreed), len(self._files.get(rank, ()))
                if free and count > self.keep:
                    break
                try:
                    fitting.append(await self._create(rank, geometry))
                except MemoryBudgetError:
                    if not free or count < 2:
                        raise
                    break
            for file in _free(fitting, agreed)[1:]:
                if len(self._files[rank]) > self.keep + 1:
                    self._remove_file(file)
                    fitting.remove(file)
            return fitting

    def roomy(self, rank: int, geometry: Geometry, *, ranks: Collection[int]) -> Geometry:
        """Return what to make files of for a state that has grown: half as much again keeps the number of moves small.

        The same where there is no file yet, or no room for all steps that should stay if each of `ranks`, which this
        host must hold, has as much.
        """
        files = self._files.get(rank, ())
        if not files or any(file.fits(geometry) for file in files):
            return geometry
        more = Geometry(
            capacity_bytes=geometry.capacity_bytes * 3 // 2,
            payload_offset=geometry.payload_offset * 3 // 2 // HEADER_BYTES * HEADER_BYTES,
        )
        needed_bytes = self._needed_bytes(ranks, self.record.keep, least_bytes=more.capacity_bytes)
        return more if self.budget.has_room(self.key, needed_bytes) else geometry

    async def place(self, rank: int, geometry: Geometry, *, agreed: Agreed) -> SlotFile | None:
        """Return a file of `rank` to receive a replica in, marked busy and WRITING; None when all must be kept.

        Args:
            rank: Whose replica.
            geometry: Size of the replica, and where its payload begins.
            agreed: What is known to be agreed; nothing that is committed, or may be, is given up.

        Raises:
            MemoryBudgetError: A new file does not fit.
        """
        async with self._changing:
            for file in list(self._files.get(rank, ())):
                if file.stray and file.pair is None and not file.busy:
                    self._remove_file(file)
            fitting = self._fitting(rank, geometry, agreed)
            if free := _free(fitting, agreed):
                file = min(free, key=lambda file: file.pair or Pair(0, 0))
            elif len(fitting) <= self.record.keep:
                file = await self._create(rank, geometry)
            else:
                return None
            file.busy, file.pair = True, None
            file.slot.begin()
            return file

    async def accept(self, file: SlotFile, header_page: bytes, *, verified: bool = False) -> None:
        """Complete the busy `file`, which what follows `header_page` was received into; verify chunks that are not yet.

        Raises:
            SlotError: The bytes do not match; the file is as empty as before.
        """
        header = await in_thread(partial(file.slot.adopt, header_page, verified=verified))
        file.pair = header.pair
        self.received_bytes += header.used_bytes

    async def lend_scratch(self, rank: int, size_bytes: int) -> Slot:
        """Return an empty slot whose payload has room for `size_bytes`, for what `rank` reads of other slots.

        Raises:
            MemoryBudgetError: It does not fit.
        """
        offset = 2 * HEADER_BYTES
        path = self.directory / f"read{rank}.slot"
        _remove(path)
        return await self._allocate(path, Geometry(capacity_bytes=offset + size_bytes, payload_offset=offset))

    def return_scratch(self, slot: Slot) -> None:
        """Remove what `lend_scratch` returned."""
        slot.path.unlink(missing_ok=True)
        self.budget.free(self.key, slot.capacity_bytes)
        slot.close()

    def discard(self, file: SlotFile) -> None:
        """Remove the busy `file`: somebody else may still write to it, so it cannot be used again."""
        if file in self._files.get(file.rank, ()):
            self._remove_file(file)

    async def verified(self, file: SlotFile) -> SlotHeader | None:
        """Return the header of `file` when every checksum is right; else clear it, report that, and return None."""
        async with self._changing:
            try:
                return await in_thread(file.slot.verify)
            except SlotError as error:
                self._clear_corrupt(file.slot, file.rank, str(error))
                file.pair = None
                return None

    def refresh(self, ranks: Iterable[int]) -> bool:
        """Learn captures that trainers completed in the files of `ranks` without having said so; True if any."""
        changed = False
        for rank in ranks:
            for file in self._files.get(rank, ()):
                pair = None if file.busy else _complete_pair(file.slot)
                if pair is not None and pair != file.pair:
                    file.pair, changed = pair, True
        return changed

    def clear_dead(self, round_: Round) -> None:
        """Clear every complete slot of a timeline that `round_` left; no fetch may be running, and no trainer."""
        self._lent.clear()
        for file in self.files():
            file.pair = _complete_pair(file.slot)
            if file.pair is not None and is_dead(file.pair, round_):
                file.slot.clear()
                file.pair = None

    def trim(self, keep: Collection[int], agreed: Agreed) -> None:
        """Remove files of ranks that are not in `keep`, and what is too small, or too much, and may be overwritten."""
        self._look_for_room(keep)
        for rank, files in list(self._files.items()):
            geometry = self._geometries.get(rank)
            fitting = files if geometry is None else [file for file in files if file.fits(geometry)]
            kept = sorted(fitting, key=lambda file: agreed.may_overwrite(file.pair))[: self.keep + 1]
            used = self._lent.get(rank, kept)
            for file in list(files):
                outgrown = file not in used and agreed.may_overwrite(file.pair)
                if not file.busy and (rank not in keep or outgrown):
                    self._remove_file(file)

    def surrender(self, rank: int, *, but: Pair | None = None) -> None:
        """Remove the files of `rank` except one that holds `but`; no fetch into them may be running."""
        for file in list(self._files.get(rank, ())):
            if file.pair is None or file.pair != but:
                self._remove_file(file)

    async def clear(self) -> None:
        """Remove every file but keep the job: a new incarnation of its run id begins."""
        async with self._changing:
            for file in list(self.files()):
                self._remove_file(file)

    async def remove(self) -> int:
        """Remove the job's directory with all its slots and return the bytes freed; no fetch may be running."""
        async with self._changing:
            # Links of an earlier daemon lead nowhere.
            freed_bytes = sum(path.stat().st_size for path in self.directory.glob("*.slot") if path.exists())
            for file in self.files():
                file.slot.close()
            self._files.clear()
            self.budget.release(self.key)
            await in_thread(_remove_job, self.directory)
            return freed_bytes

    def _adopt(self, path: Path, rank: int) -> SlotFile | None:
        try:
            slot = Slot.open(path, writable=True)
        except (OSError, SlotError) as error:
            log.error("cannot adopt %s: %s", path, error)
            return None
        self.budget.pin(slot.buffer)
        file = SlotFile(slot=slot, rank=rank, stray=slot.state() == "WRITING")
        if slot.state() == "COMPLETE":
            file.pair = self._verified_pair(slot, rank)
        return file

    def _verified_pair(self, slot: Slot, rank: int) -> Pair | None:
        header: SlotHeader | None = None
        try:
            header = slot.header()
            slot.verify()
            if (header.run_id, header.rank) == (self.record.run_id, rank):
                return header.pair
            cause = f"it is of run {header.run_id!r} rank {header.rank}"
        except SlotError as error:
            cause = str(error)
        if header is not None and slot.header_or_none() != header:
            # The trainer is alive and has begun its next capture meanwhile: the slot is in its hands.
            return None
        self._clear_corrupt(slot, rank, cause)
        return None

    def _clear_corrupt(self, slot: Slot, rank: int, cause: str) -> None:
        log.error("%s is corrupt and was cleared: %s", slot.path, cause)
        self.lost[rank] = f"one was corrupt: {cause}"
        slot.clear()

    def _look_for_room(self, ranks: Collection[int]) -> None:
        """Learn for how many committed steps of `ranks`, which this host must hold, there is room at their size now."""
        for room in range(self.record.keep, -1, -1):
            if not room or self.budget.has_room(self.key, self._needed_bytes(ranks, room)):
                break
        if room != self._room:
            log.info("there is room for %d committed steps of %s", room, sorted(ranks))
        self._room = room

    def _needed_bytes(self, ranks: Collection[int], keep: int, *, least_bytes: int = 0) -> int:
        """Return what so many committed steps of `ranks` take at their size now, and the files of others."""
        sizes, others = [0], 0
        for rank in {*ranks, *self._files}:
            files, geometry = self._files.get(rank, []), self._geometries.get(rank)
            if rank not in ranks:
                others += sum(file.slot.capacity_bytes for file in files)
                continue
            fitting = [file.slot.capacity_bytes for file in files if geometry is None or file.fits(geometry)]
            sizes.append(max([least_bytes, 0 if geometry is None else geometry.capacity_bytes, *fitting]))
        return (keep + 1) * sum(sizes) + self.copied_ranks * max(sizes) + others

    def _has_room(self, rank: int, geometry: Geometry, agreed: Agreed) -> bool:
        """Tell whether a capture of `rank` has a file, or one can be made."""
        free = _free(self._files.get(rank, ()), agreed)
        going_bytes = sum(file.slot.capacity_bytes for file in free)
        return any(file.fits(geometry) for file in free) or self.budget.has_room(
            self.key, self.budget.used_by(self.key) - going_bytes + geometry.capacity_bytes
        )

    def _fitting(self, rank: int, geometry: Geometry, agreed: Agreed) -> list[SlotFile]:
        """Return the files of `rank` that have room for `geometry` and remove the others that may go."""
        self._geometries[rank] = geometry
        for file in list(self._files.get(rank, ())):
            if not file.fits(geometry) and not file.busy and agreed.may_overwrite(file.pair):
                self._remove_file(file)
        return [file for file in self._files.get(rank, ()) if file.fits(geometry)]

    async def _create(self, rank: int, geometry: Geometry) -> SlotFile:
        paths = (self.directory / f"rank{rank}.{i}.slot" for i in itertools.count())
        path = next(path for path in paths if not os.path.lexists(path))
        file = SlotFile(slot=await self._allocate(path, geometry), rank=rank)
        self._files.setdefault(rank, []).append(file)
        return file

    async def _allocate(self, path: Path, geometry: Geometry) -> Slot:
        capacity_bytes = -(-geometry.capacity_bytes // HEADER_BYTES) * HEADER_BYTES
        apart = self.budget.allocate(self.key, capacity_bytes)
        try:
            return await in_thread(self._create_slot, path, capacity_bytes, geometry.payload_offset, apart)
        except BaseException as error:
            # Also when cancelled: the thread has made the file all the same.
            path.unlink(missing_ok=True)
            self.budget.free(self.key, capacity_bytes)
            if not isinstance(error, OSError):
                raise
            if error.errno == errno.EFBIG:
                raise SlotSizeError(
                    f"cannot allocate a slot of {capacity_bytes} bytes in {self.directory.parent}: {error}; the daemon "
                    f"may make files of {_file_limit()}: raise that (`ulimit -f unlimited`, LimitFSIZE= of systemd) "
                    f"where it is started, which is where resilient-run is unless resilientd runs as a service"
                ) from error
            raise MemoryBudgetError(
                f"cannot allocate a slot of {capacity_bytes} bytes in {'memory' if apart else self.directory.parent}: "
                f"{error}; make room, or {FEWER}"
            ) from error

    def _create_slot(self, path: Path, capacity_bytes: int, payload_offset: int, apart: bool) -> Slot:
        slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset, apart=apart)
        self.budget.pin(slot.buffer)
        return slot

    def _remove_file(self, file: SlotFile) -> None:
        file.slot.path.unlink(missing_ok=True)
        self.budget.free(self.key, file.slot.capacity_bytes)
        file.slot.close()
        self._files[file.rank].remove(file)
        if not self._files[file.rank]:
            del self._files[file.rank]


def _free(files: Iterable[SlotFile], agreed: Agreed) -> list[SlotFile]:
    return [file for file in files if not file.busy and agreed.may_overwrite(file.pair)]


async def in_thread(function: Callable[..., _T], *args: Any) -> _T:
    """Return `function(*args)`, run in a thread; a cancelled caller still waits until the thread is done.

    Threads work on mappings that the caller may unmap next.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


def _remove(path: Path) -> None:
    """Remove `path`, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_job(directory: Path) -> None:
    """Remove the directory of a job, its record last: no daemon would ever remove slots that have none."""
    with contextlib.suppress(OSError):
        for path in list(directory.iterdir()):
            if path.name != RECORD_NAME:
                _remove(path)
    shutil.rmtree(directory, ignore_errors=True)


def _file_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return "any size" if soft == resource.RLIM_INFINITY else f"at most {soft} bytes"


def _complete_pair(slot: Slot) -> Pair | None:
    header = slot.header_or_none()
    return None if header is None else header.pair
