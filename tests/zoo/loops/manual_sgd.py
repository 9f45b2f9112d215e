"""SGD by hand, without torch.optim: `p.data -= lr * p.grad`, and a look-ahead copy by `p.data.copy_`."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
slow = nn.ParameterList(p.detach().clone() for p in model.parameters())

checkpointer = Checkpointer(model=model, slow=slow)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    at("optimizer")
    for p in model.parameters():
        p.data -= 0.01 * p.grad
        p.grad = None
    if step % 5 == 4:
        for p, anchor in zip(model.parameters(), slow, strict=True):
            anchor.data += 0.5 * (p.data - anchor.data)
            p.data.copy_(anchor)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
