"""Relations between processes that the kernel keeps for us: dying with the parent, adopting orphans."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def death_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return a function that binds the calling process to its parent `parent_pid`: SIGKILL for one is for both.

    Meant as ``preexec_fn``: everything it needs is resolved here, because the child of a process with threads must
    not take locks. The kernel watches the parent's *thread* that forked, so fork from one that lasts.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def bind() -> None:
        if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent_pid:
            # The parent died before the kernel was told to watch it.
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the new parent of descendants that lose theirs while the block runs."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    if prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER) failed")
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
