"""Many connections to a socket that never end."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from cluster import wait_until


class Flood:
    """Connections to `address` that never end: the newest `count` are held, and each one has sent `data`.

    They come from `sources`, addresses of this host, in turn, or from where the kernel chooses.
    """

    def __init__(
        self, family: int, address: Any, *, count: int, data: bytes = b"", sources: Sequence[str] = ()
    ) -> None:
        self._family, self._address, self._data = family, address, data
        self._sources = sources
        self._held: deque[socket.socket] = deque()
        self._count = count
        self._over = threading.Event()
        self.opened = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Flood":
        self._thread.start()
        wait_until(lambda: self.opened >= self._count, timeout_s=60, what=lambda: f"{self.opened} of {self._count}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        for sock in self._held:
            sock.close()

    def _run(self) -> None:
        while not self._over.is_set():
            sock = socket.socket(self._family)
            sock.settimeout(5)
            self._held.append(sock)
            with contextlib.suppress(OSError):
                if self._sources:
                    sock.bind((self._sources[self.opened % len(self._sources)], 0))
                sock.connect(self._address)
                sock.sendall(self._data)
            self.opened += 1
            if self.opened > self._count:
                self._held.popleft().close()
                # As fast as it may, it would measure who gets the processor.
                self._over.wait(0.002)
