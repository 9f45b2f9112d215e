"""Hangs: what is learned, who is blamed, what is no hang; and whole jobs whose workers are stopped."""

import os
import signal
import subprocess
import sys

import pytest
from cluster import wait_until

from resilient_run.daemon.base.policy import DetectPolicy
from resilient_run.daemon.observer import process_state
from resilient_run.daemon.run.cpu_meter import cpu_seconds
from resilient_run.daemon.run.hang import ALIVE, BUSY, HangDetector
from resilient_run.daemon.run.observation import Observation

POLICY = DetectPolicy(hang_floor_s=2.0, hang_factor=3.0, hang_min_steps=3, hang_start_s=60.0)


class Watch:
    """A detector of two ranks on a clock that the test moves."""

    def __init__(self, policy: DetectPolicy = POLICY, generation: int = 1) -> None:
        self.now_s = 100.0
        self.states = {10: "running", 11: "sleeping"}
        self.generation = generation
        self.elsewhere, self.overlooked = "", False
        self.detector = HangDetector(policy, clock=lambda: self.now_s, wall=lambda: 1000.0 + self.now_s)
        self.attach()

    def attach(self) -> None:
        for rank in (0, 1):
            self.detector.attached(rank, 10 + rank, self.generation)

    def steps(self, *steps: int, each_s: float = 0.5, ranks: tuple[int, ...] = (0, 1)) -> None:
        for step in steps:
            self.wait(each_s)
            for rank in ranks:
                self.detector.progressed(rank, step)

    def wait(self, seconds: float) -> Observation | None:
        """Let time pass as it does for a daemon that looks often, and return what it sees at the end."""
        end_s = self.now_s + seconds
        while self.now_s + 0.25 < end_s:
            self.now_s += 0.25
            self.look()
        self.now_s = end_s
        return self.look()

    def look(self) -> Observation | None:
        return self.detector.check(
            self.generation,
            (0, 1),
            self.states.__getitem__,
            elsewhere=self.elsewhere,
            overlooked=self.overlooked,
        )


def test_limit_is_the_floor_or_a_multiple_of_the_longest_step() -> None:
    watch = Watch()
    watch.steps(1, 2, 3)
    assert watch.detector.limit_s == 60.0, "armed before enough steps are known"
    watch.steps(4)
    assert watch.detector.limit_s == 2.0
    watch.steps(5, each_s=1.5)
    watch.steps(6, 7)
    assert watch.detector.limit_s == 4.5
    assert watch.wait(4.4) is None
    seen = watch.wait(0.2)
    assert seen is not None
    assert (seen.kind, seen.severity, seen.generation, seen.limit) == ("hang", "fail", 1, 4.5)
    assert seen.value == pytest.approx(4.6)
    assert seen.unix_s == pytest.approx(1000.0 + watch.now_s - 4.6)
    assert watch.detector.idle_s(1) == pytest.approx(4.6)


def test_a_rank_that_is_gone_has_still_made_its_steps() -> None:
    """Its launcher asks when its process has ended."""
    watch = Watch()
    watch.steps(1, 2)
    watch.steps(3, ranks=(0,))
    watch.detector.detached(0)
    watch.detector.detached(1)
    watch.wait(1.0)
    assert watch.detector.idle_s(1) == pytest.approx(1.0)
    assert watch.detector.idle_s(2) is None, "its workers have not attached yet"
    watch.generation = 2
    watch.attach()
    watch.detector.detached(0)
    assert watch.detector.idle_s(2) is None


def test_hang_is_one_observation_until_progress_resumes() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    first = watch.wait(3.0)
    assert first is not None
    watch.states[11] = "stopped"
    assert watch.wait(20.0) is first
    watch.steps(6, each_s=0.1)
    assert watch.look() is None
    assert watch.detector.limit_s == 2.0, "a hang is nothing to learn from"


@pytest.mark.parametrize(
    ("states", "ahead", "rank", "message"),
    [
        ({10: "sleeping", 11: "stopped"}, (), 1, "rank 1 did not get past step 5 and is stopped"),
        ({10: "disk-sleep", 11: "sleeping"}, (), 0, "rank 0 did not get past step 5 and is disk-sleep"),
        ({10: "sleeping", 11: "sleeping"}, (), None, "ranks 0, 1 did not get past step 5"),
        ({10: "stopped", 11: "sleeping"}, (0,), 1, "rank 1 did not get past step 5"),
    ],
)
def test_culprits(states: dict[int, str], ahead: tuple[int, ...], rank: int | None, message: str) -> None:
    watch = Watch()
    watch.states = states
    watch.steps(*range(1, 6))
    if ahead:
        watch.steps(6, ranks=ahead)
    seen = watch.wait(10.0)
    assert seen is not None
    assert seen.rank == rank
    assert seen.message.endswith(message)


def test_rank_that_never_attached_is_the_culprit() -> None:
    watch = Watch()
    watch.detector = HangDetector(POLICY, clock=lambda: watch.now_s)
    watch.detector.attached(1, 11, 1)
    seen = watch.wait(61.0)
    assert seen is not None
    assert seen.rank == 0
    assert "rank 0 did not attach" in seen.message


def test_first_step_has_its_own_limit() -> None:
    watch = Watch()
    assert watch.wait(59.0) is None
    assert watch.wait(2.0) is not None


def test_restoring_ranks_are_not_watched() -> None:
    watch = Watch()
    for rank in (0, 1):
        watch.detector.restoring(rank)
    assert watch.wait(500.0) is None
    for rank in (0, 1):
        watch.detector.restored(rank)
    assert watch.wait(59.0) is None
    assert watch.wait(2.0) is not None


def test_finished_ranks_end_the_watch() -> None:
    """Rank 0 may take its time to write a last file when rank 1 has detached."""
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.detector.detached(1)
    assert watch.wait(500.0) is None
    watch.detector.attached(1, 11, 1)
    assert watch.wait(3.0) is not None, "its connection had only been lost for a moment"


def test_new_generation_forgets_everything() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    assert watch.wait(3.0) is not None
    watch.generation = 2
    assert watch.look() is None
    watch.attach()
    assert watch.detector.limit_s == 60.0
    assert watch.wait(30.0) is None


def test_detector_that_was_stopped_itself_blames_nobody() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.now_s += 600.0
    watch.detector.progressed(0, 6)
    assert watch.detector.limit_s == 2.0, "its own pause is nothing to learn from"
    assert watch.look() is None
    assert watch.detector.idle_s(1) == 0.0
    assert watch.wait(1.0) is None
    assert watch.wait(2.0) is not None


def test_log_only_is_a_warning() -> None:
    watch = Watch(DetectPolicy(hang_action="log", hang_floor_s=2.0, hang_min_steps=1))
    watch.steps(*range(1, 6))
    seen = watch.wait(3.0)
    assert seen is not None
    assert seen.severity == "warn"


def test_process_states_are_the_kernel_s() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: process_state(pid) == "stopped", timeout_s=30, what="a stopped process")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process_state(pid) == "zombie", timeout_s=30, what="a zombie")
    finally:
        os.waitpid(pid, 0)
    assert process_state(pid) == "gone"


def excused(seen: Observation | None) -> bool:
    """Tell whether a look found no hang; what would be one without signs of life is shown as information."""
    return seen is None or seen.severity == "info"


@pytest.mark.parametrize("pausing", [(0, 1), (0,)])
def test_pause_of_a_rank_stops_the_clock_of_all(pausing: tuple[int, ...]) -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    for rank in pausing:
        watch.detector.paused(rank, None)
    assert watch.wait(1.0) is None
    seen = watch.wait(600.0)
    assert seen is not None
    assert (seen.severity, seen.value) == ("info", pytest.approx(601.0))
    assert watch.detector.sign == ALIVE
    for rank in pausing:
        watch.detector.resumed(rank)
    assert excused(watch.wait(1.5))
    seen = watch.wait(1.0)
    assert seen is not None
    assert (seen.severity, seen.step) == ("fail", 5)
    assert watch.detector.sign == ""
    watch.steps(6, 7)
    assert watch.detector.limit_s == 2.0, "a pause is nothing to learn from"


def test_process_that_is_stopped_while_it_pauses_hangs() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.detector.paused(0, None)
    assert excused(watch.wait(100.0))
    watch.states[10] = "stopped"
    assert excused(watch.wait(1.0))
    seen = watch.wait(3.0)
    assert seen is not None
    assert (seen.severity, seen.rank, seen.step) == ("fail", 0, None)
    assert watch.detector.sign == ""


def test_pause_with_a_limit_ends_with_it() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.detector.paused(1, 60.0)
    assert excused(watch.wait(59.0))
    seen = watch.wait(2.0)
    assert seen is not None
    assert (seen.severity, seen.rank, seen.step) == ("fail", 1, 5)
    assert seen.message.endswith("rank 1 may pause for 60 s after step 5 and has not resumed")


def test_pause_on_another_host_stops_the_clock_but_not_of_stopped_processes() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.elsewhere = ALIVE
    seen = watch.wait(600.0)
    assert seen is not None
    assert seen.severity == "info"
    assert watch.detector.sign == "", "what others say of themselves is not to come back to them"
    watch.elsewhere = ""
    assert excused(watch.wait(1.5))
    watch.elsewhere, watch.states[11] = ALIVE, "stopped"
    assert excused(watch.wait(0.4))
    seen = watch.wait(2.5)
    assert seen is not None
    assert (seen.severity, seen.rank) == ("fail", 1)


def test_collectives_are_a_sign_of_life_of_all_for_as_long_as_they_go_on() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    for _ in range(100):
        watch.detector.communicated(0)
        assert excused(watch.wait(0.9))
    assert watch.detector.sign == ALIVE
    seen = watch.wait(4.0)
    assert seen is not None
    assert seen.severity == "fail"
    assert watch.detector.sign == ""


def burn(watch: Watch, seconds: float, ranks: tuple[int, ...] = (0, 1), share: float = 1.0) -> Observation | None:
    """Let time pass in which the processes of these ranks take a share of a CPU, measured as a daemon does it."""
    seen, end_s = None, watch.now_s + seconds
    while watch.now_s + 0.01 < end_s:
        seen = watch.wait(min(0.25, end_s - watch.now_s))
        suspects = watch.detector.suspects()
        watch.detector.measured({rank: share * watch.now_s if rank in ranks else 7.0 for rank in suspects})
    return seen


def test_cpu_time_stretches_the_limit() -> None:
    """Both ranks may wait for each other and spin: so it does no more than that."""
    watch = Watch()
    watch.steps(*range(1, 6))
    seen = burn(watch, 11.5)
    assert seen is not None
    assert seen.severity == "info"
    assert watch.detector.sign == BUSY
    seen = burn(watch, 1.0)
    assert seen is not None
    assert (seen.severity, seen.limit, seen.step) == ("fail", 2.0, 5)


def test_rank_at_work_is_waited_for_and_one_that_stops_working_is_not() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    assert excused(burn(watch, 6.0, ranks=(0,)))
    seen = burn(watch, 2.0, ranks=())
    assert seen is not None
    assert seen.severity == "fail"


def test_little_cpu_time_is_no_work() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    seen = burn(watch, 3.0, share=0.05)
    assert seen is not None
    assert seen.severity == "fail"


def test_ranks_that_spin_do_not_excuse_the_one_that_they_wait_for() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.steps(6, ranks=(0,))
    seen = burn(watch, 3.0, ranks=(0,))
    assert seen is not None
    assert (seen.severity, seen.rank) == ("fail", 1)
    assert watch.detector.sign == BUSY


def test_work_on_another_host_stretches_the_limit_of_those_that_just_wait() -> None:
    watch = Watch()
    watch.elsewhere = BUSY
    watch.steps(*range(1, 6))
    assert excused(watch.wait(11.5))
    seen = watch.wait(1.0)
    assert seen is not None
    assert seen.severity == "fail"
    stopped = Watch()
    stopped.elsewhere, stopped.states[11] = BUSY, "stopped"
    stopped.steps(*range(1, 6))
    seen = stopped.wait(3.0)
    assert seen is not None
    assert (seen.severity, seen.rank) == ("fail", 1)


def test_hang_that_was_let_be_and_ended_teaches_the_limit() -> None:
    watch = Watch()
    watch.steps(*range(1, 6))
    watch.overlooked = True
    assert watch.wait(10.0) is not None
    watch.steps(6, each_s=0.1)
    assert watch.detector.limit_s == pytest.approx(3 * 10.1)


def test_step_of_a_hang_is_where_training_stands() -> None:
    watch = Watch()
    for rank in (0, 1):
        watch.detector.restored(rank, 40)
    seen = watch.wait(61.0)
    assert seen is not None
    assert seen.step == 40
    assert "did not get past step 40" in seen.message


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    """As data loaders take it, also when they have ended."""
    burn_code = "import time\nwhile time.process_time() < 0.4: pass"
    tree = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn_code!r}])\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", tree], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        wait_until(lambda: cpu_seconds(parent.pid) > 0.2, timeout_s=60, what="the CPU time of a child")
        assert parent.stdout is not None
        parent.stdout.readline()
        assert cpu_seconds(parent.pid) > 0.3, "the child's, which has ended, is its parent's now"
        parent.communicate(b"\n")
    assert cpu_seconds(parent.pid) == 0.0
