"""Small models and data for loops of frameworks, and a loop's life over several generations in one process."""

import os
import random
from collections import Counter, defaultdict, deque
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


class Wave:
    """An object of the script's own with attributes and slots."""

    __slots__ = ("__dict__", "phase")

    def __init__(self) -> None:
        self.phase = 0.0
        self.heights: list[float] = []

    def rise(self) -> float:
        self.phase += 0.1
        self.heights.append(self.phase)
        return self.phase


class Remembers:
    """Weighs a loss by all that it has been asked before, in attributes of every kind that is kept."""

    asked = 0

    def prepare(self) -> None:
        self.beside = nn.Linear(4, 1)
        self.window: deque[float] = deque([0.5], maxlen=3)
        self.metrics = {"train": defaultdict(list), "seen": {1, 2}, "counts": Counter(a=3)}
        self.random, self.numpy = random.Random(1), np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(1)
        self.wave = self.same = Wave()
        self.mean = self.first = torch.zeros(())
        self.table, self.large = np.zeros(3), torch.zeros(1 << 15)
        self.nested = [(self.wave, {"a": None})]
        self.tags = set(range(100))

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        type(self).total = getattr(type(self), "total", 0) + 1
        self.window.append(self.random.random() + self.numpy.random())
        self.metrics["train"]["loss"].append(loss.item())
        self.metrics["seen"].add(self.asked)
        self.metrics["counts"]["a"] += 1
        self.tags -= set(range(100)) - {9, 64}  # in another order than a set that is made of the two
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.table[self.asked % 3] += 1
        self.late = torch.rand(2, generator=self.torch)
        self.large[self.asked] += self.asked
        self.nested.append(({"a": self.asked}, self.nested[0]))
        for weight in self.beside.parameters():
            weight.data.mul_(0.9).add_(0.01)
        drawn = sum(self.window) + self.same.rise() + self.mean + self.first + self.table.sum() + self.late.sum()
        drawn += self.large.sum() + len(self.nested) + len(self.metrics["train"]["loss"]) + len(self.metrics["seen"])
        drawn += self.metrics["counts"]["a"]
        return loss * (drawn + self.beside.weight.sum().detach() + min(self.asked, type(self).total)) / 10


class Opaque(Remembers):
    """Makes an object that no checkpoint can have."""

    made: Any = None

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        if self.asked == 3:
            self.made = iter([loss.item()])
        return super().weigh(loss)


def weighing(base: type, kind: type = Remembers) -> Any:
    """Return a class of Trainer whose loss is weighed."""

    class Weighing(base, kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.prepare()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return self.weigh(super().compute_loss(*args, **kwargs))

    return Weighing


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

        def step(self: Checkpointer, n: int | None = None, **told: Any) -> None:
            advance(self, n, **told)
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
