"""nvidia-resiliency-ext: local checkpoints of every rank on tmpfs, saved after every step."""

from pathlib import Path

import torch
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from torch import nn


class CpuStateDict(BasicTensorAwareStateDict):
    """Its basic class, which refuses tensors that are not on a GPU, with tensors that are not."""

    def __init__(self, state_dict: dict) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """The optimizer changes them in place, so they are copied even from CPU to CPU."""
        self.insert_tensors([tensor.clone() for tensor in self.pop_tensors()])

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They never leave the CPU."""


class LocalCheckpoints:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._manager = LocalCheckpointManager(directory)

    def restore(self) -> int:
        step = self._manager.find_latest()
        if step < 0:
            return 0
        state_dict, _ = self._manager.load()
        self._model.load_state_dict(state_dict.state_dict["model"])
        self._optimizer.load_state_dict(state_dict.state_dict["optimizer"])
        return step

    def step(self, completed: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._manager.save(CpuStateDict(state), completed)


make = LocalCheckpoints
