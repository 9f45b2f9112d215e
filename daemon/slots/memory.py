"""How much memory the slots of a host may take and where, and keeping them from being swapped out."""

import ctypes
import logging
import os
import re
import resource
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from resilient_run.ckpt.errors import MemoryBudgetError

log = logging.getLogger(__name__)

"""A capture goes to the one that does not hold what is committed."""

SHARE = 0.8
"""Of the smallest of what limits memory, for slots: training needs the rest."""

_LEFT_BYTES = 1 << 30
"""What slots leave of /dev/shm at least: batches of data loaders and messages between ranks travel through it, too."""

FEWER = "let a host hold fewer ranks (--nproc-per-node; of several hosts --rr-replicas) or steps (replication.keep)"
_RAISE = f"raise the limit (--rr-memory, resilientd --memory-limit), or {FEWER}"

_CGROUP_LIMITS = ("/sys/fs/cgroup{}/memory.max", "/sys/fs/cgroup/memory{}/memory.limit_in_bytes")


@dataclass(slots=True)
class _Share:
    """What one job may take, was promised, and has; `apart`: new files of it are not in the tmpfs."""

    limit_bytes: int
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    apart: bool = False

    @property
    def committed_bytes(self) -> int:
        return max(self.reserved_bytes, self.allocated_bytes)

    @property
    def promised_bytes(self) -> int:
        return self.committed_bytes - self.allocated_bytes


class MemoryBudget:
    """What the slots of all jobs on this host may take together, and whether a job's are in the tmpfs or apart.

    A job whose slots do not all fit in the tmpfs (see `most_bytes`) has new ones apart: in memory of the daemon.

    Args:
        shm_dir: An existing directory of the tmpfs.
        limit_bytes: Configured limit, None for the default.
    """

    def __init__(self, shm_dir: Path, limit_bytes: int | None) -> None:
        self._shm_dir = shm_dir
        self.limit_bytes = default_limit_bytes(shm_dir) if limit_bytes is None else limit_bytes
        self._most_bytes = most_bytes(shm_dir)
        self._shares: defaultdict[str, _Share] = defaultdict(lambda: _Share(limit_bytes=self.limit_bytes))
        self._unlocked = ""

    @property
    def used_bytes(self) -> int:
        """What all slots take now."""
        return sum(share.allocated_bytes for share in self._shares.values())

    def limit(self, job: str, limit_bytes: int | None) -> None:
        """Let the slots of `job` take `limit_bytes` at most, None: what all slots may."""
        self._shares[job].limit_bytes = self.limit_bytes if limit_bytes is None else min(limit_bytes, self.limit_bytes)

    def reserve(self, job: str, *, needed_bytes: int, formula: str) -> None:
        """Set aside `needed_bytes` for all slots of `job`, those that exist included.

        Args:
            job: Key of the job.
            needed_bytes: All that the job will need on this host.
            formula: Where `needed_bytes` comes from, for the error text.

        Raises:
            MemoryBudgetError: It does not fit; says what is needed, in use, and available, and what to change.
        """
        limit = self._shares[job].limit_bytes
        others = self._others_bytes(job)
        if others + needed_bytes > limit:
            raise MemoryBudgetError(
                f"checkpoints need {shown(needed_bytes)} ({formula}), other jobs have {shown(others)} and the limit is "
                f"{shown(limit)}: {_RAISE}"
            )
        self._shares[job].apart, trouble = self._place(job, needed_bytes)
        if trouble is not None:
            raise MemoryBudgetError(f"checkpoints need {shown(needed_bytes)} ({formula}), {trouble}")
        self._shares[job].reserved_bytes = needed_bytes

    def has_room(self, job: str, needed_bytes: int) -> bool:
        """Tell whether all slots of `job` may take `needed_bytes`, those that exist included."""
        is_within = needed_bytes + self._others_bytes(job) <= self._shares[job].limit_bytes
        return is_within and self._place(job, needed_bytes)[1] is None

    def used_by(self, job: str) -> int:
        """Return what the slots of `job` take now."""
        return self._shares[job].allocated_bytes

    def allocate(self, job: str, size_bytes: int) -> bool:
        """Count a file of `size_bytes` that is about to be created for `job`; True if it belongs apart.

        Raises:
            MemoryBudgetError: It would exceed the limit, or more than is available.
        """
        share, others = self._shares[job], self._others_bytes(job)
        own = share.allocated_bytes + size_bytes
        needed, trouble = max(share.reserved_bytes, own), None
        is_within = needed + others <= share.limit_bytes
        if is_within:
            share.apart, trouble = self._place(job, needed)
        if not is_within or trouble is not None:
            raise MemoryBudgetError(
                f"a slot of {shown(size_bytes)} does not fit: this job has {shown(share.allocated_bytes)} in slots, "
                + (trouble or f"other jobs have {shown(others)} and the limit is {shown(share.limit_bytes)}: {_RAISE}")
            )
        share.allocated_bytes = own
        return share.apart

    def found(self, job: str, size_bytes: int) -> None:
        """Count a file that exists already."""
        self._shares[job].allocated_bytes += size_bytes

    def free(self, job: str, size_bytes: int) -> None:
        """Uncount a file that was removed, or could not be created."""
        self._shares[job].allocated_bytes -= size_bytes

    def release(self, job: str) -> None:
        """Forget `job`, whose files are gone."""
        self._shares.pop(job, None)

    def pin(self, buffer: memoryview) -> None:
        """Lock `buffer`, a whole mapping, in memory until it is unmapped; warn once when that is not allowed."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer))) and not self._unlocked:
            limit, why = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], os.strerror(ctypes.get_errno())
            may = "" if limit == resource.RLIM_INFINITY else f"; the daemon may lock {shown(limit)}"
            self._unlocked = (
                f"slots are not locked in memory, and may be swapped out if there is swap ({why}{may}: ulimit -l "
                f"unlimited, or LimitMEMLOCK=infinity in the systemd unit)"
            )
            log.warning("%s", self._unlocked)

    def caveats(self, job: str) -> list[str]:
        """Return what a person should know of the memory in which the slots of `job` are."""
        lost = (
            f"slots are lost when the daemon ends, because the {shown(_size_bytes(self._shm_dir))} at {self._shm_dir} "
            f"have no room for them (docker run --shm-size=…, mount -o remount,size=…)"
        )
        return [text for text in (lost if self._shares[job].apart else "", self._unlocked) if text]

    def _place(self, job: str, needed_bytes: int) -> tuple[bool, str | None]:
        """Return whether files of `job` that are yet to be made are apart, and why none can be made, or None."""
        share, others = self._shares[job], [each for key, each in self._shares.items() if key != job]
        inside = [each for each in others if not each.apart]
        if (missing := needed_bytes - share.allocated_bytes) <= 0:
            return share.apart, None
        fits = needed_bytes + sum(each.committed_bytes for each in inside) <= self._most_bytes
        promised = missing + sum(each.promised_bytes for each in inside)
        if not share.apart and fits and promised <= free_bytes(self._shm_dir):
            return False, None
        promised, available = missing + sum(each.promised_bytes for each in others), psutil.virtual_memory().available
        if promised > available:
            return share.apart, (
                f"but this host has only {shown(available)} of memory left for the {shown(promised)} that are promised "
                f"and not allocated yet: end what else uses it, or {FEWER}"
            )
        return True, None

    def _others_bytes(self, job: str) -> int:
        return sum(share.committed_bytes for key, share in self._shares.items() if key != job)


def host_bytes(state_bytes: int, *, kept_ranks: int, copied_ranks: int, keep: int = 1) -> int:
    """Return what the slots of a host take.

    Args:
        state_bytes: Of one rank.
        kept_ranks: The ranks whose replicas the host holds, its own included.
        copied_ranks: Its own ranks where there is a persistent tier, which is written from copies, else 0.
        keep: How many committed steps stay in memory.
    """
    return ((keep + 1) * kept_ranks + copied_ranks) * state_bytes


def default_limit_bytes(shm_dir: Path) -> int:
    """Return 80 % of the memory: of the machine's or the control group's, but no more than the tmpfs at `shm_dir` has.

    A tmpfs of less than half of the memory, which is what the kernel gives one, limits nothing: slots may be apart.
    """
    memory = min([psutil.virtual_memory().total, *_cgroup_limits_bytes()])
    return int(SHARE * min(memory, max(_size_bytes(shm_dir), memory // 2)))


def most_bytes(shm_dir: Path) -> int:
    """Return what slots may take of the tmpfs at `shm_dir`: 80 % of it, and of /dev/shm all but 1 GiB at most."""
    size_bytes, shared = _size_bytes(shm_dir), Path("/dev/shm")
    is_shared = shared.exists() and shared.stat().st_dev == shm_dir.stat().st_dev
    return max(0, min(int(SHARE * size_bytes), size_bytes - _LEFT_BYTES * is_shared))


def _size_bytes(shm_dir: Path) -> int:
    stat = os.statvfs(shm_dir)
    return stat.f_blocks * stat.f_frsize


def _cgroup_limits_bytes() -> list[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = {match[1] for line in lines if (match := re.fullmatch(r"\d+:(?:[^:]*memory[^:]*)?:(.*)", line))}
    limits = []
    for group in {"", *groups}:
        for pattern in _CGROUP_LIMITS:
            try:
                text = Path(pattern.format(group.rstrip("/"))).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits.append(int(text))
    return limits


def free_bytes(shm_dir: Path) -> int:
    """Return what is left for us in the file system at `shm_dir`."""
    stat = os.statvfs(shm_dir)
    return stat.f_bavail * stat.f_frsize


def shown(size_bytes: int) -> str:
    """Return a number of bytes as a person reads it."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.2f} MiB"
