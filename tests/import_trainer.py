"""A training script for tests of imports: under torchrun it saves with plain DCP, under resilient-run it goes on.

Prints the digest of parameters and moments before the first step and after each, as one JSON line of rank 0.
"""

import argparse
import hashlib
import json
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from resilient_run import Checkpointer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tell(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (
            parameter,
            *(optimizer.state[parameter].get(name) for name in ("exp_avg", "exp_avg_sq", "step")),
        ):
            if tensor is not None:
                digest.update(full(tensor).detach().numpy().tobytes())
    if dist.get_rank() == 0:
        os.write(1, f"{json.dumps({'step': step, 'sha256': digest.hexdigest()})}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", help="train under DDP and save the last step there, with dcp.save")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--die", action="store_true", help="in the first generation rank 1 dies once it has its state")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if args.save is None else 5)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    parallel = fully_shard(model) if args.fsdp else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(model=model, optimizer=optimizer, epoch=0, rng=False) if args.save is None else None
    begin = 0 if checkpointer is None else checkpointer.restore()
    tell(begin, model, optimizer)
    generation = os.environ.get("RESILIENT_GENERATION", "0")
    dist.barrier()
    if args.die and generation == "1" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(begin + 1, args.steps + 1):
        optimizer.zero_grad()
        # The same on every rank, so that the world size makes no difference but in rounding.
        parallel(torch.full((4, 7), 1.0 / step)).square().sum().backward()
        optimizer.step()
        tell(step, model, optimizer)
        if checkpointer is not None:
            checkpointer.step(step)
    if args.save is not None:
        state = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=args.save)
    if checkpointer is not None:
        checkpointer.close()
    del parallel
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
