"""A `Checkpointer` that is made before `deepspeed.initialize`, which is refused at the first step."""

import deepspeed
import torch
from torch import nn

from resilient_run import Checkpointer

deepspeed.init_distributed(verbose=False)
print("begun", flush=True)
model = nn.Linear(8, 1)
checkpointer = Checkpointer(model=model)
checkpointer.restore()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
)
for step in range(5):
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    checkpointer.step(step + 1)
