"""LBFGS: a closure is evaluated several times in a step, and the optimizer's state grows."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=10)
inputs = torch.randn(128, 16)
targets = inputs.sin().sum(1, keepdim=True)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    at("forward")
    loss = (model(inputs) - targets).square().mean()
    at("backward")
    loss.backward()
    return loss


checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in range(checkpointer.restore(), STEPS):
    at("optimizer")
    loss = optimizer.step(closure)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
