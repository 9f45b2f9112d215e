"""bf16 parameters with an optimizer of one's own that keeps its moments in fp32, as torchao's and apex's do."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn


class Moments32(torch.optim.Optimizer):
    """Momentum in fp32 for parameters of any dtype."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                state["momentum"].mul_(0.9).add_(p.grad.float())
                p.add_(state["momentum"].to(p.dtype), alpha=-group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).bfloat16()
optimizer = Moments32(model.parameters(), lr=1e-3)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    optimizer.zero_grad()
    at("forward")
    loss = (model(inputs.bfloat16()).float() - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
