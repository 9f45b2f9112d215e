"""Two ranks whose models and calls DDP's usual examples do not have; `test_odd_models.py` runs it.

    odd_models.py CASE [ARGUMENT]

Each rank prints one JSON object.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import register

SIDE = 200
STEPS = 16


class Waves(nn.Module):
    """A layer of complex numbers between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, SIDE), nn.Linear(SIDE, 1)
        self.turn = nn.Parameter(torch.randn(SIDE, SIDE, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.after((self.before(x).to(torch.complex64) @ self.turn).abs())


class Branches(nn.Module):
    """Two branches, of which a step uses one; the rare one, in every eighth."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return (self.rare if step % 8 == 0 else self.common)(x)


class Outputs(Branches):
    """Both branches are in every forward pass, and one of them is in the loss."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        return (self.rare(x), self.common(x))[step % 2]


def made(kind: Callable[[], nn.Module], **options: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(kind(), **options)


def complex_parameter(scheme: str) -> dict[str, Any]:
    plain, ours = made(Waves), made(Waves)
    hook = register(ours, scheme)
    for step in range(20):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model in (plain, ours):
            model.zero_grad()
            model(x).sum().backward()
        if step == 0:
            first = {
                name: float((a.grad - b.grad).abs().max() / a.grad.abs().max())
                for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True)
            }
    hook.close()
    total = [p.grad.abs().sum().item() for p in ours.parameters()]
    return {"apart": first, "total": total}


def branches(scheme: str) -> dict[str, Any]:
    """Give, of the rare branch's weight, how much of the sum of all gradients neither came nor is remembered."""
    options = {"rank": 2} if scheme == "powersgd" else {} if scheme in ("onebit", "int8") else {"density": 0.05}
    kind = Outputs if sys.argv[3:] == ["outputs"] else Branches
    plain, ours = (made(kind, find_unused_parameters=True) for _ in range(2))
    hook = register(ours, scheme, **options)
    wanted, came = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    for step in range(STEPS):
        x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model, total in ((plain, wanted), (ours, came)):
            model.zero_grad()
            model(x, step).square().sum().backward()
            if (gradient := model.module.rare.weight.grad) is not None:
                total += gradient
    kept = [
        tensor.reshape(SIDE, SIDE).clone()
        for key, tensor in tensors_of(hook.state_dict())
        if "rare.weight" in key and tensor.numel() == SIDE * SIDE
    ]
    hook.close()
    for residual in kept:
        dist.all_reduce(residual)  # gradients are divided before they are remembered
        came += residual
    return {"lost": float((wanted - came).norm() / wanted.norm()), "kept": len(kept)}


def tensors_of(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(name, state)]
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return [found for key, part in parts for found in tensors_of(part, f"{name}/{key}")]


def timeout(scheme: str) -> dict[str, Any]:
    """Rank 1 stands still until rank 0 has given up."""
    told = Path(sys.argv[3])
    model = made(lambda: nn.Linear(SIDE, SIDE))
    register(model, scheme)
    model(torch.ones(1, SIDE)).sum().backward()
    if dist.get_rank():
        while not told.exists():
            time.sleep(0.05)
        return {}
    try:
        model(torch.ones(1, SIDE)).sum().backward()
    except RuntimeError as error:
        told.touch()
        return {"error": str(error)}
    return {}


def mistakes(_: str) -> dict[str, Any]:
    def text(model: Any, scheme: Any, **options: Any) -> str:
        try:
            register(model, scheme, **options)
        except CommError as error:
            return str(error)
        return ""

    model = made(lambda: nn.Linear(SIDE, SIDE))
    before = threading.active_count(), len(dist.distributed_c10d._world.pg_names)
    told = {
        "misspelt": text(model, "spardl", densty=0.1),
        "of another": text(model, "topk", k=5),
        "a text": text(model, "topk", density="0.01"),
        "no integer": text(model, "powersgd", rank=2.5),
        "inner": text(model, "dgc", rowss=3),
        "no density": text(model, "int8", density=0.1),
        "no scheme": text(model, "zenn"),
        "no longer": text(model, "ok-topk"),
        "neither": text(model, 5),
        "bare": text(model.module, "zen"),
        "teams": text(model, "spardl", teams=7),
        "no rank": text(model, "powersgd", rank=0),
        "no more": text(model, "dgc", pool=3),
        "least": text(model, "zen", least_elements="1"),
        "hosts": text(model, "zen", ranks_per_host=3),
    }
    after = threading.active_count(), len(dist.distributed_c10d._world.pg_names)
    hook = register(model, "dgc", rows=(16,), density=0.5)
    told["twice"] = text(model, "zen")
    model(torch.ones(1, SIDE)).sum().backward()
    hook.close()
    try:
        model(torch.ones(1, SIDE)).sum().backward()
    except CommError as error:
        told["closed"] = str(error)
    return {"told": told, "leaked": before != after}


CASES = {"complex": complex_parameter, "branches": branches, "timeout": timeout, "mistakes": mistakes}

if __name__ == "__main__":
    case, argument = sys.argv[1:3]
    limit = timedelta(seconds=4 if case == "timeout" else 60)
    dist.init_process_group("gloo", timeout=limit)
    print(json.dumps({"rank": dist.get_rank(), **CASES[case](argument)}), flush=True)
    os._exit(0)
