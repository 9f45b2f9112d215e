"""Hold changed conversations with a real daemon that has a job, at its port for peers and at its unix socket.

    python tests/fuzz_live.py --seconds 300 --seed 1 --json fuzz-live.json

A conversation is an honest one with one of its parts changed, in its bytes or in its structure: what strangers say in
clear, the records of TLS, what a host of the run says inside of TLS, and what launchers, trainers and `resilientctl`
say. Every so often the job of two hosts has to commit a step, and it does so at the end. A failure is a commit that
does not come, a daemon that ends or that did not expect something, or memory, files or threads that it does not give
back.
"""

import argparse
import contextlib
import json
import os
import random
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from cluster import wait_until
from fuzz import changed_bytes, changed_json
from hosts import MANIFEST, PAYLOAD_BYTES, Host, Hosts
from peer_talk import hello, identity_of, peer_address

from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.slot import plan_layout
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.trust.identity import Identity
from resilient_run.launcher.etcd_server import EmbeddedEtcd

MAX_GROWTH_BYTES = 64 << 20
MAX_MORE_FILES = 64
MAX_MORE_THREADS = 16
_COMMIT_EVERY = 200
_PATIENCE_S = 0.2
_MEMORY_BYTES = 64 << 20

Address = tuple[str, int] | str


class Line:
    """A connection on which somebody speaks first and listens then.

    Args:
        address: A unix socket's path, or a host and a port.
    """

    def __init__(self, address: Address) -> None:
        self._sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        # The daemon answers others meanwhile, on a machine that is busy.
        self._sock.settimeout(60)
        self._sock.connect(address)

    def begin(self) -> None:
        """Do what comes before anything can be said."""

    def say(self, data: bytes) -> None:
        """Send `data`."""
        self._sock.sendall(data)

    def listen(self) -> tuple[bytes, bool]:
        """Say no more; return what came, and whether the connection was closed then."""
        heard = bytearray()
        try:
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.settimeout(_PATIENCE_S)
            while data := self._sock.recv(1 << 16):
                heard += data
        except TimeoutError:
            return bytes(heard), False
        except OSError:
            pass  # it was closed before all was said
        return bytes(heard), True

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class SecureLine(Line):
    """A connection of a host of the run; what goes over it in TLS may be changed on the way.

    Args:
        address: Of its peer.
        identity: Who speaks.
        change: Is given the number of each flight and its bytes, and returns what is sent; None changes nothing.
    """

    def __init__(
        self, address: Address, identity: Identity, change: Callable[[int, bytes], bytes] | None = None
    ) -> None:
        super().__init__(address)
        if change is not None:
            self._sock.settimeout(_PATIENCE_S)  # its peer may be waiting, too, for what was taken away
        self._change, self._flights = change, 0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = identity.client.wrap_bio(self._incoming, self._outgoing)
        self._greeting = wire.encode(hello(identity.run_id))

    def begin(self) -> None:
        """Name the run, and prove who speaks.

        Raises:
            OSError: That does not go on.
        """
        super().say(self._greeting)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._fly()
                if not (data := self._sock.recv(1 << 16)):
                    raise ConnectionError("closed in the handshake") from None
                self._incoming.write(data)
        self._fly()

    def say(self, data: bytes) -> None:
        """Encrypt and send `data`."""
        self._tls.write(data)
        self._fly()

    def listen(self) -> tuple[bytes, bool]:
        """Say no more; return what came, deciphered, and whether the connection was closed then."""
        data, closed = super().listen()
        self._incoming.write(data)
        heard = bytearray()
        with contextlib.suppress(ssl.SSLError):
            while piece := self._tls.read(1 << 16):
                heard += piece
        return bytes(heard), closed

    def _fly(self) -> None:
        if data := self._outgoing.read():
            self._sock.sendall(data if self._change is None else self._change(self._flights, data))
            self._flights += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Speaker:
    """Somebody who speaks to the daemon.

    Attributes:
        name: Who.
        connect: Returns the line.
        opening: What is said first, in this order.
        repertoire: Of this some messages follow.
    """

    name: str
    connect: Callable[[], Line]
    opening: Sequence[wire.Message]
    repertoire: Sequence[wire.Message] = ()

    def speak(self, chance: random.Random) -> str:
        """Say it with one message changed, and return what came of it: "answered", "closed" or "waits"."""
        said = [*self.opening, *(chance.choices(self.repertoire, k=2) if self.repertoire else ())]
        frames = [wire.encode(message) for message in said]
        at = chance.randrange(len(frames))
        frames[at] = changed_frame(frames[at], chance)
        with contextlib.closing(self.connect()) as line:
            line.begin()
            with contextlib.suppress(OSError):
                for frame in frames:
                    line.say(frame)
            return outcome(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tamperer:
    """Somebody on the wire, who changes a flight of TLS: the greeting of a host, its proof, or what it says then."""

    address: Address
    identity: Identity
    message: wire.Message
    name: str = "records of TLS"

    def speak(self, chance: random.Random) -> str:
        """Let the host speak, and return what came of it."""
        chosen = chance.randrange(3)

        def change(flight: int, data: bytes) -> bytes:
            return changed_bytes(data, chance) if flight == chosen else data

        try:
            with contextlib.closing(SecureLine(self.address, self.identity, change)) as line:
                line.begin()
                line.say(wire.encode({**hello(self.identity.run_id), "host": self.identity.host}))
                line.say(wire.encode(self.message))
                return outcome(line)
        except TimeoutError:
            return "waits"
        except (ConnectionError, ssl.SSLError):
            return "closed"


def outcome(line: Line) -> str:
    heard, closed = line.listen()
    return "answered" if heard else "closed" if closed else "waits"


def changed_frame(frame: bytes, chance: random.Random) -> bytes:
    """Return a frame after a few changes to its bytes, or a sound frame with another structure in it."""
    if chance.random() < 0.4:
        return changed_bytes(frame, chance)
    body = changed_json(frame[4:], chance)
    return struct.pack(">I", len(body)) + body


def speakers(hosts: Hosts, other: Host) -> list[Speaker | Tamperer]:
    """Return everybody who speaks to the daemon of host a, on which `other` is the host of a second run."""
    peers, path = peer_address(hosts, "a"), str(hosts["a"].socket_path)
    pair, ask = {"generation": 1, "step": 1}, {"id": 7, "op": "have", "rank": 0, "generation": 1, "step": 1}
    agreed = {"watermark": pair, "next": {"generation": 1, "step": 2}, "older": []}
    payload_offset, used_bytes = plan_layout(len(MANIFEST), PAYLOAD_BYTES)
    size = {"payload_offset": payload_offset, "used_bytes": used_bytes}
    of_peers = [
        ask,
        {**ask, "op": "get", "offset": 0, "size": 4096},
        {**ask, "op": "get", "offset": 1 << 20, "size": 1 << 20},
        {**ask, "op": "digests", "structure": "0" * 16, "leaves": [0, 1]},
        {"op": "offer", "rank": 1, **pair, **size, **agreed, "patience_s": 0.5},
    ]
    job = {"run_id": "opened by a fuzzer", "host": "a", "replicas": 2, "nproc": 1, "etcd": other.config.to_dict()}
    job |= {
        "addr": other.address,
        "memory_limit_bytes": _MEMORY_BYTES,
        "policy": Policy().to_value(),
        "injection": False,
        "pid": os.getpid(),
    }
    name = {"run_id": job["run_id"]}
    launcher = [
        {"id": 2, "op": "job_status", **name},
        {"id": 3, "op": "settle", "timeout_s": 0.01, **name},
        {"id": 4, "op": "persisted", **name},
        {"id": 5, "op": "close_job", "discard": True, **name},
    ]
    attach = {"id": 1, "op": "attach", "run_id": other.run_id, "host": other.name, "rank": 0, "local_rank": 0}
    attach |= {"world_size": 1, "generation": 1, "topology": 1, "pid": os.getpid(), "estimate_bytes": PAYLOAD_BYTES}
    trainer = [
        {"id": 2, "op": "allocate", "capacity_bytes": used_bytes, "payload_offset": payload_offset},
        {"id": 3, "op": "restore"},
        {"id": 4, "op": "allocate_replica", "header": "A" * 64},
        {"op": "received", "path": "rank0.0.slot"},
        {"op": "dropped", "path": "rank0.0.slot"},
        {"op": "connected", "ranks": [0, 1]},
        {"op": "link", "bytes_per_s": 1e8},
        {"op": "restored", "step": 1, "seconds": 0.1},
        {"op": "complete", "path": "rank0.0.slot", **pair},
        {"op": "missed", "next": 1, "step": 2, "late": True},
        {"op": "progress", "step": 3, "worked_s": 1.5, "unhealthy": True},
        {"op": "protection", "step": 3, "steps_at_risk": 2, "reason": "slow"},
        {"op": "pause", "limit_s": 5.0},
        {"op": "resume"},
        {"op": "collectives"},
        {"op": "schedule", "iteration_s": 0.1, "collectives": 3, "spans": [0.0, 0.05]},
        {"op": "iteration", "step": 3, "monotonic_s": 5.0},
        {"op": "refused", "message": "it does not fit"},
        {"op": "raised", "digest": "0f", "step": 3},
    ]
    made = [
        Speaker(
            name="strangers at the port",
            connect=lambda: Line(peers),
            opening=[hello(hosts.run_id), hello(hosts.run_id)],
        ),
        Tamperer(address=peers, identity=identity_of(hosts), message=ask),
        Speaker(
            name="guests at the socket",
            connect=lambda: Line(path),
            opening=[{"id": 1, "op": "status"}, {"id": 2, "op": "gc"}],
        ),
        Speaker(
            name="launchers",
            connect=lambda: Line(path),
            opening=[{"id": 1, "op": "open_job", **job}],
            repertoire=launcher,
        ),
        Speaker(name="trainers", connect=lambda: Line(path), opening=[attach], repertoire=trainer),
    ]
    # One that the daemon expects replicas from, and one that has no part in the round.
    for host in "bz":
        identity = identity_of(hosts, host)
        made.append(
            Speaker(
                name="hosts of the run",
                connect=lambda identity=identity: SecureLine(peers, identity),
                opening=[{**hello(hosts.run_id), "host": host}],
                repertoire=of_peers,
            )
        )
    return made


class Daemon:
    """What the daemon holds, compared with what it held at first."""

    def __init__(self, host: Host) -> None:
        assert host.process is not None
        self._host = host
        self._process = psutil.Process(host.process.pid)
        self._before = self._holds()

    def grown(self) -> dict[str, int]:
        """Return by how much it has grown since."""
        now = self._holds()
        return {name: now[name] - before for name, before in self._before.items()}

    def _holds(self) -> dict[str, int]:
        memory = self._process.memory_info()
        # Slots are mapped in, and are shared memory.
        return {
            "bytes": memory.rss - memory.shared,
            "files": self._process.num_fds(),
            "threads": self._process.num_threads(),
        }


def run(
    *,
    seed: str,
    inputs: int | None = None,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Hold conversations, so many or for so long, with the daemon of host a, and return what came of them."""
    chance, counts, failures, done, commits = random.Random(seed), Counter[str](), list[str](), 0, 1
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rr-fuzz-")))
        config = EtcdConfig(endpoints=(stack.enter_context(EmbeddedEtcd()).endpoint,))
        hosts = stack.enter_context(contextlib.closing(Hosts(root, run_id=root.name, config=config)))
        trainers = hosts.run("ab")
        hosts.commit(trainers, [1])
        other = stack.enter_context(contextlib.closing(Hosts(root, run_id=f"{root.name}-other", config=config)))
        other["a"].process = hosts["a"].process
        (attached,) = other.run("a", replicas=1, memory_limit_bytes=_MEMORY_BYTES)
        attached.close()
        everybody = speakers(hosts, other["a"])
        for speaker in everybody:
            speaker.speak(random.Random(0))
        daemon, begun_s, told_s = Daemon(hosts["a"]), time.monotonic(), time.monotonic()
        while not failures and (inputs is None or done < inputs):
            if seconds is not None and time.monotonic() > begun_s + seconds:
                break
            speaker = everybody[done % len(everybody)]
            try:
                counts[f"{speaker.name}: {speaker.speak(chance)}"] += 1
                done += 1
                if done % _COMMIT_EVERY == 0:
                    commits += 1
                    hosts.commit(trainers, [commits])
                    failures += unexpected(hosts["a"])
            except (OSError, AssertionError) as error:
                failures.append(f"after {done} conversations, {speaker.name}: {str(error)[:2000]}")
            if time.monotonic() > told_s + 10:
                told_s = time.monotonic()
                say(f"{done} conversations, {commits} commits, grown by {daemon.grown()}")
        took_s = time.monotonic() - begun_s
        if not failures:
            commits += 1
            hosts.commit(trainers, [commits])
            failures += unexpected(hosts["a"])
        limits = {"bytes": MAX_GROWTH_BYTES, "files": MAX_MORE_FILES, "threads": MAX_MORE_THREADS}
        with contextlib.suppress(AssertionError):
            wait_until(lambda: given_back(daemon, limits), timeout_s=60, what="what was taken", pause_s=0.5)
        grown = daemon.grown()
        failures += [f"{name} grew by {grown[name]}" for name, limit in limits.items() if grown[name] > limit]
    names = sorted({speaker.name for speaker in everybody})
    return {
        "conversations": done,
        "seed": seed,
        "seconds": round(took_s, 1),
        "commits": commits,
        "grown": grown,
        "failures": failures,
        "speakers": {
            name: {what: counts[f"{name}: {what}"] for what in ("answered", "closed", "waits")} for name in names
        },
    }


def given_back(daemon: Daemon, limits: dict[str, int]) -> bool:
    grown = daemon.grown()
    return all(grown[name] <= limit for name, limit in limits.items())


def unexpected(host: Host) -> list[str]:
    """Return what the daemon did not expect: errors that end no task, and are in its log."""
    tasks = host.status()["tasks"] + [task for job in host.status()["jobs"] for task in job["tasks"]]
    found = [f"task {task['task']}: {task['error']}" for task in tasks]
    _, traceback, rest = host.log.partition("Traceback")
    return [*found, *([f"{traceback}{rest[:3000]}"] if traceback else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = run(seconds=args.seconds, seed=args.seed, say=partial(print, file=sys.stderr, flush=True))
    for name, row in found["speakers"].items():
        print(f"{name:24}" + "".join(f"{count:>10} {what}" for what, count in row.items()))
    print(f"{found['commits']} commits; the daemon grew by {found['grown']}")
    print(*found["failures"], sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
