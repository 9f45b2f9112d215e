"""The listening side between daemons: peers of the same run offer captures and fetch ranges of slots.

Whoever connects passes three gates, and each has room of its own, so that a flood at one takes nothing from those who
are further: the door, until a first message names the run; the handshake, until a certificate proves that the secret of
that run is known; and then a place among the connections of the host that the certificate names.
"""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from resilient_run.ckpt.errors import DaemonError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.digests import MAX_DIGESTS
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import SlotHeader
from resilient_run.ckpt.format.version import FORMATS

from ..base.crowd import Crowd
from ..base.door import Door, Manners, room_for
from ..base.fields import Fields
from ..slots.slots import SlotFile
from ..trust.identity import Identity
from ..trust.secure import TURN_BYTES, SecureSocket
from .daemon_transport import Offer
from .download import RANGE_BYTES
from .pacing import Pacer

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 60.0
_FRAME_BYTES = 4096
"""Hellos, offers and requests are a few hundred bytes long."""

_SHOWN = 80
"""So much of what strangers say is logged: they could fill the file system of the log."""

_MANNERS = Manners(frame_bytes=_FRAME_BYTES, silent_s=3.0)
_CONNECTIONS_PER_HOST = 16
"""A host's daemon has five, and may be restarted before the old ones are seen to break."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Seconds without a byte until the kernel asks, between its questions, and how many may stay without an answer."""

_CONNECTIONS = 4096
_HANDSHAKE_S = 5.0
_HANDSHAKES = 256
"""At a time; each may take some 100 KiB, and one that is meant well takes milliseconds."""


class PeerJob(Protocol):
    """What the server needs of a job."""

    @property
    def identity(self) -> Identity | None:
        """Who this host is to its peers, None while the run's secret is not known."""

    async def find(self, rank: int, pair: Pair) -> SlotFile | None:
        """Return the file that holds `pair` of `rank`, once the slots are verified."""

    def offered(self, host: str, offer: Offer) -> None:
        """Fetch what `host` offers, if it is ours to keep."""

    def digests(self, rank: int, pair: Pair, structure: str, wanted: Sequence[int]) -> dict[str, Any] | None:
        """Return the digests of a structure at `pair` of the own `rank` and the names of the `wanted`, None if gone."""

    def pacer(self, rank: int, pair: Pair) -> Pacer | None:
        """Return what says when `pair` of `rank` may leave, None when that is at once."""

    async def reports(self, host: str, sock: SecureSocket) -> None:
        """Hear the reports of `host` on its link, until that ends."""


class PeerServer:
    """TCP servers of this host's daemon, one for each address that jobs advertise.

    Args:
        bind_addr: Address to listen on whatever jobs advertise, None to listen on just what they advertise.
        find_job: Returns the job of a run id and a host of it ("" for the only one), None when there is none.
        spawn: Runs a function, with what is given besides, as a task that the daemon cancels at its end.
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
        self._doors: dict[str, list[Door]] = {}
        self._listening = asyncio.Lock()
        room = room_for(_HANDSHAKES)
        self._unproven: Crowd[asyncio.Task[None]] = Crowd(per_source=max(1, room // 2), in_all=room)
        self._peers: Crowd[asyncio.Task[None]] = Crowd(per_source=_CONNECTIONS_PER_HOST, in_all=room_for(_CONNECTIONS))

    async def listen(self, addr: str, ports: range | None = None) -> tuple[str, int]:
        """Return the address and port under which peers reach this daemon when a job advertises `addr`.

        Args:
            addr: Of this host.
            ports: Which ports will do, None for one that the kernel chooses.

        Raises:
            DaemonError: `addr` is no address of this host, or others have all `ports`.
        """
        bind_addr = self._bind_addr or addr
        async with self._listening:
            doors = self._doors.setdefault(bind_addr, [])
            for door in doors:
                if ports is None or door.address[1] in ports:
                    return addr, door.address[1]
            try:
                listener = await _bind(bind_addr, ports or range(1))
            except OSError as error:
                hint = "; start resilientd with --peer-addr 0.0.0.0" if error.errno == errno.EADDRNOTAVAIL else ""
                if ports is not None and error.errno == errno.EADDRINUSE:
                    hint = f"; give a free port, or a longer range, with --rr-port (now {_shown(ports)})"
                raise DaemonError(f"cannot listen for peers on {bind_addr}: {error}{hint}") from error
            door = Door(listener, manners=_MANNERS, source_of=lambda sock: sock.getpeername()[0], admit=self._admit)
            doors.append(door)
        return addr, door.address[1]

    def close(self) -> None:
        """Stop listening."""
        for doors in self._doors.values():
            for door in doors:
                door.close()

    def _admit(self, sock: socket.socket, hello: wire.Message) -> None:
        """Let whoever names a run that is open here prove that it belongs to that."""
        try:
            job, identity = self._greet(hello)
            source = sock.getpeername()[0]
        except (DaemonError, OSError) as error:
            log.warning("closing the connection of peer %s: %s", _where(sock), error)
            sock.close()
            return
        task = self._spawn(self._serve, sock, job, identity, hello)
        task.add_done_callback(self._unproven.discard)
        task.add_done_callback(self._peers.discard)
        # Before its first turn a task that is cancelled closes nothing.
        task.add_done_callback(lambda _: sock.close())
        if (turned_out := self._unproven.add(task, source)) is not None:
            log.warning("ending a handshake, to make room for others")
            turned_out.cancel()

    async def _serve(self, plain: socket.socket, job: PeerJob, identity: Identity, hello: wire.Message) -> None:
        where, sock = _where(plain), None
        try:
            sock = SecureSocket(plain, identity, server_side=True)
            host = await _prove(sock, hello)
            self._seat(host, identity.run_id)
            while (message := await sock.receive_message(_FRAME_BYTES)) is not None:
                if self._find_job(identity.run_id, identity.host) is not job:
                    raise DaemonError(f"the launcher that had run {identity.run_id!r} open here has left it")
                await self._handle(job, host, Fields(message, f"host {host}"), message, sock)
        except ConnectionError as error:
            log.info("peer %s is gone: %s", where, error)
        except (WireError, DaemonError, OSError) as error:
            log.warning("closing the connection of peer %s: %s", where, error or "it does not read, or sends nothing")
        finally:
            if sock is not None:
                sock.close()

    def _seat(self, host: str, run_id: str) -> None:
        """Count the present task among the connections of `host`: no more than it needs, the newest ones."""
        task = asyncio.current_task()
        assert task is not None
        self._unproven.discard(task)
        if (turned_out := self._peers.add(task, (run_id, host))) is not None:
            log.warning("closing a connection of host %s: it has too many", host)
            turned_out.cancel()

    def _greet(self, hello: wire.Message) -> tuple[PeerJob, Identity]:
        """Return whom a stranger wants, and who we are to it.

        Raises:
            DaemonError: It does not say hello, or speaks of nothing that is known here.
        """
        fields = Fields(hello, "hello")
        if fields.text("op") != "hello":
            raise DaemonError("a peer must say hello first")
        if (theirs := fields.optional_text("wire") or "1") != (ours := FORMATS["wire"]):
            raise DaemonError(
                f"it speaks version {theirs[:_SHOWN]} of the wire format, this daemon {ours}: install the same "
                "resilient-run"
            )
        run_id = fields.text("run_id")
        job = self._find_job(run_id, fields.optional_text("to"))
        identity = None if job is None else job.identity
        if job is None or identity is None:
            raise DaemonError(f"it asks for run {run_id[:_SHOWN]!r}, which is not open here")
        return job, identity

    async def _handle(self, job: PeerJob, host: str, fields: Fields, message: wire.Message, sock: SecureSocket) -> None:
        op = fields.text("op")
        if op == "report":
            await job.reports(host, sock)
            return
        rank, pair = fields.integer("rank"), fields.pair()
        if op == "offer":
            job.offered(host, Offer.of_fields(fields))
            return
        request_id = fields.integer("id")
        if op == "digests":
            known = job.digests(rank, pair, fields.text("structure"), fields.integers("leaves", high=MAX_DIGESTS))
            answer = {"ok": True, **known} if known else {"ok": False, "error": "SlotError", "message": "they are gone"}
            await sock.send_message({"id": request_id, **answer})
            return
        file = await job.find(rank, pair)
        header = None if file is None else _header_of(file, pair)
        if file is None or header is None:
            answer = {"ok": False, "error": "SlotError", "message": f"rank {rank} {pair} is not held here"}
            await sock.send_message({"id": request_id, **answer})
        elif op == "have":
            size = {"used_bytes": header.used_bytes, "payload_offset": header.payload_offset}
            await sock.send_message({"id": request_id, "ok": True, **size})
        elif op == "get":
            offset = fields.integer("offset", high=header.used_bytes - 1)
            size_bytes = fields.integer("size", low=1, high=min(RANGE_BYTES, header.used_bytes - offset))
            await _send_range(file, request_id, offset, size_bytes, sock, job.pacer(rank, pair), pair[1])
        else:
            raise DaemonError(f"host {host}: field 'op' must be offer, get, have, digests or report, got {op!r}")


async def _prove(sock: SecureSocket, hello: wire.Message) -> str:
    """Return the host that the client has proven to be.

    Raises:
        OSError: It has not proven any, or is unreachable.
        DaemonError: It says that it is another one, or now wants something else than its first `hello` said.
        WireError: It does not say hello again.
    """
    async with asyncio.timeout(_HANDSHAKE_S):
        host = await sock.handshake()
        again = await sock.receive_message(_FRAME_BYTES)
    if again is not None and again != {**hello, "host": host}:
        raise DaemonError(
            f"it has the certificate of host {host}, and says hello as {str(again.get('host'))[:_SHOWN]!r}"
        )
    if again is None:
        raise WireError("it sent nothing after the handshake")
    return host


async def _bind(addr: str, ports: range) -> socket.socket:
    """Return a TCP socket at `addr` with the first of `ports` that is free; the kernel chooses one for port 0."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(addr, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    for port in ports:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it: a host that loses its power says no farewell, and nothing waits for an idle one.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.bind((address[0], port, *address[2:]))
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
        else:
            return sock
    raise AssertionError("there is a last port")


def _shown(ports: range) -> str:
    return str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"


def _where(sock: socket.socket) -> str:
    try:
        return "{}:{}".format(*sock.getpeername()[:2])
    except OSError:
        return "unknown address"


async def _send_range(
    file: SlotFile,
    request_id: int,
    offset: int,
    size_bytes: int,
    sock: SecureSocket,
    pacer: Pacer | None,
    step: int,
) -> None:
    """Send bytes of the slot file; if it is overwritten meanwhile, checksums tell the receiver."""
    try:
        source = open(file.slot.path, "rb", buffering=0)  # noqa: SIM115
    except FileNotFoundError:
        answer = {"id": request_id, "ok": False, "error": "SlotError", "message": "the replica was given up"}
        await sock.send_message(answer)
        return
    # Not encrypted where it is: what changes before all of it has left would be another message to TLS.
    buffer, at = memoryview(bytearray(min(size_bytes, TURN_BYTES))), offset

    async def send(count: int) -> None:
        nonlocal at
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            while count:
                piece = buffer[: os.preadv(source.fileno(), [buffer[:count]], at)]
                if not piece:
                    raise DaemonError(f"{file.slot.path} ends at byte {at}")
                await sock.send_all(piece)
                at, count = at + len(piece), count - len(piece)

    with source:
        await sock.send_message({"id": request_id, "ok": True, "size": size_bytes})
        if pacer is None:
            await send(size_bytes)
        else:
            await pacer.send(step, size_bytes, sock.raw, send)


def _header_of(file: SlotFile, pair: Pair) -> SlotHeader | None:
    header = file.slot.header_or_none()
    return header if header is not None and header.pair == pair else None
