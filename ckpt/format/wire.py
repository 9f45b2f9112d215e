"""Messages between trainer, launcher, daemon and peer daemons: one length-prefixed JSON object each.

A frame is a 4-byte big-endian body length and that many bytes of UTF-8 JSON whose top level is an object.
Bulk bytes (slot ranges between daemons) follow a message that announces their size, outside the frame.
Nothing is unpickled.
"""

import asyncio
import json
import math
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final

from ..errors import WireError

VERSION: Final = 7
"""Of the messages and the etcd keys of docs/internals/protocol.md; who has another one is refused."""

MAX_FRAME_BYTES = 1 << 20
MAX_EAGER_BYTES = 256
"""Of the name of an object that a trainer says to have changed behind a capture."""
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")

Message = dict[str, Any]


def dial(path: Path, timeout_s: float | None = None) -> socket.socket:
    """Return a blocking connection to the daemon at `path`, which is of this process's own user.

    Raises:
        OSError: Nobody listens there within `timeout_s`, or somebody else does (PermissionError).
    """
    place = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A link could lead to whatever else this user serves, and that would be told secrets of the run. What is
        # checked is what is connected to, whatever takes the directory's name meanwhile.
        directory, found = os.fstat(place), os.stat(path.name, dir_fd=place, follow_symlinks=False)
        if directory.st_uid != os.geteuid() or directory.st_mode & 0o022 or not stat.S_ISSOCK(found.st_mode):
            raise PermissionError(f"{path} is not a socket in a directory that only uid {os.geteuid()} can write to")
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(f"/proc/self/fd/{place}/{path.name}")
            sock.settimeout(None)
            _, uid = peer(sock)
            if uid != os.geteuid():
                # Whoever made the directory first would be told secrets of the run, and where its state goes.
                raise PermissionError(f"{path} is served by uid {uid}, not by a daemon of uid {os.geteuid()}")
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(place)
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end of a unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def encode(message: Message, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the frame of `message`.

    Raises:
        WireError: The encoded message is longer than `limit_bytes`.
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limit_bytes:
        raise WireError(f"message of {len(body)} bytes exceeds the limit of {limit_bytes}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message in a frame's `body`, or an etcd value.

    Raises:
        WireError: The bytes are not a JSON object, or a number in it is not finite, so that nothing can be made of it
            that `encode` takes.
    """
    try:
        message = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"message is a JSON {type(message).__name__}, not an object")
    return message


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:80]} is not a finite number")
    return value


def _body_bytes(prefix: bytes, limit_bytes: int) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > limit_bytes:
        raise WireError(f"frame announces {length} bytes, more than the limit of {limit_bytes}")
    return int(length)


class Frame:
    """One message that arrives in pieces, and never more of it than a limit.

    Args:
        limit_bytes: The longest body.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._end = _LENGTH.size

    @property
    def missing(self) -> int:
        """How many bytes to read next: more could belong to the message after this one."""
        return self._end - len(self._buffer)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing has arrived."""
        return not self._buffer

    def feed(self, data: bytes | bytearray) -> Message | None:
        """Take up to `missing` bytes and return the message once it is whole.

        Raises:
            WireError: It is too long, or no message.
        """
        self._buffer += data
        if self._end == len(self._buffer) == _LENGTH.size:
            self._end += _body_bytes(bytes(self._buffer), self._limit_bytes)
        return decode(bytes(self._buffer[_LENGTH.size :])) if self._end == len(self._buffer) else None


async def read_message(reader: asyncio.StreamReader, limit_bytes: int = MAX_FRAME_BYTES) -> Message | None:
    """Return the next message, or None when the other side closed between messages.

    Args:
        reader: The stream.
        limit_bytes: The longest body that is taken in.

    Raises:
        WireError: The stream ended inside a frame, or the frame is not a message.
    """
    try:
        prefix = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise WireError("connection closed inside a frame") from error
        return None
    try:
        return decode(await reader.readexactly(_body_bytes(prefix, limit_bytes)))
    except asyncio.IncompleteReadError as error:
        raise WireError("connection closed inside a frame") from error


def recv_message(sock: socket.socket) -> Message | None:
    """Blocking form of `read_message` for the synchronous clients."""
    prefix = _recv_exactly(sock, _LENGTH.size, at_boundary=True)
    return None if prefix is None else decode(_recv_exactly(sock, _body_bytes(prefix, MAX_FRAME_BYTES)) or b"")


def _recv_exactly(sock: socket.socket, size: int, *, at_boundary: bool = False) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < size:
        part = sock.recv(size - len(buffer))
        if not part:
            if at_boundary and not buffer:
                return None
            raise WireError("connection closed inside a frame")
        buffer += part
    return bytes(buffer)
