"""Frames between the processes: round trips, and refusal of everything that is not a message."""

import asyncio
import contextlib
import json
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.errors import BY_NAME, CheckpointError, WireError
from resilient_run.ckpt.format.wire import MAX_FRAME_BYTES, decode, encode, read_message, recv_message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=5)


def _receive(data: bytes) -> list[dict[str, object]]:
    """Read `data` through a real socket until it ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        messages = []
        while (message := recv_message(theirs)) is not None:
            messages.append(message)
        return messages


async def _read(data: bytes) -> list[dict[str, object]]:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    messages = []
    while (message := await read_message(reader)) is not None:
        messages.append(message)
    return messages


@given(st.lists(MESSAGES, max_size=3))
def test_messages_survive_both_readers(messages: list[dict[str, object]]) -> None:
    data = b"".join(map(encode, messages))
    assert _receive(data) == messages
    assert asyncio.run(_read(data)) == messages


@given(MESSAGES, st.data())
def test_a_stream_that_ends_inside_a_frame_is_refused(message: dict[str, object], data: st.DataObject) -> None:
    frame = encode(message)
    cut = data.draw(st.integers(1, len(frame) - 1))
    with pytest.raises(WireError, match="inside a frame"):
        _receive(frame[:cut])
    with pytest.raises(WireError, match="inside a frame"):
        asyncio.run(_read(frame[:cut]))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_message_or_an_error(body: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(body), dict)


def test_a_frame_that_announces_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="announces"):
        _receive(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_a_message_longer_than_the_limit_cannot_be_sent() -> None:
    with pytest.raises(WireError, match="exceeds the limit"):
        encode({"x": "y" * MAX_FRAME_BYTES})


@pytest.mark.parametrize("body", [b"[1]", b"1", b"null", b"{", b"\xff", b"[" * 100_000, json.dumps("x").encode()])
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_a_number_that_no_message_can_carry_is_refused(number: bytes) -> None:
    """Else whoever writes down what he has read, as the root does with decisions, fails from then on."""
    with pytest.raises(WireError, match="not a finite number"):
        decode(b'{"a": [' + number + b"]}")


def test_error_names_lead_to_the_classes() -> None:
    assert all(issubclass(cls, CheckpointError) and cls.__name__ == name for name, cls in BY_NAME.items())
