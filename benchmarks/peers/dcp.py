"""`torch.distributed.checkpoint` used synchronously, with the two newest checkpoints kept."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class DcpEveryStep:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer, self._directory = model, optimizer, directory

    def restore(self) -> int:
        """Load the newest complete checkpoint; its metadata file is written last."""
        steps = [int(path.parent.name) for path in self._directory.glob("*/.metadata")]
        if not steps:
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(self._directory / str(max(steps))))
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return max(steps)

    def step(self, completed: int) -> None:
        """Save, and remove what is no longer needed."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(self._directory / str(completed)))
        if dist.get_rank() == 0:
            shutil.rmtree(self._directory / str(completed - 2), ignore_errors=True)


make = DcpEveryStep
