"""Replication by trainers: who sends to whom, real trainers over Gloo with real daemons, and peers that fail or lie."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import wait_until
from hosts import PAYLOAD_BYTES, Host, Hosts, publish
from seats import seats
from torch.distributed import TCPStore

from resilient_run.ckpt.format import slot
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, parse_header, plan_layout
from resilient_run.ckpt.link.env import TrainerEnv
from resilient_run.ckpt.transport.carriers import _SIZE_TAG
from resilient_run.ckpt.transport.edge import Edge, EdgeConfig, Reply
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.peers.exchange import PATIENCE_S, Deliveries, may_wait, receiver, routes
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.slots.slots import MAX_SLOT_BYTES

pytestmark = pytest.mark.jobs

POLICY = {"replication": {"transport": "trainer", "sub_buffer_bytes": 1 << 16}}
CONFIG = EdgeConfig(sub_buffers=4, sub_buffer_bytes=1 << 16, device=None)


def made_round(*nprocs: int) -> Round:
    hosts = tuple(f"host{index}" for index in range(len(nprocs)))
    return Round(generation=1, seats=seats(hosts, nprocs), restore=None, revision=1)


@pytest.mark.parametrize("nprocs", [(1, 1), (2, 2), (1, 1, 1), (2, 2, 2, 2, 2), (3, 1), (1, 4, 2), (8, 3, 1, 2)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_replica_has_one_sender_and_one_receiver(nprocs: tuple[int, ...], replicas: int) -> None:
    round_ = made_round(*nprocs)
    routed = {rank: routes(round_, rank, replicas) for rank in range(round_.world_size)}
    sent = [(rank, other) for rank, known in routed.items() for other in known.send_to]
    received = [(owner, rank) for rank, known in routed.items() for owner in known.receive_from]
    assert sorted(sent) == sorted(received)
    hosts = {rank: host for host in round_.hosts for rank in round_.ranks(host)}
    for rank, known in routed.items():
        assert [hosts[other] for other in known.send_to] == list(round_.holders(rank, replicas)[1:])


def test_receivers_have_the_same_place_or_take_turns() -> None:
    round_ = made_round(4, 4, 2)
    assert [receiver(round_, owner, "host1") for owner in range(4)] == [4, 5, 6, 7]
    assert [receiver(round_, owner, "host2") for owner in range(4)] == [8, 9, 8, 9]


@pytest.mark.parametrize(
    ("facts", "waits", "why"),
    [
        ({"reachable": False, "waited_s": 0.0, "step_s": 0.0}, False, "no connection"),
        ({"reachable": True, "waited_s": 9.0, "step_s": 0.1}, True, "1.0 s left"),
        ({"reachable": True, "waited_s": 11.0, "step_s": 0.1}, False, r"in 11.0 s \(limit 10.0 s\)"),
        ({"reachable": True, "waited_s": 11.0, "step_s": 5.0}, True, "9.0 s left"),
    ],
)
def test_daemons_take_over_when_a_trainer_cannot_or_does_not(facts: dict[str, Any], waits: bool, why: str) -> None:
    decided, reason = may_wait(**facts)
    assert decided is waits
    assert re.search(why, reason)


def test_patience_is_with_one_capture_and_one_trainer() -> None:
    now_s = 100.0
    deliveries = Deliveries(now_s=lambda: now_s)
    assert not deliveries.awaited("b", 0, (1, 5))[0]
    deliveries.connected(0, ["b"])
    deliveries.captured(0, (1, 5))
    assert deliveries.awaited("b", 0, (1, 5))[0]
    assert not deliveries.awaited("c", 0, (1, 5))[0]
    now_s += PATIENCE_S + 1
    deliveries.captured(0, (1, 5))
    assert not deliveries.awaited("b", 0, (1, 5))[0], "announced again, it is no newer"
    deliveries.captured(0, (1, 6))
    assert deliveries.awaited("b", 0, (1, 6))[0]
    deliveries.gone(0)
    assert not deliveries.awaited("b", 0, (1, 6))[0]


class Process:
    """A trainer process, see `replicating_trainer.py`."""

    def __init__(self, host: Host, rank: int, *, world_size: int, port: int, arguments: tuple[str, ...] = ()) -> None:
        environment = {
            "RESILIENT_SOCKET": str(host.socket_path),
            "RESILIENT_RUN_ID": host.run_id,
            "RESILIENT_GENERATION": "1",
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-P", str(Path(__file__).with_name("replicating_trainer.py")), *arguments]
        self.popen = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        said: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return said

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

    def start(self, names: str) -> None:
        self.names = names
        self.hosts.create_job()
        for name in names:
            self.hosts[name].start()
            self.hosts[name].open(replicas=2, policy=POLICY)
        self.hosts.form_round(1, names)

    def trainer(self, rank: int, *arguments: str) -> Process:
        host = self.hosts[self.names[rank]]
        made = Process(host, rank, world_size=len(self.names), port=self.store.port, arguments=arguments)
        self.processes.append(made)
        return made

    def wait_connected(self, owner: str, receiver: str) -> None:
        said = f"brings its captures itself to hosts ['{receiver}']"
        wait_until(lambda: said in self.hosts[owner].log, timeout_s=60, what=f"an edge from {owner} to {receiver}")

    def wait_committed(self, step: int) -> None:
        wait_until(
            lambda: self.hosts.watermark() == (1, step),
            timeout_s=30,
            what=lambda step=step: (
                f"step {step} committed\n" + "\n".join(self.hosts[name].log[-3000:] for name in self.names)
            ),
        )

    def bytes_of(self, name: str, rank: int, step: int) -> bytes:
        """Return all bytes of the capture that a host holds, verified."""
        (path,) = self.hosts[name].slot_paths(rank, (1, step))
        file = Slot.open(path)
        used = bytes(file.buffer[: file.verify().used_bytes])
        file.close()
        return used

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.hosts.close()


@pytest.fixture
def job(tmp_path: Path, etcd_config: EtcdConfig) -> Iterator[Job]:
    made = Job(tmp_path, etcd_config)
    yield made
    made.close()


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_trainers_bring_their_captures_to_each_other(job: Job, names: str) -> None:
    """Two hosts are a group, three a ring: there each sends to one and receives from another."""
    bring_three_steps(job, names)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
def test_gpus_bring_captures_to_each_other(job: Job) -> None:
    """The same over NCCL, through sub-buffers on the devices."""
    bring_three_steps(job, "ab", "--cuda")


def bring_three_steps(job: Job, names: str, *arguments: str) -> None:
    """Train three steps, and find every replica identical and moved by trainers alone."""
    job.start(names)
    trainers = [job.trainer(rank, *arguments) for rank in range(len(names))]
    next_host = {name: names[(index + 1) % len(names)] for index, name in enumerate(names)}
    for trainer in trainers:
        assert trainer.hear() == {"restored": 0}
    for owner, holder in next_host.items():
        job.wait_connected(owner, holder)
    for step in range(1, 4):
        for trainer in trainers:
            trainer.begin_step()
        for trainer in trainers:
            assert trainer.hear() == {"step": step, "captured": True}
        job.wait_committed(step)
    for rank, name in enumerate(names):
        own = job.bytes_of(name, rank, 3)
        assert job.bytes_of(next_host[name], rank, 3) == own
        assert "is offered to host" not in job.hosts[name].log
    for trainer in trainers:
        counted = trainer.end()
        assert (counted["sent"], counted["received"]) == (3, 3)
        assert counted["sent_bytes"] == 3 * len(own) == counted["received_bytes"]


@pytest.mark.parametrize("victim", [0, 1])
def test_daemons_bring_what_a_killed_trainer_does_not(job: Job, victim: int) -> None:
    """One end dies in the middle of a capture; the capture is committed, and the other trainer goes on and ends.

    The stuck owner does not even see that its receiver is gone, so its daemon must run out of patience.
    """
    job.start("ab")
    trainers = [job.trainer(0, "--stuck"), job.trainer(1)]
    for trainer in trainers:
        assert trainer.hear() == {"restored": 0}
    job.wait_connected("a", "b")
    job.wait_connected("b", "a")
    for trainer in trainers:
        trainer.begin_step()
    assert {"stuck": True} in [trainers[0].hear(), trainers[0].hear()]
    assert trainers[1].hear() == {"step": 1, "captured": True}
    assert not job.hosts["b"].slot_paths(0, (1, 1))
    trainers[victim].popen.kill()
    job.wait_committed(1)
    assert job.bytes_of("b", 0, 1) == job.bytes_of("a", 0, 1)
    survivor = trainers[1 - victim]
    survivor.begin_step()
    assert survivor.hear() == {"step": 2, "captured": True}
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


def test_a_lying_trainer_is_refused(job: Job, tmp_path: Path) -> None:
    job.start("ab")
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
