"""resilient-run: a capture at every step."""

from pathlib import Path

import torch
from torch import nn

from resilient_run import Checkpointer, loop

__all__ = ["loop", "make"]


def make(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Checkpointer:
    return Checkpointer(model=model, optimizer=optimizer)
