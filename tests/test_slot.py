"""The slot format: what is written is read, and nothing torn, corrupt or hostile is."""

import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.slot import CHUNK_BYTES, HEADER_BYTES, Slot, SlotHeader, parse_header, plan_layout

PAYLOAD_BYTES = 2 * CHUNK_BYTES + 12345
MANIFEST = b'{"some":"manifest"}'
SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def _table(payload: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    starts = range(0, len(payload), CHUNK_BYTES)
    hashes = [xxhash.xxh3_64_intdigest(payload[start : start + CHUNK_BYTES]) for start in starts]
    return np.array(hashes, dtype=np.uint64)


def _fill(slot: Slot, payload: bytes, *, step: int = 7, **changes: Any) -> SlotHeader:
    slot.begin()
    slot.buffer[slot.payload_offset : slot.payload_offset + len(payload)] = payload
    fields: dict[str, Any] = {"run_id": "run", "topology": 2**64 - 1, "rank": 3, "world_size": 8, "generation": 2}
    fields |= {"step": step, "payload_bytes": len(payload), "manifest": MANIFEST, "checksums": _table(payload)}
    return slot.publish(**(fields | changes))


def _create(path: Path, payload_bytes: int = PAYLOAD_BYTES) -> Slot:
    payload_offset, capacity_bytes = plan_layout(len(MANIFEST), payload_bytes)
    return Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    path = tmp_path / "rank3.0.slot"
    slot = _create(path)
    _fill(slot, random.Random(1).randbytes(PAYLOAD_BYTES))
    slot.close()
    return path


def test_states_in_order(tmp_path: Path) -> None:
    slot = _create(tmp_path / "slot")
    assert slot.state() == "EMPTY"
    with pytest.raises(SlotError, match="EMPTY, not COMPLETE"):
        slot.header()
    slot.begin()
    assert slot.state() == "WRITING"
    with pytest.raises(SlotError, match="WRITING, not COMPLETE"):
        slot.verify()
    header = _fill(slot, b"x" * 100)
    assert slot.state() == "COMPLETE"
    assert slot.header() == slot.verify() == header
    assert slot.manifest() == MANIFEST
    slot.clear()
    assert slot.state() == "EMPTY"


def test_the_file_is_private_and_allocated_in_full(tmp_path: Path) -> None:
    slot = _create(tmp_path / "slot")
    status = os.stat(slot.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == slot.capacity_bytes
    assert status.st_blocks * 512 >= status.st_size
    with pytest.raises(FileExistsError):
        _create(tmp_path / "slot")


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"space|large|memory"):
        Slot.create(tmp_path / "slot", capacity_bytes=1 << 60, payload_offset=8192)
    assert not list(tmp_path.iterdir())


@given(payload_bytes=st.integers(0, 3 * CHUNK_BYTES), step=st.integers(0, 2**64 - 1), run_id=st.text(max_size=50))
@settings(max_examples=20, deadline=None)
def test_any_capture_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, payload_bytes: int, step: int, run_id: str
) -> None:
    slot = _create(tmp_path_factory.mktemp("slot") / "slot", payload_bytes)
    payload = random.Random(payload_bytes).randbytes(payload_bytes)
    header = _fill(slot, payload, step=step, run_id=run_id)
    slot.close()
    again = Slot.open(slot.path)
    assert again.verify() == header
    assert (header.step, header.run_id, header.used_bytes) == (step, run_id, slot.payload_offset + payload_bytes)
    assert again.buffer[header.payload_offset : header.used_bytes] == payload
    assert again.buffer.readonly


def test_a_layout_has_room_for_a_growing_manifest() -> None:
    payload_offset, capacity_bytes = plan_layout(1000, PAYLOAD_BYTES)
    assert payload_offset % HEADER_BYTES == capacity_bytes % HEADER_BYTES == 0
    assert payload_offset >= HEADER_BYTES + 1500 + 8 * 3
    assert capacity_bytes >= payload_offset + PAYLOAD_BYTES
    assert plan_layout(1200, PAYLOAD_BYTES, preferred_offset=payload_offset) == (payload_offset, capacity_bytes)
    assert plan_layout(1 << 16, PAYLOAD_BYTES, preferred_offset=payload_offset)[0] > 1 << 16


@SAME_FILE
@given(data=st.data())
def test_no_bit_that_counts_can_flip_unnoticed(complete: Path, data: st.DataObject) -> None:
    with complete.open("r+b") as file:
        original = file.read()
        header = parse_header(original[:HEADER_BYTES], len(original))
        table_end = header.checksums_offset + 8 * header.chunk_count
        regions = [(0, HEADER_BYTES + header.manifest_bytes), (header.checksums_offset, table_end)]
        regions.append((header.payload_offset, header.used_bytes))
        start, end = data.draw(st.sampled_from(regions))
        at = data.draw(st.integers(start, end - 1))
        bit = data.draw(st.integers(0, 7))
        file.seek(at)
        file.write(bytes([original[at] ^ 1 << bit]))
        file.flush()
        with pytest.raises(SlotError):
            _verify(complete)
        file.seek(at)
        file.write(original[at : at + 1])
    _verify(complete)


def test_a_corrupt_chunk_is_named(complete: Path) -> None:
    slot = Slot.open(complete, writable=True)
    slot.buffer[slot.payload_offset + CHUNK_BYTES] ^= 1
    with pytest.raises(SlotError, match="rank 3 step 7: chunk 1"):
        slot.verify()
    header, table = slot.expect(slot.buffer[:HEADER_BYTES])
    slot.verify_chunk(header, table, 0)
    slot.verify_chunk(header, table, 2)
    with pytest.raises(SlotError, match="chunk 1"):
        slot.verify_chunk(header, table, 1)


@SAME_FILE
@given(size=st.integers(0, PAYLOAD_BYTES))
def test_a_truncated_file_is_refused(complete: Path, size: int) -> None:
    cut = complete.with_suffix(".cut")
    cut.write_bytes(complete.read_bytes()[:size])
    with pytest.raises(SlotError):
        _verify(cut)


@SAME_FILE
@given(body=st.binary(max_size=2 * HEADER_BYTES), magic=st.booleans())
def test_a_hostile_file_is_refused(tmp_path: Path, body: bytes, magic: bool) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(b"RRSLOT\x00\x01" + body if magic else body)
    with pytest.raises(SlotError):
        _verify(path)


@SAME_FILE
@given(at=st.integers(8, 300), word=st.integers(0, 2**64 - 1))
def test_a_hostile_header_with_a_right_checksum_cannot_reach_outside(complete: Path, at: int, word: int) -> None:
    page = bytearray(complete.read_bytes()[:HEADER_BYTES])
    struct.pack_into("<Q", page, at, word)
    page[16:24] = xxhash.xxh3_64_digest(page[:16] + page[24:])[::-1]
    capacity_bytes = complete.stat().st_size
    try:
        header = parse_header(page, capacity_bytes)
    except SlotError:
        return
    assert header.checksums_offset + 8 * header.chunk_count <= header.payload_offset
    assert header.used_bytes <= capacity_bytes


def test_what_does_not_fit_is_not_published(tmp_path: Path) -> None:
    slot = _create(tmp_path / "slot", 1000)
    _fill(slot, b"x" * 1000, step=1)
    wrong: list[dict[str, Any]] = [
        {"payload_bytes": slot.capacity_bytes},
        {"manifest": b"x" * slot.payload_offset},
        {"checksums": _table(b"x" * PAYLOAD_BYTES)},
        {"rank": 8},
        {"run_id": "é" * 101},
        {"step": -1},
        {"generation": 2**64},
    ]
    for change in wrong:
        with pytest.raises(SlotError):
            slot.publish(
                **(
                    {"run_id": "run", "topology": 0, "rank": 3, "world_size": 8, "generation": 2, "step": 2}
                    | {"payload_bytes": 1000, "manifest": MANIFEST, "checksums": _table(b"x" * 1000)}
                    | change
                )
            )
    assert slot.verify().step == 1, "a refused publication must not touch the slot"


def test_adopting_a_copy_from_another_host(complete: Path, tmp_path: Path) -> None:
    source = Slot.open(complete)
    header = source.header()
    copy = _create(tmp_path / "copy", PAYLOAD_BYTES + 5 * CHUNK_BYTES // 2)
    if copy.payload_offset != header.payload_offset:
        copy = Slot.create(
            tmp_path / "copy2", capacity_bytes=header.used_bytes + 5000, payload_offset=header.payload_offset
        )
    copy.begin()
    copy.buffer[HEADER_BYTES : header.used_bytes] = source.buffer[HEADER_BYTES : header.used_bytes]
    assert copy.state() == "WRITING"
    assert copy.adopt(source.buffer[:HEADER_BYTES]) == header
    assert copy.verify() == header
    assert copy.buffer[: header.used_bytes] == source.buffer[: header.used_bytes]


def test_a_bad_copy_is_not_adopted(complete: Path, tmp_path: Path) -> None:
    source = Slot.open(complete)
    header = source.header()
    page = bytes(source.buffer[:HEADER_BYTES])
    sizes = {"capacity_bytes": header.used_bytes, "payload_offset": header.payload_offset}
    copy = Slot.create(tmp_path / "copy", **sizes)
    copy.begin()
    copy.buffer[HEADER_BYTES : header.used_bytes] = source.buffer[HEADER_BYTES : header.used_bytes]
    copy.buffer[header.used_bytes - 1] ^= 1
    with pytest.raises(SlotError, match="chunk 2"):
        copy.adopt(page)
    with pytest.raises(SlotError):
        copy.adopt(page[:100])
    with pytest.raises(SlotError):
        copy.adopt(bytes(HEADER_BYTES))
    assert copy.state() == "WRITING"
    short = Slot.create(tmp_path / "short", capacity_bytes=header.used_bytes - 1, payload_offset=header.payload_offset)
    with pytest.raises(SlotError, match="does not fit"):
        short.adopt(page)
    moved = Slot.create(
        tmp_path / "moved", capacity_bytes=2 * header.used_bytes, payload_offset=header.payload_offset + HEADER_BYTES
    )
    with pytest.raises(SlotError, match="payload"):
        moved.adopt(page)


def test_a_slot_that_is_rewritten_under_a_reader_is_refused(complete: Path) -> None:
    reader, writer = Slot.open(complete), Slot.open(complete, writable=True)
    reader.verify()
    writer.begin()
    with pytest.raises(SlotError):
        reader.verify()


def test_a_writer_killed_at_any_moment_leaves_no_torn_slot(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    _create(path).close()
    script = textwrap.dedent(
        """
        import sys
        import numpy as np, xxhash
        from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot
        slot = Slot.open(sys.argv[1], writable=True)
        size = int(sys.argv[2])
        step = int(sys.argv[3])
        print("ready", flush=True)
        while True:
            step += 1
            slot.begin()
            payload = step.to_bytes(8, "little") * (size // 8)
            slot.buffer[slot.payload_offset : slot.payload_offset + len(payload)] = payload
            hashes = [xxhash.xxh3_64_intdigest(payload[i:i + CHUNK_BYTES]) for i in range(0, len(payload), CHUNK_BYTES)]
            slot.publish(run_id="run", topology=0, rank=0, world_size=1, generation=1, step=step,
                         payload_bytes=len(payload), manifest=b'{"step":%d}' % step,
                         checksums=np.array(hashes, dtype=np.uint64))
        """
    )
    moments = random.Random(2)
    seen = {"EMPTY": 0, "WRITING": 0, "COMPLETE": 0}
    step = 0
    for _ in range(12):
        arguments = [sys.executable, "-P", "-c", script, str(path), str(PAYLOAD_BYTES // 8 * 8), str(step)]
        writer = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        try:
            writer.wait(moments.uniform(0, 0.02))
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        slot = Slot.open(path)
        state = slot.state()
        seen[state] += 1
        if state == "COMPLETE":
            step = slot.verify().step
            assert slot.manifest() == b'{"step":%d}' % step
            payload = np.frombuffer(slot.buffer, dtype="<u8", offset=slot.payload_offset, count=PAYLOAD_BYTES // 8)
            assert (payload == step).all()
            del payload
        else:
            with pytest.raises(SlotError):
                slot.verify()
        slot.close()
    assert seen["WRITING"], f"no kill hit a writer at work, the test shows nothing: {seen}"


def _verify(path: Path) -> SlotHeader:
    slot = Slot.open(path)
    try:
        return slot.verify()
    finally:
        slot.close()
