"""Trains deterministically in `loop`, each step only once a file allows it; a process makes its model once.

Usage: loop_trainer.py GATE STEPS [WAY]; the file GATE has the number of steps that may be made. In each step gradients
are set to None at the end: those of a step that did not come to its end must not be part of the next one.

The WAY says what happens besides: "ddp" and "fsdp" wrap the model; "raise" lets rank 0 raise an error of its own in
step 10, once, and "leave" lets it end its process group before, as a `finally` does; "stuck" lets rank 0 sleep in step
10, once; "restore" kills rank 1 beside a restore, once; "second" trains in the second loop of the process; "loader" has
a worker of a DataLoader.
"""

import gc
import hashlib
import os
import signal
import sys
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from gated_trainer import loss_of, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import resilient_run
from resilient_run import Checkpointer

EVENT = 10
_PAUSE_S = 0.03


class Trainer:
    """What stays while the process does."""

    def __init__(self, gate: Path, steps: int, way: str) -> None:
        self.gate, self.steps, self.way = gate, steps, way
        self.model = self.made()
        self.models: list[weakref.ref[nn.Module]] = []

    def made(self) -> nn.Module:
        """Return the model before the first step."""
        torch.manual_seed(0)
        return nn.Linear(64, 64)

    def once(self, name: str) -> bool:
        """Return True the first time, for all processes."""
        try:
            self.gate.with_suffix(f".{name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def train(self) -> int:
        """Train, print a JSON line for each step, and return the rank."""
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        model = fully_shard(self.made()) if self.way == "fsdp" else self.model
        called = DistributedDataParallel(model) if self.way == "ddp" else model
        if self.way == "ddp":
            vars(called)["cycle"] = [called]
            gc.freeze()  # as programs do that fork later
        optimizer = torch.optim.AdamW(model.parameters())
        with Checkpointer(model=model, optimizer=optimizer) as checkpointer:
            if checkpointer.planned_step and rank == 1 and self.way == "restore" and self.once("restore"):
                os.kill(os.getpid(), signal.SIGKILL)
            start = checkpointer.restore()
            kept = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
            kept += (len({id(each()) for each in self.models} - {id(None)}),)
            self.models.append(weakref.ref(called))
            say(rank=rank, pid=os.getpid(), started_at=start, kept=kept, world=world_size, training=model.training)
            model.eval()  # as where an evaluation does not come to its end
            numbers = iter(DataLoader(range(1000), num_workers=int(self.way == "loader")))
            for step in range(start + 1, self.steps + 1):
                next(numbers)
                while int(self.gate.read_text() or 0) < step:
                    time.sleep(0.01)
                time.sleep(_PAUSE_S)
                loss = loss_of(called, step, rank, world_size)
                loss.backward()
                if called is model and self.way != "fsdp":
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                if step == EVENT and rank == 0 and self.way in {"raise", "leave"} and self.once("raise"):
                    if self.way == "leave":
                        dist.destroy_process_group()
                    raise LookupError("an error of this rank's own")
                if step == EVENT and rank == 0 and self.way == "stuck" and self.once("stuck"):
                    time.sleep(1000)
                # Before the step can be committed: a rank that is killed then does not say it any more.
                say(rank=rank, step=step, loss=loss.item())
                checkpointer.step(step)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        if rank == 0:
            sha256 = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in whole))
            say(params_sha256=sha256.hexdigest())
        dist.destroy_process_group()
        return rank


if __name__ == "__main__":
    trainer = Trainer(Path(sys.argv[1]), int(sys.argv[2]), (*sys.argv, "")[3])
    if trainer.way == "second":
        resilient_run.loop(lambda: None)
    rank = resilient_run.loop(trainer.train)
    say(returned=rank)
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)
