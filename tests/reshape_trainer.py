"""A rank of several kinds of parallel models in one state, for tests in which their number changes.

Prints one JSON line when the state that it restored has been compared with DCP's load of the same step (`--exported`),
and one for each step that it makes; ends when stdin does.
"""

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from resilient_run import Checkpointer


def say(**what: Any) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())


def layers(seed: int, rows: int = 7) -> nn.Sequential:
    """Return layers of 7, 2 and 1 rows, which few numbers of ranks divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 2), nn.Linear(2, 1))


def wide(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1))


def objects(seed: int, width: int) -> dict[str, Any]:
    """Return models in all kinds of shards, and their optimizers, with other numbers for each seed."""
    ranks = dist.get_world_size()
    rows = ranks // 2 if ranks % 2 == 0 else 1
    models: dict[str, nn.Module] = {
        "fsdp": fully_shard(layers(seed), mesh=init_device_mesh("cpu", (ranks,))),
        "hsdp": fully_shard(
            layers(seed),
            mesh=init_device_mesh("cpu", (rows, ranks // rows), mesh_dim_names=("replicate", "shard")),
        ),
        "ddp": DistributedDataParallel(nn.Sequential(layers(seed), nn.BatchNorm1d(1))),
    }
    columns = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (ranks // columns, columns), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    models["tp"] = fully_shard(parallelize_module(layers(seed, rows=8), mesh["tp"], plan), mesh=mesh["dp"])
    if width:
        models["wide"] = fully_shard(wide(seed, width), mesh=init_device_mesh("cpu", (ranks,)))
    found: dict[str, Any] = {}
    for name, model in models.items():
        found[name] = model
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:]}]
        found[f"{name}_optimizer"] = torch.optim.AdamW(groups, lr=0.02 + seed / 100)
        found[f"{name}_schedule"] = torch.optim.lr_scheduler.StepLR(found[f"{name}_optimizer"], 2, gamma=0.5)
    return found


def train(held: dict[str, Any], step: int) -> None:
    for name, model in held.items():
        if isinstance(model, nn.Module):
            optimizer = held[f"{name}_optimizer"]
            optimizer.zero_grad()
            torch.manual_seed(100 * step + dist.get_rank())
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
            held[f"{name}_schedule"].step()


def exported(held: dict[str, Any], directory: str) -> None:
    """Load with torch alone what was exported, also of optimizers: their names there are numbers."""
    for name, item in held.items():
        if isinstance(item, nn.Module):
            module = item.module if isinstance(item, DistributedDataParallel) else item
            state: dict[str, Any] = {name: module.state_dict()}
            dcp.load(state, checkpoint_id=directory)
            module.load_state_dict(state[name])
            optimizer = held[f"{name}_optimizer"]
            get_optimizer_state_dict(module, optimizer)  # makes the states that there are yet to be
            state = {f"{name}_optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=directory)
            optimizer.load_state_dict(state[f"{name}_optimizer"])
            # Not made by DCP: a plain dict of numbers.
            schedule = held[f"{name}_schedule"]
            state = {f"{name}_schedule": schedule.state_dict()}
            dcp.load(state, checkpoint_id=directory)
            schedule.load_state_dict(state[f"{name}_schedule"])


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in flat(item, f"{path}.{name}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for name, item in enumerate(value) for key, leaf in flat(item, f"{path}.{name}").items()}
    return {path: value}


def compare(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return where the states of two sets of objects differ."""
    different = []
    for name, item in one.items():
        left, right = (
            flat((each.module if isinstance(each, DistributedDataParallel) else each).state_dict())
            for each in (item, other[name])
        )
        for path in left.keys() | right.keys():
            pair = [each.get(path) for each in (left, right)]
            if all(isinstance(each, torch.Tensor) for each in pair):
                locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in pair]
                same = locals_[0].dtype == locals_[1].dtype and torch.equal(*locals_)
            else:
                same = pair[0] == pair[1]
            if not same:
                different.append(f"{name}{path}: {pair[0]} and {pair[1]}"[:300])
    return different


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exported")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--own", action="store_true", help="register a value in which ranks differ")
    args = parser.parse_args()
    numbers = {name: int(os.environ[key]) for name, key in (("rank", "RANK"), ("world_size", "WORLD_SIZE"))}
    dist.init_process_group("gloo", init_method=os.environ["TEST_STORE"], **numbers)
    rank = dist.get_rank()
    held = objects(seed=3, width=args.width)
    values = {"own": rank} if args.own else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(**held, **values, epoch=4)
        began = checkpointer.planned_step, checkpointer.planned_world
        try:
            step = checkpointer.restore()
        except Exception as error:
            say(rank=rank, error=f"{type(error).__name__}: {error}")
            raise
    different = []
    if args.exported:
        other = objects(seed=5, width=args.width)
        exported(other, args.exported)
        different = compare(held, other)
    random = torch.rand(1).item()
    say(
        rank=rank,
        restored=step,
        planned=began,
        different=different,
        told=[str(each.message) for each in caught],
        random=random,
    )
    for line in sys.stdin:
        step += 1
        train(held, step)
        torch.manual_seed(int(line) + rank)
        checkpointer.step(step)
        while (checkpointer.watermark or (0, 0))[1] < step:  # what follows a commit is captured
            time.sleep(0.001)
        say(rank=rank, step=step, captured=checkpointer.wait())
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
