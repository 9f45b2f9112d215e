"""A loop that handles its tensors between steps as a script may: swaps, resizes, copies, pickles and shares them."""

import copy
import io
import pickle

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.nn import functional as F

torch.__future__.set_swap_module_params_on_conversion(True)


class Model(nn.Module):
    """Has a cache that is as large as the batch, and a part whose shape the first batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 32))
        self.register_buffer("cache", torch.empty(0, 32), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.cache.resize_(inputs.shape).copy_(inputs)
        return self.layers(self.cache)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# As `torch.empty` makes flags: with the bytes that the heap had.
ring = {"done": torch.full((1 << 17,), 193, dtype=torch.uint8).view(torch.bool), "at": 0}

checkpointer = Checkpointer(model=model, optimizer=optimizer, ring=ring)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    inputs = torch.randn(32 + step % 3, 32)
    at("forward")
    loss = F.mse_loss(model(inputs), inputs.roll(1, 1))
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    ring["done"][ring["at"]] = step % 7 == 0
    ring["at"] += 1
    checkpointer.step(step + 1, loss)
    at("handling")
    model.to(torch.float64).to(torch.float32)
    weight = model.layers[3].weight
    views = [weight.view(-1)[::2], weight.detach().t()]
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model.state_dict()))
    torch.save([model.state_dict(), optimizer.state_dict(), views], io.BytesIO())
    model.layers[1].weight.share_memory_()
    bias = model.layers[3].bias.untyped_storage()
    bias.resize_(bias.nbytes() + 64)
    del views
    optimizer.zero_grad()
finish(checkpointer)
