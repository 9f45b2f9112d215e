"""FSDP2 with mixed precision, sharded or replicated and sharded; or with averages swapped in to evaluate."""

import sys

import torch
import torch.distributed as dist
from harness import RANK, STEPS, Checkpointer, at, finish
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VARIANT = sys.argv[1]

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
mesh = None
if VARIANT == "hybrid":
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
average = {name: p.detach().clone() for name, p in model.named_parameters()}
validation = torch.randn(400, 32)
torch.manual_seed(RANK)

checkpointer = Checkpointer(model=model, optimizer=optimizer, average=average)
for step in range(checkpointer.restore(), STEPS):
    average = checkpointer.values["average"]
    if VARIANT == "evaluation" and step % 2:
        at("evaluation")
        with torch.no_grad():
            before = {name: p.clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(average[name])
            for part in validation.split(100):
                model(part)
            model.reshard()  # the outermost parameters stay whole after a forward pass
            for name, p in model.named_parameters():
                p.copy_(before[name])
    at("data")
    inputs = torch.randn(32, 32)
    at("forward")
    loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
