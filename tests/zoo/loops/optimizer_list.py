"""Several optimizers in one container with the flat state dict that torchtitan's OptimizersContainer has."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


class OptimizersContainer(torch.optim.Optimizer):
    """One optimizer for each part of the model, as torchtitan has it for pipelines."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": 1e-3})

    def step(self, *args, **kwargs) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            f"{index}.{key}": value
            for index, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True))
            for key, value in get_optimizer_state_dict(part, optimizer, options=options).items()
        }

    def load_state_dict(self, state: dict) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for index, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            mine = {key.removeprefix(f"{index}."): v for key, v in state.items() if key.startswith(f"{index}.")}
            set_optimizer_state_dict(part, optimizer, mine, options=options)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.Sequential(nn.ReLU(), nn.Linear(256, 1)))
optimizers = OptimizersContainer([model[0], model[1]])

checkpointer = Checkpointer(model=model, optimizers=optimizers)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(64, 32)
    optimizers.zero_grad()
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizers.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
