"""An address that leads to another one; what comes back from there can be held up, or changed, on its way."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any


class Proxy:
    """Forwards TCP connections until it is cut or closed.

    Attributes:
        hold_from: Of all bytes that the target sends: those from this one on wait for `release`.
        flip: The number of one of which a bit is flipped.
        held: Set once something waits.
        port: Where it listens, also if the address left that open.
    """

    def __init__(self, address: tuple[str, int], target: tuple[str, int]) -> None:
        self.hold_from: int | None = None
        self.flip: int | None = None
        self.held = threading.Event()
        self._released = threading.Event()
        self._target = target
        self._passed = 0
        self._counting = threading.Lock()
        self._host = address[0]
        self._holder = socket.socket()  # keeps the port from all others while nobody listens
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(address)
        self.port: int = self._holder.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.mend()

    def release(self) -> None:
        """Let everything pass from now on."""
        self._released.set()

    def mend(self) -> None:
        """Accept connections, again after `cut`."""
        listener = socket.create_server((self._host, self.port))
        self._socks.append(listener)
        self._spawn(self._accept, listener)

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        self.release()
        for thread in self._threads:  # the first accepts: what it accepted last is shut down before the next is awaited
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            thread.join()
        for sock in self._socks:
            sock.close()
        self._socks.clear()
        self._threads.clear()

    def close(self) -> None:
        self.cut()
        self._holder.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                self._socks += [client, server]
                self._spawn(self._serve, client, server)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        answers = threading.Thread(target=self._forward, args=(server, client, True))
        answers.start()
        self._forward(client, server, False)
        answers.join()
        # A killed process does not leave its peer waiting either: what nobody has read is answered by a reset.
        for sock in (client, server):
            sock.close()

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):  # one end is gone
            while data := source.recv(1 << 16):
                sink.sendall(self._pass(data) if is_answer else data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pass(self, data: bytes) -> bytes:
        with self._counting:
            first, self._passed = self._passed, self._passed + len(data)
        if self.hold_from is not None and first + len(data) > self.hold_from:
            self.held.set()
            self._released.wait()
        if self.flip is None or not first <= self.flip < first + len(data):
            return data
        at = self.flip - first
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()
