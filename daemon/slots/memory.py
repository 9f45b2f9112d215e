"""How much memory the slots of a host may take, and keeping them from being swapped out."""

import ctypes
import logging
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from resilient_run.ckpt.errors import MemoryBudgetError

log = logging.getLogger(__name__)

SLOTS_PER_RANK = 2
"""A capture goes to the one that does not hold what is committed."""

SHARE = 0.8
"""Of the smallest of what limits memory, for slots: training needs the rest."""

_CGROUP_LIMITS = ("/sys/fs/cgroup{}/memory.max", "/sys/fs/cgroup/memory{}/memory.limit_in_bytes")


@dataclass(slots=True)
class _Share:
    """What one job may take, was promised, and has."""

    limit_bytes: int
    reserved_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def committed_bytes(self) -> int:
        return max(self.reserved_bytes, self.allocated_bytes)


class MemoryBudget:
    """What the slots of all jobs on this host may take together.

    The limit is `limit_bytes`, or else 80 % of the smallest of the tmpfs, the machine's memory and the
    control group's memory: tmpfs pages count against all three, and training needs the rest.

    Args:
        shm_dir: An existing directory of the tmpfs.
        limit_bytes: Configured limit, None for the default.
    """

    def __init__(self, shm_dir: Path, limit_bytes: int | None) -> None:
        self._shm_dir = shm_dir
        self.limit_bytes = default_limit_bytes(shm_dir) if limit_bytes is None else limit_bytes
        self._shares: defaultdict[str, _Share] = defaultdict(lambda: _Share(limit_bytes=self.limit_bytes))
        self._warned = False

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
                f"{shown(limit)}: use fewer replicas (--rr-replicas), or raise the limit (--rr-memory, "
                f"resilientd --memory-limit)"
            )
        missing = max(0, needed_bytes - self._shares[job].allocated_bytes)
        promised = missing + sum(
            share.committed_bytes - share.allocated_bytes for key, share in self._shares.items() if key != job
        )
        free = free_bytes(self._shm_dir)
        if promised > free:
            raise MemoryBudgetError(
                f"checkpoints need {shown(needed_bytes)} ({formula}), but {self._shm_dir} has only {shown(free)} free "
                f"for the {shown(promised)} that are promised and not allocated yet: enlarge the tmpfs "
                f"(mount -o remount,size=…), remove what else is in it, or use fewer replicas (--rr-replicas)"
            )
        self._shares[job].reserved_bytes = needed_bytes

    def allocate(self, job: str, size_bytes: int) -> None:
        """Count a file of `size_bytes` that is about to be created for `job`.

        Raises:
            MemoryBudgetError: It would exceed the limit, or more than is free in the tmpfs.
        """
        share, others, free = self._shares[job], self._others_bytes(job), free_bytes(self._shm_dir)
        own = share.allocated_bytes + size_bytes
        if max(share.reserved_bytes, own) + others > share.limit_bytes or size_bytes > free:
            raise MemoryBudgetError(
                f"a slot of {shown(size_bytes)} does not fit: this job has {shown(share.allocated_bytes)} in slots, "
                f"other jobs have {shown(others)}, the limit is {shown(share.limit_bytes)} and {self._shm_dir} has "
                f"{shown(free)} free; use fewer replicas (--rr-replicas), or raise the limit (--rr-memory, "
                f"resilientd --memory-limit)"
            )
        share.allocated_bytes = own

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
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(buffer))) and not self._warned:
            self._warned = True
            log.warning(
                "cannot lock slots in memory (%s); they may be swapped out. Remedy: raise RLIMIT_MEMLOCK "
                "(ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit)",
                os.strerror(ctypes.get_errno()),
            )

    def _others_bytes(self, job: str) -> int:
        return sum(share.committed_bytes for key, share in self._shares.items() if key != job)


def host_bytes(state_bytes: int, *, kept_ranks: int, copied_ranks: int) -> int:
    """Return what the slots of a host take.

    Args:
        state_bytes: Of one rank.
        kept_ranks: The ranks whose replicas the host holds, its own included.
        copied_ranks: Its own ranks where there is a persistent tier, which is written from copies, else 0.
    """
    return (SLOTS_PER_RANK * kept_ranks + copied_ranks) * state_bytes


def default_limit_bytes(shm_dir: Path) -> int:
    """Return 80 % of the smallest of the tmpfs at `shm_dir`, physical memory and the control group's limit."""
    stat = os.statvfs(shm_dir)
    candidates = [stat.f_blocks * stat.f_frsize, psutil.virtual_memory().total, *_cgroup_limits_bytes()]
    return int(SHARE * min(candidates))


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
