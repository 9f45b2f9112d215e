"""Fine-tuning that unfreezes a part at a time: each time the optimizer's parameters grow by a group."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn

torch.manual_seed(0)
parts = nn.ModuleList([nn.Linear(32, 256), nn.Linear(256, 256), nn.Linear(256, 1)])
EVERY = max(STEPS // 3, 1)


def optimizer_for(stage: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": part.parameters()} for part in list(parts)[2 - stage :]], lr=1e-3)


class Current:
    """The optimizer of the stage that training is in; made anew when the stage changes."""

    def __init__(self) -> None:
        self.stage, self.optimizer = 0, optimizer_for(0)

    def state_dict(self) -> dict:
        return {"stage": self.stage, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.stage, self.optimizer = state["stage"], optimizer_for(state["stage"])
        self.optimizer.load_state_dict(state["optimizer"])


current = Current()
checkpointer = Checkpointer(model=parts, current=current)
for step in range(checkpointer.restore(), STEPS):
    if (stage := min(step // EVERY, 2)) != current.stage:
        current.stage, current.optimizer = stage, optimizer_for(stage)
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (parts[2](parts[1](parts[0](inputs).relu()).relu()) - inputs.sum(1, keepdim=True)).square().mean()
    parts.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    current.optimizer.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
