"""When replicas leave: a pacer by an injected clock, and real daemons whose chunks are held against their spans."""

import asyncio
import math
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import wait_until
from hosts import Hosts, Trainer, payload, restored_bytes, wait_for_watermark

from resilient_run.ckpt.format.idle import IdleProfile, Span
from resilient_run.daemon.base.policy import ReplicationPolicy
from resilient_run.daemon.peers.pacing import Pacer

pytestmark = pytest.mark.jobs

TWO_SPANS = IdleProfile(
    iteration_s=10.0, spans=(Span(start_s=1.0, length_s=2.0), Span(start_s=6.0, length_s=2.0)), collectives=2
)


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pacer_with(clock: Clock, **policy: Any) -> tuple[Pacer, list[int]]:
    """Return a pacer with a trainer in its iteration after step 1, and the values of `every` that it tells."""
    told: list[int] = []
    pacer = Pacer(
        ReplicationPolicy(
            **{"bandwidth_mbit_s": 8.0, "variance": 1.0, "sub_buffer_bytes": 1 << 20, "max_every": 8, **policy}
        ),
        changed=lambda: told.append(pacer.every),
        clock=clock,
    )
    assert pacer.attach(0, 7) is None
    pacer.profiled(0, TWO_SPANS)
    pacer.iteration(0, 1, clock.now_s)
    return pacer, told


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    """A connection that has nothing left to send."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        yield client


async def send_all(
    pacer: Pacer, clock: Clock, sock: socket.socket, *, step: int, size_bytes: int
) -> list[tuple[float, int]]:
    """Return time since the iteration began and size of each chunk, sent at 1 MB/s."""
    sent = []
    began_s = clock.now_s

    async def send(count: int) -> None:
        sent.append((clock.now_s - began_s, count))
        clock.now_s += count / 1e6

    task = asyncio.create_task(pacer.send(step, size_bytes, sock, send))
    while not task.done():
        await asyncio.sleep(0)
        clock.now_s += 0.01
        pacer._update()
    await task
    return sent


def test_chunks_leave_in_the_spans_and_fill_them(sock: socket.socket) -> None:
    clock = Clock()
    pacer, told = pacer_with(clock)
    pacer.captured(0, 1, checkpoint_bytes=3_000_000, copies=1)
    sent = asyncio.run(send_all(pacer, clock, sock, step=1, size_bytes=3_000_000))
    assert (pacer.every, told) == (1, [])
    assert sum(size for _, size in sent) == 3_000_000
    for at_s, size in sent:
        assert 1.0 <= at_s < 3.0 or at_s >= 6.0, sent
        assert at_s >= 6.0 or at_s + size / 1e6 <= 3.0, sent
    assert sum(size for at_s, size in sent if at_s < 3.0) > 1_900_000
    assert pacer.describe()["planned_s"] == pytest.approx(3.0, abs=0.1)


def test_naive_sends_one_chunk_in_a_span(sock: socket.socket) -> None:
    clock = Clock()
    pacer, _ = pacer_with(clock, scheme="naive", sub_buffer_bytes=16 << 10)
    pacer.captured(0, 1, checkpoint_bytes=3_000_000, copies=1)
    sent = asyncio.run(send_all(pacer, clock, sock, step=1, size_bytes=3_000_000))
    buffer_bytes = 4 * (16 << 10)  # the sub-buffers together
    assert max(size for _, size in sent) == buffer_bytes, "no chunk is larger than the buffer"
    clock = Clock()
    pacer, _ = pacer_with(clock, scheme="naive")
    pacer.captured(0, 1, checkpoint_bytes=3_000_000, copies=1)
    sent = asyncio.run(send_all(pacer, clock, sock, step=1, size_bytes=3_000_000))
    assert [at_s >= 6.0 for at_s, _ in sent] == [False, True], sent
    assert sent[0][1] == pytest.approx(2_000_000, rel=0.02), "the first span is full"


def test_what_does_not_fit_in_an_iteration_lowers_the_frequency() -> None:
    clock = Clock()
    pacer, told = pacer_with(clock)
    pacer.captured(0, 1, checkpoint_bytes=6_000_000, copies=1)
    assert (pacer.every, told) == (2, [2])
    assert "one of 2 steps is captured" in pacer.reason
    pacer.captured(0, 2, checkpoint_bytes=1_000_000, copies=1)
    assert (pacer.every, told) == (1, [2, 1])


@pytest.mark.parametrize("what", ["released", "detached", "another rank", "reset", "unpaced"])
def test_nothing_waits_when_nobody_trains(what: str, sock: socket.socket) -> None:
    clock = Clock()
    pacer, _ = pacer_with(clock, scheme="unpaced" if what == "unpaced" else "interleaved")
    pacer.captured(0, 1, checkpoint_bytes=3_000_000, copies=1)
    match what:
        case "released":
            pacer.release()
        case "detached":
            pacer.detach(0)
        case "another rank":
            pacer.attach(1, 7)
        case "reset":
            pacer.reset()
    sent = asyncio.run(send_all(pacer, clock, sock, step=1, size_bytes=3_000_000))
    assert sent[0][0] < 0.1
    assert [size for _, size in sent] == [1 << 20, 1 << 20, 3_000_000 - (2 << 20)]


@pytest.mark.parametrize("end", ["iteration", "time", "released", "detached"])
def test_nothing_leaves_in_an_iteration_that_is_profiled(end: str) -> None:
    clock = Clock()
    pacer, _ = pacer_with(clock, bandwidth_mbit_s=0.0)
    pacer.attach(1, 7)
    assert pacer.patience_s == 0.0
    pacer.iteration(1, 1, clock.now_s, 20.0)
    pacer.iteration(0, 2, clock.now_s)  # the other rank is ahead
    assert pacer.patience_s == 20.0
    seen = pacer._sending.window(1, clock.now_s)
    assert (seen.remaining_s, seen.wait_s) == (0.0, 20.0)
    match end:
        case "iteration":
            pacer.iteration(1, 2, clock.now_s)
        case "time":
            clock.now_s += 20.0
        case "released":
            pacer.release()
        case "detached":
            pacer.detach(1)
    assert pacer._sending.window(1, clock.now_s).remaining_s == math.inf


def test_what_a_trainer_found_is_known_to_its_successor() -> None:
    pacer, _ = pacer_with(Clock())
    pacer.reset()
    assert pacer.attach(0, 7) == TWO_SPANS
    assert pacer.attach(0, 8) is None
    assert pacer.attach(1, 7) is None


def start(hosts: Hosts, **replication: Any) -> list[Trainer]:
    """Start two hosts with this configuration of replication."""
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy={"replication": replication})
    hosts.form_round(1, "ab")
    trainers = [hosts[name].trainer(rank, world_size=2, generation=1) for rank, name in enumerate("ab")]
    for trainer in trainers:
        answer = trainer.attach()["replication"]
        assert (answer["copies"], answer["every"], answer["idle"]) == (1, 1, None)
    return trainers


@pytest.mark.parametrize("scheme", ["interleaved", "no-pipeline", "naive", "unpaced", "blocking"])
def test_each_scheme_commits_and_restores(hosts: Hosts, scheme: str) -> None:
    trainers = start(hosts, scheme=scheme, bandwidth_mbit_s=800)
    hosts.commit(trainers, [1, 2])
    hosts["b"].kill()
    hosts["b"].close()
    replaced = hosts.run("ac", generation=2)
    restored = replaced[1].request("restore")
    assert restored["source"] == "peer"
    assert restored_bytes(restored["path"]) == payload(hosts.run_id, 1, (1, 2))


LEAVES = re.compile(r"step (\d+): (\d+) bytes leave at ([\d.]+) s, (.*)")


def test_chunks_of_real_daemons_leave_in_the_spans(hosts: Hosts) -> None:
    """By the trainer's clock the iteration began long ago or begins later, so no wall-clock time decides.

    But not before the machine was started: it may be a few minutes old.
    """
    trainers = start(hosts, bandwidth_mbit_s=800)
    hosts.commit(trainers, [1])
    profile = {"iteration_s": 120.0, "collectives": 2, "spans": [0.0, 40.0, 90.0, 30.0]}
    for trainer in trainers:
        trainer.notify("schedule", **profile)
        trainer.notify("iteration", step=2, monotonic_s=time.monotonic() - 5.0)
    hosts.commit(trainers, [2])  # inside of the first span
    for trainer in trainers:
        trainer.notify("iteration", step=3, monotonic_s=time.monotonic() - 41.0)
        trainer.capture(3)
    for trainer in trainers:  # both daemons have seen the capture once they answer this
        trainer.request("status")
    assert {trainer.watermark() for trainer in trainers} == {(1, 2)}
    for name in "ab":
        left = [(int(step), why) for step, _, _, why in LEAVES.findall(hosts[name].log)]
        assert {why for step, why in left if step == 2} == {"in span 0"}
        assert not any(step == 3 for step, _ in left)
    for trainer in trainers:  # now it is in the last span
        trainer.notify("iteration", step=3, monotonic_s=time.monotonic() - 91.0)
    wait_for_watermark(trainers, (1, 3))
    shown = hosts["a"].status()["jobs"][0]["replication"]
    assert (shown["scheme"], shown["every"], shown["idle_s"]) == ("interleaved", 1, 70.0)


def test_a_host_that_stays_need_not_learn_the_network_again(hosts: Hosts) -> None:
    """Its rank goes on with what its predecessor has found; one that comes to another host begins anew."""
    trainers = start(hosts, bandwidth_mbit_s=800)
    profile = {"iteration_s": 120.0, "collectives": 2, "spans": [0.0, 40.0, 90.0, 30.0]}
    for trainer in trainers:
        trainer.notify("schedule", **profile)
        trainer.request("status")
    hosts["b"].kill()
    hosts["b"].close()
    hosts["c"].start()
    hosts["c"].open()
    hosts.form_round(2, "ac")
    known = [
        hosts[name].trainer(rank, world_size=2, generation=2).attach()["replication"]["idle"]
        for rank, name in enumerate("ac")
    ]
    assert known == [profile, None]


def test_replicas_wait_for_the_next_iteration_while_the_network_is_profiled(hosts: Hosts) -> None:
    trainers = start(hosts)
    hosts.commit(trainers, [1])
    for trainer in trainers:
        trainer.notify("iteration", step=2, monotonic_s=time.monotonic(), quiet_s=3600.0)
        trainer.capture(2)
    for trainer in trainers:  # both daemons have seen the capture once they answer this
        trainer.request("status")
    assert {trainer.watermark() for trainer in trainers} == {(1, 1)}
    for trainer in trainers:
        trainer.notify("iteration", step=3, monotonic_s=time.monotonic(), quiet_s=None)
    wait_for_watermark(trainers, (1, 2))


def test_failure_opens_the_gate(hosts: Hosts) -> None:
    """What waits for its span is committed at once when the launcher settles."""
    trainers = start(hosts, bandwidth_mbit_s=800)
    for trainer in trainers:
        trainer.notify("schedule", iteration_s=3600.0, collectives=1, spans=[3000.0, 600.0])
        trainer.notify("iteration", step=1, monotonic_s=time.monotonic())
        trainer.capture(1)
    for name in "ab":
        launcher = hosts[name].launcher
        assert launcher is not None
        launcher.notify("settle", run_id=hosts.run_id, timeout_s=0)
    wait_for_watermark(trainers, (1, 1))


def test_frequency_is_the_same_on_every_host(hosts: Hosts) -> None:
    """The slowest host decides, and every trainer hears it."""
    trainers = start(hosts, bandwidth_mbit_s=8, max_every=8)
    trainers[0].notify("schedule", iteration_s=2.0, collectives=1, spans=[0.0, 1.9])
    # It begins later, so the capture is there in time however slow this machine is.
    trainers[0].notify("iteration", step=1, monotonic_s=time.monotonic() + 3600)
    trainers[0].capture(1)
    for trainer in trainers:
        wait_until(
            lambda trainer=trainer: any(m["op"] == "pace" and m["every"] == 2 for m in trainer.poll()),
            timeout_s=30,
            what="another frequency",
        )
