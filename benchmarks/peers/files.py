"""`torch.save` of the state after every step, as people do it under torchrun."""

import os
from pathlib import Path

import torch
from torch import nn


class SavedEveryStep:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer, self._file = model, optimizer, directory / "state.pt"

    def restore(self) -> int:
        if not self._file.exists():
            return 0
        state = torch.load(self._file)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def step(self, completed: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": completed}
        torch.save(state, f"{self._file}.new")
        os.replace(f"{self._file}.new", self._file)


make = SavedEveryStep
