"""SAM: weights are perturbed for a second backward pass and put back, then the base optimizer steps."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    targets = inputs.sum(1, keepdim=True)
    at("forward")
    loss = (model(inputs) - targets).square().mean()
    at("backward")
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(p.grad, alpha=0.05 / (norm + 1e-12).item())
    optimizer.zero_grad()
    at("forward")
    perturbed = (model(inputs) - targets).square().mean()
    at("backward")
    perturbed.backward()
    for p, old in zip(model.parameters(), before, strict=True):
        p.data.copy_(old)
    at("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
