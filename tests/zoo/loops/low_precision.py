"""bf16 parameters whose optimizer works on fp32 masters, and activations kept in a float8 buffer."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).bfloat16()
model.register_buffer("last", torch.zeros(64, 32).to(torch.float8_e4m3fn))
masters = nn.ParameterList(p.detach().float() for p in model.parameters())
optimizer = torch.optim.Adam(masters.parameters(), lr=1e-3)

checkpointer = Checkpointer(model=model, optimizer=optimizer, masters=masters)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    model.last.copy_(inputs.to(torch.float8_e4m3fn))
    at("forward")
    loss = (model(inputs.bfloat16()).float() - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad, p.grad = p.grad.float(), None
    at("optimizer")
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
