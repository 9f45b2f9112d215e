"""A run that is not protected says so: in the script, in its log, to the daemon; once, again when it gets worse, and at
the end.
"""

import logging
import os
import re
from collections.abc import Iterator

import pytest
from cluster import wait_until
from solo_daemon import SoloDaemon

from resilient_run.ckpt.capture.protection import Protection
from resilient_run.ckpt.checkpointer import Checkpointer


class Run:
    """A run whose clock the test moves."""

    def __init__(self, ckpt: Checkpointer, daemon: SoloDaemon) -> None:
        assert ckpt._pace is not None
        self.ckpt, self.daemon, self.now_s = ckpt, daemon, 1000.0
        self.watch = ckpt._pace.protection
        self.watch._clock = lambda: self.now_s
        self.watch._moved_s = self.now_s
        self.step = 0

    def train(self, steps: int, *, step_s: float) -> None:
        for _ in range(steps):
            self.step += 1
            self.now_s += step_s
            self.ckpt.step(self.step)

    def commit(self, step: int) -> None:
        """Let `step` be committed and the rank have heard of it."""
        self.daemon.commit(1, step)
        wait_until(lambda: self.watch.now.steps_at_risk == self.step - step, timeout_s=30, what=f"news of step {step}")

    def commit_after(self, steps: int, *, step_s: float) -> None:
        """Make `steps` more steps, of which the first one is captured and committed after the last one."""
        self.train(1, step_s=step_s)
        captured = self.step
        assert self.ckpt.wait(30)
        self.train(steps - 1, step_s=step_s)
        self.commit(captured)


@pytest.fixture
def run(daemon: SoloDaemon) -> Iterator[Run]:
    daemon.frozen = True
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        yield Run(ckpt, daemon)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [
        record.getMessage() for record in caplog.records if record.name == "resilient_run.ckpt.capture.protection"
    ]
    caplog.clear()
    return messages


def test_commits_that_keep_up_say_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert run.ckpt.protected == Protection(steps_at_risk=0, seconds_at_risk=0.0, reason="")
    for _ in range(20):
        run.commit_after(1, step_s=0.5)
        assert run.ckpt.protected
    run.commit_after(9, step_s=0.01)
    assert not run.ckpt.protected, "at this moment"
    run.commit_after(1, step_s=0.01)
    run.ckpt.close()
    assert _told(caplog) == [], "one commit that comes late is no news"


def test_after_close_nothing_is_protected(run: Run) -> None:
    run.commit_after(2, step_s=0.1)
    assert run.ckpt.protected
    run.ckpt.close()
    reason = "it is closed: nothing is kept"
    assert run.ckpt.protected == Protection(steps_at_risk=1, seconds_at_risk=0.0, reason=reason)
    with pytest.warns(RuntimeWarning, match=r"after close\(\): no more checkpoints are kept") as warned:
        run.train(3, step_s=0.1)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert run.ckpt.protected == Protection(steps_at_risk=4, seconds_at_risk=0.0, reason=reason)
    run.ckpt.close()
    assert not run.ckpt.protected


def test_in_a_fork_nothing_is_protected(run: Run) -> None:
    """Also when the fork happens while the watch is busy."""
    run.commit_after(2, step_s=0.1)
    with run.watch._lock:
        pid = os.fork()
        if not pid:
            present = run.ckpt.protected
            os._exit(present.steps_at_risk if present.reason == "it is closed: nothing is kept" else 99)
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), timeout_s=30, what="the fork")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert run.ckpt.protected


def test_commits_that_stand_still_are_told_again_and_again_and_when_that_is_over(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.commit_after(1, step_s=0.1)
    run.train(3, step_s=0.1)
    assert run.ckpt.protected
    run.train(1, step_s=0.1)
    assert (run.ckpt.protected.steps_at_risk, bool(run.ckpt.protected)) == (4, False)
    assert run.ckpt.protected.seconds_at_risk == pytest.approx(0.3)
    assert _told(caplog) == []
    run.train(10, step_s=0.1)
    reason = r"nothing has been committed for 1.4 s: see `resilientctl status` on every host"
    assert _told(caplog) == [f"not protected: a failure costs up to 14 steps now (step 15): {reason}"]
    assert run.daemon.wait_for("protection", step=15, steps_at_risk=14)["reason"] == reason
    run.train(13, step_s=0.1)
    assert _told(caplog) == []
    run.train(30, step_s=0.1)
    assert [text.split(":")[1] for text in _told(caplog)] == [
        " a failure costs up to 28 steps now (step 29)",
        " a failure costs up to 56 steps now (step 57)",
    ]
    run.commit(2)
    for _ in range(9):
        run.commit_after(1, step_s=0.1)
    assert _told(caplog) == ["protected again at step 67"]
    assert run.daemon.wait_for("protection", steps_at_risk=0)["reason"] == ""
    assert run.ckpt.protected
    run.ckpt.close()
    (last,) = _told(caplog)
    assert last.startswith("this run was not protected for 4.")
    assert last.endswith(" s: a failure would have cost up to 57 steps"), "not only what it was when it was told"


def test_a_run_at_the_edge_does_not_fill_its_log(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.commit_after(1, step_s=0.1)

    def relapse(good_s: float) -> list[str]:
        """Have commits come late for 2 s, and then in time; return what is told."""
        run.train(20, step_s=0.1)
        run.commit(run.step - 19)
        for _ in range(10):
            run.commit_after(1, step_s=good_s / 10)
        return [text.split()[0] for text in _told(caplog)]

    assert relapse(5) == ["not", "protected"]
    assert relapse(5) == ["not"]
    assert relapse(5) == []
    assert relapse(12) == ["protected"]
    assert relapse(12) == ["not"]
    assert relapse(25) == ["protected"]
    run.now_s += 700
    assert relapse(5) == ["not", "protected"], "long ago"


def test_at_the_end_the_worst_is_told_even_if_a_milder_time_came_last(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.commit_after(1, step_s=0.1)
    for unprotected_steps in (30, 12):
        run.train(unprotected_steps, step_s=0.1)
        run.commit(run.step - unprotected_steps + 1)
        for _ in range(9):
            run.commit_after(1, step_s=0.1)
    run.ckpt.close()
    *_, last = _told(caplog)
    assert last.endswith(" s: a failure would have cost up to 30 steps")


def test_steps_that_are_shorter_than_commits_are_told_at_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.commit_after(5, step_s=0.004)
    run.commit_after(8, step_s=0.004)
    assert _told(caplog) == []
    run.commit_after(8, step_s=0.004)
    (told,) = _told(caplog)
    assert "a failure costs up to 15 steps now" in told
    assert told.endswith("steps take 4 ms, commits 28 ms")
    for _ in range(10):
        run.commit_after(8, step_s=0.004)
    assert _told(caplog) == []


def test_long_steps_are_not_protected_when_nothing_is_committed_for_long(run: Run) -> None:
    run.commit_after(1, step_s=60.0)
    run.train(1, step_s=60.0)
    run.now_s += 100
    assert run.ckpt.protected, "what is captured may travel for as long as a step takes"
    run.now_s += 100
    assert run.ckpt.protected.reason.startswith("nothing has been committed for 260.0 s")


def test_a_daemon_that_is_away_is_told_and_one_that_comes_back_hears_of_it(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run.commit_after(1, step_s=0.1)
    link = run.ckpt._link
    assert link is not None
    run.daemon.stop()
    wait_until(lambda: (link.away_s or 0.0) > 1.0, timeout_s=30, what="the daemon to be away")
    run.train(20, step_s=0.1)
    (told,) = _told(caplog)
    assert re.search(r"the daemon of this host has been away for [1-9]", told)
    run.daemon.start()
    assert run.daemon.wait_for("protection")["steps_at_risk"] == 14


def test_only_one_rank_tells(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.frozen = True
    for name, value in daemon.environ(rank=1, world_size=2).items():
        monkeypatch.setenv(name, value)
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        run = Run(ckpt, daemon)
        run.train(40, step_s=0.1)
        assert ckpt.protected.steps_at_risk == 40
        assert not ckpt.protected
        assert "check that every rank calls step()" in ckpt.protected.reason
    assert _told(caplog) == []


def test_without_a_daemon_nothing_is_protected() -> None:
    with pytest.warns(RuntimeWarning):
        ckpt = Checkpointer(x=0)
    ckpt.restore()
    ckpt.step()
    assert not ckpt.protected
    assert ckpt.protected.steps_at_risk == 1
    assert "no daemon" in ckpt.protected.reason
