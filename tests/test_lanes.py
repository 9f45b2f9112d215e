"""The pipeline of sums: order within a lane, lanes beside each other, errors, and one step after the other."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from resilient_run.comm.net.scheme import Reduction, Stage
from resilient_run.comm.runtime import lanes as lanes_module
from resilient_run.comm.runtime.lanes import Lanes

STAGES: tuple[Stage, ...] = ("prepare", "communicate", "settle")


class Noted(Reduction):
    """Notes its stages; before some of them it waits for others."""

    def __init__(
        self, name: str, notes: list[tuple[str, str]], waits: dict[str, threading.Event] | None = None
    ) -> None:
        self.name, self.notes, self.waits = name, notes, waits or {}
        self.done = {stage: threading.Event() for stage in STAGES}

    def _pass(self, stage: str) -> None:
        if stage in self.waits:
            assert self.waits[stage].wait(30), f"{stage} of {self.name} waits for what only another lane can do"
        self.notes.append((stage, self.name))
        self.done[stage].set()

    def prepare(self) -> None:
        self._pass("prepare")

    def communicate(self) -> None:
        self._pass("communicate")

    def settle(self) -> None:
        self._pass("settle")

    def total(self) -> Tensor:
        return torch.zeros(())

    def tensors(self) -> Iterator[Tensor]:
        yield from ()


def test_sums_pass_each_lane_in_order_step_after_step() -> None:
    notes: list[tuple[str, str]] = []
    lanes = Lanes(STAGES, 3, torch.device("cpu"))
    for step in range(2):
        for index in (2, 0, 1):
            lanes.put(index, Noted(f"{step}{index}", notes))
        for index in range(3):
            lanes.take(index)
    lanes.close()
    for stage in STAGES:
        assert [name for which, name in notes if which == stage] == ["00", "01", "02", "10", "11", "12"]


def test_lanes_work_beside_each_other() -> None:
    """The first sum is communicated only when the second is prepared, and the second when the first is settled."""
    notes: list[tuple[str, str]] = []
    lanes = Lanes(STAGES, 2, torch.device("cpu"))
    first, second = Noted("first", notes), Noted("second", notes)
    first.waits["communicate"] = second.done["prepare"]
    second.waits["communicate"] = first.done["settle"]
    lanes.put(0, first)
    lanes.put(1, second)
    assert [lanes.take(0), lanes.take(1)] == [first, second]
    lanes.close()


def test_error_of_a_stage_reaches_all_who_wait() -> None:
    class Broken(Noted):
        def settle(self) -> None:
            raise OSError("no more memory")

    notes: list[tuple[str, str]] = []
    lanes = Lanes(STAGES, 2, torch.device("cpu"))
    lanes.put(0, Broken("first", notes))
    lanes.put(1, Noted("second", notes))
    for index in range(2):
        with pytest.raises(OSError, match="no more memory"):
            lanes.take(index)
    lanes.close()


@pytest.mark.timeout(60)
def test_error_before_a_stage_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has failed: a lane cannot follow the event that comes first."""
    monkeypatch.setattr(lanes_module, "recorded", lambda device: object())
    lanes = Lanes(STAGES, 1, torch.device("cpu"))
    lanes.put(0, Noted("first", []))
    with pytest.raises(AttributeError, match="wait_event"):
        lanes.take(0)
    lanes.close()
