"""Tells the daemon that this trainer lives though it makes no step: while it pauses, and when it makes collectives."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from torch.distributed import distributed_c10d

from .link import Link

_LOOK_S: Final = 1.0


class Pulse:
    """The signs of life of one rank; a thread looks every second whether there were collectives."""

    def __init__(self, link: Link) -> None:
        """Prepare; `start` starts the thread."""
        self._link = link
        self._lock = threading.Lock()
        self._pauses = 0
        self._limit_s: float | None = None
        self._ends_s = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resilient-pulse", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @contextlib.contextmanager
    def pause(self, limit_s: float | None) -> Iterator[None]:
        """Announce something long, which takes at most `limit_s`; inside of another pause, that one counts."""
        with self._lock:
            self._pauses += 1
            if self._pauses == 1:
                self._limit_s = limit_s
                self._ends_s = time.monotonic() + (limit_s or 0.0)
                self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if self._pauses == 0:
                    self._link.notify("resume")

    def attached(self) -> None:
        """Announce a pause under way to a daemon that does not know it."""
        with self._lock:
            if self._pauses:
                self._tell()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _tell(self) -> None:
        left_s = None if self._limit_s is None else max(0.0, self._ends_s - time.monotonic())
        self._link.notify("pause", limit_s=left_s)

    def _run(self) -> None:
        seen = 0
        while not self._closed.wait(_LOOK_S):
            if (begun := _collectives()) != seen:
                seen = begun
                self._link.notify("collectives")


def _collectives() -> int:
    """Return how many collectives this rank has begun, as far as its process groups count them."""
    begun = 0
    # Another thread may make or destroy groups at this moment.
    with contextlib.suppress(RuntimeError):
        for group in list(distributed_c10d._world.pg_map):
            # Not every backend counts, and this rank is in not every group.
            with contextlib.suppress(RuntimeError, AttributeError):
                begun += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return begun
