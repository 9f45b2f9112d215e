"""What do certificates and encryption between daemons cost, against the same bytes over a plain socket?

A server process holds a capture in shared memory and a client process fetches it over loopback into a slot of its own,
range after range, with every checksum verified, as for a replica or a restore.

- TLS: the daemons' own code on both sides, `PeerServer` and `Holders`.
- plain: the same ranges and checks, sent with `sendfile` and received into the slot with `sock_recv_into`, as the
  daemons did before they encrypted. It is what a transfer costs at least.

The rate is the payload over the time of one fetch, handshake included; processor time is that of both processes. The
contenders take turns. There is no goal: nobody may get in, and this says what that costs.
"""

import asyncio
import multiprocessing
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash
from report import Summary, parser, table, write_json

from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, plan_layout
from resilient_run.daemon.peers.download import Download
from resilient_run.daemon.peers.fetch import Peer
from resilient_run.daemon.peers.holders import Holders
from resilient_run.daemon.peers.peers import PeerServer
from resilient_run.daemon.slots.slots import SlotFile
from resilient_run.daemon.trust.identity import Identity

RUN_ID = "bench"
PAIR = (1, 1)
ADDRESS = "127.0.0.1"
IN_FLIGHT = 2
WAKE_BYTES = 256 << 10
MANIFEST = b"{}"


def identity(host: str) -> Identity:
    """Return a host of the run."""
    return Identity("a secret of the benchmark alone", run_id=RUN_ID, incarnation="first", host=host)


def made_slot(path: Path, size_bytes: int) -> Slot:
    """Return an empty slot with room for `size_bytes`."""
    payload_offset, capacity_bytes = plan_layout(len(MANIFEST), size_bytes)
    return Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)


def fill(slot: Slot, size_bytes: int) -> None:
    """Capture random bytes into `slot`."""
    slot.begin()
    checksums = []
    for at in range(0, size_bytes, CHUNK_BYTES):
        data = os.urandom(min(CHUNK_BYTES, size_bytes - at))
        slot.buffer[slot.payload_offset + at :][: len(data)] = data
        checksums.append(xxhash.xxh3_64_intdigest(data).to_bytes(8, "little"))
    slot.publish(
        run_id=RUN_ID,
        topology=0,
        rank=0,
        world_size=1,
        generation=PAIR[0],
        step=PAIR[1],
        payload_bytes=size_bytes,
        manifest=MANIFEST,
        checksums=b"".join(checksums),
    )


class ServedJob:
    """The server's job: one capture that is never paced."""

    def __init__(self, file: SlotFile) -> None:
        self.identity = identity("a")
        self._file = file

    async def find(self, rank: int, pair: tuple[int, int]) -> SlotFile:
        """Return the capture."""
        return self._file

    def offered(self, host: str, offer: Any) -> None:
        """Nobody offers."""

    def digests(self, *of: Any) -> None:
        """Nobody asks."""

    def pacer(self, rank: int, pair: tuple[int, int]) -> None:
        """Everything may leave at once."""


async def serve(path: Path, control: Connection) -> None:
    """Serve the capture in `path` in both ways; tell the ports, and then our processor time whenever asked for it."""
    slot = Slot.open(path)
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        return task

    job = ServedJob(SlotFile(rank=0, slot=slot, pair=PAIR))
    server = PeerServer(bind_addr=None, find_job=lambda run_id, to: job, spawn=spawn)
    secure = (await server.listen(ADDRESS))[1]

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError), path.open("rb", buffering=0) as source:
            while (message := await wire.read_message(reader)) is not None:
                writer.write(wire.encode({"id": 0, "ok": True, "size": message["size"]}))
                loop = asyncio.get_running_loop()
                await loop.sendfile(writer.transport, source, message["offset"], message["size"], fallback=False)
            writer.close()

    listener = await asyncio.start_server(plain, ADDRESS, 0)
    control.send({"TLS": secure, "plain": listener.sockets[0].getsockname()[1]})
    while await asyncio.to_thread(control.recv):
        control.send(cpu_s())
    os._exit(0)


def cpu_s() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def fetch_secure(port: int, slot: Slot, used_bytes: int) -> None:
    """Fetch as a daemon does."""
    peer = Peer(host="a", address=(ADDRESS, port), identity=identity("b"))
    try:
        await Holders([peer]).fetch(0, PAIR, slot, used_bytes)
    finally:
        await peer.close()


async def fetch_plain(port: int, slot: Slot, used_bytes: int) -> None:
    """Fetch the same ranges over a plain socket."""
    loop, download, asked = asyncio.get_running_loop(), Download(slot, used_bytes), []
    with socket.create_connection((ADDRESS, port)) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        async def receive(target: memoryview) -> None:
            while target:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(target), WAKE_BYTES))
                target = target[await loop.sock_recv_into(sock, target) :]

        while not download.is_complete:
            while len(asked) < IN_FLIGHT and (part := download.take("a")) is not None:
                await loop.sock_sendall(sock, wire.encode({"offset": part.offset, "size": len(part.target)}))
                asked.append(part)
            part, length = asked.pop(0), bytearray(4)
            await receive(memoryview(length))
            await receive(memoryview(bytearray(int.from_bytes(length, "big"))))
            await receive(part.target)
            download.landed("a", part)


@contextmanager
def served(path: Path) -> Iterator[tuple[dict[str, int], Connection]]:
    """Yield the ports of a server process for the capture in `path`, and the way to ask it for its processor time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=lambda: asyncio.run(serve(path, theirs)), daemon=True)
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        ours.send(False)
        process.join()


def main() -> None:
    """Measure both in turns."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, default=256, help="of a capture")
    options.add_argument("--repeats", type=int, default=7)
    args = options.parse_args()
    size_bytes = args.mb * 10**6
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    rates: dict[str, list[float]] = {"plain": [], "TLS": []}
    costs: dict[str, list[float]] = {"plain": [], "TLS": []}
    try:
        source, target = made_slot(directory / "source", size_bytes), made_slot(directory / "target", size_bytes)
        fill(source, size_bytes)
        used_bytes = source.header().used_bytes
        with served(directory / "source") as (ports, control):

            def both_s() -> float:
                control.send(True)
                return float(control.recv()) + cpu_s()

            # The first turn touches all memory, and does not count.
            for turn in range(args.repeats + 1):
                for name, fetch in (("plain", fetch_plain), ("TLS", fetch_secure)):
                    target.begin()
                    before_s, began_s = both_s(), time.monotonic()
                    asyncio.run(fetch(ports[name], target, used_bytes))
                    seconds, used_s = time.monotonic() - began_s, both_s() - before_s
                    assert target.buffer[used_bytes - 32 : used_bytes] == source.buffer[used_bytes - 32 : used_bytes]
                    if turn:
                        rates[name].append(size_bytes / seconds / 1e9)
                        costs[name].append(used_s / (size_bytes / 1e9))
    finally:
        shutil.rmtree(directory)
    results = {
        name: {"gb_per_s": Summary.of(rates[name]), "cpu_s_per_gb": Summary.of(costs[name])}
        for name in ("plain", "TLS")
    }
    rows = [[name, f"{found['gb_per_s']:.2f}", f"{found['cpu_s_per_gb']:.2f}"] for name, found in results.items()]
    table(f"{args.mb} MB over loopback, {args.repeats} times", ["", "GB/s", "CPU s per GB, both ends"], rows)
    write_json(
        args.json,
        question="secure_rate",
        parameters={"state_bytes": size_bytes, "repeats": args.repeats},
        results=results,
    )


if __name__ == "__main__":
    main()
