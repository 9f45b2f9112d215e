"""The goodput ledger reads what launchers write; the cost model agrees with closed forms, the thesis and simulation."""

import gc
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from wasted import effective_ratio, expected_wasted_s, linear_ratio

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.costs import DAY_S, CheckpointCost, Failures, high_frequency_s, simulate
from resilient_run.daemon.base.goodput import PHASES, Recovery, read_ledger
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.run.recoveries import Recoveries
from resilient_run.launcher import timeline


def event(**changes: Any) -> dict[str, Any]:
    """An event as `launcher/timeline.py` writes it."""
    phases = {f"{phase}_s": 0.25 for phase in PHASES}
    return {
        "event": "recovery",
        "unix_s": 1000.0,
        "run_id": "run",
        "host": "a",
        "generation": 2,
        "kind": "worker_exit",
        "cause": "rank 0 was killed",
        "complete": True,
        "restored_step": 7,
        "sources": ["local"],
        "steps_lost": 1,
        **phases,
        "total_s": 1.75,
        **changes,
    }


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in events))
    return path


def test_a_timeline_can_be_read(tmp_path: Path) -> None:
    """What the real writer writes: one complete recovery and one that was cut short before it had a generation."""
    path = tmp_path / "events"
    line = timeline.RecoveryTimeline(run_id="run", host="a", events_path=path, publish=[].append, missed_after_s=6.0)
    line.begin(kind="host_lost", cause="host b is lost", detect_s=0.5, last_step=9)
    for phase in ("decide", "stop"):
        line.mark(phase)
    line.begin(kind="worker_exit", cause="rank 0 was killed", detect_s=0.0, last_step=9)
    for phase in ("decide", "stop", "rendezvous"):
        line.mark(phase)
    line.spawned(generation=3, ranks={0})
    for name in ("attached", "restored", "first_step"):
        line.on_event({"event": name, "rank": 0, "generation": 3, "step": 8, "source": "local"})
    line.close()
    failures = sorted(read_ledger([path]).failures, key=lambda failure: failure.complete)
    assert [(failure.kind, failure.complete, failure.steps_lost) for failure in failures] == [
        ("host_lost", False, None),
        ("worker_exit", True, 1),
    ]
    assert set(failures[1].phases_s) == set(PHASES)


def test_a_long_run_keeps_few_events_and_all_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, told = random.Random(5), list[dict[str, Any]]()
    monkeypatch.setattr("time.time", lambda: 0.0)
    recoveries = Recoveries()
    monkeypatch.setattr("time.time", lambda: 5000.0)
    gc.collect()
    before = sum(type(each) is Recovery for each in gc.get_objects())
    sums_s, lost = dict.fromkeys(PHASES, 0.0), (None, 0, 1, 7)
    for generation in range(2, 202):
        kind, phases_s = chance.choice(("worker_exit", "hang")), {phase: chance.random() for phase in PHASES}
        for host, factor in (("a", 0.5), ("b", 1.0), ("c", 0.1)):
            slowed = {f"{phase}_s": factor * seconds for phase, seconds in phases_s.items()}
            costs = {"total_s": sum(slowed.values()), "steps_lost": chance.choice(lost)}
            told.append(event(host=host, generation=generation, kind=kind, unix_s=10.0 * generation, **slowed, **costs))
            recoveries.see(host, told[-1])
            found = recoveries.describe(1.0)["phases_s"]
            assert all(found[phase] >= sums_s[phase] for phase in PHASES), "a counter fell"
            sums_s = found
    found = recoveries.describe(0.5)
    kept = sum(type(each) is Recovery for each in gc.get_objects()) - before
    assert kept == 3 * len(found["failures"]) == 3 * 32
    ledger = read_ledger([write(tmp_path / "events", *told)], step_s=0.5, period_s=5000.0)
    expected = ledger.describe()
    assert found["failures"] == expected["failures"][-32:]
    assert (found["count"], found["down_s"], found["steps_lost"]) == (200, expected["down_s"], expected["steps_lost"])
    assert found["effective_ratio"] == pytest.approx(expected["effective_ratio"], rel=1e-12)
    assert Counter(found["kinds"]) == Counter(failure.kind for failure in ledger.failures)
    for phase in PHASES:
        slowest_s = sum(failure.phases_s[phase] for failure in ledger.failures)
        assert found["phases_s"][phase] == pytest.approx(slowest_s, rel=1e-12)
    assert recoveries.describe(None)["effective_ratio"] is None
    recoveries.see("d", event(**{**told[0], "host": "d"}))
    found.pop("period_s")
    late = recoveries.describe(0.5)
    assert {name: late[name] for name in found} == found, "it was added up without this host"


def test_the_slowest_host_is_what_a_failure_costs(tmp_path: Path) -> None:
    first = write(tmp_path / "a", event(), event(generation=3, unix_s=2000.0, steps_lost=0))
    second = write(tmp_path / "b", event(host="b", total_s=3.0, restore_s=1.5, steps_lost=2))
    ledger = read_ledger([first, second], step_s=0.5, period_s=100.0)
    one, two = ledger.failures
    assert (one.hosts, one.down_s, one.steps_lost, one.start_unix_s) == (("a", "b"), 3.0, 2, 997.0)
    assert ledger.lost_s(one) == 1.0
    assert ledger.wasted_s(one) == 2.5
    assert (two.hosts, ledger.lost_s(two), ledger.wasted_s(two)) == (("a",), 0.0, 0.25)
    assert ledger.effective_ratio == pytest.approx(1 - (3.0 + 1.75 + 1.0) / 100)


def test_a_failure_before_a_generation_is_one_of_all_hosts(tmp_path: Path) -> None:
    """The second one comes while hosts still stop their workers for the first; the run ends with the third."""
    unformed = {"generation": 0, "complete": False, "kind": "host_lost", "steps_lost": None}
    lines = [event(**unformed), event(generation=3, unix_s=2000.0), event(**unformed, unix_s=3000.0)]
    first = write(tmp_path / "a", *lines)
    second = write(tmp_path / "b", *({**line, "host": "b", "total_s": 2.0} for line in lines))
    both = tmp_path / "both"
    both.write_text(second.read_text() + first.read_text())
    for paths in ([first, second], [both], [first, second, both]):
        failures = read_ledger(paths).failures
        assert [(failure.kind, failure.generation, failure.hosts, failure.down_s) for failure in failures] == [
            ("host_lost", 0, ("a", "b"), 2.0),
            ("worker_exit", 3, ("a", "b"), 2.0),
            ("host_lost", 0, ("a", "b"), 2.0),
        ]


def test_a_lost_host_is_the_cause_of_what_a_new_one_takes_for_an_exit(tmp_path: Path) -> None:
    """The new one is also the slowest."""
    path = write(tmp_path / "a", event(kind="host_lost", cause="host c is lost"), event(host="b", total_s=3.0))
    (failure,) = read_ledger([path]).failures
    assert (failure.kind, failure.cause, failure.down_s) == ("host_lost", "host c is lost", 3.0)


def test_what_nobody_said_is_not_made_up(tmp_path: Path) -> None:
    path = write(tmp_path / "a", event(), event(generation=3, steps_lost=None))
    assert read_ledger([path], period_s=100.0).effective_ratio is None
    assert read_ledger([path], step_s=1.0).effective_ratio is None
    ledger = read_ledger([path], step_s=1.0, period_s=100.0)
    assert ledger.effective_ratio == pytest.approx(1 - (1.75 * 2 + 1) / 100)
    assert ledger.lost_s(ledger.failures[1]) is None


def test_other_events_and_empty_lines_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"event": "something"}, event())
    path.write_text(path.read_text() + "\n\n")
    assert len(read_ledger([path]).failures) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[]", "line 2: a JSON list"),
        ("{}", "line 2: field 'event'"),
        (json.dumps(event(total_s="1")), "line 2: field 'total_s'"),
        (json.dumps(event(generation=-1)), "line 2: field 'generation'"),
        (json.dumps(event(complete=None)), "line 2: field 'complete'"),
        (json.dumps(event(restore_s=-1)), "line 2: field 'restore_s'"),
        (json.dumps(event(unix_s=float("nan"))), "line 2: field 'unix_s'"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "events", event())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DaemonError, match=message) as caught:
        read_ledger([path])
    assert str(path) in str(caught.value)
    done = ctl(str(path))
    assert done.exit_code == 1
    assert message in done.stderr


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_events_or_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    try:
        read_ledger([path])
    except DaemonError:
        return


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(resilientctl, ["goodput", *arguments])


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a", event(), event(generation=3, complete=False, steps_lost=None)))
    text = ctl(path, "--step", "0.5", "--period", "100").stdout
    assert "worker_exit (cut short)" in text
    assert "2 failure(s): 3.50 s without training, 1 step(s) lost" in text
    assert "effective training time ratio: 96.00% of 100 s" in text
    answer = json.loads(ctl(path, "--json").stdout)
    assert (answer["count"], answer["down_s"], answer["steps_lost"], answer["effective_ratio"]) == (2, 3.5, 1, None)
    assert answer["failures"][0]["restore_s"] == 0.25
    assert ctl().exit_code != 0
    assert ctl(str(tmp_path / "missing")).exit_code == 1
    assert ctl(path, "--step", "0").exit_code == 2


# The thesis's job (Sections 6.2.2, 6.7.2, 6.7.3): GPT-2 100B, 1.2 TB of state, 62 s an iteration, 20 Gbit/s of storage.
STRAWMAN = CheckpointCost(interval_s=10800, checkpoint_s=480, retrieval_s=480, stall_s=81, overhead_s=420 - 162)
HIGH_FREQUENCY = CheckpointCost(interval_s=558, checkpoint_s=480, retrieval_s=480, stall_s=81, overhead_s=420 - 162)
GEMINI = CheckpointCost(interval_s=62, checkpoint_s=62, retrieval_s=0, overhead_s=420)


def test_equation_6_1() -> None:
    assert CheckpointCost(interval_s=10, checkpoint_s=3, retrieval_s=2).wasted_s == 10.0
    # Section 6.2.2: 42 minutes to checkpoint and as often as possible are 105 minutes.
    assert CheckpointCost(interval_s=42, checkpoint_s=42, retrieval_s=42).wasted_s == 105
    assert GEMINI.wasted_s == 1.5 * 62
    assert high_frequency_s(481, 62) == 8 * 62
    assert high_frequency_s(1, 62) == 62
    assert expected_wasted_s(GEMINI, STRAWMAN, 14 / 15) == pytest.approx((14 * 93 + 6360) / 15)


def test_the_thesis_numbers_of_figure_6_15() -> None:
    assert 1 - linear_ratio(HIGH_FREQUENCY, 0) == pytest.approx(0.145, abs=5e-4)
    failures = 0.015 * 1000
    assert linear_ratio(GEMINI, failures) == pytest.approx(0.91, abs=5e-3)
    assert linear_ratio(GEMINI, failures) / linear_ratio(HIGH_FREQUENCY, failures) == pytest.approx(1.54, abs=2e-2)
    assert linear_ratio(STRAWMAN, failures) == 0
    assert linear_ratio(GEMINI, 8) > 0.95


@pytest.mark.parametrize("scheme", [STRAWMAN, HIGH_FREQUENCY, GEMINI], ids=["strawman", "highfreq", "gemini"])
@pytest.mark.parametrize("failures_per_day", [0.0, 1.0, 8.0, 40.0])
def test_simulation_agrees_with_the_formula(scheme: CheckpointCost, failures_per_day: float) -> None:
    exact = effective_ratio(scheme, failures_per_day)
    rng = random.Random(f"{scheme} {failures_per_day}")
    failures = Failures(hosts=1, software=failures_per_day)
    runs = [simulate(scheme, failures, standbys=0, days=400, rng=rng).ratio for _ in range(8)]
    mean = sum(runs) / len(runs)
    error = (sum((run - mean) ** 2 for run in runs) / (len(runs) - 1) / len(runs)) ** 0.5
    # The last interval of a run is cut off, which the formula does not know.
    assert abs(mean - exact) < 5 * error + scheme.interval_s / (400 * DAY_S) * 2


@given(st.floats(1, 1e4), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 100), st.floats(0, 1e3), st.floats(0, 100))
def test_the_exact_ratio_is_a_ratio_and_falls_with_failures(
    interval: float, checkpoint: float, retrieval: float, stall: float, overhead: float, per_day: float
) -> None:
    scheme = CheckpointCost(
        interval_s=interval, checkpoint_s=checkpoint, retrieval_s=retrieval, stall_s=stall, overhead_s=overhead
    )
    assert 0 <= effective_ratio(scheme, per_day + 1) <= effective_ratio(scheme, per_day) <= 1


def test_rare_failures_cost_what_equation_6_1_says() -> None:
    """The exact formula to first order; training that stands still for a checkpoint is not wasted twice."""
    per_day = 1e-3
    loss = 1 - effective_ratio(GEMINI, per_day)
    assert loss * DAY_S / per_day == pytest.approx(GEMINI.wasted_s + GEMINI.overhead_s, rel=1e-3)
