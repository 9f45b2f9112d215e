"""torch's own DataLoader with shuffling and random augmentation; an epoch that is under way is begun again."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
generator = torch.Generator()
loader = DataLoader(TensorDataset(torch.randn(96, 32)), batch_size=16, shuffle=True, generator=generator)

checkpointer = Checkpointer(model=model, optimizer=optimizer)
step = checkpointer.restore()
while step < STEPS:
    generator.manual_seed(step // len(loader))
    at("data")
    for index, (clean,) in enumerate(loader):
        if index < step % len(loader):
            continue
        inputs = clean + 0.1 * torch.randn_like(clean)
        at("forward")
        loss = (model(inputs) - clean.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        at("backward")
        loss.backward()
        at("optimizer")
        optimizer.step()
        step += 1
        checkpointer.step(step, loss)
        if step % len(loader) == 0 or step == STEPS:
            break
        at("data")
finish(checkpointer)
