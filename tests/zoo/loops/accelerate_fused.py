"""Accelerate as its quick tour has it: prepare() wraps the optimizer, whose kernels are fused.

A table per domain, and each step trains one, but the optimizer decays all of them. So copying the state, 64 MiB,
takes longer than a forward and backward pass.
"""

import torch
from accelerate import Accelerator
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.nn import functional as F

DOMAINS = 8


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(2**13, 64) for _ in range(DOMAINS))
        self.head = nn.Linear(64, 2)

    def forward(self, words: torch.Tensor, domain: int) -> torch.Tensor:
        return self.head(self.tables[domain](words))


torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = Domains()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, fused=True)
optimizer = accelerator.prepare(optimizer)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    words = torch.randint(2**13, (16, 20))
    optimizer.zero_grad(set_to_none=False)
    at("forward")
    loss = F.cross_entropy(model(words, step % DOMAINS), words.sum(1) % 2)
    at("backward")
    accelerator.backward(loss)
    at("optimizer")
    optimizer.step()
    checkpointer.step(step + 1, loss)
finish(checkpointer)
