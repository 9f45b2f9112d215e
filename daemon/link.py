"""The daemon's unix socket: admits processes by their uid, answers their requests, sends them notifications."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from resilient_run.ckpt import wire
from resilient_run.ckpt.errors import BY_NAME, CheckpointError, DaemonError, WireError

from .fields import Fields

log = logging.getLogger(__name__)

_UNREAD_LIMIT_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """One process at the socket.

    Attributes:
        pid: The process.
        uid: Its user.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)
        self._writer = writer

    @property
    def is_admitted(self) -> bool:
        """Tell whether this user may talk to the daemon at all."""
        return self.uid in {0, os.geteuid()} or os.geteuid() == 0

    def may_see(self, uid: int) -> bool:
        """Tell whether this user may see the jobs of the user `uid`."""
        return self.uid in {0, os.geteuid(), uid}

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
        """Hear that the connection is closed."""


async def listen(path: Path, service: Service, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> asyncio.Server:
    """Return a server of `service` at the socket `path`, which replaces a stale one.

    Args:
        path: The caller holds the lock that goes with it, so no other daemon listens there.
        service: Answers every message.
        spawn: Runs a connection's coroutine as a task that the daemon cancels at its end.
    """
    path.unlink(missing_ok=True)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spawn(_serve(reader, writer, service))

    server = await asyncio.start_unix_server(accept, path)
    path.chmod(0o666 if os.geteuid() == 0 else 0o600)
    return server


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, service: Service) -> None:
    connection = Connection(writer)
    try:
        if not connection.is_admitted:
            raise WireError(f"uid {connection.uid} is not admitted")
        while (message := await wire.read_message(reader)) is not None:
            await _answer(connection, message, service)
            await writer.drain()
    except (WireError, DaemonError) as error:
        log.warning("closing the connection of pid %d: %s", connection.pid, error)
    except ConnectionError as error:
        log.info("pid %d is gone: %s", connection.pid, error)
    finally:
        service.gone(connection)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _answer(connection: Connection, message: wire.Message, service: Service) -> None:
    """Handle one message.

    Raises:
        DaemonError: It is no message of this protocol, or a notification that is wrong.
    """
    fields = Fields(message, "message")
    op, request_id = fields.text("op", max_bytes=64), fields.optional_integer("id")
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
