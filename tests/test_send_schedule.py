"""What may leave when, by the clock: the schedule by which daemons and trainers send, and a trainer's wait for it."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_run.ckpt.format.idle import IdleProfile, Span
from resilient_run.ckpt.format.schedule import LinkMeter, SendSchedule, Window
from resilient_run.ckpt.transport.pace import TrainerPace

MB = 1 << 20
PROFILE = IdleProfile(
    iteration_s=1.0, spans=(Span(start_s=0.1, length_s=0.2), Span(start_s=0.8, length_s=0.1)), collectives=2
)
TWO_SPANS = IdleProfile(
    iteration_s=10.0, spans=(Span(start_s=1.0, length_s=2.0), Span(start_s=6.0, length_s=2.0)), collectives=2
)


def schedule(**changes: Any) -> SendSchedule:
    """Return one in the iteration after step 1, which began at 100 s; the link makes 10 MB/s."""
    given = {"scheme": "interleaved", "variance": 1.0, "buffer_bytes": 4 * MB, "link": LinkMeter(10 * MB)}
    return SendSchedule(**{**given, "profile": PROFILE, "step": 1, "began_s": 100.0, **changes})


def look(offset_s: float, *, iterations: int = 0, every: int = 1, profile: IdleProfile = TWO_SPANS) -> Window:
    made = schedule(profile=profile, variance=0.5, every=every)
    return made.window(1 - iterations, 100.0 + offset_s)


def chunk(made: SendSchedule, offset_s: float, *, step: int = 1, queued_s: float = 0.0) -> int:
    return made.chunk(step, 10 * MB, now_s=100.0 + offset_s, queued_s=queued_s)[0]


def test_window_is_open_in_the_spans_only() -> None:
    # Half of a span is used, and that is its middle.
    assert (look(0.5).remaining_s, look(0.5).wait_s) == (0.0, 1.0)
    assert look(1.5).remaining_s == 1.0
    assert look(2.4).remaining_s == pytest.approx(0.1)
    assert (look(2.6).remaining_s, look(2.6).wait_s) == (0.0, pytest.approx(3.9))
    # The last span of a checkpoint's last iteration has no end; before that it has.
    assert look(6.5).remaining_s == math.inf
    assert look(7.0, every=2).remaining_s == 0.5
    assert (look(9.0, every=2).remaining_s, look(9.0, every=2).wait_s) == (0.0, 6.5)
    assert look(6.5, iterations=1, every=2).remaining_s == math.inf


def test_nothing_waits_for_ever() -> None:
    assert look(0.5, iterations=1).why == "late: its iterations are over"
    assert look(15.5, every=2).why == "training stalls"
    assert look(0.5, iterations=1).remaining_s == look(15.5, every=2).remaining_s == math.inf
    busy = IdleProfile(iteration_s=1.0, spans=(), collectives=1)
    assert look(1.0, profile=busy).wait_s == 1.0
    assert look(2.0, profile=busy).remaining_s == math.inf


@pytest.mark.parametrize(
    "changes",
    [
        {"link": LinkMeter()},
        {"profile": None},
        {"profile": IdleProfile(iteration_s=0.01, spans=(), collectives=1)},
        {"scheme": "unpaced"},
        {"scheme": "blocking"},
        {"released": True, "quiet_until_s": 200.0},
    ],
    ids=["unknown link", "no profile", "short", "unpaced", "blocking", "released"],
)
def test_nothing_waits_where_nothing_is_gained(changes: dict[str, Any]) -> None:
    assert chunk(schedule(**changes), 0.5) == 4 * MB
    assert schedule(**changes).chunk(1, 3 * MB, now_s=100.5, queued_s=0.0)[0] == 3 * MB


def test_chunks_are_as_long_as_what_is_left_of_a_span() -> None:
    made = schedule()
    assert chunk(made, 0.05) == 0, "the span has not begun"
    assert chunk(made, 0.2) == 64 << 10, "0.1 s of the span are left, a burst takes milliseconds of it"
    four_ms = pytest.approx(0.003 * 10 * MB, abs=MB / 50)  # 1 ms is the startup
    assert chunk(made, 0.296) == four_ms
    assert chunk(made, 0.2, queued_s=0.096) == four_ms, "the link is busy with what left already"
    assert chunk(made, 0.4) == 0, "the span is over"
    assert chunk(made, 0.85) == 4 * MB, "the last span takes whatever is left"


def test_naive_fills_a_span_with_one_chunk() -> None:
    assert chunk(schedule(scheme="naive"), 0.2) == pytest.approx(0.099 * 10 * MB, abs=MB / 50), "0.1 s are left"


def test_a_late_capture_is_not_held_back() -> None:
    made = schedule(step=2)
    assert chunk(made, 0.0) == 4 * MB, "its iteration is over"
    assert chunk(made, 0.0, step=2) == 0
    assert chunk(made, 3.0, step=2) == 4 * MB, "training stalls"


@pytest.mark.parametrize("link", [LinkMeter(), LinkMeter(10 * MB)], ids=["unknown link", "known link"])
def test_nothing_leaves_in_an_iteration_that_is_profiled(link: LinkMeter) -> None:
    made = schedule(profile=None, quiet_until_s=100.8, link=link)
    assert made.chunk(1, 10 * MB, now_s=100.3, queued_s=0.0) == (
        0,
        Window(remaining_s=0.0, wait_s=pytest.approx(0.5), why="the network is being profiled"),
    )
    assert chunk(made, 0.9) == 4 * MB, "it stalls"


def test_bandwidth_is_the_median_of_what_was_acknowledged() -> None:
    meter = LinkMeter()
    assert meter.cost is None
    for seconds, startup_s in ((0.1, 0.002), (0.1, 0.003), (9.0, 0.02)):
        meter.add(1_000_000, seconds, startup_s)
    meter.add(10, 0.1)  # too little to say anything
    assert meter.cost is not None
    assert (meter.cost.bytes_per_s, meter.cost.startup_s) == (1e7, 0.003)


class Trainer:
    """A trainer's pace, with the time that the test sets, and what it tells the daemon."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, known: bool = True) -> None:
        self.now_s = 100.0
        self.told: list[tuple[str, Any]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr("resilient_run.ckpt.transport.pace.time", clock)
        link = SimpleNamespace(notify=lambda op, **fields: self.told.append((op, fields)))
        capturer = SimpleNamespace(watermark=None, uncommitted=None)
        settings = {"scheme": "interleaved", "variance": 1.0, "sub_buffer_bytes": 4 * MB, "bandwidth_mbit_s": 0.0}
        # Without copies nothing is profiled, which would go on after the test.
        answer = {**settings, "every": 1, "copies": 0, "idle": PROFILE.to_message() if known else None}
        self.pace = TrainerPace(answer, link, capturer, loud=False)  # type: ignore[arg-type]

    @property
    def rates(self) -> list[float]:
        return [fields["bytes_per_s"] for op, fields in self.told if op == "link"]


def test_a_trainer_measures_the_link_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch)
    pace = trainer.pace
    pace.leave(1)
    assert pace.is_open
    assert [pace.admit(1, 10 * MB), pace.admit(1, 3 * MB)] == [4 * MB, 3 * MB]
    pace.sent(100, 0.1)
    assert pace.is_open, "a hundred bytes say nothing"
    pace.sent(10 * MB, 1.0)
    assert trainer.rates == [10 * MB]
    assert not pace.is_open


def test_a_trainer_counts_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo does not say when a chunk has left, so two chunks of the same moment share what is left of the span."""
    trainer = Trainer(monkeypatch)
    trainer.pace.sent(100 * MB, 10.0)
    trainer.pace.leave(1)
    trainer.now_s += 0.29
    assert trainer.pace.admit(1, 10 * MB) == 64 << 10, "10 ms are left"
    assert 0 < trainer.pace.admit(1, 10 * MB) < 32 << 10, "now less than 3 ms"


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("end", ["iteration", "close"])
def test_who_waits_is_woken(monkeypatch: pytest.MonkeyPatch, end: str, profiled: bool) -> None:
    trainer = Trainer(monkeypatch, known=not profiled)
    pace = trainer.pace
    pace.sent(100 * MB, 10.0)
    if profiled:
        monkeypatch.setattr(pace, "_hush", lambda step: 0.8 if step == 1 else None)
    pace.leave(1)
    assert not pace.is_open
    admitted: list[int] = []
    waiting = threading.Thread(target=lambda: admitted.append(pace.admit(1, 10 * MB)))
    waiting.start()
    if end == "close":
        pace.close()
    else:
        pace.leave(2)
    waiting.join(30)
    assert admitted == [4 * MB]
