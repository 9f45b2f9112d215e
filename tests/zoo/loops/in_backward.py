"""The optimizer steps inside backward: one for each parameter, by a hook, as torch's tutorial has it."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizers = {name: torch.optim.Adam([p], lr=1e-3, foreach=False) for name, p in model.named_parameters()}
by_parameter = {p: optimizers[name] for name, p in model.named_parameters()}


def step_now(parameter: torch.Tensor) -> None:
    at("optimizer")
    by_parameter[parameter].step()
    by_parameter[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_now)

names = {f"optimizer_{name.replace('.', '_')}": optimizer for name, optimizer in optimizers.items()}
checkpointer = Checkpointer(model=model, **names)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
