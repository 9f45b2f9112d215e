"""Bytes from network, disk and memory are hostile: only documented errors, bounded memory, never a wrong restore."""

import asyncio
import contextlib
import json
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient_run.ckpt.errors import CheckpointError, DaemonError, SlotError, WireError
from resilient_run.ckpt.format import manifest, wire
from resilient_run.ckpt.format.slot import CHUNK_BYTES, HEADER_BYTES, Slot, chunk_count, plan_layout
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import Flattener, unflatten
from resilient_run.daemon.run.report import Report
from resilient_run.daemon.run.rounds import Round

pytestmark = pytest.mark.fast

MIB = 1 << 20
FUZZED = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([2**63, -(2**63), 1 << 70, float("inf"), "", "x", "l", "d", "t", "s", "|O", "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def changed_json(draw: st.DrawFn, document: Any) -> Any:
    """A copy of `document` in which one or two places are replaced, removed or doubled."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        place, key = document, None
        while isinstance(place[key] if key is not None else place, dict | list) and (
            key is None or draw(st.booleans())
        ):
            inside = place if key is None else place[key]
            if not inside:
                break
            place, key = inside, draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
        if key is None:
            return draw(JSON)
        change = draw(st.sampled_from(["replace", "remove", "double"]))
        if change == "replace":
            place[key] = draw(JSON)
        elif change == "remove":
            del place[key]
        elif isinstance(place, list):
            place.append(place[key])
    return document


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after up to four changes: bytes overwritten, cut out, inserted or repeated."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        size = draw(st.integers(0, 40))
        match draw(st.sampled_from(["write", "cut", "insert", "repeat", "end"])):
            case "write":
                changed[at : at + size] = draw(st.binary(min_size=size, max_size=size))
            case "cut":
                del changed[at : at + size]
            case "insert":
                changed[at:at] = draw(st.binary(max_size=40))
            case "repeat":
                changed[at:at] = changed[max(0, at - size) : at]
            case "end":
                del changed[at:]
    return bytes(changed)


@contextlib.contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Fail when the body allocates more than this at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


# The wire.

HONEST = b"".join(
    wire.encode(message)
    for message in (
        {"op": "hello", "wire": "4", "run_id": "run", "host": "a", "to": "b"},
        {"id": 1, "op": "get", "rank": 0, "generation": 1, "step": 2, "offset": 4096, "size": 1000},
        {"op": "complete", "path": "/dev/shm/rank0.0.slot", "generation": 1, "step": 2},
    )
)


def blocking(data: bytes) -> list[Any]:
    """What `recv_message` makes of `data`: messages, and WireError in place of the end if it refuses the rest."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        seen: list[Any] = []
        try:
            while (message := wire.recv_message(theirs)) is not None:
                seen.append(message)
        except WireError:
            seen.append(WireError)
        return seen


def streaming(data: bytes) -> list[Any]:
    """The same of `read_message`."""

    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        seen: list[Any] = []
        try:
            while (message := await wire.read_message(reader)) is not None:
                seen.append(message)
        except WireError:
            seen.append(WireError)
        return seen

    return asyncio.run(read())


@FUZZED
@given(changed_bytes(HONEST) | st.binary(max_size=100))
def test_both_readers_take_the_same_from_any_stream(data: bytes) -> None:
    assert json.dumps(blocking(data), default=str) == json.dumps(streaming(data), default=str)


@pytest.mark.parametrize(
    "body",
    [b'{"a":[' + b"{}," * 349_000 + b"{}]}", b'{"a":[' + b"0," * 520_000 + b"0]}", b'{"a":' * 200_000, b"[" * MIB],
    ids=["objects", "numbers", "deep objects", "deep lists"],
)
def test_a_message_cannot_be_blown_up(body: bytes) -> None:
    frame = struct.pack(">I", len(body)) + body
    assert len(body) <= wire.MAX_FRAME_BYTES
    with at_most(64 * MIB):
        streaming(frame)


def test_memory_is_not_taken_for_announced_bytes_that_do_not_come() -> None:
    with at_most(8 * MIB):
        assert blocking(struct.pack(">I", wire.MAX_FRAME_BYTES) + b"{") == [WireError]
        assert streaming(struct.pack(">I", 2**32 - 1) + b"{") == [WireError]


# What etcd says.


@FUZZED
@given(
    changed_json(
        {
            "term": 1,
            "election": 3,
            "complete": [[1, 2], [1, 3]],
            "missed": {"generation": 1, "next": 3, "step": 4, "late": False},
            "claims": [[1, 2, "s", "m", "d", [[0, 3], [5, 5]]]],
            "absent": ["b"],
            "work": [[0, 5, 1.5, 9.0, 64]],
        }
    ).filter(lambda value: isinstance(value, dict))
)
def test_reports_are_read_or_refused(value: Any) -> None:
    with contextlib.suppress(DaemonError):
        report = Report.parse(value)
        assert all(type(number) is int for pair in report.complete for number in pair)
        assert Report.parse(report.to_value()) == report


@FUZZED
@given(
    changed_json(
        {
            "generation": 2,
            "members": [{"host": "a", "nproc": 1, "label": "x"}, {"host": "b", "nproc": 2, "label": "y"}],
            "restore": {"generation": 1, "step": 5},
        }
    ).filter(lambda value: isinstance(value, dict))
)
def test_rounds_are_read_or_refused(value: Any) -> None:
    with contextlib.suppress(DaemonError):
        round_ = Round.parse(value, revision=1)
        assert [round_.holders(rank, 2)[0] for rank in range(min(8, round_.world_size))]


# Slots.

PAYLOAD_BYTES = CHUNK_BYTES + 70_000


def state(step: int) -> dict[str, Any]:
    """A state that is different in every leaf at every step."""
    words = np.random.default_rng(step).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    return {
        "weight": torch.from_numpy(words),
        "moments": np.arange(step, step + 9000.0),
        "step": step,
        "name": f"at {step}",
    }


def write_slot(path: Path, step: int) -> bytes:
    """Write the state of `step` as a Checkpointer lays it out and return the file's bytes."""
    flat = Flattener(state(step))
    layout = manifest.plan_payload(flat.specs())
    document = manifest.encode(manifest.encode_tensors(flat.specs(), layout), flat.node)
    payload_offset, capacity_bytes = plan_layout(400, layout.payload_bytes)
    path.unlink(missing_ok=True)
    slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    slot.begin()
    payload = slot.buffer[slot.payload_offset :]
    for leaf, spec, offset in zip(flat.leaves, flat.specs(), layout.offsets, strict=True):
        data = leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf
        payload[offset : offset + spec.nbytes] = np.ascontiguousarray(data).tobytes()
    ends = [min(start + CHUNK_BYTES, layout.payload_bytes) for start in range(0, layout.payload_bytes, CHUNK_BYTES)]
    chunks = [payload[number * CHUNK_BYTES : end] for number, end in enumerate(ends)]
    assert len(chunks) == chunk_count(layout.payload_bytes)
    slot.publish(
        run_id="run",
        topology=1,
        rank=0,
        world_size=1,
        generation=1,
        step=step,
        payload_bytes=layout.payload_bytes,
        manifest=document,
        checksums=b"".join(xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little") for chunk in chunks),
    )
    del payload, chunks
    slot.close()
    return path.read_bytes()


def restore(path: Path) -> tuple[int, Any]:
    """Return the step and the state in the slot at `path` the way a restore reads it."""
    slot = Slot.open(path)
    try:
        header = slot.verify()
        parsed = manifest.parse(slot.manifest(), header.payload_bytes)
        payload = bytes(slot.buffer[header.payload_offset : header.used_bytes])

        def leaf(index: int) -> bytes:
            return payload[parsed.offsets[index] :][: parsed.tensors[index].nbytes]

        return header.step, unflatten(parsed.tree, leaf)
    finally:
        slot.close()


@pytest.fixture(scope="module")
def two_slots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes], list[tuple[int, Any]]]:
    """A path to write on, the files of two captures in the same slot, and what each of them restores."""
    path = tmp_path_factory.mktemp("hostile") / "rank0.0.slot"
    files, states = [], []
    for step in (1, 2):
        files.append(write_slot(path, step))
        states.append(restore(path))
    assert states[0] != states[1]
    return path, files, states


@FUZZED
@given(data=st.data())
def test_a_changed_slot_restores_the_same_state_or_nothing(
    two_slots: tuple[Path, list[bytes], list[tuple[int, Any]]], data: st.DataObject
) -> None:
    """Also when whole regions are those of another capture in the same slot, which has right checksums of its own."""
    path, (first, second), states = two_slots
    changed = bytearray(first)
    places = [0, 8, 16, 24, 32, HEADER_BYTES, len(first) - PAYLOAD_BYTES, len(first) - HEADER_BYTES]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.sampled_from(places) | st.integers(0, len(changed)))
        size = data.draw(st.sampled_from([1, 8, 24, HEADER_BYTES, CHUNK_BYTES, len(first)]) | st.integers(0, 64))
        match data.draw(st.sampled_from(["other", "write", "zero", "cut", "grow", "move"])):
            case "other":
                changed[at : at + size] = second[at : at + size]
            case "write":
                size = min(size, 64)
                changed[at : at + size] = data.draw(st.binary(min_size=size, max_size=size))
            case "zero":
                changed[at : at + size] = bytes(len(changed[at : at + size]))
            case "cut":
                del changed[max(0, len(changed) - size) :]
            case "grow":
                changed += bytes(min(size, 9000))
            case "move":
                changed[at : at + 64] = changed[at + 64 : at + 128]
    path.write_bytes(changed)
    try:
        restored = restore(path)
    except SlotError:
        return
    assert restored in states


def training_state() -> TrainingState:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return TrainingState({"model": model, "optimizer": optimizer, "epoch": 3}, rng=False)


def documents() -> tuple[Any, bytes]:
    """The manifest of a small training state as a JSON document, and its payload."""
    flat = training_state().flatten()
    layout = manifest.plan_payload(flat.specs())
    payload = bytearray(layout.payload_bytes)
    for leaf, spec, offset in zip(flat.leaves, flat.specs(), layout.offsets, strict=True):
        data = leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else np.frombuffer(leaf, np.uint8)
        payload[offset : offset + spec.nbytes] = np.ascontiguousarray(data).tobytes()
    return json.loads(manifest.encode(manifest.encode_tensors(flat.specs(), layout), flat.node)), bytes(payload)


DOCUMENT, PAYLOAD = documents()


def test_the_document_that_is_changed_below_can_be_loaded() -> None:
    parsed = manifest.parse(json.dumps(DOCUMENT).encode(), len(PAYLOAD))
    training_state().load(parsed, torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside of a JSON value."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(node[key], (*path, key))


def without(inside: Any, key: Any) -> None:
    del inside[key]


def twice(inside: Any, key: Any) -> None:
    if isinstance(inside, list):
        inside.insert(key, inside[key])


def becomes(value: Any) -> Callable[[Any, Any], None]:
    return lambda inside, key: inside.__setitem__(key, value)


ATOMS = [None, -1, 2**70, "x", [], {}, ["x", 0], ["x", 1 << 40], ["l"], ["d", [], []], ["d", [["l"]], [0]]]
ATOMS += [["f", "7ff8000000000000"], ["size", 1 << 40], ["C", ["a"], [1]]]


@pytest.mark.parametrize("change", [without, twice, *map(becomes, ATOMS)])
def test_a_changed_manifest_with_right_checksums_is_loaded_or_refused(change: Callable[[Any, Any], None]) -> None:
    """Whoever can write right checksums can write any state; but nothing else happens than a documented error.

    Every place of a real manifest is changed, one at a time.
    """
    for *path, key in places(DOCUMENT):
        document = json.loads(json.dumps(DOCUMENT))
        inside = document
        for step in path:
            inside = inside[step]
        change(inside, key)
        with contextlib.suppress(CheckpointError):
            parsed = manifest.parse(json.dumps(document).encode(), len(PAYLOAD))
            training_state().load(parsed, torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8))


def test_a_manifest_cannot_be_blown_up() -> None:
    """Sizes that a manifest only claims take no memory, and nodes take no more than their text's share."""
    claims = [
        ["s", f"|S{1 << 40}", ""],
        ["size", *[1 << 60] * 9],
        ["x", 1 << 60],
        ["i", "f" * (MIB // 8)],
        ["b", "A" * (MIB // 8)],
    ]
    huge = {"kind": "torch", "dtype": "uint8", "shape": [1 << 58], "device": "cpu", "offset": 0, "nbytes": 1 << 58}
    nodes = [*claims, ["l", *[["l"]] * 50_000]]
    with at_most(16 * MIB):
        for node in nodes:
            text = json.dumps({"version": 1, "tensors": [], "tree": node}).encode()
            with contextlib.suppress(SlotError):
                unflatten(manifest.parse(text, 0).tree, [].__getitem__)
        with pytest.raises(SlotError, match="entry 0"):
            manifest.parse(json.dumps({"version": 1, "tensors": [huge], "tree": None}).encode(), 1 << 20)
