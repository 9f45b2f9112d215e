"""How many files this process may have open: as many as the kernel lets it; what it starts gets the usual number."""

import resource
from contextlib import suppress

_LIMIT = resource.RLIMIT_NOFILE
_inherited = resource.getrlimit(_LIMIT)


def raise_file_limit() -> None:
    """Let this process have as many files open as its hard limit says."""
    hard = _inherited[1]
    # Where the kernel's own limit is lower than the hard one, what was inherited stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(_LIMIT, (hard, hard))


def restore_file_limit(pid: int) -> None:
    """Give the child process `pid` the limit that this one was started with: who uses select() counts on it."""
    # It may have ended, or be another user's whom we may not limit.
    with suppress(ProcessLookupError, PermissionError):
        resource.prlimit(pid, _LIMIT, _inherited)
