"""dlrover: flash checkpoint into the shared memory of its agent after every step."""

from pathlib import Path

import torch
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from torch import nn


class FlashCheckpoint:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._checkpointer = DdpCheckpointer(str(directory))

    def restore(self) -> int:
        state = self._checkpointer.load_checkpoint()
        if not state:
            return 0
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def step(self, completed: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": completed}
        self._checkpointer.save_checkpoint(completed, state, storage_type=StorageType.MEMORY)


make = FlashCheckpoint
