"""The persistent tier's files: exact slots come back, no damaged byte is believed, the newest pair stays."""

import errno
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from hosts import publish
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, plan_layout
from resilient_run.daemon.tier import files
from resilient_run.daemon.tier import tier as tier_module
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
    file = RankFile(capacity_bytes=used_bytes, payload_offset=slot.payload_offset, stored_bytes=writer.finish())
    persisted = Persisted(run_id="run", pair=pair, world_size=1, ranks={0: file})
    tier.publish(persisted)
    return persisted


def whole(tier: Tier) -> bytes:
    """Return what rank 0 has of step 7."""
    used_bytes = tier.manifest((1, 7)).ranks[0].capacity_bytes
    return tier.read_ranges((1, 7), 0, [(0, used_bytes)])


def test_exact_slot_comes_back(tmp_path: Path, target: str, slot: Slot) -> None:
    persisted = store(Tier(target, "run"), slot)
    tier = Tier(target, "run")
    assert tier.published() == [(1, 7)]
    assert tier.manifest((1, 7)) == persisted
    data = whole(tier)
    assert data == bytes(slot.buffer[: slot.header().used_bytes])
    geometry = persisted.ranks[0]
    copy = Slot.create(
        tmp_path / "copy.slot", capacity_bytes=geometry.capacity_bytes, payload_offset=geometry.payload_offset
    )
    copy.buffer[HEADER_BYTES : len(data)] = data[HEADER_BYTES:]
    assert copy.adopt(data[:HEADER_BYTES]) == slot.header()
    copy.close()


def test_what_was_published_anew_is_read_anew(target: str, slot: Slot) -> None:
    tier, other = Tier(target, "run"), Tier(target, "run", level=19)
    store(other, slot)
    start = slot.payload_offset
    slot.buffer[start : start + FRAME_BYTES] = bytes(FRAME_BYTES)
    for _ in range(2):
        tier.check_whole((1, 7))
        assert len(whole(tier)) == slot.header().used_bytes
        other.refuse((1, 7))
        store(other, slot)


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
        whole(tier)


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
        found = whole(tier)
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
        whole(tier)


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


PAIRS = st.tuples(st.integers(0, 4), st.integers(0, 9))
NAMES = st.sets(st.sampled_from(["manifest.json", "manifest.refused.json", "rank0.zst", "rank0.zst.0.part"]))


@given(st.dictionaries(PAIRS, NAMES), st.integers(1, 5), st.none() | PAIRS)
def test_newest_published_pair_is_never_superfluous(
    found: dict[Pair, set[str]], keep: int, before: Pair | None
) -> None:
    published = sorted(pair for pair, names in found.items() if "manifest.json" in names)
    deleted = superfluous(found, keep, before)
    assert deleted == sorted(deleted)
    assert not set(published[-keep:]) & set(deleted)
    assert not published or len([pair for pair in published if pair not in deleted]) == min(keep, len(published))
    for pair in deleted:
        if published and pair < published[-1]:
            continue
        assert before is not None
        assert (1, 0) <= pair < before
        assert "manifest.refused.json" not in found[pair]


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
    assert whole(tier) == bytes(slot.buffer[: slot.header().used_bytes])


def left_over(tier: Tier, pair: Pair, *ranks: int) -> None:
    """Write the files of `ranks`, and no manifest."""
    for rank in ranks:
        tier.write(pair, rank).finish()


def two_ranks(pair: Pair) -> Persisted:
    file = RankFile(capacity_bytes=9000, payload_offset=8192, stored_bytes=8)
    return Persisted(run_id="run", pair=pair, world_size=2, ranks={0: file, 1: file})


def directories(target: str) -> set[str]:
    fs, path = fsspec.url_to_fs(target)
    return {str(name).rpartition("/")[2] for name in fs.ls(f"{path}/run", detail=False)}


def test_what_was_left_unfinished_goes_when_a_newer_pair_is_asked_for(target: str, slot: Slot) -> None:
    tier = Tier(target, "run")
    left_over(tier, (0, 5), 0)
    store(tier, slot, (1, 2))
    left_over(tier, (1, 3), 0, 1)
    store(tier, slot, (1, 4))
    tier.refuse((1, 4))
    left_over(tier, (1, 5), 0)
    left_over(tier, (1, 6), 0)
    left_over(tier, (2, 1), 0)
    # An import in the making has no published pair beside it.
    assert tier.prune(3) == [(1, 2)]
    assert directories(target) == {"1-2", "1-3", "1-4", "1-5", "1-6", "2-1"}
    assert tier.prune(3, (1, 6)) == [(1, 2)]
    assert directories(target) == {"1-2", "1-4", "1-6", "2-1"}
    store(tier, slot, (1, 6))
    assert tier.prune(3, (1, 6)) == [(1, 2), (1, 6)]
    assert directories(target) == {"1-2", "1-6", "2-1"}


def test_import_in_the_making_stays(target: str) -> None:
    tier = Tier(target, "run")
    tier.write((0, 5), 0).finish()
    assert tier.prune(1, (1, 6)) == []
    assert directories(target) == {"0-5"}


def test_killed_writer_leaves_nothing_for_long(tmp_path: Path, slot: Slot) -> None:
    writer = os.fork()
    if writer == 0:
        try:
            Tier(str(tmp_path), "run", host="a").write((1, 7), 0).write(slot.buffer[:FRAME_BYTES])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(writer, 0)
    assert len(list((tmp_path / "run" / "1-7").iterdir())) == 1
    Tier(str(tmp_path), "run", host="b").prune(1, (1, 8))
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


@pytest.mark.parametrize("moment", ["before", "meanwhile", "unknown"])
def test_pair_without_a_file_is_not_published(
    target: str, slot: Slot, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another host, which takes itself for the root, removes it."""
    tier = Tier(target, "run")
    store(tier, slot, (1, 2))
    left_over(tier, (1, 3), 0, 1)
    fs, path = fsspec.url_to_fs(target)
    write_small, names_in = tier_module.write_small, tier_module.names_in

    def write_and_lose(*args: Any) -> None:
        write_small(*args)
        if moment == "meanwhile":
            fs.rm_file(f"{path}/run/1-3/rank1.zst")
        else:
            monkeypatch.setattr(tier_module, "names_in", refuse)

    def refuse(*_: Any) -> set[str]:
        raise OSError(errno.EIO, "Input/output error")

    if moment == "before":
        fs.rm_file(f"{path}/run/1-3/rank1.zst")
    monkeypatch.setattr(tier_module, "write_small", write_and_lose)
    message = "Input/output error" if moment == "unknown" else r"gone from \(1, 3\): rank1\.zst"
    with pytest.raises(TierError, match=message):
        tier.publish(two_ranks((1, 3)))
    monkeypatch.setattr(tier_module, "names_in", names_in)
    monkeypatch.setattr(tier_module, "write_small", write_small)
    # An error says nothing about what is there.
    assert tier.published() == ([(1, 2), (1, 3)] if moment == "unknown" else [(1, 2)])
    left_over(tier, (1, 3), 1)
    tier.publish(two_ranks((1, 3)))
    assert tier.published() == [(1, 2), (1, 3)]


def test_attempt_that_hung_does_not_take_back_what_the_next_one_published(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(target, "run")
    left_over(tier, (1, 3), 0, 1)
    names_in, looks = tier_module.names_in, itertools.count()

    def hang(*args: Any) -> set[str]:
        if next(looks) != 1:
            return names_in(*args)
        tier.publish(two_ranks((1, 3)))
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "names_in", hang)
        with pytest.raises(TierError, match="Input/output error"):
            tier.publish(two_ranks((1, 3)))
    assert tier.published() == [(1, 3)]


def test_pair_that_another_root_publishes_while_it_is_deleted_is_not_published(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(target, "run")
    left_over(tier, (1, 3), 0, 1)
    fs, path = fsspec.url_to_fs(target)
    rm = type(fs).rm

    def publish_and_remove(fs: Any, directory: str, **options: Any) -> None:
        rm(fs, directory, **options)
        fs.makedirs(directory, exist_ok=True)
        fs.pipe_file(f"{path}/run/1-3/manifest.json", two_ranks((1, 3)).dump())

    monkeypatch.setattr(type(fs), "rm", publish_and_remove)
    tier.prune(1, (1, 4))
    assert tier.published() == []


def test_published_pair_without_a_file_is_damaged(target: str, slot: Slot) -> None:
    tier = Tier(target, "run")
    store(tier, slot)
    fs, path = fsspec.url_to_fs(target)
    fs.rm_file(f"{path}/run/1-7/rank0.zst")
    with pytest.raises(SlotError, match=r"rank 0 of \(1, 7\) in .* is gone"):
        list(tier.read((1, 7), 0, [0]))
    # As where the storage is not mounted.
    fs.rm_file(f"{path}/run/1-7/manifest.json")
    with pytest.raises(TierError, match="cannot read rank 0"):
        list(tier.read((1, 7), 0, [0]))


@pytest.mark.parametrize("function", ["info", "ls"])
def test_storage_that_does_not_answer_is_not_taken_for_empty(
    target: str, slot: Slot, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """fsspec's `exists` says no to everything."""
    tier = Tier(target, "run")
    for step in (1, 2, 3):
        store(tier, slot, (1, step))
    fs, _ = fsspec.url_to_fs(target)
    place, name = (os, "listdir") if function == "ls" and isinstance(fs, LocalFileSystem) else (type(fs), function)
    ask = getattr(place, name)

    def stale(*given: Any, **options: Any) -> Any:
        if "/1-3" in str(given[-1]):
            raise OSError(errno.ESTALE, "Stale file handle")
        return ask(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, stale)
        if function == "ls":
            for act in (tier.published, lambda: tier.prune(1), lambda: tier.prune(1, (1, 9))):
                with pytest.raises(TierError, match="Stale file handle"):
                    act()
        else:
            for act in (lambda: tier.manifest((1, 3)), lambda: tier.refuse((1, 3))):
                with pytest.raises(TierError, match="Stale file handle"):
                    act()
    assert tier.published() == [(1, 1), (1, 2), (1, 3)]


def test_pair_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(str(tmp_path), "run")
    for step in (1, 2, 3):
        left_over(tier, (1, step), 0)
    remove = LocalFileSystem.rm

    def rm(fs: Any, path: str, **options: Any) -> None:
        if path.endswith("/1-1"):
            raise PermissionError(path)
        remove(fs, path, **options)

    monkeypatch.setattr(LocalFileSystem, "rm", rm)
    with pytest.raises(TierError, match=r"cannot delete \(1, 1\): PermissionError"):
        tier.prune(1, (1, 3))
    assert directories(str(tmp_path)) == {"1-1", "1-3"}


@pytest.mark.parametrize(
    ("target", "message"), [("nosuch://bucket", "nosuch"), ("nosuch::file:///x", "nosuch"), ("s4://me:pw@b", "s4")]
)
def test_unknown_storage_is_refused_at_once(target: str, message: str) -> None:
    with pytest.raises(DaemonError, match=message) as caught:
        Tier(target, "run").check()
    assert "pw" not in str(caught.value)


def test_error_of_the_storage_takes_back_no_publication(
    target: str, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root whose write to etcd failed publishes a pair again; then nobody can tell for a moment what is there."""
    tier = Tier(target, "run")
    persisted = store(tier, slot)
    listed, looks = tier_module.names_in, iter([True, False])

    def failing(fs: Any, directory: str) -> set[str]:
        if not next(looks):
            raise OSError(errno.EIO, "for a moment")
        return listed(fs, directory)

    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "names_in", failing)
        with pytest.raises(TierError, match="for a moment"):
            tier.publish(persisted)
    assert tier.published() == [(1, 7)]


def test_pair_that_is_published_once_it_was_listed_stays(
    target: str, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host was the root in between, and has deleted the older pair."""
    tier, other = Tier(target, "run"), Tier(target, "run")
    store(tier, slot, (1, 1))
    left_over(tier, (1, 2), 0, 1)
    found = tier._found

    def found_before_the_other() -> Any:
        listed = found()
        other.publish(two_ranks((1, 2)))
        assert other.prune(1) == [(1, 2)]
        return listed

    monkeypatch.setattr(tier, "_found", found_before_the_other)
    tier.prune(1, (1, 3))
    monkeypatch.undo()
    assert tier.published() == [(1, 2)]
