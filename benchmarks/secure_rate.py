"""What do certificates and encryption between daemons cost, in rate and in processor time?

Two hosts hold a capture each in shared memory, and fetch over a link of a laboratory network (`netlab`, needs root) or
over loopback into a slot of their own, range after range, with every checksum verified.

- TLS: the daemons' own code on both sides, `PeerServer` and `Holders`.
- plain: the same ranges and checks, sent with `sendfile` and received into the slot with `sock_recv_into`, as the
  daemons did before they encrypted. It is what a transfer costs at least.
- bare TLS: as many bytes, from one buffer into the slot, by `ssl.SSLSocket.sendall` and `recv_into` alone, on blocking
  sockets and with no checks. It is what TLS costs a Python process at least.

"restore" is a fetch of one host from the other, "replicate" one of each from the other at the same time, as when two
hosts hold each other's replicas. The rate is the payload in one direction over the time of one fetch, connection and
handshake included; processor time is that of both hosts. The contenders take turns.

Full TCP segments in Ethernet frames of 1514 bytes carry 95.6 % payload, and TLS adds 0.1 % to that: that is the most a
link can give. Goals: 90 % of the link up to 1 Gbit/s, and 1.5 times the processor time of plain.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from lab_state import parse_rate
from netlab import NetLab
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
LOOPBACK = "loopback"
CONTENDERS = ("plain", "TLS", "bare TLS")
DIRECTIONS = {"restore": ((0, 1),), "replicate": ((0, 1), (1, 0))}
"""Which host fetches from which."""

NAMES = ("a", "b")
IN_FLIGHT = 2
WAKE_BYTES = 256 << 10
MANIFEST = b"{}"
SHM_BYTES = 4 << 30


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
    """A host's job: one capture that is never paced."""

    def __init__(self, name: str, file: SlotFile) -> None:
        self.identity = identity(name)
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


class Node:
    """One host: its capture, a slot to fetch into, and a port for each contender.

    Args:
        name: Of the host.
        address: At which it listens.
        size_bytes: Of a capture.
        directory: In shared memory.
    """

    def __init__(self, name: str, address: str, size_bytes: int, directory: Path) -> None:
        self.name, self.address, self._size_bytes = name, address, size_bytes
        self._source, self._target = (made_slot(directory / name, size_bytes) for name in ("source", "target"))
        self._source_path = directory / "source"
        fill(self._source, size_bytes)
        self._used_bytes = self._source.header().used_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> dict[str, int]:
        """Listen, and return the ports."""
        job = ServedJob(self.name, SlotFile(rank=0, slot=self._source, pair=PAIR))
        self._server = PeerServer(bind_addr=None, find_job=lambda run_id, to: job, spawn=self._spawn)
        secure = (await self._server.listen(self.address))[1]
        self._plain = await asyncio.start_server(self._serve_plain, self.address, 0)
        bare = socket.create_server((self.address, 0))
        threading.Thread(target=self._serve_bare, args=(bare,), daemon=True).start()
        ports = (self._plain.sockets[0].getsockname()[1], secure, bare.getsockname()[1])
        return dict(zip(CONTENDERS, ports, strict=True))

    async def fetch(self, contender: str, host: str, address: tuple[str, int]) -> float:
        """Fetch from another node, and return the seconds that it took."""
        self._target.begin()
        begun_s = time.monotonic()
        match contender:
            case "TLS":
                peer = Peer(host=host, address=address, identity=identity(self.name))
                await Holders([peer]).fetch(0, PAIR, self._target, self._used_bytes)
                await peer.close()
            case "plain":
                await self._fetch_plain(address)
            case _:
                await asyncio.to_thread(self._fetch_bare, address)
        return time.monotonic() - begun_s

    def _spawn(self, work: Any, *given: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work(*given))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_plain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError), self._source_path.open("rb", buffering=0) as source:
            while (message := await wire.read_message(reader)) is not None:
                writer.write(wire.encode({"id": 0, "ok": True, "size": message["size"]}))
                await loop.sendfile(writer.transport, source, message["offset"], message["size"], fallback=False)
            writer.close()

    async def _fetch_plain(self, address: tuple[str, int]) -> None:
        loop, download, asked = asyncio.get_running_loop(), Download(self._target, self._used_bytes), []
        with socket.create_connection(address) as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            async def receive(target: memoryview) -> None:
                while target:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(target), WAKE_BYTES))
                    target = target[await loop.sock_recv_into(sock, target) :]

            while not download.is_complete:
                while len(asked) < IN_FLIGHT and (part := download.take("peer")) is not None:
                    await loop.sock_sendall(sock, wire.encode({"offset": part.offset, "size": len(part.target)}))
                    asked.append(part)
                part, length = asked.pop(0), bytearray(4)
                await receive(memoryview(length))
                await receive(memoryview(bytearray(int.from_bytes(length, "big"))))
                await receive(part.target)
                download.landed("peer", part)

    def _serve_bare(self, listener: socket.socket) -> None:
        buffer = memoryview(os.urandom(WAKE_BYTES))
        while True:
            with identity(self.name).server.wrap_socket(listener.accept()[0], server_side=True) as sock:
                for at in range(0, self._size_bytes, len(buffer)):
                    sock.sendall(buffer[: self._size_bytes - at])

    def _fetch_bare(self, address: tuple[str, int]) -> None:
        slot = self._target
        target = slot.buffer[slot.payload_offset : slot.payload_offset + self._size_bytes]
        with identity(self.name).client.wrap_socket(socket.create_connection(address)) as sock:
            while target:
                target = target[sock.recv_into(target) :]


async def be_node(name: str, address: str, size_bytes: int) -> None:
    """Be the node of a host until stdin ends: tell the ports, and answer each order there with a line."""
    directory = Path(tempfile.mkdtemp(dir=os.environ.get("RESILIENT_SHM_DIR", "/dev/shm")))
    try:
        node = Node(name, address, size_bytes, directory)
        print(json.dumps(await node.listen()), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            seconds = await node.fetch(order["contender"], order["host"], tuple(order["address"])) if order else 0.0
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(json.dumps({"seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)
    finally:
        shutil.rmtree(directory)


class Place:
    """Both nodes, on a link or on loopback."""

    def __init__(self, nodes: Sequence[subprocess.Popen[str]], addresses: Sequence[str]) -> None:
        self._nodes, self._addresses = nodes, addresses
        self._ports = [self._answer(node) for node in nodes]

    def run(self, contender: str, ways: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Let nodes fetch from each other at the same time; return the seconds of the last one, and processor time."""
        before_s = self._cpu_s()
        for here, there in ways:
            address = (self._addresses[there], self._ports[there][contender])
            self._order(self._nodes[here], {"contender": contender, "host": NAMES[there], "address": address})
        seconds = max(self._answer(self._nodes[here])["seconds"] for here, _ in ways)
        return seconds, self._cpu_s() - before_s

    def _cpu_s(self) -> float:
        for node in self._nodes:
            self._order(node, {})
        return sum(float(self._answer(node)["cpu_s"]) for node in self._nodes)

    @staticmethod
    def _order(node: subprocess.Popen[str], order: Mapping[str, Any]) -> None:
        assert node.stdin is not None
        node.stdin.write(json.dumps(order) + "\n")
        node.stdin.flush()

    @staticmethod
    def _answer(node: subprocess.Popen[str]) -> dict[str, Any]:
        assert node.stdout is not None
        answer: dict[str, Any] = json.loads(node.stdout.readline())
        return answer


@contextlib.contextmanager
def placed(rate: str, size_bytes: int) -> Iterator[Place]:
    """Yield both nodes on a link of this rate, or on loopback."""
    with contextlib.ExitStack() as stack:
        hosts: list[tuple[str, Callable[..., subprocess.Popen[str]]]] = [("127.0.0.1", subprocess.Popen)] * 2
        if rate != LOOPBACK:
            lab = stack.enter_context(NetLab(NAMES, rate=rate, shm_bytes=SHM_BYTES))
            hosts = [(lab.host(name).address, lab.host(name).popen) for name in NAMES]
        nodes = []
        for name, (address, popen) in zip(NAMES, hosts, strict=True):
            command = [sys.executable, *sys.argv[:1], "--node", name, "--address", address, "--bytes", str(size_bytes)]
            node = stack.enter_context(popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            nodes.append(node)
        yield Place(nodes, [address for address, _ in hosts])
        for node in nodes:
            assert node.stdin is not None
            node.stdin.close()


def measure(rate: str, size_bytes: int, repeats: int) -> dict[str, dict[str, Summary]]:
    """Return what every contender reaches in each direction at a place, with its cost beside that of plain."""
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    with placed(rate, size_bytes) as place:
        # The first turn touches all memory, and does not count.
        for turn in range(repeats + 1):
            for direction, ways in DIRECTIONS.items():
                for contender in CONTENDERS:
                    seconds, used_s = place.run(contender, ways)
                    if turn:
                        rates.setdefault(f"{direction}, {contender}", []).append(size_bytes / seconds)
                        costs.setdefault(f"{direction}, {contender}", []).append(
                            used_s / (len(ways) * size_bytes / 1e9)
                        )
    found = {}
    for name in rates:
        plain = costs[f"{name.partition(',')[0]}, plain"]
        found[name] = {
            "gb_per_s": Summary.of(value / 1e9 for value in rates[name]),
            "cpu_s_per_gb": Summary.of(costs[name]),
            "cpu_of_plain": Summary.of(own / its for own, its in zip(costs[name], plain, strict=True)),
        }
        if rate != LOOPBACK:
            found[name]["fraction_of_link"] = Summary.of(8 * value / parse_rate(rate) for value in rates[name])
    return found


def main() -> None:
    """Measure at each place in turn."""
    options = parser(__doc__)
    options.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "4gbit", LOOPBACK], help="of links")
    options.add_argument("--mb", type=int, default=256, help="of a capture, at most")
    options.add_argument("--seconds", type=float, default=3.0, help="that a capture takes on a link, at most")
    options.add_argument("--repeats", type=int, default=7)
    for hidden, kind in (("--node", str), ("--address", str), ("--bytes", int)):
        options.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.node:
        asyncio.run(be_node(args.node, args.address, args.bytes))
        return
    results = {}
    for rate in args.rates:
        size_bytes = args.mb * 10**6
        if rate != LOOPBACK:
            size_bytes = min(size_bytes, int(parse_rate(rate) / 8 * args.seconds))
        results[rate] = measure(rate, size_bytes, args.repeats)
        rows = [
            [
                name,
                f"{100 * found['fraction_of_link'].median:.1f} %" if "fraction_of_link" in found else "",
                f"{found['gb_per_s']:.3f}",
                f"{found['cpu_s_per_gb']:.2f}",
                f"{found['cpu_of_plain']:.1f}",
            ]
            for name, found in results[rate].items()
        ]
        header = ["", "of the link", "GB/s", "CPU s per GB, both hosts", "of plain's"]
        table(f"{size_bytes / 1e6:.0f} MB, {rate}, {args.repeats} times", header, rows)
    parameters = {"most_bytes": args.mb * 10**6, "most_s": args.seconds, "repeats": args.repeats}
    write_json(args.json, question="secure_rate", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
