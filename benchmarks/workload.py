"""The training that benchmarks run: a stack of linear layers with AdamW, as large as asked for."""

import itertools
import math
import os
from typing import Any

import torch
from torch import nn

_WIDTH = 1024
_BYTES_PER_PARAMETER = 12  # float32, and AdamW's two moments


def build(state_bytes: int, tensors: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer whose states together take about `state_bytes`.

    Args:
        state_bytes: Of parameters and moments.
        tensors: How many parameters the model has: a Llama of 7B has 291, one of 70B 723. None for layers of 12 MiB.
    """
    torch.manual_seed(0)
    if tensors is None:
        layers, width = max(1, round(state_bytes / (_BYTES_PER_PARAMETER * _WIDTH * (_WIDTH + 1)))), _WIDTH
    else:
        layers = max(1, tensors // 2)
        width = max(1, round(math.sqrt(state_bytes / (_BYTES_PER_PARAMETER * layers))))
    pairs = ((nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    model = nn.Sequential(*itertools.chain.from_iterable(pairs))
    return model, torch.optim.AdamW(model.parameters())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int) -> None:
    """One forward, backward and update."""
    loss_of(model, batch=batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, *, batch: int) -> torch.Tensor:
    """The loss of one forward pass over random data."""
    width = next(model.parameters()).shape[-1] if not isinstance(model, nn.Sequential) else model[0].in_features
    loss: torch.Tensor = model(torch.randn(batch, width)).square().mean()
    return loss


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return every tensor of the state, once the optimizer has made a step."""
    moments: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return [_local(tensor.detach()) for tensor in (*model.parameters(), *moments)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def emit(line: str) -> None:
    """Write one line to stdout in one call, so that lines of different ranks never interleave."""
    os.write(1, f"{line}\n".encode())
