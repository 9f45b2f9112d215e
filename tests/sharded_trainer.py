"""A rank with states of FSDP2, with replicas and with tensor parallelism too: writes them into a slot in DIRECTORY."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_export import make_slot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def model() -> nn.Sequential:
    """Return layers of 7, 2 and 1 rows, which few numbers of ranks divide."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2), nn.Linear(2, 1))


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    models = {"fsdp": fully_shard(model(), mesh=init_device_mesh("cpu", (world_size,)))}
    if world_size == 4:
        models["hsdp"] = fully_shard(
            model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        models["tp"] = fully_shard(parallelize_module(model(), mesh["tp"], plan), mesh=mesh["dp"])
    objects: dict[str, Any] = {name: dict(each.state_dict()) for name, each in models.items()}
    optimizer = torch.optim.AdamW(models["fsdp"].parameters())
    models["fsdp"](torch.ones(3, 6)).sum().backward()
    optimizer.step()
    objects["optimizer"] = optimizer.state_dict()
    objects["scalar"] = distribute_tensor(torch.tensor(2.5), init_device_mesh("cpu", (world_size,)), [Replicate()])
    moments = {
        f"{index}.{name}": value.full_tensor() if isinstance(value, DTensor) else value
        for index, state in objects["optimizer"]["state"].items()
        for name, value in state.items()
    }
    objects["fsdp"] = dict(models["fsdp"].state_dict())
    trained = {name: tensor.full_tensor() for name, tensor in objects["fsdp"].items()}
    tree = {"objects": objects, "values": {"own": rank}, "rng": None}
    make_slot(directory / f"{rank}.slot", tree, rank=rank, world_size=world_size, shards=None).close()
    if rank == 0:
        torch.save(
            {"moments": moments, "trained": trained, "model": dict(model().state_dict())}, directory / "whole.pt"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
