"""Trains as `gated_trainer` does, with steps that some ranks call unhealthy.

Usage: unhealthy_trainer.py GATE STEPS [--poison STEP:RANK…] [--doubt STEP:RANK…] [--stubborn]; the loss of a poisoned
rank is not finite, and a doubted one is called unhealthy although it is. A stubborn script skips nothing.
"""

import argparse
import os
import time
from pathlib import Path

import gated_trainer
import torch
import torch.distributed as dist

from resilient_run import Checkpointer


def main(gate: Path, steps: int, poison: list[str], doubt: list[str], *, stubborn: bool) -> None:
    """Train, and print a JSON line for each step."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = gated_trainer.begin()
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    start, skipped = checkpointer.restore(), sorted(checkpointer.unhealthy_steps)
    gated_trainer.say(rank=rank, pid=os.getpid(), started_at=start, skips=skipped)
    for step in range(start + 1, steps + 1):
        if step in skipped and not stubborn:
            continue
        while int(gate.read_text() or 0) < step:
            time.sleep(0.01)
        optimizer.zero_grad()
        loss = gated_trainer.loss_of(model, step, rank, world_size)
        if f"{step}:{rank}" in poison:
            loss = loss * torch.inf
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        gated_trainer.say(rank=rank, step=step, loss=loss.item())
        checkpointer.step(step, healthy=loss.isfinite() & (f"{step}:{rank}" not in doubt))
    if rank == 0:
        gated_trainer.say(params_sha256=gated_trainer.sha256_of(model))
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("gate", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--poison", nargs="*", default=[])
    parser.add_argument("--doubt", nargs="*", default=[])
    parser.add_argument("--stubborn", action="store_true")
    main(**vars(parser.parse_args()))
