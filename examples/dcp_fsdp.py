"""A script that saves with `torch.distributed.checkpoint`, into memory: DCP's own calls with our reader and writer.

    resilient-run --standalone --nproc-per-node 4 --rr-persist /mnt/ckpt examples/dcp_fsdp.py --steps 5000
    torchrun --standalone --nproc-per-node 2 examples/dcp_fsdp.py --load /mnt/ckpt RUN_ID

The second loads what the first has persisted, into another world size; RUN_ID is the directory in /mnt/ckpt.
"""

import argparse
import hashlib
import json
import os
import signal
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from resilient_run import MemoryReader, MemoryTier, MemoryWriter, PersistedReader

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--sync", action="store_true", help="save with dcp.save in place of dcp.async_save")
parser.add_argument("--demo-kill", type=int, metavar="STEP", help="kill rank 1 there, once")
parser.add_argument("--load", nargs=2, metavar=("TARGET", "RUN_ID"), help="only load what that run has persisted")
args = parser.parse_args()

dist.init_process_group("gloo")
background = dist.new_group(backend="gloo")  # saves run beside training, so they need a group of their own
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state_dict() -> dict:
    """Return the state that is saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def load(reader: dcp.StorageReader) -> int:
    """Load the state and return the step that it is of."""
    state = state_dict()
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def report() -> None:
    """Print a hash of all tensors, the same for each way of sharding them."""
    tensors = [*model.parameters(), *(state[key] for state in optimizer.state.values() for key in sorted(state))]
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    if dist.get_rank() == 0:
        digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in whole)).hexdigest()
        print(json.dumps({"step": step, "sha256": digest}), flush=True)


def leave() -> NoReturn:
    """End this process at once: in Python's own end a thread of Gloo can abort it (docs/api.md)."""
    dist.destroy_process_group()
    os._exit(0)


step = 0
if args.load:
    step = load(PersistedReader(*args.load))
    report()
    leave()

with MemoryTier() as memory:
    loaded = memory.step > 0
    if loaded:
        step = load(MemoryReader(memory))
        report()
    saved = None
    while step < args.steps:
        torch.manual_seed(step)
        model(torch.randn(16, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report()
        if saved is not None:
            saved.result()
        if args.demo_kill == step and dist.get_rank() == 1 and not loaded:
            os.kill(os.getpid(), signal.SIGKILL)
        writer = MemoryWriter(memory, step=step)
        if args.sync:
            dcp.save(state_dict(), storage_writer=writer)
        else:
            saved = dcp.async_save(state_dict(), storage_writer=writer, process_group=background)
    if saved is not None:
        saved.result()
leave()
