"""Parameters rounded through numpy views for an evaluation and put back; one of them is a number (0-dim)."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
model.scale = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
validation = torch.randn(2000, 32)
views = [p.detach().numpy() for p in model.parameters()]

checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in range(checkpointer.restore(), STEPS):
    if step % 2:
        at("evaluation")
        before = [view.copy() for view in views]
        for view in views:
            view[...] = view.round(2)
        with torch.no_grad():
            for part in validation.split(200):
                model(part)
        for view, old in zip(views, before, strict=True):
            view[...] = old
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model.scale * model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
