"""Does a flood leave anything behind: commits per second before it, meanwhile, and afterwards?

Two real daemons on one machine; the benchmark takes the trainers' part, and commits one small capture of two ranks
after the other. Each round measures that, floods both daemons for a minute, and measures it again 10 s later, when what
the flood has left open has timed out. The flood, all at once, at the port for peers and at the unix socket of each
daemon: 2000 connections that say nothing, ever new ones; 800 that say a byte a second of a message; and bytes without a
meaning as fast as they are taken.

Goal: afterwards as before, and no memory or files kept. How many commits there are meanwhile is mostly a question of
who gets the processors, which flood and daemons share here.
"""

import contextlib
import os
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from report import Summary, parser, table, write_json

from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.launcher.etcd_server import EmbeddedEtcd

# The tests' harness plays launcher, rendezvous, trainers, and the attackers.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
from flood import Flood
from hosts import Hosts, Trainer
from peer_talk import peer_address
from replication_rate import capture_all

Address = tuple[socket.AddressFamily, Any]

STATE_BYTES = 1 << 16
SILENT = 2000
SLOW = 200


class Committing:
    """Two ranks that commit one step after the other."""

    def __init__(self, trainers: list[Trainer]) -> None:
        self._trainers = trainers
        self._step = 0

    def rate(self, seconds: float) -> float:
        """Commit for so long, and return how many there were in a second."""
        begun_s, first = time.monotonic(), self._step
        while (taken_s := time.monotonic() - begun_s) < seconds or self._step == first:
            self._step += 1
            capture_all(self._trainers, self._step, STATE_BYTES)
        return (self._step - first) / taken_s


@contextlib.contextmanager
def running(*works: Any) -> Iterator[None]:
    """Let each of `works`, functions of an event, run in a thread until the event is set."""
    over = threading.Event()
    threads = [threading.Thread(target=work, args=(over,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def drip(family: int, address: Any, over: threading.Event) -> None:
    """Keep connections that say a byte a second of a message of 4000 bytes; those that are closed are opened again."""
    message = struct.pack(">I", 4000) + b'{"op":"' + b"x" * 4000
    held: list[tuple[socket.socket, Iterator[int]]] = []
    while not over.wait(1.0):
        kept = []
        for sock, said in held:
            try:
                at = next(said)
                sock.sendall(message[at : at + 1])
                kept.append((sock, said))
            except OSError:
                sock.close()
        held = kept
        while len(held) < SLOW and not over.is_set():
            sock = socket.socket(family)
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                sock.connect(address)
            held.append((sock, iter(range(len(message)))))
    for sock, _ in held:
        sock.close()


def garbage(family: int, address: Any, over: threading.Event) -> None:
    """Send bytes without a meaning, over ever new connections."""
    while not over.wait(0.002):
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.settimeout(5)
            sock.connect(address)
            sock.sendall(os.urandom(4096))


def flooded_rate(committing: Committing, addresses: list[Address], seconds: float) -> float:
    """Return the commits per second in a flood of so many seconds."""
    with contextlib.ExitStack() as stack:
        works = []
        for family, address in addresses:
            for work in (drip, garbage):
                works.append(lambda over, work=work, family=family, address=address: work(family, address, over))
        stack.enter_context(running(*works))
        for family, address in addresses:
            stack.enter_context(Flood(family, address, count=SILENT // len(addresses)))
        return committing.rate(seconds)


def holds(daemons: list[psutil.Process]) -> dict[str, int]:
    """Return the memory, without what is shared, and the files of all daemons together."""
    memory = [daemon.memory_info() for daemon in daemons]
    return {
        "bytes": sum(found.rss - found.shared for found in memory),
        "files": sum(daemon.num_fds() for daemon in daemons),
    }


def main() -> None:
    """Measure round by round."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="rounds")
    options.add_argument("--seconds", type=float, default=60.0, help="of each flood")
    options.add_argument("--quiet-seconds", type=float, default=15.0, help="that are measured before and after it")
    options.add_argument("--settle-seconds", type=float, default=10.0, help="after it, before that is measured")
    args = options.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found: dict[str, list[float]] = {name: [] for name in ("before", "meanwhile", "after", "after / before")}
    kept: dict[str, list[float]] = {"bytes": [], "files": []}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = EtcdConfig(endpoints=(stack.enter_context(EmbeddedEtcd()).endpoint,))
        hosts = stack.enter_context(contextlib.closing(Hosts(root, run_id=f"flood-{os.getpid()}", config=config)))
        trainers = hosts.run("ab")
        committing = Committing(trainers)
        committing.rate(args.quiet_seconds)  # learns what it can do
        addresses: list[Address] = [(socket.AF_INET, peer_address(hosts, name)) for name in "ab"]
        addresses += [(socket.AF_UNIX, str(hosts[name].socket_path)) for name in "ab"]
        daemons = [psutil.Process(host.process.pid) for name in "ab" if (host := hosts[name]).process is not None]
        for _ in range(args.repeats):
            at_first = holds(daemons)
            before = committing.rate(args.quiet_seconds)
            meanwhile = flooded_rate(committing, addresses, args.seconds)
            committing.rate(args.settle_seconds)
            after = committing.rate(args.quiet_seconds)
            for name, value in zip(found, (before, meanwhile, after, after / before), strict=True):
                found[name].append(value)
            for name, value in holds(daemons).items():
                kept[name].append(value - at_first[name])
    results = {name: Summary.of(values) for name, values in found.items()}
    rows = [[name, f"{results[name]:.1f}" if name != "after / before" else f"{results[name]:.2f}"] for name in results]
    table(f"Commits per second, {args.repeats} rounds with a flood of {args.seconds:.0f} s each", ["", ""], rows)
    of_kept = {name: Summary.of(values) for name, values in kept.items()}
    print(
        f"A round adds to both daemons {of_kept['bytes'].median / 1e6:.1f} MB and {of_kept['files'].median:.0f} files."
    )
    write_json(
        args.json,
        question="after_flood",
        parameters={
            "repeats": args.repeats,
            "flood_s": args.seconds,
            "quiet_s": args.quiet_seconds,
            "settle_s": args.settle_seconds,
            "silent_connections": SILENT,
            "slow_connections": SLOW * len(addresses),
            "state_bytes": STATE_BYTES,
        },
        results={"commits_per_s": results, "kept_by_both_daemons": of_kept},
    )


if __name__ == "__main__":
    main()
