"""Trains deterministically, each step only once a file allows it, so that a test decides what happens when.

Usage: gated_trainer.py GATE STEPS; the file GATE has the number of steps that may be made.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilient_run import Checkpointer

_WIDTH = 64


def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    return model, torch.optim.AdamW(model.parameters())


def loss_of(model: torch.nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return the loss of a rank in a step."""
    generator = torch.Generator().manual_seed(world_size * step + rank)
    return model(torch.randn(8, _WIDTH, generator=generator)).square().mean()


def sha256_of(model: torch.nn.Module) -> str:
    """Return the hash of the parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(gate: Path, steps: int) -> None:
    """Train, and print a JSON line for each step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = begin()
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    start = checkpointer.restore()
    say(rank=rank, pid=os.getpid(), started_at=start)
    for step in range(start + 1, steps + 1):
        while int(gate.read_text() or 0) < step:
            time.sleep(0.01)
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, world_size)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        # Before the step can be committed: a rank that is killed then does not say it any more.
        say(rank=rank, step=step, loss=loss.item())
        checkpointer.step(step)
    if rank == 0:
        say(params_sha256=sha256_of(model))
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


def say(**line: object) -> None:
    """Print a JSON line."""
    # One write, which nothing of another rank can come into.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
