"""TLS over a non-blocking socket of asyncio: bytes go from and to the caller's memory, without a buffer in between."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, TypeVar

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import wire

from .identity import Identity, host_of

T = TypeVar("T")

TURN_BYTES: Final = 256 << 10
"""What is encrypted or decrypted at a time, before others of the event loop have their turns."""

_WAKE_BYTES: Final = 2 << 20
"""So much is waited for before it is deciphered, where a link is slow: waking up costs. Sockets can hold more."""

_RECORD_BYTES: Final = (16 << 10) + 256 + 5
"""The longest TLS record (RFC 8446, 5.2): so much of what is awaited may have left the kernel, still undeciphered."""


class SecureSocket:
    """One connection between daemons; one task at a time sends, one receives, and who fails closes it.

    Args:
        sock: Connected and non-blocking; it is this object's from now on, also if it cannot be made.
        identity: Who we are.
        server_side: Whether we were called.

    Raises:
        OSError: The peer is gone.
    """

    def __init__(self, sock: socket.socket, identity: Identity, *, server_side: bool) -> None:
        context = identity.server if server_side else identity.client
        try:
            self.raw = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._low_water = 1

    async def handshake(self) -> str:
        """Return the name of the peer's host, which has proven that it knows the run's secret; the caller sets a limit.

        A client knows that of its server before the server knows it of the client.

        Raises:
            OSError: The peer is of another run, no peer, or gone.
            DaemonError: Its certificate names no host.
        """
        await self._insist(self.raw.do_handshake)
        return host_of(self.raw)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, which must not change meanwhile; it is in the kernel then.

        Raises:
            OSError: The connection broke.
        """
        left = memoryview(data)
        while left:
            # TLS wants to be handed the same bytes again until it has sent them.
            piece = left[:TURN_BYTES]
            left = left[await self._insist(lambda: self.raw.send(piece)) :]  # noqa: B023
            if left:
                await asyncio.sleep(0)

    async def send_message(self, message: wire.Message) -> None:
        """Send a message.

        Raises:
            OSError: The connection broke.
        """
        await self.send_all(wire.encode(message))

    async def receive_into(self, target: memoryview, timeout_s: float | None = None) -> int:
        """Fill `target`, and return how much of it was: less only when the peer has closed the connection.

        Args:
            target: Where it goes.
            timeout_s: For each wait for more.

        Raises:
            OSError: The connection broke, or somebody has changed what was sent.
            TimeoutError: Nothing came for too long.
        """
        filled = turn = 0
        while filled < len(target):
            try:
                count = self.raw.recv_into(target[filled:])
            except ssl.SSLWantReadError:
                async with asyncio.timeout(timeout_s):
                    await self._readable(len(target) - filled)
                turn = 0
                continue
            except ssl.SSLWantWriteError:
                async with asyncio.timeout(timeout_s):
                    await self._writable()
                continue
            if not count:
                break
            filled, turn = filled + count, turn + count
            if turn >= TURN_BYTES:
                await asyncio.sleep(0)
                turn = 0
        return filled

    async def receive_message(self, limit_bytes: int, timeout_s: float | None = None) -> wire.Message | None:
        """Return the next message, or None when the peer closed between messages.

        Args:
            limit_bytes: The longest body that is taken in.
            timeout_s: For each wait for more.

        Raises:
            WireError: The connection ended inside a frame, or the frame is no message.
            OSError: The connection broke.
            TimeoutError: Nothing came for too long.
        """
        frame = wire.Frame(limit_bytes)
        while True:
            data = bytearray(frame.missing)
            count = await self.receive_into(memoryview(data), timeout_s)
            if not count and frame.is_empty:
                return None
            if count < len(data):
                raise WireError("connection closed inside a frame")
            if (message := frame.feed(data)) is not None:
                return message

    def is_idle(self) -> bool:
        """Tell whether the connection stands and nothing has come that nobody asked for."""
        try:
            self.raw.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the connection."""
        self.raw.close()

    async def _insist(self, operation: Callable[[], T]) -> T:
        """Return what `operation` returns once TLS can read and write what it has to for that."""
        while True:
            try:
                return operation()
            except ssl.SSLWantReadError:
                await self._readable(1)
            except ssl.SSLWantWriteError:
                await self._writable()

    async def _readable(self, wanted_bytes: int) -> None:
        """Wait for so many more bytes, or for fewer; waking up for every packet would cost more than receiving does."""
        low_water = max(1, min(wanted_bytes - _RECORD_BYTES, _WAKE_BYTES))
        if low_water != self._low_water:
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        ready = self._loop.create_future()
        self._loop.add_reader(self.raw, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(self.raw)

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self.raw, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self.raw)


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
