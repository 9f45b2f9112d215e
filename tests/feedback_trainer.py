"""One rank of trainings with each compressor under DDP, beside the same with error feedback by hand: JSON lines.

    torchrun … tests/feedback_trainer.py topk randomk topk+sparse …

Each variant is what `register` takes, and the switch sparse, for sparse gradients of the table.
"""

import json
import os
import sys
import zlib
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.hook import GradientHook, register
from resilient_run.comm.ops.spread import murmur

DENSITY = {"topk": {"density": 0.1}, "randomk": {"density": 0.5}}


class Model(nn.Module):
    """A table and a layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16, sparse=sparse)
        self.out = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(words).mean(1)))


def coalesced(gradient: Tensor) -> Tensor:
    """Return it dense; duplicates are added in the order in which `coalesce` does it."""
    return gradient.coalesce().to_dense() if gradient.is_sparse else gradient


class ByHand:
    """Compresses each averaged gradient plus what it left out before, and sums what all ranks' messages say."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = model
        self._compressor = named(name, **DENSITY.get(name, {}))
        self._left: dict[str, Tensor] = {}
        self._step = 0

    def average(self) -> None:
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            dense = coalesced(parameter.grad).flatten()
            corrected = dense / dist.get_world_size() + self._left.get(name, 0)
            seed = int(murmur(torch.tensor([self._step]), zlib.crc32(name.encode())))
            message = self._compressor.compress(corrected, seed=seed)
            self._left[name] = corrected - self._decoded(message, corrected, seed)
            messages: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(messages, message)
            if (summed_as := self._compressor.summed_as(corrected.dtype)) is not None:
                messages = [sum(each.view(summed_as) for each in messages).view(torch.uint8)]
            total = sum(self._decoded(each, corrected, seed) for each in messages)
            parameter.grad = total.view(parameter.shape)
        self._step += 1

    def _decoded(self, message: Tensor, dense: Tensor, seed: int) -> Tensor:
        return self._compressor.decompress(message, dense.numel(), dense.dtype, seed=seed)


def step(model: nn.Module, number: int) -> float:
    """Run the backward pass of this rank's batch of a step and return its loss."""
    generator = torch.Generator().manual_seed(100 * (number % 4) + dist.get_rank())
    words = torch.randint(50, (32, 3), generator=generator)
    loss = F.cross_entropy(model(words), words[:, 0] % 4)
    model.zero_grad()
    loss.backward()
    return loss.item()


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 2 * coalesced(parameter.grad)


def parallel(model: Model, name: str) -> tuple[DistributedDataParallel, GradientHook]:
    made = DistributedDataParallel(model)
    return made, register(made, name, least_elements=1, **DENSITY.get(name, {}))


def train(variant: str) -> dict[str, Any]:
    name, *switches = variant.split("+")
    model, other = Model(sparse="sparse" in switches), Model(sparse="sparse" in switches)
    (hooked, hook), by_hand = parallel(model, name), ByHand(other, name)
    losses, equal, state, between = [], True, {}, {}
    for number in range(40):
        if number == 30:
            state, between = deepcopy(hook.state_dict()), deepcopy(model.state_dict())
        losses.append(step(hooked, number))
        step(other, number)
        by_hand.average()
        descend(model)
        descend(other)
        equal = equal and all(map(torch.equal, model.parameters(), other.parameters()))
    hook.close()
    resumed = Model(sparse="sparse" in switches)
    resumed.load_state_dict(between)
    hooked, hook = parallel(resumed, name)
    hook.load_state_dict(state)
    for number in range(30, 40):
        step(hooked, number)
        descend(resumed)
    hook.close()
    return {
        "losses": losses,
        "as_by_hand": equal,
        "resumed": all(map(torch.equal, model.parameters(), resumed.parameters())),
        "remembered": sorted(state["kept"]),
        "layouts": sorted({str(parameter.grad.layout) for parameter in model.parameters()}),
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for variant in sys.argv[1:]:
        line = {"variant": variant, "rank": dist.get_rank(), **train(variant)}
        os.write(1, f"{json.dumps(line)}\n".encode())
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
