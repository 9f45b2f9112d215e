"""The smallest script that survives: `resilient-run --standalone --nproc-per-node 2 examples/minimal.py`."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resilient_run import Checkpointer

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(8, 1)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpointer = Checkpointer(model=model, optimizer=optimizer)

for step in range(checkpointer.restore(), 1000):
    inputs = torch.randn(32, 8)
    loss = (parallel(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step + 1)

if dist.get_rank() == 0:
    print(f"largest weight error: {(model.weight - 1).abs().max():.6f}", flush=True)
checkpointer.close()
dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
