"""Messages between trainer, launcher, daemon and peer daemons: one length-prefixed JSON object each.

A frame is a 4-byte big-endian body length and that many bytes of UTF-8 JSON whose top level is an object.
Bulk bytes (slot ranges between daemons) follow a message that announces their size, outside the frame.
Nothing is unpickled.
"""

import asyncio
import json
import socket
import struct
from typing import Any

from .errors import WireError

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return the frame of `message`.

    Raises:
        WireError: The encoded message is longer than `MAX_FRAME_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Return the message in a frame's `body`.

    Raises:
        WireError: The bytes are not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"message is a JSON {type(message).__name__}, not an object")
    return message


def _body_bytes(prefix: bytes) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"frame announces {length} bytes, more than the limit of {MAX_FRAME_BYTES}")
    return int(length)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None when the other side closed between messages.

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
        return decode(await reader.readexactly(_body_bytes(prefix)))
    except asyncio.IncompleteReadError as error:
        raise WireError("connection closed inside a frame") from error


def recv_message(sock: socket.socket) -> Message | None:
    """Blocking form of `read_message` for the synchronous clients."""
    prefix = _recv_exactly(sock, _LENGTH.size, at_boundary=True)
    return None if prefix is None else decode(_recv_exactly(sock, _body_bytes(prefix)) or b"")


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
