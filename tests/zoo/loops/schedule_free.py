"""schedulefree's AdamW: the weights are other ones while it evaluates, between optimizer.eval() and train()."""

import schedulefree
import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.0025, warmup_steps=5)
validation = torch.randn(2000, 32)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
optimizer.train()
for step in range(checkpointer.restore(), STEPS):
    if step % 2:
        at("evaluation")
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            for part in validation.split(200):
                model(part)
    at("data")
    model.train()
    optimizer.train()
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
