"""Both transports of replicas in the same scenarios: real trainers and daemons, with ends and ways that fail or lie.

And what only trainers need: who sends to whom, and how long a daemon waits for it.
"""

import asyncio
import gc
import json
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import wait_until
from hosts import PAYLOAD_BYTES, Host, Hosts, publish
from launchers import start_python
from proxy import Proxy
from seats import seats
from torch.distributed import TCPStore

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import slot
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, parse_header, plan_layout
from resilient_run.ckpt.link.env import TrainerEnv
from resilient_run.ckpt.transport.carriers import _SIZE_TAG
from resilient_run.ckpt.transport.edge import Edge, EdgeConfig, Reply
from resilient_run.daemon.base.policy import ReplicationPolicy
from resilient_run.daemon.base.record import JobRecord
from resilient_run.daemon.base.supervise import Supervisor
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.peers.pacing import Pacer
from resilient_run.daemon.peers.replication import Replicator
from resilient_run.daemon.peers.sources import Sources
from resilient_run.daemon.peers.trainer_transport import (
    PATIENCE_S,
    PATIENCE_STEPS,
    TrainerTransport,
    _Loan,
    receiver,
    routes,
)
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView
from resilient_run.daemon.slots.memory import MemoryBudget
from resilient_run.daemon.slots.slots import MAX_SLOT_BYTES, JobSlots, SlotFile

pytestmark = pytest.mark.jobs

TRAINER = str(Path(__file__).with_name("replicating_trainer.py"))
TRANSPORTS = ("daemon", "trainer")
IN_THE_MIDDLE = 100_000
"""A byte of a capture's payload, counted from the first that its owner's daemon sends."""

AWAY = "127.0.0.2"
CONFIG = EdgeConfig(sub_buffers=4, sub_buffer_bytes=1 << 16, device=None)


def made_round(*nprocs: int) -> Round:
    hosts = tuple(f"host{index}" for index in range(len(nprocs)))
    return Round(generation=1, seats=seats(hosts, nprocs), restore=None, revision=1)


@pytest.mark.parametrize("nprocs", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2, 2, 2), (3, 1), (1, 4, 2), (8, 3, 1, 2)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_replica_has_one_sender_and_one_receiver(nprocs: tuple[int, ...], replicas: int) -> None:
    round_ = made_round(*nprocs)
    routed = {rank: routes(round_, rank, replicas) for rank in range(round_.world_size)}
    sent = [(rank, other) for rank, known in routed.items() for other in known["send_to"]]
    received = [(owner, rank) for rank, known in routed.items() for owner in known["receive_from"]]
    assert sorted(sent) == sorted(received)
    hosts = {rank: host for host in round_.hosts for rank in round_.ranks(host)}
    for rank, known in routed.items():
        assert [hosts[other] for other in known["send_to"]] == list(round_.holders(rank, replicas)[1:])


def test_receivers_have_the_same_place_or_take_turns() -> None:
    round_ = made_round(4, 4, 2)
    assert [receiver(round_, owner, "host1") for owner in range(4)] == [4, 5, 6, 7]
    assert [receiver(round_, owner, "host2") for owner in range(4)] == [8, 9, 8, 9]


def test_patience_is_with_one_capture_and_one_trainer(tmp_path: Path) -> None:
    now_s = 100.0
    record = JobRecord(run_id="run", host="a", incarnation="i", replicas=2, attached=True, launcher_pid=os.getpid())
    transport = TrainerTransport(
        run_id="run",
        view=JobView(host="a", replicas=2),
        slots=JobSlots(directory=tmp_path, record=record, budget=MemoryBudget(tmp_path, 0)),
        spawn=lambda _, work: None,
        now_s=lambda: now_s,
    )
    payload_offset, capacity_bytes = plan_layout(100, 100)
    slot = Slot.create(tmp_path / "slot", capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    file, newer = (SlotFile(slot=slot, rank=0, pair=(1, step)) for step in (5, 6))

    def waits(after_s: float, file: SlotFile, host: str = "b") -> bool:
        nonlocal now_s
        now_s += after_s
        return transport.bring(host, 0, file)

    assert not waits(0, file), "its trainer has no connection"
    transport.connected(0, ["b"])
    assert waits(0, file)
    assert not waits(0, file, "c")
    assert waits(PATIENCE_S, file)
    assert not waits(1, file)
    assert waits(0, newer)
    for _ in range(2):
        transport.stepped(0)
        now_s += 3 * PATIENCE_S / PATIENCE_STEPS
    assert waits(0, newer), "steps take so long"
    assert waits(1, newer)
    transport.detached(0)
    assert not waits(0, newer)
    slot.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_generation_ends_before_its_first_turn_leaves_no_warning(tmp_path: Path, transport: str) -> None:
    """So it is when a peer is lost in that moment, or the job ends."""
    record = JobRecord(run_id="run", host="host0", incarnation="i", replicas=2, attached=True, launcher_pid=os.getpid())
    view = JobView(host="host0", replicas=2, round=made_round(1, 1))
    payload_offset, capacity_bytes = plan_layout(100, 100)
    slot = Slot.create(tmp_path / "slot", capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    file = SlotFile(slot=slot, rank=0, pair=(1, 5))

    slots = JobSlots(directory=tmp_path, record=record, budget=MemoryBudget(tmp_path, 0))

    async def begin_and_end() -> None:
        async with asyncio.TaskGroup() as group:
            replicator = Replicator(
                run_id="run",
                view=view,
                slots=slots,
                pacer=Pacer(ReplicationPolicy(), changed=lambda: None),
                in_flight=1,
                group=group,
                supervisor=Supervisor("run 'run'"),
                sources=Sources(run_id="run", view=view, slots=slots, tier=None, identity=lambda: None),
                tier=None,
                observe=lambda found: None,
            )

            def begin() -> None:
                if transport == "daemon":
                    replicator.daemons.bring("host1", 0, file)
                else:
                    replicator.trainers._loans[1] = _Loan(file=file, pair=(1, 5), receiver=0, page=b"")
                    replicator.trainers.received(0, str(slot.path))

            begin()
            await replicator.abort()
        begin()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asyncio.run(begin_and_end())
        gc.collect()
    slot.close()
    assert [str(warning.message) for warning in told if "never awaited" in str(warning.message)] == []


class Process:
    """A trainer process, see `replicating_trainer.py`."""

    def __init__(
        self, host: Host, rank: int, *, generation: int, world_size: int, port: int, arguments: tuple[str, ...] = ()
    ) -> None:
        environment = {
            "RESILIENT_SOCKET": str(host.socket_path),
            "RESILIENT_RUN_ID": host.run_id,
            "RESILIENT_GENERATION": str(generation),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.popen = start_python([TRAINER, *arguments], {**os.environ, **environment}, **pipes)

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        said: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return said

    def hear_of(self, **what: Any) -> None:
        """Let it say this next, after other things."""
        while not what.items() <= self.hear().items():
            pass

    def begin_step(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")

    def end(self) -> dict[str, Any]:
        """Let it end and return its counters; it must end by itself."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        said = self.hear()
        assert self.popen.wait(30) == 0
        return said

    def close(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            if not stream.closed:
                stream.close()
        self.popen.kill()
        self.popen.wait()


class Job:
    """Daemons of one rank each, the store that their trainers share, and the trainers."""

    def __init__(self, root: Path, config: EtcdConfig) -> None:
        self.hosts = Hosts(root, run_id=root.name, config=config)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.processes: list[Process] = []
        self.proxies: list[Proxy] = []

    def start(self, names: str, transport: str, *, apart: str = "") -> None:
        """Start a daemon for each name; nobody answers where those of `apart` are said to listen: see `lead_to`."""
        self.names, self.apart, self.generation = names, apart, 1
        self.policy = {"replication": {"transport": transport, "sub_buffer_bytes": 1 << 16}}
        self.hosts.create_job()
        for name in names:
            self.open(name)
        self.hosts.form_round(1, names)

    def open(self, name: str) -> None:
        """Start the daemon of a host, again if it had one, and its launcher."""
        self.hosts[name].drop_clients()
        self.hosts[name].start("--peer-addr", "127.0.0.1")
        self.hosts[name].open(replicas=2, policy=self.policy, addr=AWAY if name in self.apart else "127.0.0.1")

    def lead_to(self, name: str) -> Proxy:
        """Let the daemon of a host be reached where it is said to listen, through what is returned."""
        key = f"{self.hosts.prefix}ckpt/hosts/{name}"
        entry = wait_until(lambda: self.hosts.etcd(lambda etcd: etcd.get(key)), timeout_s=30, what=key)
        self.proxies.append(Proxy((AWAY, entry.value["port"]), ("127.0.0.1", entry.value["port"])))
        return self.proxies[-1]

    def train(self, *arguments: tuple[str, ...]) -> list[Process]:
        """Start a trainer for each host, with its arguments if there are any, and return them once they begin."""
        trainers = [
            self.trainer(rank, *more) for rank, more in zip_longest(range(len(self.names)), arguments, fillvalue=())
        ]
        for trainer in trainers:
            assert trainer.hear() == {"restored": 0}
        if self.policy["replication"]["transport"] == "trainer":
            for owner, holder in self.holders().items():
                said = f"brings its captures itself to hosts ['{holder}']"
                what = f"an edge from {owner} to {holder}"
                wait_until(lambda owner=owner, said=said: said in self.hosts[owner].log, timeout_s=60, what=what)
        return trainers

    def fail(self) -> None:
        """Kill all trainers, and let the next generation begin."""
        for process in self.processes:
            process.popen.kill()
        self.generation += 1
        self.hosts.form_round(self.generation, self.names)
        begun = f"generation {self.generation}: ranks"
        for name in self.names:
            wait_until(lambda name=name: begun in self.hosts[name].log, timeout_s=30, what=begun)

    def stop_in_the_middle(self, transport: str) -> Proxy:
        """Let two hosts train a step, and return when b has a part of a's capture; the proxy may hold the rest."""
        proxy = self.lead_to("a")
        proxy.hold_from = IN_THE_MIDDLE if transport == "daemon" else None
        trainers = self.train(("--stuck",) if transport == "trainer" else ())
        for trainer in trainers:
            trainer.begin_step()
        if transport == "trainer":
            trainers[0].hear_of(stuck=True)
        else:
            assert proxy.held.wait(60)
        assert not self.hosts["b"].slot_paths(0, (1, 1))
        return proxy

    def holders(self) -> dict[str, str]:
        """Return host → the one that holds its captures, too."""
        return dict(zip(self.names, self.names[1:] + self.names[:1], strict=True))

    def trainer(self, rank: int, *arguments: str) -> Process:
        host = self.hosts[self.names[rank]]
        sizes = {"generation": self.generation, "world_size": len(self.names), "port": self.store.port}
        made = Process(host, rank, **sizes, arguments=arguments)
        self.processes.append(made)
        return made

    def wait_committed(self, step: int) -> None:
        wait_until(
            lambda: self.hosts.watermark() == (self.generation, step),
            timeout_s=120,
            what=lambda step=step: (
                f"step {step} committed\n" + "\n".join(self.hosts[name].log[-3000:] for name in self.names)
            ),
        )

    def bytes_of(self, name: str, rank: int, step: int) -> bytes:
        """Return all bytes of the capture that a host holds, verified."""
        (path,) = self.hosts[name].slot_paths(rank, (self.generation, step))
        file = Slot.open(path)
        used = bytes(file.buffer[: file.verify().used_bytes])
        file.close()
        return used

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.hosts.close()
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def job(tmp_path: Path, etcd_config: EtcdConfig) -> Iterator[Job]:
    made = Job(tmp_path, etcd_config)
    yield made
    made.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_captures_become_replicas(job: Job, names: str, transport: str) -> None:
    """Two hosts are a group, three a ring: there each brings to one and receives from another."""
    bring_three_steps(job, names, transport)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
def test_gpus_bring_captures_to_each_other(job: Job) -> None:
    """The same over NCCL, through sub-buffers on the devices."""
    bring_three_steps(job, "ab", "trainer", "--cuda")


def bring_three_steps(job: Job, names: str, transport: str, *arguments: str) -> None:
    """Train three steps, and find every replica identical, and moved by that transport alone."""
    job.start(names, transport)
    trainers = job.train(*[arguments] * len(names))
    for step in range(1, 4):
        for trainer in trainers:
            trainer.begin_step()
        for trainer in trainers:
            assert trainer.hear() == {"step": step, "captured": True}
        job.wait_committed(step)
    by_trainers = 3 if transport == "trainer" else 0
    for rank, (owner, holder) in enumerate(job.holders().items()):
        own = job.bytes_of(owner, rank, 3)
        assert job.bytes_of(holder, rank, 3) == own
        assert ("is offered to host" in job.hosts[owner].log) is (transport == "daemon")
    for trainer in trainers:
        counted = trainer.end()
        assert (counted["sent"], counted["received"]) == (by_trainers, by_trainers)
        assert counted["sent_bytes"] == by_trainers * len(own) == counted["received_bytes"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_holder_that_dies_in_the_middle_gets_it_once_it_is_back(job: Job, transport: str) -> None:
    """Its daemon, that is: with the trainers' transport, the owner's brings what that can bring no more."""
    job.start("ab", transport, apart="a")
    proxy = job.stop_in_the_middle(transport)
    job.hosts["b"].kill()
    proxy.release()
    job.open("b")
    job.wait_committed(1)
    assert job.bytes_of("b", 0, 1) == job.bytes_of("a", 0, 1)
    assert "Traceback" not in job.hosts["a"].log, job.hosts["a"].log


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_the_last_generation_was_bringing_is_in_nobody_s_way(job: Job, transport: str) -> None:
    job.start("ab", transport, apart="a")
    proxy = job.stop_in_the_middle(transport)
    job.fail()
    proxy.release()
    for trainer in job.train():
        trainer.begin_step()
    job.wait_committed(1)
    assert job.bytes_of("b", 0, 1) == job.bytes_of("a", 0, 1)
    assert not job.hosts["b"].slot_paths(0, (1, 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_capture_that_changes_on_the_way_is_refused_and_comes_again(job: Job, transport: str) -> None:
    job.start("ab", transport, apart="a")
    proxy = job.lead_to("a")
    proxy.flip = IN_THE_MIDDLE if transport == "daemon" else None
    for trainer in job.train(("--flip",) if transport == "trainer" else ()):
        trainer.begin_step()
    refusal = {
        "daemon": r"offer of rank 0 \(1, 1\) failed, it will be repeated: daemon of host a .*(?i:bad.record.mac)",
        "trainer": r"what rank 1 received as \(1, 1\) is not held: .*chunk",
    }
    wait_until(lambda: re.search(refusal[transport], job.hosts["b"].log), timeout_s=60, what="a refusal")
    job.wait_committed(1)
    assert job.bytes_of("b", 0, 1) == job.bytes_of("a", 0, 1)


@pytest.mark.parametrize("lost", ["owner", "nobody", "receiver"])
def test_one_transport_brings_what_the_other_does_not(job: Job, lost: str) -> None:
    """A trainer sticks in the middle of a capture: it is committed all the same.

    The stuck owner does not even see that its receiver is gone, so its daemon must run out of patience.
    """
    job.start("ab", "trainer")
    trainers = job.train(("--stuck",))
    for trainer in trainers:
        trainer.begin_step()
    trainers[0].hear_of(stuck=True)
    # Without it there is no step that could be committed.
    trainers[1].hear_of(step=1, captured=True)
    assert not job.hosts["b"].slot_paths(0, (1, 1))
    survivors = [trainer for trainer, name in zip(trainers, ("owner", "receiver"), strict=True) if name != lost]
    for trainer in set(trainers).difference(survivors):
        trainer.popen.kill()
    job.wait_committed(1)
    assert job.bytes_of("b", 0, 1) == job.bytes_of("a", 0, 1)
    for survivor in survivors:
        survivor.begin_step()
        survivor.hear_of(step=2, captured=True)
        survivor.end()


def made_page(tmp_path: Path, run_id: str, *, rank: int = 0, generation: int = 1, step: int = 1) -> bytes:
    """Return all bytes of a capture that fits the protocol."""
    payload_offset, capacity_bytes = plan_layout(100, PAYLOAD_BYTES)
    path = tmp_path / f"made.{rank}.{generation}.{step}"
    file = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    publish(file, run_id=run_id, rank=rank, world_size=2, pair=(generation, step))
    made = bytes(file.buffer[: file.header().used_bytes])
    file.close()
    path.unlink()
    return made


def absurd(page: bytes) -> bytes:
    """Return a header page with a right checksum that announces more bytes than any host has."""
    header = parse_header(page, MAX_SLOT_BYTES)
    return slot._pack_header(replace(header, payload_bytes=1 << 42, payload_offset=1 << 42))


@pytest.mark.parametrize("scheme", ["interleaved", "naive"])
def test_sub_buffers_of_any_configuration_are_accepted(scheme: str) -> None:
    most = ReplicationPolicy(transport="trainer", scheme=scheme, sub_buffers=64, sub_buffer_bytes=1 << 30)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

    def open_edge(rank: int, generation: int, more_bytes: int = 0) -> Edge:
        env = TrainerEnv(
            socket=Path("/nowhere"),
            run_id="run",
            generation=generation,
            rank=rank,
            local_rank=0,
            world_size=2,
            store=("127.0.0.1", store.port),
        )
        config = EdgeConfig(sub_buffers=most.in_flight, sub_buffer_bytes=most.chunk_bytes + more_bytes, device=None)
        return Edge.open(env, owner=0, receiver=1, config=config)

    with ThreadPoolExecutor(2) as pool:
        for edge in pool.map(open_edge, (0, 1), (1, 1)):
            edge.close()
        for opening in [pool.submit(open_edge, rank, 2, 1) for rank in (0, 1)]:
            with pytest.raises(WireError, match="wants"):
                opening.result()


def test_a_lying_trainer_is_refused(job: Job, tmp_path: Path) -> None:
    job.start("ab", "trainer")
    liar = job.hosts["a"].trainer(0, world_size=2, generation=1)
    liar.attach()
    victim = job.trainer(1)
    env = TrainerEnv(
        socket=job.hosts["a"].socket_path,
        run_id=job.hosts.run_id,
        generation=1,
        rank=0,
        local_rank=0,
        world_size=2,
        store=("127.0.0.1", job.store.port),
    )
    edge = Edge.open(env, owner=0, receiver=1, config=CONFIG)
    assert victim.hear() == {"restored": 0}
    capture = made_page(tmp_path, job.hosts.run_id)
    page = capture[:HEADER_BYTES]
    for wrong in (
        bytes(HEADER_BYTES),
        b"\xff" * HEADER_BYTES,
        page[:-9] + b"\1" + page[-8:],
        absurd(page),
        made_page(tmp_path, job.hosts.run_id, rank=1)[:HEADER_BYTES],
        made_page(tmp_path, job.hosts.run_id, generation=2)[:HEADER_BYTES],
        made_page(tmp_path, "another run")[:HEADER_BYTES],
    ):
        assert edge.announce(wrong) is Reply.NEVER
    torn = torch.frombuffer(bytearray(capture), dtype=torch.uint8)[HEADER_BYTES:].clone()
    torn[-1] ^= 1
    assert edge.announce(page) is Reply.SEND
    edge.carrier.send(torn, lambda remaining_bytes: remaining_bytes)
    wait_until(lambda: "is not held" in job.hosts["b"].log, timeout_s=30, what="the torn capture refused")
    assert not job.hosts["b"].held().get(0)
    assert edge.announce(page) is Reply.SEND
    edge._group.send([torch.tensor([1 << 17])], 1, _SIZE_TAG).wait()  # a chunk larger than a sub-buffer
    with pytest.raises(RuntimeError, match=r"closed|reset by peer"):  # reset if something of ours was not read yet
        edge.announce(page)
    edge.close()
    victim.begin_step()
    assert victim.hear() == {"step": 1, "captured": True}, "it trains on"
    victim.end()
