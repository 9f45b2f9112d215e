"""One rank of two whose backward passes reach two models of `register(model, "auto")` in opposite orders; prints JSON.

It trains beside twins that DDP sums.
"""

import copy
import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from resilient_run.comm.hook import register
from resilient_run.comm.trial import trial

trial._FIRST_STEPS, trial._FIRST_WARM_UP, trial._WARM_UP, trial._LEAST_STEPS = 2, 0, 0, 1  # type: ignore[misc]
trial._HOPELESS = 1e9  # type: ignore[misc]  # kernels are compiled in the first step that needs them
STEPS = 60

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
bare = [nn.Linear(200, 100), nn.Linear(200, 100)]
# DDP's own sums in two orders need groups of their own. Without the option its first step asks for one order.
twins, models = (
    [DDP(copy.deepcopy(each), process_group=dist.new_group(), find_unused_parameters=True) for each in bare]
    for _ in range(2)
)
hooks = [register(model, "auto", seconds=0.01) for model in models]
torch.manual_seed(dist.get_rank() + 1)
order = (0, 1) if dist.get_rank() else (1, 0)
same, steps = True, 0
while steps < STEPS and any(hook.chosen is None for hook in hooks):
    inputs = torch.randn(2, 8, 200)
    inputs[:, :, 20:] = 0  # so sparse that zen is tried
    for pair in (models, twins):
        for each in pair:
            each.zero_grad()
        loss = torch.stack([pair[place](inputs[place]).square().sum() for place in order]).sum()
        loss.backward()
    same &= all(
        torch.equal(mine.grad, its.grad)
        for model, twin in zip(models, twins, strict=True)
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True)
    )
    steps += 1
for hook in hooks:
    hook.close()
print(json.dumps({"same": same, "chosen": [hook.chosen for hook in hooks], "steps": steps}), flush=True)
dist.destroy_process_group()
