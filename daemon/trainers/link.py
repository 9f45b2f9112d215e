"""The daemon's unix socket: admits processes of its own user, answers their requests, sends them notifications."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from resilient_run.ckpt.errors import BY_NAME, CheckpointError, DaemonError
from resilient_run.ckpt.format import wire

from ..base.crowd import Crowd
from ..base.door import Door, Manners, room_for
from ..base.fields import Fields

log = logging.getLogger(__name__)

_UNREAD_LIMIT_BYTES = 1 << 20
_GUEST_FRAME_BYTES = 1 << 16
"""The longest message of whoever holds nothing open: `open_job` with a policy is the longest."""

_MANNERS = Manners(frame_bytes=_GUEST_FRAME_BYTES, silent_s=None)
_GUESTS = 512


class Connection:
    """One process at the socket.

    Attributes:
        pid: The process.
        entrance: The socket that it connected to.
        busy: Whether a message of it is being answered.
    """

    busy = False

    def __init__(self, writer: asyncio.StreamWriter, pid: int, entrance: Path) -> None:
        self.pid = pid
        self.entrance = entrance
        self._writer = writer

    def notify(self, message: wire.Message) -> None:
        """Send `message`; a process that does not read for a long time is disconnected."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > _UNREAD_LIMIT_BYTES:
            log.warning("disconnecting pid %d, which does not read its messages", self.pid)
            self._writer.transport.abort()
            return
        self._writer.write(wire.encode(message))

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


class Service(Protocol):
    """What answers the messages."""

    async def handle(self, connection: Connection, op: str, fields: Fields) -> dict[str, Any]:
        """Return the fields of the answer to `op`; a notification's are dropped."""

    def gone(self, connection: Connection) -> None:
        """Handle the end of the connection."""

    def is_guest(self, connection: Connection) -> bool:
        """Tell whether the connection holds nothing open, neither a job nor a trainer's session."""


class LinkServer:
    """Serves `service` at a unix socket. A process's connections that hold nothing open make room for newer ones.

    Args:
        service: Answers every message.
        spawn: Runs a function, with what is given besides, as a task that the daemon cancels at its end.
    """

    def __init__(self, service: Service, spawn: Callable[..., object]) -> None:
        self._service = service
        self._spawn = spawn
        room = room_for(_GUESTS)
        self._guests: Crowd[Connection] = Crowd(
            per_source=max(1, room // 2), in_all=room, may_go=lambda connection: not connection.busy
        )

    def listen(self, path: Path) -> Door:
        """Return the door at the socket `path`, which replaces a stale one.

        Args:
            path: The caller holds the lock that goes with it, so no other daemon listens there.
        """
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        return Door(listener, manners=_MANNERS, source_of=_own_process, admit=self._admit)

    def _admit(self, sock: socket.socket, message: wire.Message) -> None:
        self._spawn(self._serve, sock, wire.peer(sock)[0], message)

    async def _serve(self, sock: socket.socket, pid: int, first: wire.Message) -> None:
        entrance = Path(sock.getsockname())
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        connection = Connection(writer, pid, entrance)
        message: wire.Message | None = first
        try:
            while message is not None:
                connection.busy = True
                self._seat(connection)
                await _answer(connection, message, self._service)
                await writer.drain()
                connection.busy = False
                message = await wire.read_message(reader, self._seat(connection))
        except CheckpointError as error:
            log.warning("closing the connection of pid %d: %s", connection.pid, error)
        except ConnectionError as error:
            log.info("pid %d is gone: %s", connection.pid, error)
        finally:
            self._guests.discard(connection)
            self._service.gone(connection)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _seat(self, connection: Connection) -> int:
        """Count `connection` among the guests for as long as it is one; return how long its next message may be."""
        self._guests.discard(connection)
        if not self._service.is_guest(connection):
            return wire.MAX_FRAME_BYTES
        if (turned_out := self._guests.add(connection, connection.pid)) is not None:
            log.warning(
                "closing a connection of pid %d, which has no job open, to make room for others", turned_out.pid
            )
            turned_out.close()
        return _GUEST_FRAME_BYTES


def _own_process(sock: socket.socket) -> str:
    """Return which process connects.

    Raises:
        PermissionError: It is another user's: not even root has anything to ask of a daemon that is not its own.
    """
    pid, uid = wire.peer(sock)
    if uid != os.geteuid():
        raise PermissionError(f"pid {pid} is of uid {uid}, and this daemon serves uid {os.geteuid()} alone")
    return f"pid {pid}"


async def _answer(connection: Connection, message: wire.Message, service: Service) -> None:
    """Handle one message.

    Raises:
        CheckpointError: It is no message of this protocol, or a notification that is wrong.
    """
    fields = Fields(message, "message")
    op, request_id = fields.text("op", high=64), fields.optional_integer("id")
    fields = Fields(message, op)
    if request_id is None:
        await service.handle(connection, op, fields)
        return
    try:
        answer = {"id": request_id, "ok": True, **await service.handle(connection, op, fields)}
    except CheckpointError as error:
        name = type(error).__name__
        answer = {
            "id": request_id,
            "ok": False,
            "error": name if name in BY_NAME else DaemonError.__name__,
            "message": str(error),
        }
    connection.notify(answer)
