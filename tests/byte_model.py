"""A small model of real text, trained by several ranks that sum their gradients with a scheme."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport

CONTEXT = 8
HELD_OUT = 20_000
DECAY_AFTER = 2 / 3
_MODULES = ("argparse", "ast", "configparser", "difflib", "doctest", "inspect", "pathlib", "subprocess", "tarfile")


def read_text() -> Tensor:
    """Return the source of some modules of the standard library, byte by byte."""
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.frombuffer(
        bytearray().join((folder / f"{name}.py").read_bytes() for name in _MODULES), dtype=torch.uint8
    )


def build(width: int, seed: int) -> nn.Module:
    """Return a model that predicts a byte from the `CONTEXT` before it; the same one for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(128, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, width),
        nn.Tanh(),
        nn.Linear(width, 128),
    )


def loss_of(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Return the mean cross-entropy of the bytes behind the windows that begin at `starts`."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long() & 127
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def train(
    scheme_of: Callable[[Transport], Scheme],
    *,
    ranks: int,
    steps: int,
    every: int,
    width: int = 128,
    batch: int = 16,
    learning_rate: float = 0.2,
    seed: int = 0,
) -> list[float]:
    """Return the loss on held-out text after each `every` steps of plain SGD; the same in each run.

    The gradient of the whole model goes through the scheme as one tensor, and the learning rate falls to a tenth after
    two thirds of the steps, as in the paper. All ranks must end with the same parameters, bit for bit.
    """
    text = read_text()
    limit = len(text) - HELD_OUT - CONTEXT
    held_out = torch.arange(limit, limit + HELD_OUT - CONTEXT - 1)

    def work(transport: Transport) -> tuple[list[float], Tensor]:
        model, scheme = models[transport.rank], scheme_of(transport)
        parameters = list(model.parameters())
        generator = torch.Generator().manual_seed(1000 * seed + transport.rank)
        losses = []
        for step in range(1, steps + 1):
            starts = torch.randint(limit - CONTEXT - 1, (batch,), generator=generator)
            gradients = torch.autograd.grad(loss_of(model, text, starts), parameters)
            total = scheme.reduce("model", torch.cat([gradient.reshape(-1) for gradient in gradients]))
            with torch.no_grad():
                parts = total.split([parameter.numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    rate = learning_rate if step <= DECAY_AFTER * steps else learning_rate / 10
                    parameter -= rate / ranks * part.view_as(parameter)
                if step % every == 0 and transport.rank == 0:
                    losses.append(float(loss_of(model, text, held_out)))
        return losses, torch.cat([parameter.detach().reshape(-1) for parameter in parameters])

    models = [build(width, seed) for _ in range(ranks)]
    found = run_ranks(ranks, work)
    assert all(torch.equal(final, found[0][1]) for _, final in found)
    return found[0][0]
