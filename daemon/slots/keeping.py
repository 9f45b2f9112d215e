"""Which slots must stay although no launcher holds their job open: somebody has them mapped, or cannot be asked."""

import fcntl
from pathlib import Path

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.slot import MAGIC

from ..base.record import JobRecord
from ..trust.private import opened


def is_kept(directory: Path, record: JobRecord) -> bool:
    """Tell whether nobody may collect the slots in `directory`.

    The launcher that was written down lives, a trainer has a slot mapped, or a file is of another version, so that only
    a daemon of that version knows what it is worth.
    """
    paths = list(directory.glob("*.slot"))
    return record.is_open or any(is_mapped(path) or version_of(path) not in (b"", MAGIC) for path in paths)


def is_mapped(path: Path) -> bool:
    """Tell whether a trainer has the slot file `path` mapped: it holds a lock on it as long as it has."""
    try:
        with opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, DaemonError):
        return False
    return False


def version_of(path: Path) -> bytes:
    """Return the first bytes of a slot file, which name its version.

    Empty for one whose creation was cut short, and for what is no file of ours.
    """
    try:
        with opened(path) as file:
            version = file.read(len(MAGIC))
    except (OSError, DaemonError):
        return b""
    return version if version.strip(b"\0") else b""
