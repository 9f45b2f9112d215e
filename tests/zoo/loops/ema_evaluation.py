"""torch_ema as its README has it: the averages are swapped in for an evaluation of every second step."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch_ema import ExponentialMovingAverage

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ema = ExponentialMovingAverage(model.parameters(), decay=0.9)
validation = torch.randn(4000, 32)


def evaluate() -> float:
    with torch.no_grad():
        errors = [(model(part) - part.sum(1, keepdim=True)).square().mean() for part in validation.split(200)]
    return torch.stack(errors).mean().item()


checkpointer = Checkpointer(model=model, optimizer=optimizer, ema=ema, best=float("inf"))
for step in range(checkpointer.restore(), STEPS):
    if step % 2:
        at("evaluation")
        with ema.average_parameters():
            checkpointer.values["best"] = min(checkpointer.values["best"], evaluate())
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    ema.update()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
