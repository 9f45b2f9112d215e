"""Another user of this host, for tests that root runs."""

import os
from collections.abc import Callable
from pathlib import Path

MALLORY = 65534


def open_way(directory: Path) -> None:
    """Let other users come to `directory` through its parents, which pytest keeps for this user."""
    for path in directory.parents:
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o711)


def make_public(directory: Path) -> Path:
    """Make a directory where everybody may write, as /dev/shm and /tmp are, and return it."""
    open_way(directory)
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def as_mallory(act: Callable[[], object]) -> int:
    """Return the errno that `act` fails with as another user without any group, 0 when it succeeds."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.setgroups([])
            os.setresgid(MALLORY, MALLORY, MALLORY)
            os.setresuid(MALLORY, MALLORY, MALLORY)
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
