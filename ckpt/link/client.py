"""A connection to the daemon of this host that mends itself, for trainers and launchers.

One thread owns the connection. When the daemon goes away it keeps trying, introduces itself again and repeats the
requests that had no answer (each one is idempotent); meanwhile notifications are dropped. Sending never blocks: a
daemon that does not read for so long that the socket is full counts as gone.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from ..errors import BY_NAME, CheckpointError, DaemonError, WireError
from ..format.wire import Message, dial, encode, recv_message

_DIAL_S: Final = 5.0
_RETRY_S: Final = 0.1
_REFUSED_S: Final = 1.0
_UNREAD_BYTES: Final = 1 << 20

_connections: Final = weakref.WeakSet[socket.socket]()
"""All of this process, and in a child those that it has inherited."""


class DaemonClient:
    """Every method may be called from any thread of the process that made it.

    After a fork the child has no connection: its copy of the socket is closed, so that the daemon sees this process
    end.

    Args:
        address: Of the daemon's socket.
        hello: What is sent first on every connection.
        on_welcome: Called in the client's thread with the daemon's answer to each hello.
        on_message: Called in the client's thread with each message that answers nothing.
        on_trouble: Called in the client's thread with why the daemon is not there (OSError, WireError) or refused the
            hello (another CheckpointError), before it is tried again.
        name: Of the thread.
    """

    def __init__(
        self,
        address: Path,
        hello: Message,
        *,
        on_welcome: Callable[[Message], None],
        on_message: Callable[[Message], None],
        on_trouble: Callable[[Exception], None],
        name: str,
    ) -> None:
        self.address = address
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._connected_at_s: float | None = None
        self._is_full = False
        self._welcome = threading.Event()
        self._lost_s: float | None = None
        self._pending: dict[int, tuple[bytes, Future[Message]]] = {}
        self._first: Future[Message] = Future()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def connected_s(self) -> float | None:
        """Seconds since somebody took the present connection, answered or not; None while there is none."""
        connected_at_s = self._connected_at_s
        return None if connected_at_s is None else time.monotonic() - connected_at_s

    @property
    def is_welcome(self) -> bool:
        """Tell whether a daemon is there that has answered the hello."""
        return self._welcome.is_set()

    @property
    def was_welcome(self) -> bool:
        """Tell whether a daemon has ever answered the hello."""
        return self._first.done() and self._first.exception() is None

    @property
    def away_s(self) -> float | None:
        """Seconds since the daemon went away, None while it is there and before it ever was."""
        lost_s = self._lost_s
        return None if lost_s is None else time.monotonic() - lost_s

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._thread.start()

    def wait_welcome(self, timeout_s: float) -> Message:
        """Return the first answer to the hello.

        Raises:
            CheckpointError: The daemon refused, as the class that it named; this is the end of the client.
            TimeoutError: No daemon has answered within `timeout_s`.
        """
        return self._first.result(timeout_s)

    def wait_back(self, timeout_s: float) -> None:
        """Wait until a daemon is there, at most `timeout_s`."""
        self._welcome.wait(timeout_s)

    def request(self, op: str, *, within_s: float, **fields: Any) -> Message:
        """Send a request and return its answer, across reconnections.

        Raises:
            CheckpointError: The daemon refused, as the class that it named, or did not answer within `within_s`.
            WireError: The request is no message.
        """
        number = next(self._ids)
        frame = encode({"id": number, "op": op, **fields})
        future: Future[Message] = Future()
        with self._lock:
            if self._closed.is_set():
                raise DaemonError(f"{op}: the connection to the daemon is closed")
            self._pending[number] = (frame, future)
            self._send(frame)
        try:
            return future.result(within_s)
        except TimeoutError:
            what = "the daemon did not answer" if self._welcome.is_set() else "no daemon answers"
            raise DaemonError(f"{what} {op!r} at {self.address} within {within_s:.0f} s: see its log") from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def notify(self, op: str, **fields: Any) -> None:
        """Send a notification if the daemon is there; never block."""
        frame = encode({"op": op, **fields})
        with self._lock:
            self._send(frame)

    def close(self, within_s: float | None = None) -> None:
        """End the connection and its thread, which is waited for `within_s` at most; requests under way fail."""
        with self._lock:
            self._closed.set()
            self._shut()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self._keep_connected()
        finally:
            # Whatever ended it: nobody waits for an answer that cannot come.
            with self._lock:
                self._closed.set()
                pending, self._pending = self._pending, {}
            for future in [self._first, *(future for _, future in pending.values())]:
                if not future.done():
                    future.set_exception(DaemonError("the connection to the daemon was closed"))

    def _keep_connected(self) -> None:
        while not self._closed.is_set():
            pause_s = _REFUSED_S
            try:
                with dial(self.address, _DIAL_S) as connection:
                    _connections.add(connection)
                    try:
                        self._serve(connection)
                    finally:
                        self._disconnected()
            except OSError as error:
                pause_s = _RETRY_S
                self._tell(error)
            except WireError as error:
                self._tell(error)
            except CheckpointError as refusal:
                if not self._first.done():
                    self._first.set_exception(refusal)
                    return
                self._tell(refusal)
            self._closed.wait(pause_s)

    def _disconnected(self) -> None:
        with self._lock:
            self._connection = self._connected_at_s = None
            self._welcome.clear()
            if self._lost_s is None and self.was_welcome:
                self._lost_s = time.monotonic()

    def _tell(self, trouble: Exception) -> None:
        if not self._closed.is_set():
            self._on_trouble(trouble)

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._connection, self._connected_at_s = connection, time.monotonic()
            self._is_full = False
        # Where steps take a millisecond, a busy daemon is hundreds of messages behind, and each takes 768 bytes here.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        connection.sendall(encode({"id": 0, **self._hello}))
        while (message := recv_message(connection)) is not None:
            if message.get("id") == 0:
                self._greeted(_checked(message))
            elif "op" in message:
                self._on_message(message)
            else:
                self._answer(message)
        if self._is_full:
            raise WireError("it has not read its messages for so long that the socket is full")
        if self._welcome.is_set():
            raise ConnectionResetError("closed by the daemon")
        raise WireError("it closed the connection before it answered")

    def _greeted(self, answer: Message) -> None:
        with self._lock:
            self._lost_s = None
            self._welcome.set()
            for frame, _ in self._pending.values():
                self._send(frame)
        self._on_welcome(answer)
        if not self._first.done():
            self._first.set_result(answer)

    def _answer(self, message: Message) -> None:
        number = message.get("id")
        with self._lock:
            _, future = self._pending.pop(number, (None, None)) if isinstance(number, int) else (None, None)
        if future is None:
            return
        try:
            future.set_result(_checked(message))
        except CheckpointError as error:
            future.set_exception(error)

    def _send(self, frame: bytes) -> None:
        if self._connection is None or not self._welcome.is_set():
            return
        sent = 0
        try:
            sent = self._connection.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._is_full = sent != len(frame)
        except BlockingIOError:
            self._is_full = True
        except OSError:
            pass
        if sent != len(frame):
            self._shut()

    def _shut(self) -> None:
        # Wakes the client's thread, which closes the connection and, unless the client is closed, makes a new one.
        self._welcome.clear()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def _checked(answer: Message) -> Message:
    if answer.get("ok"):
        return answer
    raise BY_NAME.get(str(answer.get("error")), DaemonError)(answer.get("message", "the daemon gave no reason"))


def _close_inherited() -> None:
    for connection in list(_connections):
        connection.close()


# Once for the process: a handler cannot be taken back, and there is a connection whenever a daemon is started again.
os.register_at_fork(after_in_child=_close_inherited)
