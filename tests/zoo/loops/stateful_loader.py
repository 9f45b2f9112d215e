"""torchdata's StatefulDataLoader, with random augmentation and as many workers as its argument says."""

import random
import sys

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

WORKERS = int(sys.argv[1])


class Noisy(torch.utils.data.Dataset):
    """Samples with noise of their own, drawn in the worker that loads them."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        clean = torch.full((32,), index / 256)
        return clean + random.Random(index).random() + (torch.randn(32) if WORKERS == 0 else 0)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = StatefulDataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=WORKERS)

checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, unjudged=("loader",))
step = checkpointer.restore()
generator = torch.get_rng_state() if step else None
while step < STEPS:
    at("data")
    batches = iter(loader)
    if generator is not None:
        torch.set_rng_state(generator)  # going on with an epoch made an iterator, which draws from it
        generator = None
    for inputs in batches:
        at("forward")
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        at("backward")
        loss.backward()
        at("optimizer")
        optimizer.step()
        step += 1
        checkpointer.step(step, loss)
        if step == STEPS:
            break
        at("data")
finish(checkpointer)
