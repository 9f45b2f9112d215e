"""Persisting on real daemons: what is published, what comes back when memory is gone, and what failures leave."""

import asyncio
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from cluster import wait_until
from etcd_process import EtcdProcess
from hosts import PAYLOAD_BYTES, Hosts, payload, restored_bytes
from seats import seats

from resilient_run.ckpt.errors import DaemonError, MemoryBudgetError, RestoreError, TopologyError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.base.policy import PersistPolicy
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView
from resilient_run.daemon.tier import tier as tier_module
from resilient_run.daemon.tier.manifest import RankFile
from resilient_run.daemon.tier.persist_plan import PersistAnswer, PersistRequest, is_due, merged
from resilient_run.daemon.tier.publish import Publisher
from resilient_run.daemon.tier.tier import Tier, TierError

pytestmark = pytest.mark.jobs


@pytest.fixture
def own_hosts(tmp_path: Path, etcd: EtcdProcess) -> Iterator[Hosts]:
    """Hosts with an etcd that no other test uses."""
    made = Hosts(tmp_path, run_id=tmp_path.name, config=EtcdConfig(endpoints=(etcd.endpoint,)))
    made.policy = persist(tmp_path, every_steps=2)
    yield made
    made.close()


@pytest.fixture
def hosts(hosts: Hosts, tmp_path: Path) -> Hosts:
    hosts.policy = persist(tmp_path, every_steps=2)
    return hosts


@pytest.fixture
def storage(hosts: Hosts) -> Iterator[Callable[[float], Path]]:
    """Gives the target a file system with room for the files of so many ranks, also when it has another one."""
    target = Path(hosts.policy["persist"]["target"])

    def resize(ranks: float) -> Path:
        options = f"size={int(ranks * PAYLOAD_BYTES)}" + (",remount" if target.is_mount() else "")
        target.mkdir(exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", target], check=False).returncode:
            pytest.skip("needs the right to mount")
        return target

    yield resize
    if target.is_mount():
        subprocess.run(["umount", "--lazy", target], check=True)


def persist(root: Path, **settings: Any) -> dict[str, Any]:
    return {"persist": {"target": str(root / "tier"), "every_steps": 0, "every_s": 0, "grace_s": 60, **settings}}


def part_of(host: str, name: str) -> str:
    """Return what the file `name` is called while `host` writes it."""
    return f"{name}.{xxhash.xxh3_64_hexdigest(host.encode())}.part"


def wait_for_outage(hosts: Hosts) -> None:
    """Wait until a paused etcd has kept every daemon waiting for longer than a lease or a request lasts."""

    def count() -> int:
        return min(host.log.count("not refreshed") for host in hosts.hosts.values())

    before = count()
    wait_until(lambda: count() >= before + 4, timeout_s=60, what="an outage")


def published(hosts: Hosts) -> list[Pair]:
    """Return the pairs that etcd says are published."""
    entry = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}state/persisted"))
    return [] if entry is None else [tuple(pair) for pair in entry.value["pairs"]]


def wait_for_published(hosts: Hosts, pairs: list[Pair]) -> None:
    wait_until(
        lambda: published(hosts) == pairs,
        timeout_s=60,
        what=lambda: "\n".join([f"{pairs} published", *(host.log for host in hosts.hosts.values())]),
    )


def tier_of(hosts: Hosts) -> Tier:
    return Tier(hosts.policy["persist"]["target"], hosts.run_id)


def lose_everything(hosts: Hosts) -> list[list[int]]:
    """Take all daemons, their memory and the run's keys away; begin the run anew as the first launcher does."""
    for host in hosts.hosts.values():
        host.close()
    hosts.etcd(lambda etcd: etcd.commit({}, {}, [hosts.prefix]))
    hosts.create_job("second")
    for host in hosts.hosts.values():
        host.start()
    first = next(iter(hosts.hosts.values()))
    first.open()
    assert first.launcher is not None
    pairs: list[list[int]] = first.launcher.request("persisted", run_id=hosts.run_id)["pairs"]
    watermark = {"generation": pairs[-1][0], "step": pairs[-1][1]}
    hosts.etcd(lambda etcd: etcd.put(f"{hosts.prefix}state/watermark", watermark))
    hosts.etcd(lambda etcd: etcd.put(f"{hosts.prefix}state/persisted", {"pairs": pairs}))
    return pairs


def test_committed_steps_are_published_and_restored_when_all_memory_is_gone(hosts: Hosts) -> None:
    trainers = hosts.run("ab")
    for step in (1, 2, 3, 4):
        hosts.commit(trainers, [step])
        if step % 2 == 0:
            wait_for_published(hosts, [(1, done) for done in range(2, step + 1, 2)])
    hosts.commit(trainers, [5])
    assert lose_everything(hosts) == [[1, 2], [1, 4]]
    trainers = hosts.run("ab", generation=2)
    for rank, trainer in enumerate(trainers):
        answer = trainer.request("restore")
        # The own host or a peer may have fetched it from the tier already.
        assert answer["source"] in ("persisted", "peer", "local")
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, rank, (1, 4))
    hosts.wait_for_replicas("ab", (1, 4), 4)
    hosts.commit(trainers, [5, 6])
    wait_for_published(hosts, [(1, 2), (1, 4), (2, 6)])


def test_only_the_newest_are_kept(hosts: Hosts) -> None:
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent, every_steps=1, keep=2)
    trainers = hosts.run("ab")
    for step in (1, 2, 3, 4):
        hosts.commit(trainers, [step])
        wait_for_published(hosts, [(1, done) for done in (step - 1, step) if done])
    directory = Path(hosts.policy["persist"]["target"]) / hosts.run_id
    assert sorted(path.name for path in directory.iterdir()) == ["1-3", "1-4"]
    assert sorted(path.name for path in (directory / "1-4").iterdir()) == ["manifest.json", "rank0.zst", "rank1.zst"]
    assert hosts["a"].status()["jobs"][0]["persist"]["written"] == [1, 4]


def test_failing_storage_stops_neither_commits_nor_the_next_attempt(hosts: Hosts) -> None:
    """The target is a file: every write fails until an administrator makes a directory of it."""
    target = Path(hosts.policy["persist"]["target"])
    target.write_text("in the way")
    trainers = hosts.run("ab")
    hosts.commit(trainers, range(1, 8))
    wait_until(lambda: "is not persisted yet, trying again" in hosts["a"].log, timeout_s=30, what="a warning")
    assert hosts.watermark() == (1, 7)
    target.unlink()
    wait_for_published(hosts, [(1, 2)])
    hosts.commit(trainers, [8, 9])
    wait_until(lambda: published(hosts)[1:], timeout_s=30, what="another pair")
    assert tier_of(hosts).published() == published(hosts)


def test_daemon_killed_while_it_persists_publishes_nothing(hosts: Hosts) -> None:
    """One host's writes fail, so the pair stays half written, and then the host dies."""
    target = Path(hosts.policy["persist"]["target"])
    directory = target / hosts.run_id / "1-2"
    in_the_way = directory / part_of("b", "rank1.zst")
    in_the_way.mkdir(parents=True)
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1, 2])
    wait_until((directory / "rank0.zst").exists, timeout_s=30, what="the file of rank 0")
    hosts["b"].kill()
    assert tier_of(hosts).published() == []
    in_the_way.rmdir()
    hosts["b"].drop_clients()
    hosts["b"].start()
    trainers = hosts.run("ab", generation=2)
    for trainer in trainers:
        trainer.request("restore")
    hosts.commit(trainers, [3, 4])
    # Its successor may still write the pair that was asked for, or its root asks for a newer one: whole either way.
    wait_until(lambda: published(hosts), timeout_s=30, what="a published pair")
    tier = tier_of(hosts)
    for pair in tier.published():
        for rank in range(2):
            file = tier.manifest(pair).ranks[rank]
            data = tier.read_ranges(pair, rank, [(0, file.capacity_bytes)])
            assert data[file.payload_offset :] == payload(hosts.run_id, rank, pair)


def test_what_was_left_unfinished_makes_room_for_the_next_step(hosts: Hosts, storage: Callable[[float], Path]) -> None:
    """A step that one host had written when another was killed in the middle of it, and what is none of the tier's."""
    run = storage(2.5) / hosts.run_id
    left = [run / "1-1" / "rank0.zst", run / "1-1" / part_of("b", "rank1.zst")]
    others = [run / "9-9" / part_of("c", "rank0.zst"), run / "notes"]
    for path, size_bytes in [*((path, PAYLOAD_BYTES * 2 // 3) for path in left), *((path, 1) for path in others)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))
    hosts.commit(hosts.run("ab"), [1, 2])
    wait_for_published(hosts, [(1, 2)])
    files = [run / "1-2" / name for name in ("manifest.json", "rank0.zst", "rank1.zst")]
    assert {path for path in run.rglob("*") if path.is_file()} == {*files, *others}


def test_step_that_cannot_be_written_makes_room_for_the_next_one(
    hosts: Hosts, storage: Callable[[float], Path]
) -> None:
    """There is room for the file of one of two ranks."""
    target = storage(1.5)
    hosts.create_job()
    hosts["a"].start()
    hosts["a"].open(nproc=2)
    hosts.form_round(1, "a", nproc=2)
    trainers = [hosts["a"].trainer(rank, local_rank=rank, world_size=2, generation=1) for rank in range(2)]
    for trainer in trainers:
        trainer.attach()
    hosts.commit(trainers, [1, 2])
    wait_until(lambda: "is not persisted by this host" in hosts["a"].log, timeout_s=90, what="a failure")
    assert "No space left on device" in hosts["a"].log
    assert (target / hosts.run_id / "1-2").exists()  # with the file of one rank, unless both were written at once
    storage(2.5)
    steps = itertools.count(3)

    def is_published_later() -> bool:
        # The next step is due once the root has heard of the failure.
        hosts.commit(trainers, [next(steps)])
        return bool(published(hosts))

    wait_until(is_published_later, timeout_s=60, what="a published pair")
    assert not (target / hosts.run_id / "1-2").exists()


@pytest.mark.parametrize(("damage", "message"), [("flipped", "does not match its checksums"), ("missing", "is gone")])
def test_damaged_file_is_refused_and_its_pair_taken_back(hosts: Hosts, damage: str, message: str) -> None:
    trainers = hosts.run("ab")
    for step in (1, 2, 3, 4):
        hosts.commit(trainers, [step])
        if step % 2 == 0:
            wait_for_published(hosts, [(1, done) for done in range(2, step + 1, 2)])
    path = Path(hosts.policy["persist"]["target"]) / hosts.run_id / "1-4" / "rank1.zst"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage == "flipped":
        path.write_bytes(data)
    assert lose_everything(hosts)[-1] == [1, 4]
    trainers = hosts.run("ab", generation=2)
    with pytest.raises(RestoreError, match="no verified copy of rank 1 at step 4"):
        trainers[1].request("restore")
    wait_for_published(hosts, [(1, 2)])
    assert message in hosts["a"].log + hosts["b"].log
    # The next start of this run id falls back to the older pair, on every rank.
    assert lose_everything(hosts) == [[1, 2]]
    for rank, trainer in enumerate(hosts.run("ab", generation=2)):
        assert restored_bytes(trainer.request("restore")["path"]) == payload(hosts.run_id, rank, (1, 2))


def test_etcd_hears_of_a_damaged_pair_after_an_outage(own_hosts: Hosts, etcd: EtcdProcess) -> None:
    hosts = own_hosts
    trainers = hosts.run("ab")
    for step in (1, 2, 3, 4):
        hosts.commit(trainers, [step])
        if step % 2 == 0:
            wait_for_published(hosts, [(1, done) for done in range(2, step + 1, 2)])
    path = Path(hosts.policy["persist"]["target"]) / hosts.run_id / "1-4" / "rank1.zst"
    damaged = path.read_bytes()[:-1]
    # Nobody can open it yet, as where storage does not answer.
    path.unlink()
    path.mkdir()
    lose_everything(hosts)
    trainers = hosts.run("ab", generation=2)
    etcd.pause()
    path.rmdir()
    path.write_bytes(damaged)
    with pytest.raises(RestoreError, match="no verified copy of rank 1 at step 4"):
        trainers[1].request("restore")
    wait_for_outage(hosts)
    etcd.resume()
    wait_for_published(hosts, [(1, 2)])


def test_other_world_size_is_refused(hosts: Hosts) -> None:
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1, 2])
    wait_for_published(hosts, [(1, 2)])
    lose_everything(hosts)
    trainers = hosts.run("abc", generation=2)
    for trainer in trainers:
        with pytest.raises(TopologyError, match="saved by 2 ranks, this run has 3"):
            trainer.request("restore")


def test_sigterm_persists_the_newest_step(hosts: Hosts) -> None:
    """All daemons are told to end at once, as in a preemption; none is asked for anything by its trainers."""
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent)
    hosts.commit(hosts.run("ab"), [1, 2, 3])
    assert published(hosts) == []
    for host in hosts.hosts.values():
        assert host.process is not None
        host.process.terminate()
    for host in hosts.hosts.values():
        assert host.process is not None
        assert host.process.wait(90) == 0, host.log
    assert tier_of(hosts).published() == [(1, 3)]
    assert published(hosts) == [(1, 3)]


def test_sigterm_while_nobody_is_root_persists_too(own_hosts: Hosts, etcd: EtcdProcess) -> None:
    """Every lease has expired, the root's too, when the daemons have written their parts."""
    hosts = own_hosts
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent)
    hosts.commit(hosts.run("ab"), [1, 2, 3])
    etcd.pause()
    for host in hosts.hosts.values():
        assert host.process is not None
        host.process.terminate()
    wait_for_outage(hosts)
    etcd.resume()
    for host in hosts.hosts.values():
        assert host.process is not None
        assert host.process.wait(90) == 0, host.log
    assert tier_of(hosts).published() == [(1, 3)]
    assert published(hosts) == [(1, 3)]


def test_sigterm_of_one_daemon_asks_all_hosts(hosts: Hosts) -> None:
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent)
    hosts.commit(hosts.run("ab"), [1, 2])
    assert hosts["b"].stop() == 0
    wait_for_published(hosts, [(1, 2)])


def test_sigterm_ends_within_the_grace_when_storage_hangs(hosts: Hosts) -> None:
    """A pipe nobody reads takes the place of a hung network file system."""
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent, grace_s=1)
    directory = Path(hosts.policy["persist"]["target"]) / hosts.run_id / "1-1"
    directory.mkdir(parents=True)
    os.mkfifo(directory / "manifest.json")
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    assert hosts["a"].stop() == 0
    assert "was not persisted within 1 s" in hosts["a"].log


def test_closed_job_is_persisted_unless_discarded(hosts: Hosts) -> None:
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent)
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1, 2])
    assert hosts["a"].launcher is not None
    hosts["a"].launcher.request("close_job", run_id=hosts.run_id, discard=False)
    # Already: the container, or the step of a scheduler, may end with the launcher, and this daemon with it.
    assert published(hosts) == [(1, 2)]


def test_copies_count_in_the_memory_budget(hosts: Hosts) -> None:
    hosts.create_job()
    hosts["a"].start()
    hosts["a"].open(memory_limit_bytes=5 << 20)
    hosts.form_round(1, "a")
    with pytest.raises(MemoryBudgetError, match="and 1 copies while they are persisted"):
        hosts["a"].trainer(0, world_size=1, generation=1).attach(estimate_bytes=2 << 20)


def test_unknown_storage_is_refused_when_the_job_is_opened(hosts: Hosts) -> None:
    hosts.create_job()
    hosts["a"].start()
    with pytest.raises(DaemonError, match=r"persist\.target nosuch://x"):
        hosts["a"].open(policy=persist(Path("/"), target="nosuch://x"))


def test_newer_commits_wait_for_the_copy_but_are_not_lost(hosts: Hosts) -> None:
    """Every step is asked for; what is published is exactly what was captured at that step."""
    hosts.policy = persist(Path(hosts.policy["persist"]["target"]).parent, every_steps=1, keep=9)
    trainers = hosts.run("ab")
    hosts.commit(trainers, range(1, 9))
    wait_until(lambda: published(hosts), timeout_s=30, what="a published pair")
    lose_everything(hosts)
    pairs = published(hosts)
    for rank, trainer in enumerate(hosts.run("ab", generation=2)):
        assert restored_bytes(trainer.request("restore")["path"]) == payload(hosts.run_id, rank, pairs[-1])


@pytest.mark.parametrize("problem", ["fails", "hangs"])
def test_cleaning_does_not_stop_publishing(
    tmp_path: Path, etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    run_id, asked_for = tmp_path.name, []
    tier, awake = Tier(str(tmp_path), run_id), threading.Event()
    monkeypatch.setattr(tier_module, "_STALL_S", 1.0)

    def prune(_: int, before: Pair) -> list[Pair]:
        asked_for.append(before)
        if problem == "hangs":
            awake.wait()
        raise TierError("no")

    monkeypatch.setattr(tier, "prune", prune)

    async def publish() -> None:
        etcd = await Etcd.connect(etcd_config, prefix=keys.prefix(run_id))
        view = JobView(host="a", replicas=1, leader="a")
        view.round = Round(generation=1, seats=seats(("a",), (1,)), restore=None, revision=1)
        publisher = Publisher(run_id=run_id, policy=PersistPolicy(target=str(tmp_path)), tier=tier, view=view)
        request = PersistRequest(pair=(1, 2), unix_s=0.0)
        running = asyncio.create_task(publisher.run(etcd, lambda: request))
        writer = tier.write((1, 2), 0)
        file = RankFile(capacity_bytes=9000, payload_offset=8192, stored_bytes=writer.finish())
        answer = PersistAnswer(pair=(1, 2), world_size=1, ranks={0: file}, error=None)
        await etcd.put(keys.ANSWERS("a"), answer.to_value())
        await asyncio.wait_for(view.wait_for(lambda: publisher.is_settled((1, 2))), 60)
        running.cancel()
        await asyncio.wait([running])
        await etcd.close()

    try:
        asyncio.run(publish())
    finally:
        awake.set()
    assert asked_for == [(1, 2), (1, 2)]
    assert tier.published() == [(1, 2)]


# The pure part.


def due(
    pair: Pair,
    *,
    now_s: float = 1000.0,
    last: Pair | None = None,
    asked_s: float = 900.0,
    settled: bool = True,
    **policy: Any,
) -> bool:
    request = None if last is None else PersistRequest(pair=last, unix_s=asked_s)
    settings = PersistPolicy(**{"target": "x", "every_s": 0.0, **policy})
    return is_due(settings, pair, last=request, settled=settled, since_step=0, since_unix_s=950.0, now_unix_s=now_s)[0]


def test_when_a_pair_is_due() -> None:
    assert not due((1, 100))
    assert due((1, 10), every_steps=10)
    assert not due((1, 9), every_steps=10)
    assert not due((1, 19), every_steps=10, last=(1, 10))
    assert due((1, 20), every_steps=10, last=(1, 10))
    assert due((1, 1), every_s=50.0)
    assert not due((1, 1), every_s=51.0)
    assert due((1, 11), every_s=100.0, last=(1, 10))
    assert not due((1, 11), every_s=101.0, last=(1, 10))
    # One at a time, unless nothing can come of the one before.
    assert not due((1, 30), every_steps=10, last=(1, 10), settled=False)
    assert due((2, 30), every_steps=10, last=(1, 10), settled=False)
    assert due((1, 30), every_steps=10, last=(1, 10), settled=False, now_s=1501.0)


def test_request_of_a_time_to_come_holds_nothing_up() -> None:
    """The clock was set back by two hours, or the host that asked has one that is ahead."""
    assert due((1, 11), every_s=100.0, last=(1, 10), asked_s=8200.0)
    assert due((1, 11), every_s=100.0, now_s=949.0)
    assert not due((1, 19), every_steps=10, last=(1, 10), asked_s=8200.0)
    assert due((1, 20), every_steps=10, last=(1, 10), asked_s=8200.0, settled=False)
    assert due((1, 20), every_s=100.0, last=(1, 10), asked_s=8200.0, settled=False)
    # A host that is told to end, with a clock that is ahead by a little, has time to write what it asked for.
    assert not due((1, 20), every_steps=10, last=(1, 10), asked_s=1005.0, settled=False)


def test_a_pair_is_published_when_every_rank_is_written() -> None:
    file = RankFile(capacity_bytes=9000, payload_offset=8192, stored_bytes=10)
    first = PersistAnswer(pair=(1, 2), world_size=3, ranks={0: file, 1: file}, error=None)
    second = PersistAnswer(pair=(1, 2), world_size=3, ranks={2: file}, error=None)
    whole = merged((1, 2), "run", {"a": first, "b": second})
    assert whole is not None
    assert whole.ranks.keys() == {0, 1, 2}
    assert merged((1, 2), "run", {"a": first}) is None
    assert merged((1, 3), "run", {"a": first, "b": second}) is None
    assert (
        merged((1, 2), "run", {"a": first, "b": PersistAnswer(pair=(1, 2), world_size=0, ranks={}, error="full")})
        is None
    )
    assert PersistAnswer.parse(json.loads(json.dumps(first.to_value()))) == first
