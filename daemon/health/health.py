"""The health of this host in numbers: memory, swap, load, and the room on disks and on the tmpfs of the slots."""

import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from ..base.policy import DetectPolicy
from .threshold import Measure

_GIB = 1 << 30


def measure_host(policy: DetectPolicy, *, tmpfs: Path, disks: Iterable[Path]) -> list[Measure]:
    """Measure this host now; blocks as long as a file system does.

    Args:
        policy: The thresholds.
        tmpfs: Where the slots are.
        disks: Directories that need room; one that is not there yet stands for its parent.
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    measures = [
        Measure(
            name="memory",
            kind="memory",
            value=100 * memory.available / memory.total,
            warn=policy.memory_warn_percent,
            fail=policy.memory_fail_percent,
            low_is_bad=True,
            message=f"{_rest(memory.available, memory.total)} of memory is available",
        ),
        Measure(
            name="load",
            kind="load",
            value=load,
            warn=policy.load_warn,
            fail=policy.load_fail,
            message=f"{load:.1f} processes want to run on each CPU",
        ),
        _measure_room("tmpfs", tmpfs, policy.tmpfs_warn_percent, policy.tmpfs_fail_percent),
        *(_measure_room("disk", disk, policy.disk_warn_percent, policy.disk_fail_percent) for disk in disks),
    ]
    if swap.total:
        measures.append(
            Measure(
                name="swap",
                kind="memory",
                value=100 * swap.used / swap.total,
                warn=policy.swap_warn_percent,
                fail=policy.swap_fail_percent,
                message=f"{_rest(swap.used, swap.total)} of swap is in use",
            )
        )
    return measures


def local_directory(target: str | None) -> list[Path]:
    """Return the directory that the persistent tier `target` is on this host, none when it is elsewhere or not set."""
    path = re.sub(r"^(file|local)://", "", target or "")
    return [] if not path or "://" in path or "::" in path else [Path(path).absolute()]


def _measure_room(kind: str, directory: Path, warn: float, fail: float) -> Measure:
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        usage = psutil.disk_usage(str(existing))
        # Of what an unprivileged user may have: root's reserve is not for training.
        total_bytes = usage.used + usage.free
        percent = 100 * usage.free / total_bytes if total_bytes else 0.0
        message = f"{_rest(usage.free, total_bytes)} of the file system of {directory} is free"
    except OSError as error:
        percent, message = 0.0, f"{directory} cannot be reached: {error.strerror}"
    return Measure(
        name=f"{kind} {directory}", kind=kind, value=percent, warn=warn, fail=fail, low_is_bad=True, message=message
    )


def _rest(part_bytes: int, total_bytes: int) -> str:
    percent = 100 * part_bytes / total_bytes if total_bytes else 0.0
    return f"{percent:.1f} % ({part_bytes / _GIB:.2f} of {total_bytes / _GIB:.2f} GiB)"
