"""The gate of trainers that send captures themselves: what leaves when, by the clock."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest

from resilient_run.ckpt.format.idle import IdleProfile, Span
from resilient_run.ckpt.transport.gate import Gate

MB = 1 << 20
SETTINGS = {"scheme": "interleaved", "variance": 1.0, "sub_buffer_bytes": 4 * MB, "bandwidth_mbit_s": 0.0}
PROFILE = IdleProfile(
    iteration_s=1.0, spans=(Span(start_s=0.1, length_s=0.2), Span(start_s=0.8, length_s=0.1)), collectives=2
)


@dataclass
class Known:
    profile: IdleProfile | None = PROFILE
    every: int = 1
    quiet_s: float | None = None


class Clock:
    """Time that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made_gate(clock: Clock, *, known: Known | None = None, **changes: Any) -> tuple[Gate, list[float]]:
    measured: list[float] = []
    return Gate({**SETTINGS, **changes}, known or Known(), measured=measured.append, clock=clock), measured


def test_everything_leaves_while_nothing_is_known() -> None:
    gate, measured = made_gate(Clock())
    gate.begins(1)
    assert gate.is_open, "the link was not measured yet"
    assert gate.admit(1, 10 * MB) == 4 * MB
    assert gate.admit(1, 3 * MB) == 3 * MB
    gate.sent(100, 0.1)
    assert gate.is_open, "a hundred bytes say nothing"
    gate.sent(10 * MB, 1.0)
    assert measured == [10 * MB]
    assert not gate.is_open


@pytest.mark.parametrize(
    ("known", "changes"),
    [
        (Known(profile=None), {}),
        (Known(profile=IdleProfile(iteration_s=0.01, spans=(), collectives=1)), {}),
        (Known(), {"scheme": "unpaced"}),
        (Known(), {"scheme": "blocking"}),
    ],
)
def test_nothing_waits_where_nothing_is_gained(known: Known, changes: dict[str, Any]) -> None:
    gate, _ = made_gate(Clock(), known=known, bandwidth_mbit_s=100.0, **changes)
    gate.begins(1)
    assert gate.is_open
    assert gate.admit(1, 10 * MB) == 4 * MB


def test_chunks_are_as_long_as_what_is_left_of_a_span() -> None:
    clock = Clock()
    gate, _ = made_gate(clock)
    gate.sent(100 * MB, 10.0)  # 10 MB/s
    gate.begins(1)
    clock.now_s += 0.2
    assert gate.admit(1, 10 * MB) == 64 << 10, "0.1 s of the span are left, a burst takes milliseconds of it"
    clock.now_s += 0.096
    first = gate.admit(1, 10 * MB)
    assert first == pytest.approx(0.003 * 10 * MB, abs=MB / 50), "4 ms of the span are left, 1 ms is the startup"
    clock.now_s += 0.554
    assert gate.admit(1, 10 * MB) == 4 * MB, "the last span takes whatever is left"


def test_naive_fills_a_span_with_one_chunk() -> None:
    clock = Clock()
    gate, _ = made_gate(clock, scheme="naive")
    gate.sent(100 * MB, 10.0)  # 10 MB/s
    gate.begins(1)
    clock.now_s += 0.2
    assert gate.admit(1, 10 * MB) == pytest.approx(0.099 * 10 * MB, abs=MB / 50), "0.1 s of the span are left"


def test_a_late_capture_is_not_held_back() -> None:
    clock = Clock()
    gate, _ = made_gate(clock)
    gate.sent(100 * MB, 10.0)
    gate.begins(2)
    assert gate.admit(1, 10 * MB) == 4 * MB, "its iteration is over"
    clock.now_s += 3.0
    assert gate.admit(2, 10 * MB) == 4 * MB, "training stalls"


def test_nothing_leaves_in_an_iteration_that_is_profiled() -> None:
    clock, known = Clock(), Known(profile=None, quiet_s=0.8)
    gate, _ = made_gate(clock, known=known)
    gate.begins(1)
    assert not gate.is_open
    clock.now_s += 0.9
    assert gate.is_open, "it stalls"
    gate.begins(2)
    assert not gate.is_open
    known.quiet_s = None
    gate.begins(3)
    assert gate.admit(2, 10 * MB) == 4 * MB


@pytest.mark.parametrize("known", [Known(), Known(profile=None, quiet_s=0.8)])
@pytest.mark.parametrize("end", ["iteration", "close"])
def test_who_waits_is_woken(end: str, known: Known) -> None:
    gate, _ = made_gate(Clock(), known=replace(known))
    gate.sent(100 * MB, 10.0)
    gate.begins(1)
    admitted: list[int] = []
    waiting = threading.Thread(target=lambda: admitted.append(gate.admit(1, 10 * MB)))
    waiting.start()
    if end == "close":
        gate.close()
    else:
        gate._known.quiet_s = None
        gate.begins(2)
    waiting.join(30)
    assert admitted == [4 * MB]
