"""What processes may do (open files, capabilities of the kernel), and telling them from later ones of their number."""

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

_LIMIT = resource.RLIMIT_NOFILE
_inherited = resource.getrlimit(_LIMIT)


def raise_limits() -> None:
    """Let this process have as many files open, and lock as much memory, as its hard limits say."""
    for limit in (_LIMIT, resource.RLIMIT_MEMLOCK):
        hard = resource.getrlimit(limit)[1]
        # Where the kernel's own limit is lower than the hard one, what was inherited stays.
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (hard, hard))


def restore_file_limit(pid: int) -> None:
    """Give the child process `pid` the limit that this one was started with: who uses select() counts on it."""
    # It may have ended, or be another user's whom we may not limit.
    with suppress(ProcessLookupError, PermissionError):
        resource.prlimit(pid, _LIMIT, _inherited)


def network_namespace() -> int | None:
    """Return which network this process sees; None when it cannot tell."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return None


def has_capability(pid: int, number: int) -> bool:
    """Tell whether the capability of this number is in effect for a process."""
    text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", text, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def started_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None when there is no such process.

    Raises:
        OSError: Nobody can tell now.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command's name in parentheses, and may hold any bytes.
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in b"ZX" else int(fields[18])
