"""A rank of FSDP1 loads what other numbers of ranks had, which is FSDP1's own full state, bit for bit.

`flat_ranks.py DIRECTORY N,M…`: N ranks train and capture, and M ranks go on. Those are the first ranks of this run.
"""

import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_ranks import Holders, capture
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _optim_utils

from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import gather
from resilient_run.ckpt.format.slot import Slot
from resilient_run.ckpt.state.state import TrainingState

WAYS = (
    ("FULL_SHARD",),
    ("FULL_SHARD", "orig"),
    ("SHARD_GRAD_OP", "orig", "bf16"),
    ("SHARD_GRAD_OP", "bf16"),
    ("HYBRID_SHARD",),
    ("NO_SHARD", "orig"),
)
GROUPS: dict[int, Any] = {}
MESHES: dict[int, DeviceMesh] = {}
"""By number of ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.norm(self.linear(inputs)).relu()


class Net(nn.Module):
    """Odd sizes, a frozen layer, one parameter in two places, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(3, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(self.tied(hidden)) * self.scale


def build(way: tuple[str, ...], size: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    strategy, *others = way
    is_hybrid = strategy == "HYBRID_SHARD"
    bf16 = torch.bfloat16 if "bf16" in others else None
    wrap = functools.partial(
        FullyShardedDataParallel,
        process_group=None if is_hybrid else GROUPS[size],
        device_mesh=MESHES[size] if is_hybrid else None,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params="orig" in others,
        mixed_precision=MixedPrecision(param_dtype=bf16, buffer_dtype=bf16),
        device_id=torch.device("cpu"),
    )
    net = Net()
    net.first.requires_grad_(False)
    net.first = wrap(net.first)
    for number, block in enumerate(net.blocks):
        net.blocks[number] = wrap(block)
    model = wrap(net)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1], "lr": seed / 100}, {"params": trained[1:]}], lr=seed / 50)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(held: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        held["model"](torch.randn(6, 3)).float().square().mean().backward()
        held["optimizer"].step()
        held["optimizer"].zero_grad()
        held["schedule"].step()


def unflatten(info: Any, states: dict[str, dict[str, Any]], name: str, *others: Any) -> None:
    """On a CPU, what torch gathers of one kind of state is a view of memory that the next kind is gathered in."""
    unflattened(info, states, name, *others)
    for state in states.values():
        state[name] = state[name].clone()


unflattened, _optim_utils._unflatten_orig_param_states = _optim_utils._unflatten_orig_param_states, unflatten


def whole(held: dict[str, Any], size: int) -> dict[str, Any]:
    """Return what FSDP1 gathers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = {key: value.clone() for key, value in held["model"].state_dict().items()}
        of_optimizer = FullyShardedDataParallel.full_optim_state_dict(
            held["model"], held["optimizer"], rank0_only=False, group=GROUPS[size]
        )
    found = {f"model {key}": value for key, value in model.items() if "norm.running" not in key}
    for name, state in of_optimizer["state"].items():
        found |= {f"state {name} {key}": value.clone() for key, value in state.items()}
    options = [{key: value for key, value in each.items() if key != "params"} for each in of_optimizer["param_groups"]]
    return {**found, "options": options, "schedule": held["schedule"].state_dict()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), (key, found[key], value)
        else:
            assert found[key] == value, (key, found[key], value)


def assert_exported(exported: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check an export, which has the dtypes of buffers in which FSDP1 holds them."""
    found = {f"model {key}": value for key, value in exported["model"].items()}
    for name, state in exported["optimizer"]["state"].items():
        found |= {f"state {name} {key}": value for key, value in state.items()}
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.pop(key).to(value.dtype), value), key
    assert all("norm.running" in key for key in found), found.keys()
    trained = {name for group in exported["optimizer"]["param_groups"] for name in group["params"]}
    assert trained == exported["optimizer"]["state"].keys()
    options = [{key: each[key] for key in each if key != "params"} for each in exported["optimizer"]["param_groups"]]
    assert options == expected["options"]


def main() -> None:
    directory, *pairs = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in range(1, dist.get_world_size() + 1):
        GROUPS[size] = dist.new_group(list(range(size)))
        MESHES[size] = DeviceMesh(
            "cpu", torch.arange(size).view(-(-size // 2), -1) if size % 2 == 0 else [[*range(size)]]
        )
    for number, (pair, way) in enumerate((pair, way) for pair in pairs for way in WAYS):
        before, after = map(int, pair.split(","))
        files = [Path(directory, f"{number}.{each}") for each in range(before)]
        made = Path(directory, f"{number}.whole")
        if rank < before:
            held = build(way, before, 3)
            torch.manual_seed(rank)
            train(held, 3)
            state = TrainingState(held, rng=False)
            capture(files[rank], state, rank=rank, world_size=before).close()
            gathered = whole(held, before)
            if rank == 0:
                torch.save(gathered, made)
        dist.barrier()
        if rank < after:
            expected = torch.load(made)
            held = build(way, after, 5)
            train(held, 1)
            slots = {each: Slot.open(file, writable=True) for each, file in enumerate(files)}
            holders = Holders({"a": slots})
            holders.load(TrainingState(held, rng=False), rank, after, before)
            assert_same(whole(held, after), expected)
            if rank == 0:
                assert_exported(gather(of_slots(list(slots.values()))), expected)
            train(held, 1)
            holders.close()
            os.write(1, f"same {rank} {pair} {way}\n".encode())
        dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
