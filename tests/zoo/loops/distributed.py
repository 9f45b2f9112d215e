"""DDP on all ranks, with the evaluation that its argument names."""

import sys

import torch
import torch.distributed as dist
from harness import RANK, STEPS, Checkpointer, at, finish
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_ema import ExponentialMovingAverage

VARIANT = sys.argv[1]

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
local = VARIANT in ("local sgd", "collective")
parallel = model if VARIANT == "collective" else DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=local)
state = {}
if VARIANT == "local sgd":
    alone, _ = dist.new_subgroups(group_size=1)
    parallel.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=4), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(optimizer, averager)
if VARIANT == "ema":
    state["ema"] = ExponentialMovingAverage(model.parameters(), decay=0.9)
if VARIANT == "early stopping":
    state |= {"best": float("inf"), "bad": 0, "stop": False}
validation = torch.randn(2000, 32)
torch.manual_seed(RANK)


def evaluate() -> torch.Tensor:
    with torch.no_grad():
        errors = [(model(part) - part.sum(1, keepdim=True)).square().mean() for part in validation.split(200)]
    return torch.stack(errors).mean()


checkpointer = Checkpointer(model=model, optimizer=optimizer, **state)
done = checkpointer.restore()
if VARIANT == "local sgd":
    parallel._comm_hooks[0][1].iter = done  # what torch's hook counts, and does not keep
for step in range(STEPS if VARIANT == "early stopping" and checkpointer.values["stop"] else done, STEPS):
    if step % 2 and VARIANT in ("ema", "collective"):
        at("evaluation")
        if VARIANT == "ema":
            with state["ema"].average_parameters():
                evaluate()
        else:
            # All ranks look at the mean of their weights, then go on with their own.
            mine = [p.detach().clone() for p in model.parameters()]
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
            evaluate()
            for p, own in zip(model.parameters(), mine, strict=True):
                p.data.copy_(own)
    at("data")
    inputs = torch.randn(32, 32)
    at("forward")
    loss = (parallel(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    if VARIANT == "ema":
        state["ema"].update()
    if VARIANT == "early stopping" and step % 2:
        at("evaluation")
        values, error = checkpointer.values, evaluate()
        dist.all_reduce(error)
        values["bad"] = 0 if error < 0.95 * values["best"] else values["bad"] + 1
        values["best"] = min(values["best"], error.item())
        values["stop"] = values["bad"] >= 3
    checkpointer.step(step + 1, loss)
    if VARIANT == "early stopping" and checkpointer.values["stop"]:
        break
finish(checkpointer)
