"""The pace of a trainer's checkpoints: which iterations are profiled, and that training waits for none of them."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cluster import wait_until
from solo_daemon import SoloDaemon

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.format.schedule import STALL, STALL_S

PROFILE_STEPS = 5


class Training:
    """Iterations as long as the test says."""

    def __init__(self, ckpt: Checkpointer, daemon: SoloDaemon, clock: SimpleNamespace) -> None:
        self.ckpt, self.daemon, self.clock, self.steps = ckpt, daemon, clock, 0

    def iterate(self, length_s: float) -> float | None:
        """Make a step; return for how long the daemon was told to keep replicas back after it."""
        self.clock.now_s += length_s
        self.steps += 1
        self.ckpt.step(self.steps)
        quiet_s: float | None = self.daemon.wait_for("iteration", step=self.steps)["quiet_s"]
        return quiet_s

    def commit(self, step: int) -> None:
        """Let the newest capture be committed, and the rank hear that the next step is captured."""
        assert self.uncommitted == step
        self.daemon.watermark = (1, step)
        self.daemon.call_for(1, self.steps + 1)
        wait_until(lambda: self.uncommitted is None, timeout_s=30, what=f"news of step {step}")

    @property
    def uncommitted(self) -> int | None:
        assert self.ckpt._capturer is not None
        return self.ckpt._capturer.uncommitted


@pytest.fixture
def training(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A run with a peer, which commits when the test says so."""
    clock = SimpleNamespace(now_s=1000.0, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    clock.monotonic = lambda: clock.now_s
    for module in ("pace", "profile"):
        monkeypatch.setattr(f"resilient_run.ckpt.transport.{module}.time", clock)
    daemon.frozen = True
    daemon.replication |= {"scheme": "interleaved", "copies": 1, "profile_steps": PROFILE_STEPS}
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        yield Training(ckpt, daemon, clock)


def test_network_is_profiled_while_training_waits_for_nothing(training: Training) -> None:
    """Replicas leave one iteration after their capture, and iterations in which they travel are not looked at."""
    assert [training.iterate(0.5), training.iterate(0.5)] == [None, None], "these only warm up"
    assert training.iterate(0.5) is None, "step 1 is still on its way"
    training.commit(1)
    for _ in range(PROFILE_STEPS - 2):
        assert training.iterate(3.0) == STALL * 0.5 + STALL_S, "of the iteration before, step 1 had the network"
        captured = training.steps
        assert training.iterate(0.5) is None, "now that one is on its way"
        training.commit(captured)
    told = training.daemon.wait_for("schedule")
    assert (told["iteration_s"], told["collectives"]) == (0.5, 0)
    assert training.iterate(3.0) is None
    assert training.ckpt.stats.waited_s == 0.0


def test_short_iterations_are_profiled_as_they_are(training: Training) -> None:
    """Replicas are not going to be paced there, so none is kept back."""
    for _ in range(PROFILE_STEPS + 1):
        assert training.iterate(0.05) is None
    assert training.daemon.wait_for("schedule")["iteration_s"] == pytest.approx(0.05)
    assert training.uncommitted == 1, "nothing was committed meanwhile"


def test_iteration_without_a_capture_is_profiled_too(training: Training) -> None:
    for _ in range(3):
        training.iterate(0.5)
    training.daemon.call_for(1, 100)
    wait_until(lambda: training.uncommitted is None, timeout_s=30, what="news of the next capture")
    for _ in range(PROFILE_STEPS - 2):
        assert training.iterate(0.5) is not None
    assert training.iterate(0.5) is None
    assert training.daemon.wait_for("schedule")["iteration_s"] == 0.5
