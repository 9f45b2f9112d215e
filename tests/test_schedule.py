"""Algorithm 6.2 by hand, by properties, and against what is printed; how often a checkpoint is sent."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.format.idle import IdleProfile, Iteration, Span, common, typical
from resilient_run.ckpt.format.schedule import TransferCost, fill, plan, unrolled


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One transfer: so many bytes of a replica, in one idle span."""

    span: int
    replica: int
    offset: int
    size_bytes: int


def partition(
    spans: Sequence[Span],
    *,
    checkpoint_bytes: int,
    copies: int,
    buffer_bytes: int,
    cost: TransferCost,
    variance: float,
    endless: bool = True,
) -> list[Chunk]:
    """Place the chunks one by one; `endless`: the last span is as long as it takes, else what does not fit is left."""
    chunks: list[Chunk] = []
    replica, offset = 0, 0
    if not checkpoint_bytes or not copies:
        return chunks
    for index, span in enumerate(spans):
        last = endless and index == len(spans) - 1
        remaining_s = math.inf if last else variance * span.length_s
        while size_bytes := cost.chunk_bytes(
            remaining_s, buffer_bytes=buffer_bytes, remaining_bytes=checkpoint_bytes - offset
        ):
            chunks.append(Chunk(span=index, replica=replica, offset=offset, size_bytes=size_bytes))
            remaining_s -= cost.seconds(size_bytes)
            offset += size_bytes
            if offset == checkpoint_bytes:
                replica, offset = replica + 1, 0
                if replica == copies:
                    return chunks
    return chunks


TICK = TransferCost(startup_s=1.0, bytes_per_s=10.0)


def spans(*lengths_s: float) -> list[Span]:
    """Return spans of these lengths with as much busy time between them."""
    starts, start_s = [], 0.0
    for length_s in lengths_s:
        starts.append(start_s)
        start_s += 2 * length_s
    return [Span(start_s=start, length_s=length) for start, length in zip(starts, lengths_s, strict=True)]


def profile(*lengths_s: float) -> IdleProfile:
    return IdleProfile(iteration_s=2 * sum(lengths_s), spans=tuple(spans(*lengths_s)), collectives=len(lengths_s))


def sizes(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.span, chunk.size_bytes) for chunk in chunks]


def place(
    *lengths_s: float, size: int, copies: int = 1, buffer: int = 20, mu: float = 1.0, endless: bool = True
) -> list:
    return partition(
        spans(*lengths_s),
        checkpoint_bytes=size,
        copies=copies,
        buffer_bytes=buffer,
        cost=TICK,
        variance=mu,
        endless=endless,
    )


def test_by_hand() -> None:
    # A full buffer takes 1 + 20/10 = 3 s, so a span of 7 s has room for two and 1 s, which is startup time alone.
    assert sizes(place(7, 1, size=40)) == [(0, 20), (0, 20)]
    assert sizes(place(7, 1, size=45)) == [(0, 20), (0, 20), (1, 5)]
    # 0.9 * 7 = 6.3 s leave 0.3 s after two buffers; 0.5 * 7 = 3.5 s leave nothing of use after one.
    assert sizes(place(7, 1, size=45, mu=0.9)) == [(0, 20), (0, 20), (1, 5)]
    assert sizes(place(7, 1, size=45, mu=0.5)) == [(0, 20), (1, 20), (1, 5)]
    # What a span has left after the startup is filled: 4.5 s = 3 s + 1 s + 0.5 s.
    assert sizes(place(4.5, 9, size=30)) == [(0, 20), (0, 5), (1, 5)]
    # Spans no longer than the startup time are of no use.
    assert sizes(place(1, 1.05, 9, size=30)) == [(2, 20), (2, 10)]
    # The last span takes the rest, however short it is; without it the rest is left out.
    assert sizes(place(3, 0, size=70)) == [(0, 20), (1, 20), (1, 20), (1, 10)]
    assert sizes(place(3, 0, size=70, endless=False)) == [(0, 20)]
    assert place(3, 3, size=0) == place(3, 3, size=9, copies=0) == []


def test_each_copy_begins_anew() -> None:
    chunks = place(6, 6, 6, size=25, copies=2)
    assert [(chunk.span, chunk.replica, chunk.offset, chunk.size_bytes) for chunk in chunks] == [
        (0, 0, 0, 20),
        (0, 0, 20, 5),
        (0, 1, 0, 5),
        (1, 1, 5, 20),
    ]


lengths = st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=12)


@given(
    lengths_s=lengths,
    size=st.integers(1, 400),
    copies=st.integers(1, 3),
    buffer=st.integers(1, 50),
    startup_s=st.floats(0, 1),
    bytes_per_s=st.floats(1, 1000),
    mu=st.floats(0.1, 1),
)
def test_every_byte_once_in_order_and_no_span_overfull(
    lengths_s: list[float], size: int, copies: int, buffer: int, startup_s: float, bytes_per_s: float, mu: float
) -> None:
    cost = TransferCost(startup_s=startup_s, bytes_per_s=bytes_per_s)
    chunks = partition(
        spans(*lengths_s), checkpoint_bytes=size, copies=copies, buffer_bytes=buffer, cost=cost, variance=mu
    )
    expected = (0, 0)
    for chunk in chunks:
        assert (chunk.replica, chunk.offset) == expected
        assert 1 <= chunk.size_bytes <= buffer
        end = chunk.offset + chunk.size_bytes
        expected = (chunk.replica + 1, 0) if end == size else (chunk.replica, end)
    assert expected == (copies, 0)
    assert [chunk.span for chunk in chunks] == sorted(chunk.span for chunk in chunks)
    for index, length_s in enumerate(lengths_s[:-1]):
        used_s = sum(cost.seconds(chunk.size_bytes) for chunk in chunks if chunk.span == index)
        assert used_s <= mu * length_s + 1e-9
        # Nothing that would have fit was put off.
        if any(chunk.span > index for chunk in chunks):
            assert used_s >= mu * length_s - cost.seconds(1) - 1e-9


@given(
    lengths_s=lengths,
    size=st.integers(0, 400),
    copies=st.integers(0, 3),
    buffer=st.integers(1, 50),
    startup_s=st.floats(0, 1),
    bytes_per_s=st.floats(1, 1000),
    mu=st.floats(0.1, 1),
)
def test_what_fits_is_counted_as_chunk_by_chunk(
    lengths_s: list[float], size: int, copies: int, buffer: int, startup_s: float, bytes_per_s: float, mu: float
) -> None:
    cost = TransferCost(startup_s=startup_s, bytes_per_s=bytes_per_s)
    named = {"checkpoint_bytes": size, "copies": copies, "buffer_bytes": buffer, "cost": cost, "variance": mu}
    chunks = partition(spans(*lengths_s), **named, endless=False)
    placed_bytes, used_s = fill(spans(*lengths_s), **named)
    # Where a chunk fits exactly, rounding may leave it a byte short: in each span once.
    assert placed_bytes == pytest.approx(sum(chunk.size_bytes for chunk in chunks), abs=len(lengths_s))
    if placed_bytes == sum(chunk.size_bytes for chunk in chunks):
        assert used_s == pytest.approx(sum(cost.seconds(chunk.size_bytes) for chunk in chunks), abs=startup_s + 1e-9)


def test_counting_takes_no_longer_for_more_bytes() -> None:
    cost = TransferCost(startup_s=0.0, bytes_per_s=1.0)
    placed_bytes, used_s = fill(
        spans(2.0**62), checkpoint_bytes=2**60, copies=2, buffer_bytes=1, cost=cost, variance=1.0
    )
    assert (placed_bytes, used_s) == (2**61, 2.0**61)


def as_printed(
    *lengths_s: float, size: int, copies: int = 1, buffer: int = 20, mu: float = 1.0, rounds: int = 9999
) -> list[tuple[int, float]]:
    """Return span and size of each part by Algorithm 6.2 as printed; TimeoutError after `rounds` rounds.

    But for the bound of the counter: `copies` copies are sent, not one more.
    """
    parts: list[tuple[int, float]] = []
    remain_size, copy = float(size), 0
    for index, length_s in enumerate(lengths_s):
        remain_span = math.inf if index == len(lengths_s) - 1 else mu * length_s
        while remain_span > 0:
            if not (rounds := rounds - 1):
                raise TimeoutError
            full = remain_span >= TICK.seconds(buffer)
            chunk = min(remain_size, buffer if full else max(0.0, (remain_span - TICK.startup_s) * TICK.bytes_per_s))
            if chunk > 0:
                remain_size -= chunk
                remain_span -= TICK.startup_s + remain_size / TICK.bytes_per_s
                parts.append((index, chunk))
            if remain_size == 0:
                if copy == copies - 1:
                    return parts
                copy, remain_size = copy + 1, float(size)
    return parts


def test_slips_of_the_printed_algorithm() -> None:
    # Where a span is full after its first chunk, print and correction agree.
    assert as_printed(3, 1, size=40) == sizes(place(3, 1, size=40)) == [(0, 20), (1, 20)]
    # Taking the time of what *remains*, 7 s, for that of the chunk, 3 s, ends a span of 6 s after one chunk.
    assert as_printed(6, 1, size=80) == [(0, 20), (1, 20), (1, 20), (1, 20)]
    assert sizes(place(6, 1, size=80)) == [(0, 20), (0, 20), (1, 20), (1, 20)]
    # The other way round it is overfull: the end of each copy leaves nothing, so only its startup time is taken.
    assert as_printed(3.5, 1, size=4, copies=3) == [(0, 4), (0, 4), (0, 4)]
    assert sizes(place(3.5, 1, size=4, copies=3)) == [(0, 4), (0, 4), (1, 4)]
    # A span with less than the startup time left is never given up.
    with pytest.raises(TimeoutError):
        as_printed(0.5, 1, size=20)
    assert sizes(place(0.5, 1, size=20)) == [(1, 20)]


def test_what_fits_is_sent_every_iteration() -> None:
    made, reason = plan(
        profile(7, 7), checkpoint_bytes=60, copies=1, buffer_bytes=20, cost=TICK, variance=1, max_every=8
    )
    assert (made.paced, made.every, made.late_bytes, made.used_s) == (True, 1, 0, 9)
    assert "9.000 s of it are used" in reason


def test_what_does_not_is_sent_every_nth() -> None:
    made, reason = plan(
        profile(7, 7), checkpoint_bytes=100, copies=1, buffer_bytes=20, cost=TICK, variance=1, max_every=8
    )
    assert (made.every, made.late_bytes) == (2, 0)
    assert made.used_s == 5 * TICK.seconds(20)
    assert [span.start_s for span in unrolled(profile(7, 7), 2, 0.0)] == [0, 14, 28, 42]
    assert "one of 2 steps is captured" in reason
    limited, reason = plan(
        profile(7, 7), checkpoint_bytes=100, copies=1, buffer_bytes=20, cost=TICK, variance=1, max_every=1
    )
    assert (limited.every, limited.late_bytes) == (1, 20)
    assert "20 bytes go into the last span" in reason


def test_a_checkpoint_that_comes_late_misses_the_first_spans() -> None:
    made, _ = plan(
        profile(7, 7),
        checkpoint_bytes=40,
        copies=1,
        buffer_bytes=20,
        cost=TICK,
        variance=1,
        max_every=1,
        ready_s=4.0,
    )
    assert unrolled(profile(7, 7), 1, 4.0) == [Span(start_s=4.0, length_s=3.0), Span(start_s=14.0, length_s=7.0)]
    assert (made.late_bytes, made.used_s) == (0, 2 * TICK.seconds(20))


def test_nothing_is_scheduled_where_it_would_only_delay() -> None:
    short = IdleProfile(iteration_s=0.05, spans=(Span(start_s=0, length_s=0.05),), collectives=0)
    cost = TransferCost(startup_s=0.001, bytes_per_s=1e9)
    for made, reason in (
        plan(short, checkpoint_bytes=9, copies=1, buffer_bytes=9, cost=cost, variance=1, max_every=1),
        plan(profile(7), checkpoint_bytes=9, copies=0, buffer_bytes=9, cost=cost, variance=1, max_every=1),
    ):
        assert not made.paced
        assert reason.startswith("sent at once")


def test_a_network_that_is_never_idle_is_used_at_the_end() -> None:
    busy = IdleProfile(iteration_s=2.0, spans=(), collectives=3)
    made, _ = plan(busy, checkpoint_bytes=9, copies=1, buffer_bytes=9, cost=TICK, variance=1, max_every=2)
    assert (made.every, made.paced, made.used_s, made.late_bytes) == (2, True, 0.0, 9)


def seen(*busy: tuple[float, float], length_s: float = 1.0) -> Iteration:
    return Iteration(length_s=length_s, busy=busy)


def test_typical_iteration() -> None:
    noise = random.Random(1)
    iterations = [seen(length_s=9.0), seen(length_s=5.0)]
    for _ in range(9):
        late = noise.uniform(-0.01, 0.01)
        iterations.append(seen((0.2 + late, 0.4 + late), (0.3 + late, 0.5 + late), (0.9 + late, 0.95 + late)))
    iterations.append(seen((0.1, 0.9), length_s=2.0))
    found, reason = typical(iterations)
    assert found is not None
    assert (found.iteration_s, found.collectives) == (1.0, 3)
    edges = [edge for span in found.spans for edge in (span.start_s, span.end_s)]
    assert edges == pytest.approx([0, 0.2, 0.5, 0.9, 0.95, 1.0], abs=0.02)
    assert reason.startswith("9 of 10 iterations have 3 collectives")


def test_training_without_collectives_is_idle() -> None:
    found, _ = typical([seen()] * 5)
    assert found is not None
    assert found.spans == (Span(start_s=0.0, length_s=1.0),)


def test_iterations_that_differ_have_no_profile() -> None:
    found, reason = typical([seen(*[(0.1, 0.2)] * count) for count in range(12)])
    assert (found, reason) == (None, "iterations differ: at most 1 of 10 have the same number of collectives, 2")
    found, reason = typical([seen(length_s=length) for length in (1, 1, 1, 9, 2, 7, 3, 5)])
    assert found is None
    assert "deviate" in reason
    assert typical([seen()] * 2)[0] is None


def test_host_is_idle_when_every_rank_is() -> None:
    one = IdleProfile(
        iteration_s=1.0, spans=(Span(start_s=0.0, length_s=0.5), Span(start_s=0.8, length_s=0.2)), collectives=1
    )
    other = IdleProfile(
        iteration_s=1.0, spans=(Span(start_s=0.1, length_s=0.3), Span(start_s=0.6, length_s=0.4)), collectives=2
    )
    both = common([one, other])
    assert both.spans == (
        Span(start_s=0.1, length_s=pytest.approx(0.3)),
        Span(start_s=0.8, length_s=pytest.approx(0.2)),
    )
    assert common([one]).spans == (one.spans[0], Span(start_s=0.8, length_s=pytest.approx(0.2)))


@pytest.mark.parametrize(
    ("mbit_s", "limit_bytes", "burst_bytes"),
    [(25, 4 << 20, 64 << 10), (200, 4 << 20, 125_000), (400_000, 4 << 20, 4 << 20), (400_000, 32 << 20, 32 << 20)],
)
def test_a_burst_takes_milliseconds_on_any_link(mbit_s: int, limit_bytes: int, burst_bytes: int) -> None:
    """As the paper's 32 MB sub-buffers do at 400 Gbit/s: a collective that comes early waits for one of them."""
    cost = TransferCost(startup_s=0.001, bytes_per_s=mbit_s * 1e6 / 8)
    assert cost.burst_bytes(limit_bytes, "interleaved") == burst_bytes
