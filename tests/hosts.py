"""Real daemons for tests, one per loopback host, with the test in the roles of launcher, trainer and rendezvous."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from cluster import wait_until
from launchers import start_daemon

from resilient_run.ckpt.errors import BY_NAME
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, chunk_count, plan_layout
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig, EtcdUnavailable

T = TypeVar("T")
TOPOLOGY = 2**64 - 3
MANIFEST = b'{"made":"by a test"}'
PAYLOAD_BYTES = 3 * CHUNK_BYTES + 77


def connect(sock: socket.socket, path: Path) -> None:
    """Connect to a daemon as its user: it serves nobody else."""
    uid = os.geteuid()
    os.seteuid(path.stat().st_uid)
    try:
        sock.connect(str(path))
    finally:
        os.seteuid(uid)


class Client:
    """A connection to a daemon's unix socket, as its user; notifications that come between answers are kept."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        connect(self.sock, path)
        self.notifications: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return the answer; raises the error that the daemon names."""
        number = next(self._ids)
        self.sock.sendall(wire.encode({"id": number, "op": op, **fields}))
        while True:
            message = wire.recv_message(self.sock)
            if message is None:
                raise ConnectionError(f"the daemon closed the connection instead of answering {op}")
            if message.get("id") == number:
                break
            self.notifications.append(message)
        if not message["ok"]:
            raise BY_NAME[message["error"]](message["message"])
        return message

    def notify(self, op: str, **fields: Any) -> None:
        self.sock.sendall(wire.encode({"op": op, **fields}))

    def poll(self) -> list[dict[str, Any]]:
        """Return every notification so far."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(1, socket.MSG_PEEK):
                self.sock.settimeout(60)
                message = wire.recv_message(self.sock)
                assert message is not None
                self.notifications.append(message)
                self.sock.setblocking(False)
        except BlockingIOError:
            pass
        finally:
            self.sock.settimeout(60)
        return self.notifications

    def is_closed(self) -> bool:
        """Tell whether the daemon closed the connection, waiting for it."""
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()


class Trainer(Client):
    """One rank: attaches, restores and captures made-up states into its slots as a Checkpointer would."""

    def __init__(self, host: "Host", rank: int, *, local_rank: int, world_size: int, generation: int) -> None:
        super().__init__(host.socket_path)
        self.host, self.rank, self.generation, self.world_size = host, rank, generation, world_size
        self.identity = {
            "run_id": host.run_id,
            "rank": rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "generation": generation,
            "topology": TOPOLOGY,
            "pid": os.getpid(),
        }
        self.paths: list[str] = []

    def attach(self, **changes: Any) -> dict[str, Any]:
        return self.request("attach", **{**self.identity, "estimate_bytes": PAYLOAD_BYTES, **changes})

    def allocate(self, payload_bytes: int = PAYLOAD_BYTES) -> None:
        payload_offset, capacity_bytes = plan_layout(len(MANIFEST), payload_bytes)
        self.paths = self.request("allocate", capacity_bytes=capacity_bytes, payload_offset=payload_offset)["paths"]

    def capture(self, step: int, *, slot: int | None = None, announce: bool = True) -> Path:
        """Write the state of `step` into a slot, by default the one that `step` alternates to, and announce it."""
        if not self.paths:
            self.allocate()
        path = self.paths[step % 2 if slot is None else slot]
        opened = Slot.open(path, writable=True)
        publish(
            opened, run_id=self.host.run_id, rank=self.rank, world_size=self.world_size, pair=(self.generation, step)
        )
        opened.close()
        if announce:
            self.notify("complete", path=path, generation=self.generation, step=step)
        return Path(path)

    def watermark(self) -> tuple[int, int] | None:
        """Return the newest watermark that was pushed to this trainer."""
        return next(reversed(self.watermarks()), None)

    def watermarks(self) -> list[tuple[int, int]]:
        """Return the watermarks that were pushed to this trainer, in order and each once."""
        pushed = [m["watermark"] for m in self.poll() if m["op"] == "watermark" and m["watermark"]]
        return list(dict.fromkeys((pair["generation"], pair["step"]) for pair in pushed))

    def next(self) -> tuple[int, int] | None:
        """Return from which step on this trainer was told last to make the next capture."""
        pushed = [m["next"] for m in self.poll() if m["op"] == "watermark"]
        return (pushed[-1]["generation"], pushed[-1]["step"]) if pushed else None


def payload(run_id: str, rank: int, pair: tuple[int, int], size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the made-up state of a rank at a step."""
    return random.Random(f"{run_id}/{rank}/{pair}").randbytes(size_bytes)


def publish(
    slot: Slot, *, run_id: str, rank: int, world_size: int, pair: tuple[int, int], size_bytes: int = PAYLOAD_BYTES
) -> None:
    """Capture the made-up state of a rank into `slot`."""
    data = payload(run_id, rank, pair, size_bytes)
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, size_bytes, CHUNK_BYTES)]
    assert len(chunks) == chunk_count(size_bytes)
    slot.begin()
    slot.buffer[slot.payload_offset : slot.payload_offset + size_bytes] = data
    slot.publish(
        run_id=run_id,
        topology=TOPOLOGY,
        rank=rank,
        world_size=world_size,
        generation=pair[0],
        step=pair[1],
        payload_bytes=size_bytes,
        manifest=MANIFEST,
        checksums=b"".join(xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little") for chunk in chunks),
    )


def corrupt(path: Path) -> None:
    """Flip one bit in the last byte of the payload."""
    slot = Slot.open(path, writable=True)
    slot.buffer[slot.header().used_bytes - 1] ^= 1
    slot.close()


class Host:
    """One host: its directories, at most one daemon process, and the launcher's connection."""

    address = "127.0.0.1"
    prefix: Sequence[str] = ()
    """What stands before the daemon's command to run it on this host."""

    def __init__(self, name: str, root: Path, *, run_id: str, config: EtcdConfig) -> None:
        self.name, self.run_id, self.config = name, run_id, config
        self.run_dir = root / name
        self.shm_dir = Path("/dev/shm") / f"rr-test-{os.getpid()}-{root.name}-{name}"
        self.socket_path = self.run_dir / "resilientd.sock"
        self.log_path = root / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.launcher: Client | None = None
        self.policy: dict[str, Any] = {}
        self.injection = False
        self.clients: list[Client] = []

    def start(self, *arguments: str) -> None:
        """Start the daemon and wait until it listens at both of its sockets."""
        arguments = ("--log-level", "debug", "--run-dir", str(self.run_dir), "--shm-dir", str(self.shm_dir), *arguments)
        with open(self.log_path, "ab") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = self.process = start_daemon(arguments, os.environ, self.prefix, **options)

        def listening() -> bool:
            assert process.poll() is None, self.log
            # The vault's is opened last.
            for path in (self.socket_path, self.shm_dir / self.socket_path.name):
                with socket.socket(socket.AF_UNIX) as probe:
                    if probe.connect_ex(str(path)) != 0:
                        return False
            return True

        wait_until(listening, timeout_s=30, what=f"daemon of {self.name}")

    def open(self, *, nproc: int = 1, replicas: int = 2, **changes: Any) -> dict[str, Any]:
        """Open the job as its launcher."""
        self.launcher = self.client()
        job = {
            "run_id": self.run_id,
            "host": self.name,
            "replicas": replicas,
            "nproc": nproc,
            "etcd": self.config.to_dict(),
            "addr": self.address,
            "memory_limit_bytes": None,
            "policy": self.policy,
            "injection": self.injection,
            "pid": os.getpid(),
        }
        return self.launcher.request("open_job", **{**job, **changes})

    def client(self) -> Client:
        client = Client(self.socket_path)
        self.clients.append(client)
        return client

    def trainer(self, rank: int, *, local_rank: int = 0, world_size: int, generation: int) -> Trainer:
        trainer = Trainer(self, rank, local_rank=local_rank, world_size=world_size, generation=generation)
        self.clients.append(trainer)
        return trainer

    def status(self) -> dict[str, Any]:
        client = Client(self.socket_path)
        try:
            return client.request("status")
        finally:
            client.close()

    def held(self) -> dict[int, set[tuple[int, int]]]:
        """Return rank → pairs that this daemon holds of the job."""
        held: dict[int, set[tuple[int, int]]] = {}
        for job in self.status()["jobs"]:
            for slot in job["slots"]:
                if job["run_id"] == self.run_id and slot["step"] is not None:
                    held.setdefault(slot["rank"], set()).add((slot["generation"], slot["step"]))
        return held

    def slot_paths(self, rank: int, pair: tuple[int, int]) -> list[Path]:
        """Return the files in which a complete capture of `rank` at `pair` is."""
        found = []
        for path in self.shm_dir.glob(f"*/rank{rank}.*.slot"):
            slot = Slot.open(path)
            if slot.state() == "COMPLETE" and (slot.header().generation, slot.header().step) == pair:
                found.append(path)
            slot.close()
        return found

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def drop_clients(self) -> None:
        """Let the launcher and every trainer of this host die."""
        for client in self.clients:
            client.close()
        self.clients, self.launcher = [], None

    def kill(self) -> None:
        """SIGKILL the daemon."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM the daemon and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """Leave nothing behind."""
        self.drop_clients()
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.shm_dir, ignore_errors=True)


class Hosts:
    """The hosts of one job, and what launchers write to etcd for it."""

    def __init__(self, root: Path, *, run_id: str, config: EtcdConfig) -> None:
        self._root, self.run_id, self.config = root, run_id, config
        self.prefix = f"/resilient-run/{run_id}/"
        self.incarnation = "first"
        self.policy: dict[str, Any] = {}
        self.injection = False
        self.hosts: dict[str, Host] = {}
        self._runner = asyncio.Runner()
        self._etcd: Etcd | None = None

    def __getitem__(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = Host(name, self._root, run_id=self.run_id, config=self.config)
            self.hosts[name].policy, self.hosts[name].injection = self.policy, self.injection
        return self.hosts[name]

    def etcd(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        """Return what `work` does with a connection to etcd, which is kept: tests ask again and again."""

        async def run() -> T:
            if self._etcd is not None:
                with contextlib.suppress(EtcdUnavailable):
                    return await work(self._etcd)
                await self._etcd.close()
            self._etcd = await Etcd.connect(self.config)
            return await work(self._etcd)

        return self._runner.run(run())

    def create_job(self, incarnation: str = "first") -> None:
        self.incarnation = incarnation
        value = {"incarnation": incarnation, "min_nodes": 1, "max_nodes": 9, "token": f"secret of {self.run_id}"}
        value["elastic_s"] = 1.0
        puts = {f"{self.prefix}rdzv/job": value, f"{self.prefix}rdzv/job/{incarnation}.1": {}}
        self.etcd(lambda etcd: etcd.commit({}, puts))

    def form_round(
        self,
        generation: int,
        names: Sequence[str],
        *,
        nproc: int = 1,
        labels: Mapping[str, str] | None = None,
        sessions: Mapping[str, str] | None = None,
        made_by: int | None = None,
    ) -> tuple[int, int] | None:
        """Form a round as a launcher does, with the watermark in one transaction, and return what it restores."""
        session_of = dict.fromkeys(names, "s") | dict(sessions or {})
        seats = [{"host": name, "session": session_of[name], "nproc": nproc, "role": "default"} for name in names]
        for seat in seats if labels else ():
            seat["label"] = (labels or {})[str(seat["host"])]

        async def form(etcd: Etcd) -> tuple[int, int] | None:
            while True:
                watermark = await etcd.get(f"{self.prefix}state/watermark")
                value = {
                    "generation": generation,
                    "members": seats,
                    "restore": None if watermark is None else watermark.value,
                    "made_by": made_by,
                }
                guards = {f"{self.prefix}state/watermark": 0 if watermark is None else watermark.revision}
                if await etcd.commit(guards, {f"{self.prefix}rdzv/round": value}):
                    return None if watermark is None else (watermark.value["generation"], watermark.value["step"])

        return self.etcd(form)

    def watermark(self) -> tuple[int, int] | None:
        entry = self.etcd(lambda etcd: etcd.get(f"{self.prefix}state/watermark"))
        return None if entry is None else (entry.value["generation"], entry.value["step"])

    def run(
        self,
        names: Sequence[str],
        *,
        generation: int = 1,
        replicas: int = 2,
        labels: Mapping[str, str] | None = None,
        memory_limit_bytes: int | None = None,
    ) -> list[Trainer]:
        """Start a host per name with one rank each, form the round, and return the attached trainers."""
        if generation == 1:
            self.create_job()
        for name in names:
            host = self[name]
            if host.process is None:
                host.start()
            if host.launcher is None:
                host.open(replicas=replicas, memory_limit_bytes=memory_limit_bytes)
            for client in [client for client in host.clients if client is not host.launcher]:
                client.close()
        self.form_round(generation, names, labels=labels)
        trainers = [
            self[name].trainer(rank, world_size=len(names), generation=generation) for rank, name in enumerate(names)
        ]
        for trainer in trainers:
            trainer.attach()
        return trainers

    def commit(self, trainers: Sequence[Trainer], steps: Sequence[int]) -> None:
        """Let every trainer capture each of `steps`, the next one as soon as the last is committed."""
        for step in steps:
            for trainer in trainers:
                trainer.capture(step)
            wait_for_watermark(trainers, (trainers[0].generation, step))

    def wait_for_replicas(self, names: Sequence[str], pair: tuple[int, int], count: int) -> None:
        """Wait until the hosts hold `count` replicas of `pair` together."""
        wait_until(
            lambda: sum(pair in pairs for name in names for pairs in self[name].held().values()) == count,
            timeout_s=30,
            what=lambda: f"{count} replicas of {pair}, held: {[self[name].held() for name in names]}",
        )

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        if self._etcd is not None:
            self._runner.run(self._etcd.close())
        self._runner.close()


def wait_for_watermark(trainers: Sequence[Trainer], pair: tuple[int, int]) -> None:
    """Wait until every trainer was told that `pair` is committed."""
    for trainer in trainers:
        wait_until(
            lambda trainer=trainer: trainer.watermark() == pair,
            timeout_s=30,
            what=lambda rank=trainer.rank: "\n".join(
                [f"watermark {pair} at rank {rank}", *(t.host.log for t in trainers)]
            ),
        )


def restored_bytes(path: str) -> bytes:
    """Return the payload of the complete slot at `path`, verified."""
    slot = Slot.open(path)
    header = slot.verify()
    data = bytes(slot.buffer[header.payload_offset : header.used_bytes])
    slot.close()
    return data
