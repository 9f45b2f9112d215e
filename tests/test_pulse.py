"""Signs of life on the wire: pauses, also to a daemon that comes back, and collectives."""

import pytest
import torch
import torch.distributed as dist
from solo_daemon import SoloDaemon

from resilient_run.ckpt.checkpointer import Checkpointer


def said(daemon: SoloDaemon) -> list[str]:
    """Return what the daemon heard of pauses."""
    return [message["op"] for message in list(daemon.seen) if message["op"] in ("pause", "resume")]


def test_outermost_pause_counts_and_ends_whatever_happens(daemon: SoloDaemon) -> None:
    with Checkpointer(epoch=0) as checkpointer:
        with pytest.raises(KeyError), checkpointer.pause(), checkpointer.pause(limit_s=5.0):
            raise KeyError
        daemon.wait_for("resume")
        assert daemon.wait_for("pause")["limit_s"] is None
        assert said(daemon) == ["pause", "resume"]


def test_daemon_that_comes_back_hears_of_a_pause_and_of_what_is_left(daemon: SoloDaemon) -> None:
    with Checkpointer(epoch=0) as checkpointer:
        checkpointer.restore()
        with checkpointer.pause(limit_s=600.0):
            first = daemon.wait_for("pause")["limit_s"]
            daemon.stop()
            daemon.seen.clear()
            daemon.start()
            assert 0 < daemon.wait_for("pause")["limit_s"] < first <= 600.0
        daemon.wait_for("resume")
        daemon.stop()
        daemon.seen.clear()
        daemon.start()
        daemon.wait_for("attach")
        checkpointer.step(1)
        daemon.wait_for("complete")
        assert said(daemon) == []


@pytest.mark.parametrize("limit_s", [0, -1.0, float("nan"), float("inf")])
def test_limit_is_a_positive_number(daemon: SoloDaemon, limit_s: float) -> None:
    with Checkpointer(epoch=0) as checkpointer:
        with pytest.raises(ValueError, match=r"pause\(limit_s=") as refused:
            checkpointer.pause(limit_s=limit_s)
        daemon.wait_for("refused", message=str(refused.value))


def test_without_a_daemon_a_pause_does_nothing() -> None:
    with pytest.warns(RuntimeWarning, match="no checkpoints are kept"):
        checkpointer = Checkpointer(epoch=0)
    with checkpointer.pause(limit_s=1.0):
        pass


def test_collectives_are_heard_of(daemon: SoloDaemon, alone: None) -> None:
    with Checkpointer(epoch=0):
        for _ in range(2):
            dist.all_reduce(torch.zeros(1))
            daemon.wait_for("collectives")
            daemon.seen.clear()


def test_rank_that_makes_no_collectives_says_nothing_of_them(daemon: SoloDaemon, alone: None) -> None:
    dist.all_reduce(torch.zeros(1))
    with Checkpointer(epoch=0) as checkpointer:
        daemon.wait_for("collectives")
        daemon.seen.clear()
        assert checkpointer._pulse is not None
        checkpointer._pulse._thread.join(2.5)
        assert [message["op"] for message in daemon.seen] == []
