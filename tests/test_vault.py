"""Slots on a real tmpfs: geometry, what may be overwritten, the memory budget, and adoption after SIGKILL."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hosts import MANIFEST, PAYLOAD_BYTES, Hosts, corrupt, publish, wait_for_watermark
from seats import seats

from resilient_run.ckpt.errors import DaemonError, MemoryBudgetError, SlotSizeError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, MAGIC, Slot, plan_layout
from resilient_run.daemon.base.record import JobRecord
from resilient_run.daemon.jobs import Jobs
from resilient_run.daemon.run.commit import Agreed
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView
from resilient_run.daemon.slots.memory import MemoryBudget, default_limit_bytes
from resilient_run.daemon.slots.slots import Geometry, JobSlots, SlotFile
from resilient_run.daemon.slots.vault import Vault
from resilient_run.daemon.trust.private import open_directory

MIB = 1 << 20
OFFSET, CAPACITY = plan_layout(len(MANIFEST), PAYLOAD_BYTES)
SMALL = Geometry(capacity_bytes=CAPACITY, payload_offset=OFFSET)
LARGE = Geometry(capacity_bytes=CAPACITY + MIB, payload_offset=OFFSET)


@pytest.fixture
def shm_dir(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"rr-test-{os.getpid()}-{tmp_path.name}"
    open_directory(path)
    yield path
    shutil.rmtree(path)


def record(run_id: str = "run") -> JobRecord:
    return JobRecord(run_id=run_id, host="a", incarnation="i", replicas=2, attached=False, launcher_pid=os.getpid())


def open_vault(shm_dir: Path, limit_bytes: int = 64 * MIB) -> Vault:
    return Vault(shm_dir, MemoryBudget(shm_dir, limit_bytes))


def fill(file: SlotFile, pair: Pair, *, run_id: str = "run") -> None:
    """Let the daemon receive a replica into a placed slot."""
    publish(file.slot, run_id=run_id, rank=file.rank, world_size=9, pair=pair)
    file.pair, file.busy = pair, False


def said(committed: Pair | None) -> Agreed:
    """Return that `committed` is, and that every step after it is captured."""
    generation, step = committed or (1, 0)
    return Agreed(committed=committed, next=(generation, step + 1))


async def place(slots: JobSlots, pair: Pair, committed: Pair | None, geometry: Geometry = SMALL) -> SlotFile | None:
    file = await slots.place(3, geometry, agreed=said(committed))
    if file is not None:
        fill(file, pair)
    return file


def test_only_what_is_older_than_the_watermark_is_overwritten(shm_dir: Path) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        first, second = await place(slots, (1, 1), None), await place(slots, (1, 2), None)
        assert await place(slots, (1, 3), None) is None
        assert await place(slots, (1, 3), (1, 1)) is None
        assert await place(slots, (1, 3), (1, 2)) is first
        assert await place(slots, (1, 4), (1, 3)) is second
        assert slots.held() == {3: {(1, 3), (1, 4)}}
        assert len(list(slots.files())) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(1, 6))
def test_allocation_that_was_cancelled_leaves_neither_file_nor_budget(shm_dir: Path, turns: int) -> None:
    """A new round cancels the fetches of the last one, wherever they are; those of the new one need the same files."""

    async def scenario() -> None:
        slots = open_vault(shm_dir, limit_bytes=2 * -(-CAPACITY // HEADER_BYTES) * HEADER_BYTES).open(record())
        fetch = asyncio.create_task(slots.place(3, SMALL, agreed=said(None)))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not fetch.done()
        fetch.cancel()
        await asyncio.wait([fetch])
        assert fetch.cancelled()
        assert await place(slots, (1, 1), None) is not None
        assert await place(slots, (1, 2), None) is not None
        assert slots.held() == {3: {(1, 1), (1, 2)}}

    asyncio.run(scenario())


def test_slot_that_is_being_received_is_nobody_else_s(shm_dir: Path) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        files = [await slots.place(3, SMALL, agreed=said(None)) for _ in range(3)]
        assert files[0] is not files[1]
        assert files[2] is None
        assert {file.slot.state() for file in slots.files()} == {"WRITING"}
        assert slots.held() == {}

    asyncio.run(scenario())


def test_watermark_survives_a_change_of_geometry(shm_dir: Path) -> None:
    """A file of the new size is made beside the one with the watermark, which another replaces once that has moved."""

    async def scenario() -> None:
        vault = open_vault(shm_dir)
        slots = vault.open(record())
        await place(slots, (1, 1), None)
        kept = await place(slots, (1, 2), (1, 1))
        lent = await slots.allocate(3, LARGE, agreed=said((1, 2)))
        assert len(lent) == 1
        assert kept not in lent
        assert slots.held() == {3: {(1, 2)}}
        assert await slots.allocate(3, LARGE, agreed=said((1, 2))) == lent
        slots.trim({3}, said((1, 2)))
        assert len(list(slots.files())) == 2
        fill(lent[0], (2, 3))
        slots.trim({3}, said((2, 3)))
        assert list(slots.files()) == lent
        lent = await slots.allocate(3, LARGE, agreed=said((2, 3)))
        assert len(lent) == 2
        assert list(slots.files()) == lent
        slots.trim({}, said((2, 3)))
        assert list(shm_dir.glob("*/*.slot")) == []
        assert vault.budget.used_bytes == 0

    asyncio.run(scenario())


def test_older_pairs_survive_a_change_of_geometry(shm_dir: Path) -> None:
    """There are as many files as usual meanwhile; those of the new size become more."""

    def after(step: int) -> Agreed:
        older = (Pair(1, step - 2), Pair(1, step - 1))
        return Agreed(committed=Pair(1, step), next=Pair(1, step + 1), older=older)

    async def scenario() -> None:
        slots = open_vault(shm_dir).open(replace(record(), keep=3))
        for step in (1, 2, 3):
            await place(slots, (1, step), None)
        for step, files, lent in ((3, 4, 1), (4, 4, 2), (5, 4, 3), (6, 4, 4), (7, 4, 4)):
            found = await slots.allocate(3, LARGE, agreed=after(step))
            assert (len(list(slots.files())), len(found)) == (files, lent)
            assert {(1, step - 2), (1, step - 1), (1, step)} <= slots.held()[3]
            fill(next(file for file in found if after(step).may_overwrite(file.pair)), (1, step + 1))

    asyncio.run(scenario())


def test_a_state_that_grows_gets_more_where_as_much_has_room_of_each_rank(shm_dir: Path) -> None:
    async def scenario(limit_bytes: int, other: Geometry = SMALL) -> Geometry:
        vault = open_vault(shm_dir)
        slots = vault.open(replace(record(), run_id=str(limit_bytes)))
        slots.budget.limit(slots.key, limit_bytes)
        for rank, own in ((3, other), (4, SMALL)):
            assert slots.roomy(rank, own, ranks=(3, 4)) == own, "there is none yet"
            await slots.allocate(rank, own, agreed=said(None))
            assert slots.roomy(rank, own, ranks=(3, 4)) == own, "it is large enough"
        return slots.roomy(4, LARGE, ranks=(3, 4))

    more = asyncio.run(scenario(6 * LARGE.capacity_bytes))
    assert more.capacity_bytes == LARGE.capacity_bytes * 3 // 2
    assert more.payload_offset > LARGE.payload_offset
    assert asyncio.run(scenario(6 * LARGE.capacity_bytes - 1)) == LARGE
    large = Geometry(capacity_bytes=4 * LARGE.capacity_bytes, payload_offset=OFFSET)
    both_bytes = 2 * (large.capacity_bytes + more.capacity_bytes)
    assert asyncio.run(scenario(both_bytes, large)) == more
    assert asyncio.run(scenario(both_bytes - 1, large)) == LARGE, "it would take the room of the larger rank"


def test_older_pairs_go_for_others_and_what_is_lent_stays(shm_dir: Path) -> None:
    """Rank 3 is lent to a trainer: its surplus goes when that asks again. That of rank 4 goes at once."""

    def after(*older: int) -> Agreed:
        return Agreed(committed=Pair(1, 2), next=Pair(1, 3), older=tuple(Pair(1, step) for step in older))

    async def scenario() -> None:
        slots = open_vault(shm_dir).open(replace(record(), keep=2))
        slots.budget.limit(slots.key, 6 * CAPACITY + CAPACITY // 2)
        view = JobView(host="a", replicas=1, watermark=Pair(1, 2), watermark_revision=1)
        view.round = Round(generation=1, seats=seats("a", [5]), revision=1)
        for step, file in enumerate(await slots.allocate(3, SMALL, agreed=said(None))):
            fill(file, (1, step))
        for step in (1, 2, 0):
            replica = await slots.place(4, SMALL, agreed=said(None))
            assert replica is not None
            fill(replica, (1, step))
        slots.trim({3, 4}, after(1))
        assert (slots.keep, len(list(slots.files()))) == (2, 6)
        slots.trim({3, 4}, after())
        assert len(list(slots.files())) == 6, "there is room"
        grown = Geometry(capacity_bytes=2 * CAPACITY, payload_offset=SMALL.payload_offset)
        view.next, view.older = Pair(1, 3), ()
        await slots.make_room(4, grown, view=view)
        assert slots.keep == 1
        slots.trim({3, 4}, after())
        assert slots.held() == {3: {(1, 0), (1, 1), (1, 2)}, 4: {(1, 2)}}
        assert len(await slots.allocate(3, SMALL, agreed=after())) == 2
        assert (1, 2) in slots.held()[3]
        assert len(list(slots.files())) == 3
        await slots.make_room(4, grown, view=view)
        (lent,) = await slots.allocate(4, grown, agreed=after())
        assert lent.slot.capacity_bytes == 2 * CAPACITY

    asyncio.run(scenario())


def test_what_is_being_lent_is_not_trimmed(shm_dir: Path) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        await slots.allocate(3, SMALL, agreed=said(None))
        lending = asyncio.create_task(slots.allocate(3, LARGE, agreed=said(None)))
        while not lending.done():
            slots.trim({3}, said(None))
            await asyncio.sleep(0)
        lent = await lending
        assert len(lent) == 2
        assert all(file.slot.path.exists() for file in lent)
        assert list(slots.files()) == lent

    asyncio.run(scenario())


def test_round_clears_what_it_did_not_restore(shm_dir: Path) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        await place(slots, (1, 7), None)
        await place(slots, (1, 8), None)
        slots.clear_dead(Round(generation=2, seats=seats("a", [4]), restore=(1, 7), revision=1))
        assert slots.held() == {3: {(1, 7)}}
        assert sorted(file.slot.state() for file in slots.files()) == ["COMPLETE", "EMPTY"]

    asyncio.run(scenario())


def test_vault_adopts_what_verifies_and_clears_the_rest(shm_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def before() -> list[Path]:
        slots = open_vault(shm_dir).open(record())
        files = [await slots.place(rank, SMALL, agreed=said(None)) for rank in range(6)]
        for step, file in enumerate(files):
            assert file is not None
            fill(file, (1, step))
        return [file.slot.path for file in slots.files()]

    async def after() -> dict[int, set[Pair]]:
        vault = open_vault(shm_dir)
        (slots,) = vault.scan()
        assert slots.record == record()
        assert slots.held() == {}
        await slots.adopt()
        assert vault.budget.used_bytes == 5 * CAPACITY + len(b"no slot")
        return slots.held()

    paths = asyncio.run(before())
    corrupt(paths[1])
    slot = Slot.open(paths[2], writable=True)
    slot.begin()
    paths[3].write_bytes(b"no slot")
    slot.close()
    publish(Slot.open(paths[4], writable=True), run_id="another", rank=4, world_size=9, pair=(1, 4))
    (shm_dir / ("0" * 32)).mkdir()
    assert asyncio.run(after()) == {0: {(1, 0)}, 5: {(1, 5)}}
    assert caplog.text.count("is corrupt and was cleared") == 2
    assert [Slot.open(path).state() for path in (paths[1], paths[2], paths[4])] == ["EMPTY", "WRITING", "EMPTY"]
    assert paths[3].read_bytes() == b"no slot"
    assert "is of another version" in caplog.text
    assert not (shm_dir / ("0" * 32)).exists()


def test_what_a_trainer_still_writes_for_an_earlier_daemon_harms_no_replica(shm_dir: Path) -> None:
    async def before() -> Path:
        file = await open_vault(shm_dir).open(record()).place(3, SMALL, agreed=said(None))
        assert file is not None
        return file.slot.path

    async def after() -> None:
        vault = open_vault(shm_dir)
        (slots,) = vault.scan()
        await slots.adopt()
        file = await place(slots, (1, 1), None)
        assert file is not None
        lent.buffer[OFFSET : OFFSET + 8] = b"too late"
        assert await slots.verified(file) is not None
        assert vault.budget.used_bytes == CAPACITY

    lent = Slot.open(asyncio.run(before()), writable=True)
    asyncio.run(after())
    lent.close()


def test_files_are_private_and_allocated_in_full(shm_dir: Path) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        for file in await slots.allocate(0, SMALL, agreed=said(None)):
            stat = file.slot.path.stat()
            assert stat.st_mode & 0o777 == 0o600
            assert stat.st_blocks * 512 >= stat.st_size == CAPACITY
        assert slots.directory.stat().st_mode & 0o777 == 0o700

    asyncio.run(scenario())


def test_garbage_is_only_what_nobody_has_open_and_this_version_wrote(shm_dir: Path) -> None:
    """A trainer has one job's slot mapped, another version wrote in the second, a launcher holds the third open."""

    async def scenario() -> None:
        vault = open_vault(shm_dir, limit_bytes=1 << 40)
        files = {}
        for run_id in ("mapped", "newer", "open", "left"):
            slots = vault.open(replace(record(run_id), launcher_pid=os.getpid() if run_id == "open" else None))
            files[run_id] = (await slots.allocate(0, SMALL, agreed=said(None)))[0].slot.path
        with files["newer"].open("r+b") as file:
            file.write(MAGIC[:-1] + bytes([MAGIC[-1] + 1]))
        with files["mapped"].open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            jobs = Jobs(open_vault(shm_dir, limit_bytes=1 << 40), asyncio.create_task)
            jobs.scan()
            await jobs.collect(orphan_ttl_s=0.0)
            assert {run_id for run_id, path in files.items() if path.exists()} == {"mapped", "newer", "open"}
            assert (await jobs.collect_garbage())["removed"] == []
        assert (await jobs.collect_garbage())["removed"] == ["mapped"]
        assert {run_id for run_id, path in files.items() if path.exists()} == {"newer", "open"}

    asyncio.run(scenario())


def test_garbage_is_nothing_of_a_run_that_has_another_launcher_here(shm_dir: Path) -> None:
    """Two launchers of a run share a machine, so nobody has a copy of what the one that was killed has left."""

    async def scenario() -> None:
        vault = open_vault(shm_dir)
        for host, launcher_pid in (("a", os.getpid()), ("a#1", None)):
            vault.open(replace(record(), host=host, launcher_pid=launcher_pid))
        jobs = Jobs(open_vault(shm_dir), asyncio.create_task)
        jobs.scan()
        await jobs.collect(orphan_ttl_s=0.0)
        assert (await jobs.collect_garbage())["removed"] == []
        assert len(list(open_vault(shm_dir).scan())) == 2
        for slots in open_vault(shm_dir).scan():
            slots.update_record(launcher_pid=None)
        jobs = Jobs(open_vault(shm_dir), asyncio.create_task)
        jobs.scan()
        assert (await jobs.collect_garbage())["removed"] == ["run", "run"]

    asyncio.run(scenario())


def test_job_that_does_not_fit_is_refused_until_there_is_room(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    vault = open_vault(shm_dir)
    with monkeypatch.context() as patched:
        patched.setattr(JobRecord, "save", full)
        for _ in range(2):
            with pytest.raises(DaemonError, match=r"cannot keep anything of run 'run' in .*No space left.*make room"):
                vault.open(record())
    assert vault.open(record()).record == record()


def test_record_that_cannot_be_read_is_left_alone(shm_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        slots = open_vault(shm_dir).open(record())
        await slots.allocate(0, SMALL, agreed=said(None))
        (slots.directory / "job.json").write_text('{"written": "by a version that is not known yet"}')
        vault = open_vault(shm_dir)
        assert vault.scan() == []
        assert vault.budget.used_bytes == 2 * CAPACITY
        with pytest.raises(DaemonError, match="another version kept of run 'run': go on with that version"):
            vault.open(record())
        assert len(list(slots.directory.glob("*.slot"))) == 2

    asyncio.run(scenario())
    assert "is left alone" in caplog.text


@pytest.mark.parametrize("names", range(4))
def test_removal_that_is_killed_is_completed_by_the_next_daemon(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    """After `names` of record, two slots and the directory are gone; the record is the newest file."""

    async def make() -> Path:
        slots = open_vault(shm_dir).open(record())
        await slots.allocate(0, SMALL, agreed=said(None))
        slots.update_record(launcher_pid=None)
        return slots.directory

    async def removed(vault: Vault) -> int:
        jobs = Jobs(vault, asyncio.create_task)
        jobs.scan()
        return len((await jobs.collect_garbage())["removed"])

    def killed_at(*arguments: Any, **options: Any) -> None:
        nonlocal names
        if names == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        names -= 1
        unlink(*arguments, **options)

    directory, unlink = asyncio.run(make()), os.unlink
    assert len(list(directory.iterdir())) == 3
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(os, "unlink", killed_at)
            monkeypatch.setattr(os, "rmdir", killed_at)
            asyncio.run(removed(open_vault(shm_dir)))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert directory.exists()
    asyncio.run(removed(open_vault(shm_dir)))
    assert not directory.exists()


def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DaemonError, match="remove it, or choose another directory"):
        open_directory(tmp_path / "link")


def test_budget_counts_every_job_and_says_what_to_change(shm_dir: Path) -> None:
    budget = MemoryBudget(shm_dir, 100 * MIB)
    budget.reserve("one", needed_bytes=60 * MIB, formula="60")
    with pytest.raises(
        MemoryBudgetError, match=r"need 41.00 MiB \(41\), other jobs have 60.00 MiB .* is 100.00 MiB.*--rr-"
    ):
        budget.reserve("two", needed_bytes=41 * MIB, formula="41")
    budget.limit("two", 30 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"limit is 30\.00 MiB"):
        budget.reserve("two", needed_bytes=40 * MIB, formula="40")
    budget.limit("two", None)
    budget.reserve("two", needed_bytes=40 * MIB, formula="40")
    budget.reserve("one", needed_bytes=50 * MIB, formula="50")
    budget.allocate("one", 60 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"does not fit.*--nproc-per-node.*replication\.keep"):
        budget.allocate("one", 1 * MIB)
    budget.release("two")
    budget.allocate("one", 40 * MIB)
    budget.free("one", 40 * MIB)
    assert budget.used_bytes == 60 * MIB


def test_budget_never_promises_more_than_there_is(shm_dir: Path) -> None:
    stat = os.statvfs(shm_dir)
    assert 0 < default_limit_bytes(shm_dir) <= 0.8 * stat.f_blocks * stat.f_frsize
    free = stat.f_bavail * stat.f_frsize
    budget = MemoryBudget(shm_dir, 4 * free)
    with pytest.raises(MemoryBudgetError, match="of memory left for the"):
        budget.reserve("one", needed_bytes=2 * free, formula="all")
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        budget.allocate("one", 2 * free)
    assert budget.used_bytes == 0


def test_limit_of_file_sizes_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosts["a"]
    monkeypatch.setattr(host, "prefix", ["prlimit", f"--fsize={2 * CAPACITY - 1}"])
    (trainer,) = hosts.run("a")
    with pytest.raises(SlotSizeError, match=rf"at most {2 * CAPACITY - 1} bytes: raise that \(`ulimit -f unlimited`"):
        trainer.allocate(2 * CAPACITY)
    trainer.allocate()


def test_killed_daemon_adopts_its_slots_and_goes_on(hosts: Hosts) -> None:
    """SIGKILL in the middle of a generation; the trainers come back, and what they captured meanwhile counts."""
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1, 2])
    hosts["a"].kill()
    trainers[0].capture(3, announce=False)
    trainers[1].capture(3)
    hosts["a"].drop_clients()
    hosts["a"].start()
    hosts["a"].open()
    again = hosts["a"].trainer(0, world_size=2, generation=1)
    # What was captured meanwhile may be committed by now; else the trainer is told.
    known = again.attach()["watermark"]
    assert known in [{"generation": 1, "step": step} for step in (2, 3)]
    paths = trainers[0].paths
    again.allocate()
    assert again.paths == paths
    wait_for_watermark([again, trainers[1]] if known["step"] == 2 else [trainers[1]], (1, 3))
    hosts.commit([again, trainers[1]], [4])
    hosts["a"].kill()
    hosts["a"].drop_clients()
    hosts["a"].start()
    trainers = hosts.run("ab", generation=2)
    assert trainers[0].request("restore")["source"] == "local"
    assert hosts["a"].launcher is not None
    assert hosts["a"].launcher.request("job_status", run_id=hosts.run_id)["attached"] is True


def test_killed_daemon_s_corrupt_slot_is_found_at_adoption_and_replaced(hosts: Hosts) -> None:
    hosts.commit(hosts.run("ab"), [1, 2])
    hosts["a"].kill()
    (path,) = hosts["a"].slot_paths(1, (1, 2))
    slot = Slot.open(path, writable=True)
    slot.buffer[HEADER_BYTES + 1] ^= 1
    slot.close()
    hosts["a"].drop_clients()
    hosts["a"].start()
    hosts.run("ab", generation=2)
    hosts.wait_for_replicas("ab", (1, 2), 4)
    assert f"{path} is corrupt and was cleared" in hosts["a"].log
