"""The listening side between daemons: peers that know the job's secret offer captures and fetch ranges of slots."""

import asyncio
import errno
import hmac
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from resilient_run.ckpt.errors import DaemonError, SlotError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.digests import MAX_DIGESTS
from resilient_run.ckpt.format.slot import SlotHeader

from ..base.crowd import Crowd
from ..base.door import Door, Manners, room_for
from ..base.fields import Fields
from ..run.rounds import Pair
from ..slots.slots import SlotFile
from .daemon_transport import Offer
from .download import RANGE_BYTES
from .pacing import Pacer

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 60.0
_FRAME_BYTES = 4096
"""Hellos, offers and requests are a few hundred bytes long."""

_MANNERS = Manners(frame_bytes=_FRAME_BYTES, silent_s=3.0)
_CONNECTIONS_PER_HOST = 16
"""A host's daemon has four, and may be restarted before the old ones are seen to break."""

_CONNECTIONS = 4096


class PeerJob(Protocol):
    """What the server needs of a job."""

    @property
    def token(self) -> str | None:
        """The secret that peers must show, None while it is not known."""

    async def find(self, rank: int, pair: Pair) -> SlotFile | None:
        """Return the file that holds `pair` of `rank`, once the slots are verified."""

    def offered(self, host: str, offer: Offer) -> None:
        """Fetch what `host` offers, if it is ours to keep."""

    def digests(self, rank: int, pair: Pair, structure: str, wanted: Sequence[int]) -> dict[str, Any] | None:
        """Return the digests of a structure at `pair` of the own `rank` and the names of the `wanted`, None if gone."""

    def pacer(self, rank: int, pair: Pair) -> Pacer | None:
        """Return what says when `pair` of `rank` may leave, None when that is at once."""


class PeerServer:
    """TCP servers of this host's daemon, one for each address that jobs advertise.

    Args:
        bind_addr: Address to listen on whatever jobs advertise, None to listen on just what they advertise.
        find_job: Returns the job of a run id and a host of it ("" for the only one), None when there is none.
        spawn: Runs a connection's coroutine as a task that the daemon cancels at its end.
    """

    def __init__(
        self,
        *,
        bind_addr: str | None,
        find_job: Callable[[str, str], PeerJob | None],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        self._bind_addr = bind_addr
        self._find_job = find_job
        self._spawn = spawn
        self._doors: dict[str, Door] = {}
        self._listening = asyncio.Lock()
        self._peers: Crowd[asyncio.Task[None]] = Crowd(per_source=_CONNECTIONS_PER_HOST, in_all=room_for(_CONNECTIONS))

    async def listen(self, addr: str) -> tuple[str, int]:
        """Return the address and port under which peers reach this daemon when a job advertises `addr`.

        Raises:
            DaemonError: `addr` is no address of this host.
        """
        bind_addr = self._bind_addr or addr
        async with self._listening:
            if bind_addr not in self._doors:
                try:
                    listener = await _bind(bind_addr)
                except OSError as error:
                    hint = "; start resilientd with --peer-addr 0.0.0.0" if error.errno == errno.EADDRNOTAVAIL else ""
                    raise DaemonError(f"cannot listen for peers on {bind_addr}: {error}{hint}") from error
                self._doors[bind_addr] = Door(
                    listener, manners=_MANNERS, source_of=lambda sock: sock.getpeername()[0], admit=self._admit
                )
        return addr, self._doors[bind_addr].address[1]

    def close(self) -> None:
        """Stop listening."""
        for door in self._doors.values():
            door.close()

    def _admit(self, sock: socket.socket, hello: wire.Message) -> None:
        """Serve whoever knows the secret of a job; of one host no more than it needs, the newest ones."""
        try:
            job, run_id, host = self._greet(hello)
        except DaemonError as error:
            log.warning("closing the connection of peer %s: %s", _where(sock), error)
            sock.close()
            return
        task = self._spawn(self._serve(sock, job, host))
        task.add_done_callback(self._peers.discard)
        if (turned_out := self._peers.add(task, (run_id, host))) is not None:
            log.warning("closing a connection of host %s: it has too many", host)
            turned_out.cancel()

    async def _serve(self, sock: socket.socket, job: PeerJob, host: str) -> None:
        where = _where(sock)
        reader, writer = await asyncio.open_connection(sock=sock, limit=_FRAME_BYTES)
        try:
            while (message := await wire.read_message(reader, _FRAME_BYTES)) is not None:
                await self._handle(job, host, Fields(message, f"host {host}"), message, writer)
        except (WireError, DaemonError, TimeoutError) as error:
            log.warning("closing the connection of peer %s: %s", where, error or "it does not read")
        except ConnectionError as error:
            log.info("peer %s is gone: %s", where, error)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _greet(self, hello: wire.Message) -> tuple[PeerJob, str, str]:
        fields = Fields(hello, "hello")
        if fields.text("op") != "hello":
            raise DaemonError("a peer must say hello first")
        run_id, token, host = fields.text("run_id"), fields.text("token"), fields.text("host")
        job = self._find_job(run_id, fields.optional_text("to"))
        if job is None or job.token is None:
            raise DaemonError(f"host {host} asks for run {run_id!r}, which is not open here")
        if not hmac.compare_digest(job.token.encode(), token.encode()):
            raise DaemonError(f"host {host} does not know the secret of run {run_id!r}")
        return job, run_id, host

    async def _handle(
        self, job: PeerJob, host: str, fields: Fields, message: wire.Message, writer: asyncio.StreamWriter
    ) -> None:
        op, rank, pair = fields.text("op"), fields.integer("rank"), fields.pair()
        if op == "offer":
            job.offered(host, Offer.parse(fields))
            return
        request_id = fields.integer("id")
        if op == "digests":
            known = job.digests(rank, pair, fields.text("structure"), fields.integers("leaves", high=MAX_DIGESTS))
            answer = {"ok": True, **known} if known else {"ok": False, "error": "SlotError", "message": "they are gone"}
            writer.write(wire.encode({"id": request_id, **answer}))
            await writer.drain()
            return
        file = await job.find(rank, pair)
        header = None if file is None else _header_of(file, pair)
        if file is None or header is None:
            answer = {"ok": False, "error": "SlotError", "message": f"rank {rank} {pair} is not held here"}
            writer.write(wire.encode({"id": request_id, **answer}))
        elif op == "have":
            size = {"used_bytes": header.used_bytes, "payload_offset": header.payload_offset}
            writer.write(wire.encode({"id": request_id, "ok": True, **size}))
        elif op == "get":
            offset = fields.integer("offset", high=header.used_bytes - 1)
            size_bytes = fields.integer("size", low=1, high=min(RANGE_BYTES, header.used_bytes - offset))
            await _send_range(file, request_id, offset, size_bytes, writer, job.pacer(rank, pair), pair[1])
        else:
            raise DaemonError(f"host {host}: field 'op' must be offer, get, have or digests, got {message['op']!r}")
        await writer.drain()


async def _bind(addr: str) -> socket.socket:
    """Return a TCP socket at `addr` with a port that the kernel chooses."""
    found = await asyncio.get_running_loop().getaddrinfo(addr, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _where(sock: socket.socket) -> str:
    try:
        return "{}:{}".format(*sock.getpeername()[:2])
    except OSError:
        return "that has gone"


async def _send_range(
    file: SlotFile,
    request_id: int,
    offset: int,
    size_bytes: int,
    writer: asyncio.StreamWriter,
    pacer: Pacer | None,
    step: int,
) -> None:
    """Send bytes of the slot file; if it is overwritten meanwhile, checksums tell the receiver."""
    try:
        source = open(file.slot.path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        answer = {"id": request_id, "ok": False, "error": "SlotError", "message": "the replica was given up"}
        writer.write(wire.encode(answer))
        return
    loop = asyncio.get_running_loop()
    at = offset

    async def send(count: int) -> None:
        nonlocal at
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            if writer.transport.is_closing():
                raise ConnectionError("the connection is closed")
            try:
                await loop.sendfile(writer.transport, source, at, count, fallback=False)
            except asyncio.SendfileNotAvailableError as error:
                # What asyncio makes of a connection that breaks before the first byte.
                raise ConnectionError(str(error)) from error
        at += count

    with source:
        writer.write(wire.encode({"id": request_id, "ok": True, "size": size_bytes}))
        if pacer is None:
            await send(size_bytes)
        else:
            await pacer.send(step, size_bytes, writer.transport, send)


def _header_of(file: SlotFile, pair: Pair) -> SlotHeader | None:
    try:
        header = file.slot.header()
    except SlotError:
        return None
    return header if (header.generation, header.step) == pair else None
