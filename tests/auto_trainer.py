"""One rank of a training whose gradients `register(model, "auto")` sums, beside a twin that DDP sums; prints JSON.

auto_trainer.py ROWS [--sparse] [--lossy] [--steps STEPS]

It trains until a choice is made, goes on for some steps, and once more with a new hook that is given the state.
"""

import argparse
import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from resilient_run.comm.hook import register

parser = argparse.ArgumentParser()
parser.add_argument("rows", type=int)
parser.add_argument("--sparse", action="store_true", help="the table has sparse gradients")
parser.add_argument("--lossy", action="store_true")
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
bare = nn.Sequential(nn.Embedding(args.rows, 16, sparse=args.sparse), nn.Linear(16, 1))
model, twin = DDP(copy.deepcopy(bare)), DDP(bare)
hook = register(model, "auto", lossy=args.lossy, seconds=0.5)
torch.manual_seed(dist.get_rank() + 1)


def train(steps: int, *, to_choice: bool = False) -> int:
    """Train both; return after how many steps."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.001) for each in (model, twin)]
    for step in range(steps):
        if to_choice and hook.chosen is not None:
            return step
        batch = torch.randint(args.rows, (32,))
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(batch).square().sum().backward()
            optimizer.step()
    return steps


def same() -> bool:
    """Tell whether both models are, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


steps = train(args.steps, to_choice=True)
first = {
    "steps": steps,
    "same_until_then": same(),
    "chosen": hook.chosen,
    "scheme": hook.scheme.name,
    "received_bytes": hook.world.traffic.received_bytes,
}
train(5)
first["same_after"] = same()
state = hook.state_dict()
hook.close()
model = DDP(model.module)
hook = register(model, "auto", lossy=args.lossy)
hook.load_state_dict(state)
train(3)
first |= {"chosen_again": hook.chosen, "scheme_again": hook.scheme.name, "same_again": same()}
hook.close()
print(json.dumps(first), flush=True)
dist.destroy_process_group()
