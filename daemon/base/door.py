"""A listening socket that a flood does not close: connections without a message cost little, and are closed first.

A connection is a *stranger* until its first message arrives. A stranger has no task, and no buffer beyond that one
small message. Their number is limited (`Crowd`): over the limit, the busiest source loses its oldest connection. So
thousands of silent connections do not affect known ones, and a client that speaks at once is served.
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import wire

from .crowd import Crowd

log = logging.getLogger(__name__)

_BACKLOG = 4096
_BATCH = 16
_PAUSE_S = 0.2
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_STRANGERS = 1024
_SHARE_OF_FILES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Manners:
    """What is asked of a stranger.

    Attributes:
        frame_bytes: The longest first message.
        silent_s: How long it may take to say it, None for as long as there is room.
    """

    frame_bytes: int
    silent_s: float | None


class Door:
    """Accepts connections and hands on those whose first message has come.

    Args:
        listener: A bound socket; the door listens and closes it.
        manners: What is asked of strangers.
        source_of: Returns whose a connection is, for the share that each source has of the room; raises OSError for one
            that is not let in.
        admit: Gets each connection, as a non-blocking socket, with its first message; it closes what it refuses.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        manners: Manners,
        source_of: Callable[[socket.socket], Hashable],
        admit: Callable[[socket.socket, wire.Message], None],
    ) -> None:
        self._listener = listener
        self._manners = manners
        self._source_of = source_of
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        room = room_for(_STRANGERS)
        self._strangers: Crowd[_Stranger] = Crowd(per_source=max(1, room // 2), in_all=room)
        self._resuming: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._loop.add_reader(listener, self._accept)

    @property
    def address(self) -> tuple[str, int]:
        """Address and port of a TCP listener."""
        addr, port = self._listener.getsockname()[:2]
        return str(addr), int(port)

    def close(self) -> None:
        """Stop listening and send strangers away."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        while (stranger := self._strangers.turn_out()) is not None:
            stranger.dismiss()

    def _accept(self) -> None:
        # Not all that wait at once: those who are known have their turns in between.
        for _ in range(_BATCH):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._refused(error)
                return
            self._welcome(sock)

    def _refused(self, error: OSError) -> None:
        """Make room when the process has no file left for another connection, or wait for some."""
        log.warning("cannot accept a connection: %s", error)
        if error.errno in _EXHAUSTED and (stranger := self._strangers.turn_out()) is not None:
            stranger.dismiss()
            return
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            source = self._source_of(sock)
        except OSError as error:
            log.warning("a connection was not accepted: %s", error)
            sock.close()
            return
        stranger = _Stranger(sock, source, self._manners, self._heard)
        if (turned_out := self._strangers.add(stranger, source)) is not None:
            log.warning("closing an idle connection of %s, to make room for others", turned_out.source)
            turned_out.dismiss()

    def _heard(self, stranger: "_Stranger", message: wire.Message | None) -> None:
        self._strangers.discard(stranger)
        if message is None:
            stranger.dismiss()
        else:
            self._admit(stranger.release(), message)


class _Stranger:
    """A connection whose first message is awaited; `heard` gets that, or None when it will not come."""

    def __init__(
        self,
        sock: socket.socket,
        source: Hashable,
        manners: Manners,
        heard: Callable[["_Stranger", wire.Message | None], None],
    ) -> None:
        self.source = source
        self._sock = sock
        self._frame = wire.Frame(manners.frame_bytes)
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._timer = None if manners.silent_s is None else self._loop.call_later(manners.silent_s, self._late)
        self._loop.add_reader(sock, self._read)

    def release(self) -> socket.socket:
        """Return the socket, which is the caller's now."""
        self._loop.remove_reader(self._sock)
        if self._timer is not None:
            self._timer.cancel()
        return self._sock

    def dismiss(self) -> None:
        """Close the connection."""
        self.release().close()

    def _late(self) -> None:
        log.warning("closing a connection of %s: it sent nothing in time", self.source)
        self._heard(self, None)

    def _read(self) -> None:
        try:
            data = self._sock.recv(self._frame.missing)
            if data:
                message = self._frame.feed(data)
                if message is None:
                    return
            else:
                message = None
                if not self._frame.is_empty:
                    raise WireError("connection closed inside a frame")
        except (BlockingIOError, InterruptedError):
            return
        except (WireError, OSError) as error:
            log.warning("closing a connection of %s: %s", self.source, error)
            message = None
        self._heard(self, message)


def room_for(wanted: int) -> int:
    """Return how many connections of one kind there may be: `wanted`, less where the process may open few files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // _SHARE_OF_FILES))
