"""A thread keeps an exponential average of the weights, written by `.data` while the next step goes on."""

import threading

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
average = nn.ParameterList(p.detach().clone() for p in model.parameters())
optimizer = torch.optim.Adam([*model.parameters(), *average], lr=1e-3)  # it never gets a gradient of the average


def follow(weights: list[torch.Tensor]) -> None:
    for mine, weight in zip(average, weights, strict=True):
        mine.data.mul_(0.9).add_(weight, alpha=0.1)


checkpointer = Checkpointer(model=model, optimizer=optimizer, average=average)
for step in range(checkpointer.restore(), STEPS):
    follower = threading.Thread(target=follow, args=([p.detach().clone() for p in model.parameters()],))
    follower.start()
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    follower.join()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
