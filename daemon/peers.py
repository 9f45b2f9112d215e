"""The listening side between daemons: peers that know the job's secret offer captures and fetch ranges of slots."""

import asyncio
import errno
import hmac
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from resilient_run.ckpt import wire
from resilient_run.ckpt.errors import DaemonError, SlotError, WireError
from resilient_run.ckpt.slot import SlotHeader

from .fetch import RANGE_BYTES
from .fields import Fields
from .offer import Offer
from .pacing import Pacer
from .rounds import Pair
from .slots import SlotFile

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 10.0
_SEND_TIMEOUT_S = 60.0


class PeerJob(Protocol):
    """What the server needs of a job."""

    @property
    def token(self) -> str | None:
        """The secret that peers must show, None while it is not known."""

    async def find(self, rank: int, pair: Pair) -> SlotFile | None:
        """Return the file that holds `pair` of `rank`, once the slots are verified."""

    def offered(self, host: str, offer: Offer) -> None:
        """Fetch what `host` offers, if it is ours to keep."""

    def pacer(self, rank: int, pair: Pair) -> Pacer | None:
        """Return what says when `pair` of `rank` may leave, None when that is at once."""


class PeerServer:
    """TCP servers of this host's daemon, one for each address that jobs advertise.

    Args:
        bind_addr: Address to listen on whatever jobs advertise, None to listen on just what they advertise.
        find_job: Returns the job of a run id, None when there is none.
        spawn: Runs a connection's coroutine as a task that the daemon cancels at its end.
    """

    def __init__(
        self,
        *,
        bind_addr: str | None,
        find_job: Callable[[str], PeerJob | None],
        spawn: Callable[..., asyncio.Task[None]],
    ) -> None:
        self._bind_addr = bind_addr
        self._find_job = find_job
        self._spawn = spawn
        self._servers: dict[str, asyncio.Server] = {}
        self._listening = asyncio.Lock()

    async def listen(self, addr: str) -> tuple[str, int]:
        """Return the address and port under which peers reach this daemon when a job advertises `addr`.

        Raises:
            DaemonError: `addr` is no address of this host.
        """
        bind_addr = self._bind_addr or addr
        async with self._listening:
            if bind_addr not in self._servers:
                try:
                    self._servers[bind_addr] = await asyncio.start_server(self._accept, bind_addr, 0)
                except OSError as error:
                    hint = "; start resilientd with --peer-addr 0.0.0.0" if error.errno == errno.EADDRNOTAVAIL else ""
                    raise DaemonError(f"cannot listen for peers on {bind_addr}: {error}{hint}") from error
        return addr, int(self._servers[bind_addr].sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        for server in self._servers.values():
            server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = "{}:{}".format(*(writer.get_extra_info("peername") or ("?", 0))[:2])
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                job, host = self._greet(await wire.read_message(reader))
            while (message := await wire.read_message(reader)) is not None:
                await self._handle(job, host, Fields(message, f"host {host}"), message, writer)
        except (WireError, DaemonError, TimeoutError) as error:
            log.warning("closing the connection of peer %s: %s", where, error or "it said nothing in time")
        except ConnectionError as error:
            log.info("peer %s is gone: %s", where, error)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _greet(self, hello: wire.Message | None) -> tuple[PeerJob, str]:
        fields = Fields(hello or {}, "hello")
        if fields.text("op") != "hello":
            raise DaemonError("a peer must say hello first")
        run_id, token, host = fields.text("run_id"), fields.text("token"), fields.text("host")
        job = self._find_job(run_id)
        if job is None or job.token is None:
            raise DaemonError(f"host {host} asks for run {run_id!r}, which is not open here")
        if not hmac.compare_digest(job.token.encode(), token.encode()):
            raise DaemonError(f"host {host} does not know the secret of run {run_id!r}")
        return job, host

    async def _handle(
        self, job: PeerJob, host: str, fields: Fields, message: wire.Message, writer: asyncio.StreamWriter
    ) -> None:
        op, rank, pair = fields.text("op"), fields.integer("rank"), fields.pair()
        if op == "offer":
            job.offered(host, Offer.parse(fields))
            return
        request_id = fields.integer("id")
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
            raise DaemonError(f"host {host}: field 'op' must be offer, get or have, got {message['op']!r}")
        await writer.drain()


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
            await loop.sendfile(writer.transport, source, at, count, fallback=False)
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
