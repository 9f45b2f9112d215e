"""The trainer's connection to the daemon of its host: requests, notifications, watermarks, and reconnection.

One thread owns the connection. When the daemon goes away it keeps trying, attaches again and repeats the requests that
had no answer (each one is idempotent); meanwhile notifications are dropped, because after the attachment the trainer
reports afresh. Sending never blocks: a daemon that does not read for so long that the socket is full counts as gone.
"""

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

from ..errors import BY_NAME, CheckpointError, DaemonError, WireError
from ..format.version import FORMATS
from ..format.wire import Message, dial, encode, recv_message
from .env import TrainerEnv

CONNECT_S: Final = 600.0
"""How long the first connection may take; the launcher, which had one, knows that there is a daemon."""

_WARN_S: Final = 10.0
_DIAL_S: Final = 2.0
_RETRY_S: Final = 0.2
_REFUSED_S: Final = 2.0
_log = logging.getLogger(__name__)


class Link:
    """A connection that mends itself; every method may be called from any thread of the process that made it.

    After a fork the child has no link: its copy of the socket is closed, so that the daemon sees this process end.
    """

    def __init__(
        self,
        env: TrainerEnv,
        *,
        topology: int,
        estimate_bytes: int,
        on_attached: Callable[[Message], None],
        on_agreed: Callable[[Message], None],
        on_fault: Callable[[Message], None],
        on_message: Callable[[Message], None],
    ) -> None:
        """Prepare a link; `open` connects it.

        Args:
            env: Who attaches to which daemon.
            topology: Fingerprint that the attachment announces.
            estimate_bytes: Bytes of one capture that the attachment announces.
            on_attached: Called in the link's thread with the answer to each attachment.
            on_agreed: Called in the link's thread with what is agreed, in `watermark` and `next`, after the answer.
            on_fault: Called in the link's thread with each fault that is ordered for this rank.
            on_message: Called in the link's thread with any other notification.
        """
        self._env = env
        self._attach = {
            "op": "attach",
            **FORMATS,
            "run_id": env.run_id,
            "host": env.host,
            "rank": env.rank,
            "local_rank": env.local_rank,
            "world_size": env.world_size,
            "generation": env.generation,
            "topology": topology,
            "pid": os.getpid(),
            "estimate_bytes": estimate_bytes,
        }
        self._on_attached = on_attached
        self._on_agreed = on_agreed
        self._on_fault = on_fault
        self._on_message = on_message
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._attached = False
        self._lost_s: float | None = None
        self._pending: dict[int, tuple[Message, Future[Message]]] = {}
        self._first: Future[Message] = Future()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def away_s(self) -> float | None:
        """Seconds since the daemon went away, None while it is there."""
        lost_s = self._lost_s
        return None if lost_s is None else time.monotonic() - lost_s

    def open(self, timeout_s: float) -> Message:
        """Connect, attach, and return the answer to the attachment.

        Raises:
            OSError: There is no daemon at the socket, even after `CONNECT_S`.
            CheckpointError: The daemon refused, as the class that it named, or did not answer within `timeout_s`.
        """
        connection = self._connect_patiently()
        self._thread = threading.Thread(target=self._run, args=(connection,), name="resilient-link", daemon=True)
        self._thread.start()
        try:
            return self._first.result(timeout_s)
        except FutureTimeoutError:
            self.close()
            raise DaemonError(f"the daemon did not answer an attachment within {timeout_s} s: see its log") from None
        except CheckpointError:
            self.close()
            raise

    def request(self, op: str, *, timeout_s: float, **fields: Any) -> Message:
        """Send a request and return its answer, across reconnections.

        Raises:
            CheckpointError: The daemon refused, as the class that it named, or did not answer within `timeout_s`.
        """
        number = next(self._ids)
        message = {"id": number, "op": op, **fields}
        future: Future[Message] = Future()
        with self._lock:
            if self._closed.is_set():
                raise DaemonError(f"{op}: the link to the daemon is closed")
            self._pending[number] = (message, future)
            self._send(message)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise DaemonError(f"the daemon did not answer {op!r} within {timeout_s} s: see its log") from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def notify(self, op: str, **fields: Any) -> None:
        """Send a notification if the daemon is there; never block."""
        with self._lock:
            self._send({"op": op, **fields})

    def close(self) -> None:
        """End the connection and its thread; requests under way fail."""
        with self._lock:
            self._closed.set()
            self._shut()
        if self._thread is not None:
            self._thread.join()

    def _connect(self) -> socket.socket:
        connection = dial(self._env.socket, _DIAL_S)
        _close_after_fork(connection)
        return connection

    def _connect_patiently(self) -> socket.socket:
        began_s = time.monotonic()
        warned = False
        while True:
            try:
                return self._connect()
            except OSError as error:
                waited_s = time.monotonic() - began_s
                if waited_s > CONNECT_S:
                    raise
                if waited_s > _WARN_S and not warned:
                    warned = True
                    _log.warning("rank %d waits for the daemon at %s: %s", self._env.rank, self._env.socket, error)
                self._closed.wait(_RETRY_S)

    def _run(self, first: socket.socket) -> None:
        connection: socket.socket | None = first
        refused = ""
        while connection is not None:
            with connection:
                try:
                    self._serve(connection)
                except (OSError, WireError) as error:
                    if not self._closed.is_set():
                        _log.warning("the connection to the daemon broke (%s); training goes on", error)
                except CheckpointError as error:
                    if not self._first.done():
                        self._first.set_exception(error)
                        break
                    if str(error) != refused:
                        refused = str(error)
                        _log.warning("the daemon refused to attach again: %s; training goes on, trying again", error)
                    self._closed.wait(_REFUSED_S)
                with self._lock:
                    self._connection, self._attached = None, False
                    self._lost_s = time.monotonic() if self._lost_s is None else self._lost_s
            connection = self._reconnect()
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in [self._first, *(future for _, future in pending.values())]:
            if not future.done():
                future.set_exception(DaemonError("the link to the daemon was closed"))

    def _reconnect(self) -> socket.socket | None:
        while not self._closed.wait(_RETRY_S):
            try:
                return self._connect()
            except OSError as error:
                _log.debug("no daemon at %s: %s", self._env.socket, error)
        return None

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._connection = connection
        connection.sendall(encode({"id": 0, **self._attach}))
        while (message := recv_message(connection)) is not None:
            if message.get("op") == "watermark":
                self._on_agreed(message)
            elif message.get("op") == "inject":
                self._on_fault(message)
            elif message.get("id") == 0:
                self._welcome(_checked(message))
            elif "op" in message:
                self._on_message(message)
            else:
                self._answer(message)
        raise ConnectionResetError("closed by the daemon")

    def _welcome(self, answer: Message) -> None:
        with self._lock:
            self._attached, self._lost_s = True, None
            for message, _ in self._pending.values():
                self._send(message)
        self._on_attached(answer)
        if not self._first.done():
            self._first.set_result(answer)

    def _answer(self, message: Message) -> None:
        with self._lock:
            _, future = self._pending.pop(message.get("id", 0), (None, None))
        if future is None:
            return
        try:
            future.set_result(_checked(message))
        except CheckpointError as error:
            future.set_exception(error)

    def _send(self, message: Message) -> None:
        if self._connection is None or not self._attached:
            return
        frame = encode(message)
        try:
            sent = self._connection.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        if sent != len(frame):
            self._shut()

    def _shut(self) -> None:
        # Wakes the link's thread, which closes the connection and, unless the link is closed, makes a new one.
        self._attached = False
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def _checked(answer: Message) -> Message:
    if answer.get("ok"):
        return answer
    raise BY_NAME.get(str(answer.get("error")), DaemonError)(answer.get("message", "the daemon gave no reason"))


def _close_after_fork(connection: socket.socket) -> None:
    reference = weakref.ref(connection)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)
