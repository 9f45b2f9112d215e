"""The training loop of `recovery_time.py`, the same under every launcher; `--keeper` says who keeps the state.

With `--loop`, the keeper also calls the training again in processes that survive; model and optimizer stay in them.
"""

import argparse
import importlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import build, emit, train_step

BATCH = 16


class Keeper(Protocol):
    """What the training loop needs from whoever keeps its state."""

    def restore(self) -> int: ...

    def step(self, completed: int) -> None: ...


def make_keeper(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Keeper:
    """Return the keeper in `peers/<name>.py`, which alone imports the package that it stands for."""
    keeper: Keeper = importlib.import_module(f"peers.{name}").make(model, optimizer, directory)
    return keeper


def main() -> None:
    """Train, and report every completed step with the time on the clock that all processes of the host share."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keeper", required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--state-mb", type=int, required=True)
    options.add_argument("--directory", type=Path, required=True)
    options.add_argument("--tensors", type=int)
    options.add_argument("--loop", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    model, optimizer = build(args.state_mb << 20, args.tensors)
    lives = itertools.count()

    def train() -> None:
        life = next(lives)
        dist.init_process_group("gloo")
        parallel = DistributedDataParallel(model)
        keeper = make_keeper(args.keeper, model, optimizer, args.directory)
        for step in range(keeper.restore() + 1, args.steps + 1):
            train_step(parallel, optimizer, batch=BATCH)
            keeper.step(step)
            line = {"rank": dist.get_rank(), "pid": os.getpid(), "life": life, "step": step}
            emit(json.dumps({**line, "ranks": dist.get_world_size(), "monotonic_s": time.monotonic()}))
        del parallel  # a DDP module that outlives its process group can deadlock in torch's destructors
        dist.destroy_process_group()

    if args.loop:
        importlib.import_module(f"peers.{args.keeper}").loop(train)
    else:
        train()
    # Peers leave threads and processes behind that would keep the interpreter; what is measured has been written.
    os._exit(0)


if __name__ == "__main__":
    main()
