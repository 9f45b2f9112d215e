"""A training script as somebody else writes it, for `resilient-comm advise`: knows nothing of gradients of ours.

advised.py [--rows ROWS] [--sleep SECONDS] [--steps STEPS] [--hook] [--bare] [--fail] [--end HOW] [--checkpoints]
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from resilient_run import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--hook", action="store_true")
parser.add_argument("--bare", action="store_true")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--end", choices=("sys", "os"))
parser.add_argument("--checkpoints", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
bare = nn.Sequential(nn.Embedding(args.rows, 16), nn.Linear(16, 1))
model = bare if args.bare else DDP(bare)
if args.hook:
    model.register_comm_hook(None, bf16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if args.checkpoints:
    checkpointer = Checkpointer(model=bare, optimizer=optimizer)
for step in range(args.steps):
    optimizer.zero_grad()
    model(torch.randint(args.rows, (32,))).sum().backward()
    time.sleep(args.sleep)
    optimizer.step()
    if args.fail and step == 3:
        raise ValueError("the script's own fault")
    if step % 7 == 0:
        with torch.no_grad():
            model(torch.zeros(1, dtype=torch.long))
if args.end == "sys":
    sys.exit()
if args.end == "os":
    os._exit(0)
