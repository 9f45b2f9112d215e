"""Small models and data for loops of frameworks, and a loop's life over several generations in one process."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from solo_daemon import SoloDaemon, is_committed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from resilient_run.ckpt import checkpointer
from resilient_run.ckpt.checkpointer import Checkpointer


class Numbers(Dataset[Any]):
    """Augments in the process that reads it."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), index / 16) + 0.1 * torch.randn(4)
        return {"x": x, "labels": x.sum()[None]}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for _ in range(22):
            x = torch.rand(4, generator=generator)
            yield {"x": x, "labels": x.sum()[None]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.net(x), labels), "logits": labels}


Loop = Callable[[], Any]


class Ended(BaseException):
    """In place of a SIGKILL, in one process."""


def content(module: nn.Module) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


class Attempts:
    """Runs loops that are ended by force.

    Attributes:
        daemon: What they attach to.
    """

    def __init__(self, daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
        self.daemon = daemon
        self._monkeypatch = monkeypatch
        self._advance, self._from_environ = Checkpointer.step, checkpointer.TrainerEnv.from_environ
        self._ends: list[int] = []

    def __call__(self, loop: Loop, *at: int) -> Any:
        """Return what a loop ends with, ended by force after each of the steps `at`; without any, nothing is kept."""
        advance, ends = self._advance, self._ends

        def step(self: Checkpointer, n: int | None = None) -> None:
            advance(self, n)
            # After each step, or the one at which it ends may come before the news of the commit of the one before.
            if ends:
                committed = is_committed(self)
                if self._step == ends[0]:
                    assert committed
                    raise Ended

        self._monkeypatch.setattr(Checkpointer, "step", step)
        ends[:] = at
        for generation in range(1, len(at) + 2):
            env = self._from_environ(self.daemon.environ(generation=generation)) if at else None
            self._monkeypatch.setattr(checkpointer.TrainerEnv, "from_environ", lambda _, env=env: env)
            self.daemon.plan, self.daemon.next = self.daemon.watermark, None
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            try:
                return loop()
            except Ended:
                ends.pop(0)
            finally:
                if (left := checkpointer._open.get(os.getpid())) is not None:
                    left.close()
        raise AssertionError("it ended too often")
