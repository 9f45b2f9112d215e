"""The recovery timeline: phases in order, one event per recovery, nothing from other generations."""

import errno
import fcntl
import json
import logging
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import recovery_phases

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.goodput import PHASES, Recovery, read_ledger
from resilient_run.daemon.base.logs import log_formatter
from resilient_run.daemon.etcd.client import Entry
from resilient_run.launcher.rendezvous.rounds import View, rendezvous_mirror
from resilient_run.launcher.timeline import RecoveryTimeline, newest_step, whole

pytestmark = pytest.mark.fast


class Told(RecoveryTimeline):
    """The timeline of a host, and what it has told.

    Attributes:
        path: The file of its events.
        shown: The events that it published.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.shown = path, list[dict[str, Any]]()
        super().__init__(run_id="run", host="a", events_path=path, publish=self.shown.append, missed_after_s=6.0)

    def fail(self, cause: str = "c", **changes: Any) -> None:
        self.begin(**{"kind": "worker_exit", "cause": cause, "detect_s": 0.0, "last_step": 3, **changes})

    def written(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def timeline(tmp_path: Path) -> Told:
    return Told(tmp_path / "events.jsonl")


def event(name: str, rank: int, generation: int = 2, **fields: Any) -> dict[str, Any]:
    return {"op": "event", "event": name, "rank": rank, "generation": generation, **fields}


def restore(timeline: Told, ranks: Sequence[int] = (0,), step: int = 3) -> None:
    timeline.spawned(generation=2, ranks=set(ranks))
    for name in ("attached", "restored"):
        for rank in ranks:
            timeline.on_event(event(name, rank, step=step, source="local"))


def recover(timeline: Told, ranks: Sequence[int] = (0,), step: int = 3) -> None:
    for phase in ("decide", "stop", "rendezvous"):
        timeline.mark(phase)
    restore(timeline, ranks, step)
    for rank in ranks:
        timeline.on_event(event("first_step", rank, step=step))


def test_a_recovery_is_one_event_and_one_line(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    timeline.fail("rank 1 was killed by SIGKILL", detect_s=0.25, last_step=8)
    with caplog.at_level(logging.WARNING):
        recover(timeline, (0, 1), 7)
    (written,) = timeline.written()
    assert written["complete"]
    assert written["steps_lost"] == 1
    assert written["restored_step"] == 7
    assert written["sources"] == ["local"]
    durations = [written[f"{phase}_s"] for phase in PHASES]
    assert durations[0] == pytest.approx(0.25, abs=1e-3)
    assert all(duration >= 0 for duration in durations)
    assert sum(durations) == pytest.approx(written["total_s"], abs=1e-3)
    (line,) = caplog.messages
    assert "rank 1 was killed by SIGKILL" in line
    assert "step 7 from local memory, 1 step(s) lost" in line


def test_what_nobody_knows_is_not_said_to_be_nothing(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    """A daemon that was restarted a moment before has not heard yet how far the ranks are."""
    unknown: tuple[dict[str, int], ...] = {}, {"0": 8}
    for heard in unknown:
        timeline.fail(last_step=newest_step(heard, {0, 1}))
        recover(timeline, (0, 1), 7)
    timeline.fail(last_step=newest_step({"0": 8, "1": 9}, {0, 1}))
    recover(timeline, (0, 1), 7)
    assert [told["steps_lost"] for told in timeline.written()] == [None, None, 2]
    assert ["lost" in line for line in caplog.messages] == [False, False, True]


def test_it_waits_for_every_rank_of_its_generation(timeline: Told) -> None:
    timeline.fail("host b was lost", kind="host_lost")
    timeline.spawned(generation=2, ranks={0, 1})
    timeline.on_event(event("first_step", 0, step=4))
    timeline.on_event(event("first_step", 1, generation=1, step=4))
    assert not timeline.path.exists()
    timeline.on_event(event("first_step", 1, step=4))
    assert len(timeline.written()) == 1


def test_a_second_failure_reports_the_first_as_interrupted(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    timeline.fail("first")
    timeline.mark("decide")
    timeline.mark("stop")
    timeline.fail("second")
    timeline.spawned(generation=1, ranks={0})
    timeline.fail("third")
    recover(timeline)
    first, second, third = timeline.written()
    assert (first["cause"], first["complete"]) == ("first", False)
    assert [phase for phase in PHASES if f"{phase}_s" in first] == ["detect", "decide", "stop", "rendezvous"]
    assert (second["cause"], second["complete"]) == ("second", False)
    assert (third["cause"], third["complete"], third["steps_lost"]) == ("third", True, 0)
    assert caplog.messages[0] == "not recovered (first): no workers were started again"
    assert caplog.messages[1].startswith("recovery interrupted after")


def test_time_until_the_next_failure_is_in_the_phase_that_it_interrupts(timeline: Told) -> None:
    timeline.fail("first")
    for phase in ("decide", "stop", "rendezvous"):
        timeline.mark(phase)
    restore(timeline)
    time.sleep(0.3)
    timeline.fail("second", detect_s=0.1)
    timeline.fail("third", kind="hang", idle_s=60.0)
    timeline.close()
    events = timeline.written()
    assert events[0]["first_step_s"] >= 0.1
    for before, after in pairwise(events):
        assert after["unix_s"] - after["total_s"] == pytest.approx(before["unix_s"], abs=0.05)
    for told in events:
        durations = [told[f"{phase}_s"] for phase in PHASES if f"{phase}_s" in told]
        assert min(durations) >= 0
        assert sum(durations) == pytest.approx(told["total_s"], abs=1e-3)


def test_failure_that_another_clock_saw_earlier_takes_no_time_of_a_recovery_that_ended(timeline: Told) -> None:
    timeline.fail("first")
    recover(timeline)
    timeline.fail("second", kind="host_lost", detect_s=1.0)
    timeline.close()
    first, second = timeline.written()
    assert second["unix_s"] - second["total_s"] == pytest.approx(first["unix_s"], abs=0.05)


def test_whoever_joins_takes_no_time_of_a_recovery_that_ended_either(timeline: Told) -> None:
    timeline.fail()
    recover(timeline)
    timeline.join(kind="host_lost", cause="host b is lost", since_s=9.0)
    recover(timeline)
    assert timeline.written()[1]["total_s"] < 9.0


def test_failure_of_which_more_is_known_is_one_failure(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    """A worker is killed in a hang, which another host has reported."""
    timeline.fail("rank 0 was killed", idle_s=60.0)
    timeline.mark("decide")
    timeline.fail("rank 1 hangs", kind="hang", idle_s=60.0)
    recover(timeline)
    (told,) = timeline.written()
    assert (told["kind"], told["complete"]) == ("hang", True)
    assert told["detect_s"] >= 60
    assert len(caplog.messages) == 1


def test_cause_that_is_seen_later_does_not_take_time_of_the_recovery_before(timeline: Told) -> None:
    timeline.fail("first")
    timeline.spawned(generation=1, ranks={0})
    timeline.fail("second", idle_s=5.0)
    timeline.correct(kind="host_lost", cause="host b is lost")
    timeline.close()
    first, second = timeline.written()
    assert second["unix_s"] - second["total_s"] == pytest.approx(first["unix_s"], abs=0.05)


def test_worker_that_attaches_again_to_a_new_daemon_ends_no_phase_twice(timeline: Told) -> None:
    timeline.fail()
    restore(timeline)
    time.sleep(0.1)
    timeline.on_event(event("attached", 0))
    timeline.on_event(event("first_step", 0, step=4))
    (told,) = timeline.written()
    assert told["restore_s"] < 0.1 <= told["first_step_s"]


def test_workers_that_are_stopped_again_make_no_phase_negative(timeline: Told) -> None:
    """They die once they are formed, before anything of them is heard of."""
    timeline.fail()
    for phase in ("decide", "stop", "rendezvous", "stop"):
        timeline.mark(phase)
    time.sleep(0.1)
    timeline.close()
    (written,) = timeline.written()
    durations = {phase: written[f"{phase}_s"] for phase in PHASES if f"{phase}_s" in written}
    assert list(durations) == ["detect", "decide", "stop", "rendezvous"]
    assert durations["rendezvous"] >= 0.1  # in which the run ends
    assert min(durations.values()) >= 0
    assert sum(durations.values()) == pytest.approx(written["total_s"], abs=1e-3)


def test_what_a_script_does_after_its_last_step_is_no_part_of_a_recovery(timeline: Told) -> None:
    timeline.fail()
    restore(timeline)
    time.sleep(0.1)
    timeline.close()
    (told,) = timeline.written()
    assert (told["complete"], told["restored_step"]) == (False, 3)
    assert told["total_s"] < 0.1


def test_recovery_of_a_run_that_then_succeeds_is_complete(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    """Its workers had no step left to do."""
    timeline.fail()
    restore(timeline)
    timeline.close(succeeded=True)
    (told,) = timeline.written()
    assert (told["complete"], told["steps_lost"], timeline.shown) == (True, 0, [told])
    (line,) = caplog.messages
    assert line.startswith("recovered in ")


def test_host_that_was_not_needed_any_more_has_recovered_from_nothing(timeline: Told) -> None:
    timeline.fail(kind="host_lost")
    timeline.close(succeeded=True)
    assert not timeline.path.exists()


def test_end_of_a_run_that_fails_has_one_cause(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    """What ends it says why; the event says how far the recovery came."""
    timeline.fail()
    timeline.spawned(generation=2, ranks={0})
    timeline.close()
    (told,) = timeline.written()
    assert not told["complete"]
    assert not caplog.messages


def test_a_round_that_is_broken_protects_nothing(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    """Its first commit may be heard of after the loss of a host that it counts."""
    timeline.fail("host c is lost", kind="host_lost")
    timeline.on_event(event("first_commit", 0, generation=1, hosts=["a", "c", "b"], replicas=2, every=1, caveats=[]))
    assert not caplog.messages
    timeline.spawned(generation=2, ranks={0})
    timeline.on_event(event("first_commit", 0, generation=1, hosts=["a", "c", "b"], replicas=2, every=1, caveats=[]))
    assert not caplog.messages
    timeline.on_event(event("first_commit", 0, generation=2, hosts=["a", "b"], replicas=2, every=1, caveats=[]))
    assert caplog.messages == ["protected: every step, 2 replicas on hosts a, b"]


def test_what_a_person_shall_see_is_no_warning_to_programs(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    timeline.on_event(event("first_commit", 0, generation=1, hosts=["a"], replicas=1, every=1, caveats=[]))
    timeline.fail(last_step=8)
    timeline.fail("d", kind="hang", last_step=8)
    recover(timeline, (0,), 7)
    timeline.fail("e", last_step=8)
    timeline.mark("stop")
    timeline.fail("f", kind="hang", last_step=8)
    formatter = log_formatter("%(message)s", {"RESILIENT_LOG_FORMAT": "json"})
    levels = [json.loads(formatter.format(record))["level"] for record in caplog.records]
    words = [message.partition(" ")[0] for message in caplog.messages]
    assert list(zip(words, levels, strict=True)) == [("protected:", "info"), ("recovered", "info"), ("not", "warning")]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_training_without_checkpoints_is_no_part_of_a_recovery(timeline: Told) -> None:
    """Nothing says when its steps begin."""
    for generation in (2, 3):
        timeline.fail(last_step=None)
        for phase in ("decide", "stop", "rendezvous"):
            timeline.mark(phase)
        timeline.spawned(generation=generation, ranks={0})
        time.sleep(0.1)
    timeline.close()
    told = timeline.written()
    assert len(told) == 2
    assert max(event["total_s"] for event in told) < 0.1


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def end(timeline: Told, cause: str) -> None:
    timeline.fail(cause)
    timeline.close()


def test_an_event_for_whose_end_there_is_no_room_leaves_nothing(
    timeline: Told, caplog: pytest.LogCaptureFixture
) -> None:
    end(timeline, "first")
    before = timeline.path.read_text()
    with room_for(len(before) + 20):
        end(timeline, "second")
    assert timeline.path.read_text() == before
    assert "its end did not fit" in caplog.text
    with room_for(len(before)):
        end(timeline, "third")
    end(timeline, "fourth")
    assert [failure.cause for failure in read_ledger([timeline.path]).failures] == ["first", "fourth"]


def test_what_is_behind_an_event_that_was_cut_is_not_taken_back(
    timeline: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers of several hosts may append to one file."""
    write = os.write

    def cut(descriptor: int, line: bytes) -> int:
        written = write(descriptor, line[:20])
        with timeline.path.open("ab") as other:
            other.write(b"other\n")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        end(timeline, "first")
    end(timeline, "second")
    lines = timeline.path.read_text().splitlines()
    assert lines[0].endswith("other")
    assert json.loads(lines[-1])["cause"] == "second"


def test_an_event_that_is_cut_when_its_file_is_closed_costs_no_other(
    timeline: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A network file system may tell only then that a quota is used up, and keeps the pages that did fit."""
    close = os.close

    def cut(descriptor: int) -> None:
        os.ftruncate(descriptor, 20)
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", cut)
        end(timeline, "first")
    assert "Disk quota exceeded" in caplog.text
    end(timeline, "second")
    lines = timeline.path.read_bytes().splitlines()
    assert len(lines[0]) == 20
    assert json.loads(lines[-1])["cause"] == "second"


def test_an_event_that_a_full_pipe_cuts_costs_no_other(timeline: Told) -> None:
    os.mkfifo(timeline.path)
    reader = os.open(timeline.path, os.O_RDONLY | os.O_NONBLOCK)
    size_bytes = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    end(timeline, "x" * size_bytes)
    end(timeline, "no room")
    assert len(os.read(reader, size_bytes)) == size_bytes
    end(timeline, "second")
    end(timeline, "third")
    begins, *others = os.read(reader, size_bytes).splitlines()
    os.close(reader)
    assert not begins
    assert [json.loads(line)["cause"] for line in others] == ["second", "third"]


def test_an_undisturbed_run_reports_nothing(timeline: Told) -> None:
    timeline.spawned(generation=1, ranks={0})
    timeline.on_event(event("attached", 0, generation=1))
    timeline.on_event(event("first_step", 0, generation=1, step=1))
    timeline.close()
    assert not timeline.path.exists()


def test_a_host_that_stood_by_meanwhile_reports_nothing(timeline: Told) -> None:
    timeline.fail("host a was cut off", kind="host_lost", detect_s=1.0, last_step=8)
    timeline.mark("stop")
    timeline.abandon()
    recover(timeline, (0,), 30)
    timeline.close()
    assert not timeline.path.exists()


def test_whoever_takes_a_lost_host_s_place_reports_from_the_failure_on(timeline: Told) -> None:
    timeline.join(kind="host_lost", cause="host b is lost", since_s=1.5)
    timeline.spawned(generation=2, ranks={1})
    for name in ("attached", "restored", "first_step"):
        timeline.on_event(event(name, 1, step=7, source="peer"))
    (written,) = timeline.written()
    assert timeline.shown == [written]
    assert written["complete"]
    assert (written["kind"], written["ranks"], written["steps_lost"]) == ("host_lost", {"1": "peer"}, None)
    assert written["rendezvous_s"] == pytest.approx(1.5, abs=1e-3)
    assert "detect_s" not in written
    assert written["total_s"] >= 1.5


def test_a_worker_s_exit_may_have_another_cause(timeline: Told) -> None:
    timeline.correct(kind="host_lost", cause="no recovery is under way")
    timeline.join(kind="worker_exit", cause="c", since_s=1.0)
    timeline.correct(kind="host_lost", cause="host b is lost")
    timeline.abandon()
    for kind in ("worker_exit", "hang"):
        timeline.fail(kind=kind)
        timeline.correct(kind="host_lost", cause="host b is lost")
        recover(timeline)
    events = timeline.written()
    assert [(event["kind"], event["cause"]) for event in events] == [("host_lost", "host b is lost"), ("hang", "c")]


@pytest.mark.parametrize(
    ("kind", "idle_s", "detect_s"),
    [("worker_exit", 1.5, 0.25), ("host_lost", 1.5, 1.5), ("host_lost", 60.0, 6.0), ("hang", 60.0, 60.0)],
)
def test_what_nobody_saw_happen_began_after_the_last_step(
    timeline: Told, kind: str, idle_s: float, detect_s: float
) -> None:
    timeline.fail(kind=kind, detect_s=0.25, idle_s=idle_s)
    recover(timeline)
    (written,) = timeline.written()
    assert written["detect_s"] == pytest.approx(detect_s, abs=1e-3)
    assert sum(written[f"{phase}_s"] for phase in PHASES) == pytest.approx(written["total_s"], abs=1e-3)


def test_a_lost_host_was_lost_before_a_worker_exited_because_of_it(timeline: Told) -> None:
    timeline.fail(idle_s=1.5)
    timeline.mark("stop")
    timeline.correct(kind="host_lost", cause="host b is lost")
    timeline.close()
    (written,) = timeline.written()
    assert written["detect_s"] == pytest.approx(1.5, abs=1e-3)
    assert written["total_s"] == pytest.approx(1.5 + written["stop_s"] + written["rendezvous_s"], abs=1e-3)


def test_phases_of_the_benchmark_add_up_to_what_it_measures_from_outside(timeline: Told) -> None:
    timeline.fail(kind="host_lost", idle_s=1.5)
    recover(timeline)
    (written,) = timeline.written()
    known_s = written["unix_s"] - written["total_s"] + written["detect_s"]
    phases = recovery_phases.between(written, known_s - 1.25, written["unix_s"] + 0.5)
    assert list(phases) == list(PHASES)
    assert phases["detect"] == pytest.approx(1.25, abs=1e-3)
    assert phases["first_step"] == pytest.approx(written["first_step_s"] + 0.5, abs=1e-3)
    assert sum(phases.values()) == pytest.approx(written["unix_s"] + 0.5 - (known_s - 1.25), abs=1e-3)


RECOVERY = Recovery(
    unix_s=1.0,
    run_id="run",
    host="a",
    generation=3,
    kind="worker_exit",
    complete=True,
    restored_step=7,
    phases_s={},
    total_s=1.0,
)


def test_a_newcomer_s_cause_gives_way_to_that_of_a_survivor() -> None:
    survivor = replace(RECOVERY, host="a", kind="host_lost", cause="host b is lost", total_s=2.0)
    newcomer = replace(RECOVERY, host="b", kind="worker_exit", cause="rank 0 exited", total_s=3.0)
    told = whole([survivor, newcomer])
    assert (told["kind"], told["cause"], told["slowest"]) == ("host_lost", "host b is lost", "b")
    assert whole([newcomer, replace(survivor, kind="worker_exit")])["cause"] == "rank 0 exited"


@pytest.mark.parametrize(
    "changed", [{"resized": []}, {"resized": [2]}, {"ranks": {"9" * 5000: "local"}}, {"ranks": {"-1": "local"}}]
)
def test_an_event_of_which_no_sum_can_be_made_is_refused(changed: dict[str, Any]) -> None:
    """Else it would end the launcher that sums up."""
    assert Recovery.parse({**RECOVERY.to_value(), "resized": [2, 1]}).resized == (2, 1)
    with pytest.raises(DaemonError, match=f"field '{next(iter(changed))}' must be"):
        Recovery.parse({**RECOVERY.to_value(), **changed})


def test_a_host_that_is_recovering_joins_nothing(timeline: Told) -> None:
    timeline.fail("its own")
    timeline.join(kind="host_lost", cause="another", since_s=9.0)
    recover(timeline)
    (written,) = timeline.written()
    assert written["cause"] == "its own"


def test_all_hosts_together_are_as_slow_as_the_slowest(timeline: Told, caplog: pytest.LogCaptureFixture) -> None:
    about = replace(RECOVERY, kind="host_lost", cause="host b is lost")
    events = [
        replace(about, host="a", total_s=2.0, ranks={"0": "local", "10": "local"}, steps_lost=1),
        replace(about, host="d", total_s=3.5, ranks={"2": "peer"}),
    ]
    with caplog.at_level(logging.WARNING):
        timeline.sum_up(3, events)
        timeline.sum_up(3, events)
    (written,) = timeline.written()
    assert (written["event"], written["total_s"], written["slowest"]) == ("recovered", 3.5, "d")
    assert written["hosts"] == {"a": 2.0, "d": 3.5}
    assert list(written["ranks"].items()) == [("0", "local"), ("2", "peer"), ("10", "local")]
    assert written["steps_lost"] == 1
    (line,) = caplog.messages
    assert (
        "in 3.50 s, the slowest is d: step 7 from local memory (ranks 0, 10) and peer memory (rank 2), 1 step" in line
    )


@pytest.mark.parametrize(
    "value", [{}, {"ranks": {"x": "local"}}, {"ranks": {"0": 1}}, {"total_s": "1"}, {"steps_lost": "0"}, {"host": None}]
)
def test_an_event_in_etcd_that_is_none_counts_as_nothing(value: dict[str, Any]) -> None:
    recovery = replace(RECOVERY, generation=2, cause="c", ranks={"0": "local"}, steps_lost=0)
    mirror, key = rendezvous_mirror(), "rdzv/recovered/2/a"
    written = Entry(value=recovery.to_value(), revision=1)
    assert View.of(mirror.apply({key: written})).recovered == {(2, "a"): recovery}
    damaged = Entry(value={**recovery.to_value(), **value} if value else {}, revision=2)
    assert not View.of(mirror.apply({key: damaged})).recovered


def test_what_protects_a_run_is_said_again_only_when_it_has_changed(
    timeline: Told, caplog: pytest.LogCaptureFixture
) -> None:

    def committed(generation: int, *hosts: str, replicas: int = 2, every: int = 1, caveats: Sequence[str] = ()) -> None:
        told = {"hosts": list(hosts), "replicas": replicas, "every": every, "caveats": list(caveats)}
        timeline.on_event(event("first_commit", 0, generation, step=3, **told))

    with caplog.at_level(logging.WARNING):
        committed(1, "a", "b")
        committed(2, "a", "b")
        committed(3, "a", "c")
        committed(4, "a", "c", "d", every=3)
        committed(5, "a", replicas=1)
        committed(6, *(f"h{number}" for number in range(10)))
        committed(7, "a", replicas=1, caveats=["slots may be swapped out"])
    assert caplog.messages == [
        "protected: every step, 2 replicas on hosts a, b",
        "protected: every step, 2 replicas on hosts a, c",
        "protected: one of 3 steps, 2 replicas of each rank on hosts a, c, d",
        "protected: every step, 1 replica on host a, and none elsewhere",
        "protected: every step, 2 replicas of each rank on hosts h0, h1, h2, h3, h4, h5, h6, h7, … (10 in all)",
        "protected: every step, 1 replica on host a, and none elsewhere; slots may be swapped out",
    ]
