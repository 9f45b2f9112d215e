"""A script with checkpoint files by `torch.distributed.checkpoint`, every fourth step, and four lines of resilient-run.

The files are as before; each step is kept in memory besides. After a failure the memory comes first, and a new run
begins with the newest files.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from resilient_run import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--dump-folder", type=Path, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
for layer in (model[0], model[3]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
torch.manual_seed(dist.get_rank())


def state() -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}


def load_files() -> int:
    """Return the step of the newest checkpoint files, which are loaded, 0 if there are none."""
    steps = [int(path.parent.name) for path in args.dump_folder.glob("checkpoint/*/.metadata")]
    if not steps:
        return 0
    loaded = state()
    dcp.load(loaded, checkpoint_id=args.dump_folder / "checkpoint" / str(max(steps)))
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return max(steps)


checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
for step in range(checkpointer.restore() or load_files(), args.steps):
    inputs = torch.randn(16, 32)
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    # Files first: a run that goes on from this step does not come here again.
    if (step + 1) % 4 == 0:
        dcp.save(state(), checkpoint_id=args.dump_folder / "checkpoint" / str(step + 1))
    checkpointer.step(step + 1)

digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.full_tensor().detach().numpy().tobytes())
if dist.get_rank() == 0:
    print(f"parameters {digest.hexdigest()}", flush=True)
checkpointer.close()
dist.destroy_process_group()
os._exit(0)
