"""Deterministic steps in any number of ranks, whose number may change: python elastic_trainer.py STEPS GATE.

A step has the same samples whatever the number of ranks, and gradients are summed in the order of ranks. No step begins
before the one before it is committed, and before the file GATE says at least its number. With STEPS 0 the run ends with
the step that GATE names.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from resilient_run import Checkpointer

SAMPLES = 12


def say(**fields: object) -> None:
    """Print one JSON line, in one write: the ranks of a host share its output."""
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **fields}) + "\n").encode())


def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what is trained, as it is at the beginning."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return the loss of the rank's samples of a step."""
    data = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(step))
    return model(data[rank::world_size]).square().sum() / SAMPLES


def trained(worlds: Mapping[int, int]) -> str:
    """Return the digest of the parameters after steps in so many ranks each."""
    model, optimizer = begin()
    for step, world_size in sorted(worlds.items()):
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(world_size):
            optimizer.zero_grad()
            loss_of(model, step, rank, world_size).backward()
            for total, parameter in zip(totals, model.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    return sha256_of(model.parameters())


def sha256_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the digest of these tensors' bytes."""
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def main(steps: str, gate: str) -> None:
    """Train."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say(pid=os.getpid(), world=world_size)
    dist.init_process_group("gloo")
    model, optimizer = begin()
    checkpointer = Checkpointer(model=model, optimizer=optimizer, samples=0)
    step = checkpointer.restore()
    while step < (int(steps) or int(Path(gate).read_text())):
        step += 1
        while int(Path(gate).read_text()) < step:
            time.sleep(0.01)
        optimizer.zero_grad()
        loss_of(model, step, rank, world_size).backward()
        for parameter in model.parameters():
            grads = [torch.empty_like(parameter) for _ in range(world_size)]
            dist.all_gather(grads, parameter.grad)
            parameter.grad = torch.zeros_like(parameter)
            for grad in grads:
                parameter.grad += grad
        optimizer.step()
        checkpointer.values["samples"] += SAMPLES
        say(begun=step, by=world_size, samples=checkpointer.values["samples"], monotonic_s=time.monotonic())
        checkpointer.step(step)
        while (checkpointer.watermark or (0, 0))[1] < step:
            time.sleep(0.001)
        say(step=step, of=world_size, samples=checkpointer.values["samples"])
    say(params_sha256=sha256_of(model.parameters()))
    checkpointer.close()
    dist.barrier()
    # A thread of Gloo can abort a process in Python's own end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
