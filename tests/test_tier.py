"""The persistent tier's files: exact slots come back, no damaged byte is believed, the newest pair stays."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from hosts import publish
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, plan_layout
from resilient_run.daemon.tier import files
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.tier import FRAME_BYTES, Tier, TierError, superfluous

PAYLOAD_BYTES = FRAME_BYTES + 4321


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    """A complete slot of rank 0 at (1, 7) of the run "run"."""
    payload_offset, capacity_bytes = plan_layout(100, PAYLOAD_BYTES)
    made = Slot.create(tmp_path / "made.slot", capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    publish(made, run_id="run", rank=0, world_size=1, pair=(1, 7), size_bytes=PAYLOAD_BYTES)
    yield made
    made.close()


@pytest.fixture(params=["directory", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "tier") if request.param == "directory" else f"memory://{tmp_path.name}"


def store(tier: Tier, slot: Slot, pair: Pair = (1, 7)) -> Persisted:
    """Write and publish the slot as rank 0 of `pair`."""
    used_bytes = slot.header().used_bytes
    writer = tier.write(pair, 0)
    for start in range(0, used_bytes, FRAME_BYTES):
        writer.write(slot.buffer[start : min(start + FRAME_BYTES, used_bytes)])
    file = RankFile(used_bytes=used_bytes, payload_offset=slot.payload_offset, stored_bytes=writer.finish())
    persisted = Persisted(run_id="run", pair=pair, world_size=1, ranks={0: file})
    tier.publish(persisted)
    return persisted


def test_exact_slot_comes_back(tmp_path: Path, target: str, slot: Slot) -> None:
    persisted = store(Tier(target, "run"), slot)
    tier = Tier(target, "run")
    assert tier.published() == [(1, 7)]
    assert tier.manifest((1, 7)) == persisted
    data = b"".join(tier.read((1, 7), 0))
    assert data == bytes(slot.buffer[: slot.header().used_bytes])
    geometry = persisted.ranks[0].geometry
    copy = Slot.create(
        tmp_path / "copy.slot", capacity_bytes=geometry.capacity_bytes, payload_offset=geometry.payload_offset
    )
    copy.buffer[HEADER_BYTES : len(data)] = data[HEADER_BYTES:]
    assert copy.adopt(data[:HEADER_BYTES]) == slot.header()
    copy.close()


def test_nothing_is_published_before_its_manifest(target: str, slot: Slot) -> None:
    tier = Tier(target, "run")
    assert tier.published() == []
    tier.write((1, 7), 0).finish()
    assert tier.published() == []
    with pytest.raises(SlotError, match="is not published"):
        tier.manifest((1, 7))
    assert Tier(target, "another run").published() == []


@pytest.mark.parametrize("at", ["magic", "frame header", "frame", "end"])
def test_damaged_byte_is_refused(tmp_path: Path, slot: Slot, at: str) -> None:
    tier = Tier(str(tmp_path / "tier"), "run")
    store(tier, slot)
    path = tmp_path / "tier" / "run" / "1-7" / "rank0.zst"
    data = bytearray(path.read_bytes())
    data[{"magic": 0, "frame header": 12, "frame": 5000, "end": -1}[at]] ^= 1
    path.write_bytes(data)
    with pytest.raises(SlotError):
        list(tier.read((1, 7), 0))


@given(st.data())
def test_no_mutation_is_believed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is cut out, put in or changed: the file is refused, or is what it was."""
    root = tmp_path_factory.mktemp("tier")
    payload_offset, capacity_bytes = plan_layout(100, 300)
    slot = Slot.create(root / "small.slot", capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    publish(slot, run_id="run", rank=0, world_size=1, pair=(1, 7), size_bytes=300)
    tier = Tier(str(root), "run")
    store(tier, slot)
    expected = bytes(slot.buffer[: slot.header().used_bytes])
    slot.close()
    path = root / "run" / "1-7" / "rank0.zst"
    original = path.read_bytes()
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 40)))
    path.write_bytes(original[:start] + data.draw(st.binary(max_size=40)) + original[end:])
    try:
        found = b"".join(tier.read((1, 7), 0))
    except SlotError:
        return
    assert found == expected


def test_frame_that_would_unpack_to_more_is_refused(tmp_path: Path, slot: Slot) -> None:
    """A small frame that announces a gigabyte costs no gigabyte."""
    import struct

    import xxhash
    import zstandard

    tier = Tier(str(tmp_path / "tier"), "run")
    store(tier, slot)
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    head = struct.pack("<IIQ", len(frame), FRAME_BYTES, xxhash.xxh3_64_intdigest(frame))
    (tmp_path / "tier" / "run" / "1-7" / "rank0.zst").write_bytes(b"RRTIER\x00\x01" + head + frame)
    with pytest.raises(SlotError, match="of another size than it announces"):
        list(tier.read((1, 7), 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"run_id": "another"},
        {"step": 8},
        {"world_size": 2},
        {"world_size": 1 << 40},
        {"ranks": {}},
        {"ranks": {"0": {"used_bytes": 1 << 50, "payload_offset": 8192, "stored_bytes": 1}}},
        {"ranks": {"0": {"used_bytes": 9000, "payload_offset": 8191, "stored_bytes": 1}}},
        {"ranks": {"../0": {"used_bytes": 9000, "payload_offset": 8192, "stored_bytes": 1}}},
    ],
)
def test_strange_manifest_is_refused(tmp_path: Path, slot: Slot, changes: dict[str, Any]) -> None:
    tier = Tier(str(tmp_path / "tier"), "run")
    store(tier, slot)
    path = tmp_path / "tier" / "run" / "1-7" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(SlotError, match=r"manifest\.json of generation 1 step 7"):
        tier.manifest((1, 7))


def test_damaged_pair_is_not_published_any_more(target: str, slot: Slot) -> None:
    tier = Tier(target, "run")
    store(tier, slot)
    store(tier, slot, (1, 9))
    tier.refuse((1, 9))
    assert tier.published() == [(1, 7)]
    tier.refuse((1, 9))


def test_pruning_keeps_the_newest_and_what_is_in_the_making(target: str, slot: Slot) -> None:
    tier = Tier(target, "run")
    for step in (1, 2, 3, 4):
        store(tier, slot, (1, step))
    tier.write((1, 3), 1).finish()
    tier.write((2, 1), 0).finish()
    assert tier.prune(2) == [(1, 3), (1, 4)]
    assert tier.published() == [(1, 3), (1, 4)]
    store(tier, slot, (2, 5))
    assert tier.prune(1) == [(2, 5)]
    assert Tier(target, "run").published() == [(2, 5)]


@given(st.dictionaries(st.tuples(st.integers(1, 4), st.integers(0, 9)), st.booleans()), st.integers(1, 5))
def test_newest_published_pair_is_never_superfluous(found: dict[Pair, bool], keep: int) -> None:
    published = sorted(pair for pair, is_published in found.items() if is_published)
    deleted = superfluous(found, keep)
    assert deleted == sorted(deleted)
    assert not set(published[-keep:]) & set(deleted)
    assert all(pair < published[-1] for pair in deleted)
    assert not published or len([pair for pair in published if pair not in deleted]) == min(keep, len(published))


@pytest.mark.parametrize("run_id", ["..", ".", "a b?*[x]%", "größe"])
def test_run_id_is_one_directory(tmp_path: Path, slot: Slot, run_id: str) -> None:
    tier = Tier(str(tmp_path / "tier"), run_id)
    tier.write((1, 1), 0).finish()
    (directory,) = (tmp_path / "tier").iterdir()
    assert [path.name for path in directory.iterdir()] == ["1-1"]
    tier.publish(Persisted(run_id=run_id, pair=(1, 1), world_size=1, ranks={}))
    assert tier.published() == [(1, 1)]


def test_storage_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TierError, match=r"cannot write rank0\.zst of \(1, 1\): (NotADirectory|FileExists)Error"):
        Tier(str(tmp_path / "file"), "run").write((1, 1), 0)


def test_failed_write_leaves_nothing_and_the_next_one_is_whole(
    tmp_path: Path, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes the place of a full disk: opening works, writing fails."""
    directory = tmp_path / "tier" / "run" / "1-7"

    def open_full(path: str, mode: int) -> int:
        Path(path).touch(mode)
        return os.open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(files, "open_new", open_full)
    tier = Tier(str(tmp_path / "tier"), "run")

    def write_all() -> None:
        writer = tier.write((1, 7), 0)
        try:
            writer.write(slot.buffer[:FRAME_BYTES])
            writer.finish()
        except TierError:
            writer.abandon()
            raise

    with pytest.raises(TierError, match="No space left on device"):
        write_all()
    assert list(directory.iterdir()) == []
    monkeypatch.undo()
    store(tier, slot)
    assert b"".join(tier.read((1, 7), 0)) == bytes(slot.buffer[: slot.header().used_bytes])


def left_over(tier: Tier, pair: Pair, *ranks: int) -> None:
    """Write the files of `ranks`, and no manifest."""
    for rank in ranks:
        tier.write(pair, rank).finish()


def test_only_what_this_host_left_unfinished_is_removed(tmp_path: Path, slot: Slot) -> None:
    root = tmp_path / "tier" / "run"
    own, other = Tier(str(root.parent), "run", host="a"), Tier(str(root.parent), "run", host="b")
    for pair in [(1, 2), (1, 3)]:
        store(own, slot, pair)
    own.refuse((1, 3))
    left_over(own, (1, 4), 0, 1)
    left_over(own, (1, 5), 0)
    left_over(own, (1, 9), 0)
    left_over(Tier(str(root.parent), "another run", host="a"), (1, 4), 0)
    writers = [tier.write(pair, 0) for pair in [(1, 2), (1, 4), (1, 5), (1, 6), (1, 9)] for tier in (own, other)]
    writers.append(own.write((1, 7), 0))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("rank0.zst", "notes"):
        (elsewhere / name).write_text("somebody's")
    (root / "1-1").symlink_to(elsewhere)
    (root / "1-4" / "rank2.zst").symlink_to(elsewhere / "notes")
    (root / "1-4" / "notes").write_text("somebody's")
    (root / "x").mkdir()
    (root / "x" / "rank0.zst").write_text("somebody's")
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    with pytest.raises(TierError, match=r"cannot remove what is unfinished of \(1, 1\)"):
        own.remove_unfinished({0, 2}, (1, 6))
    after = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    (part,) = {name.rpartition("/")[2] for name in before - after if name.endswith(".part")}
    gone = {f"1-4/{part}", f"1-5/{part}", f"1-9/{part}", f"1-7/{part}", "1-7", "1-4/rank0.zst", "1-5/rank0.zst"}
    assert before - after == {f"tier/run/{name}" for name in gone}
    assert after <= before
    (root / "1-1").unlink()
    own.remove_unfinished({0}, (1, 6), failed=True)
    assert {path.name for path in (root / "1-6").iterdir()} == {path.name for path in (root / "1-5").iterdir()}
    other.remove_unfinished({0}, (1, 6), failed=True)
    assert not (root / "1-6").exists()
    assert own.published() == [(1, 2)]
    for writer in writers:
        writer.abandon()


def test_unfinished_objects_are_removed(target: str, slot: Slot) -> None:
    tier = Tier(target, "run", host="a")
    store(tier, slot, (1, 2))
    left_over(tier, (1, 3), 0, 1)
    left_over(tier, (1, 4), 0)
    tier.remove_unfinished(range(1), (1, 4))
    with pytest.raises(TierError, match=r"ranks \[0\] of \(1, 3\) are gone"):
        tier.publish(two_ranks((1, 3)))
    assert tier.published() == [(1, 2)]
    left_over(tier, (1, 3), 0)
    tier.publish(two_ranks((1, 3)))
    assert tier.published() == [(1, 2), (1, 3)]


def two_ranks(pair: Pair) -> Persisted:
    file = RankFile(used_bytes=9000, payload_offset=8192, stored_bytes=8)
    return Persisted(run_id="run", pair=pair, world_size=2, ranks={0: file, 1: file})


def test_killed_writer_leaves_nothing_for_long(tmp_path: Path, slot: Slot) -> None:
    tier = Tier(str(tmp_path), "run", host="a")
    writer = os.fork()
    if writer == 0:
        try:
            tier.write((1, 7), 0).write(slot.buffer[:FRAME_BYTES])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(writer, 0)
    assert len(list((tmp_path / "run" / "1-7").iterdir())) == 1
    Tier(str(tmp_path), "run", host="a").remove_unfinished(range(1), (1, 8))
    assert list((tmp_path / "run").iterdir()) == []


def test_two_hosts_that_write_the_same_rank_do_not_mix(tmp_path: Path) -> None:
    """One has lost the rank to the other, and does not know it yet."""
    first, second = (Tier(str(tmp_path), "run", host=host).write((1, 7), 0) for host in "ab")
    first.write(memoryview(bytes(9000)))
    stored_bytes = first.finish()
    path = tmp_path / "run" / "1-7" / "rank0.zst"
    assert path.stat().st_size == stored_bytes
    second.abandon()
    assert list(path.parent.iterdir()) == [path]


def test_file_of_a_pair_that_is_published_meanwhile_stays(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path), "run")
    left_over(tier, (1, 3), 0, 1)

    def is_ours(name: str) -> bool:
        tier.publish(two_ranks((1, 3)))
        return name.startswith("rank")

    directory = tmp_path / "run" / "1-3"
    files.remove_files(LocalFileSystem(), str(directory), is_ours, unless=["manifest.json"], part=".part")
    assert {path.name for path in directory.iterdir()} == {"manifest.json", "rank0.zst", "rank1.zst"}


def test_pair_is_published_whole_or_removed(tmp_path: Path, slot: Slot) -> None:
    """Its root publishes it while its hosts, which were asked for a newer one, remove their files."""
    tiers = [Tier(str(tmp_path), "run", host=host) for host in "ab"]
    for step in range(1, 101):
        pair = (1, step)
        left_over(tiers[0], pair, 0, 1)
        start = threading.Barrier(3)

        def remove(rank: int, pair: Pair = pair, start: threading.Barrier = start) -> None:
            start.wait()
            tiers[rank].remove_unfinished({rank}, (2, 1))

        threads = [threading.Thread(target=remove, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        with contextlib.suppress(TierError):
            tiers[0].publish(two_ranks(pair))
        for thread in threads:
            thread.join()
        if pair in tiers[1].published():
            names = {path.name for path in (tmp_path / "run" / f"1-{step}").iterdir()}
            assert names == {"manifest.json", "rank0.zst", "rank1.zst"}
        tiers[0].prune(1)


@pytest.mark.parametrize(
    ("target", "message"), [("nosuch://bucket", "nosuch"), ("nosuch::file:///x", "nosuch"), ("s4://me:pw@b", "s4")]
)
def test_unknown_storage_is_refused_at_once(target: str, message: str) -> None:
    with pytest.raises(DaemonError, match=message) as caught:
        Tier(target, "run").check()
    assert "pw" not in str(caught.value)
