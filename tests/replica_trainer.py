"""Training loops whose ranks hold some bytes in common and others not.

`LOOP STEPS [THAW]` says which one, for how long, and at which step the frozen layer of `mixed` thaws.

- `mixed`: DDP with BatchNorm without synchronization, dropout of each rank's own, a frozen layer that thaws on all
  ranks, a second optimizer as in a GAN, an average of the weights, a counter and an average of each rank alone, and a
  module that no rank synchronizes and whose optimizer has nothing to do for the first steps.
- `uneven`: DDP; before the model rank 0 alone has an average of the weights, and each rank what is left of its epoch,
  which is shorter in each step. Each step waits for its commit.
- `hybrid`: FSDP2 over a mesh of 2 replicas and as many shards as there are ranks for.
"""

import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from resilient_run import Checkpointer


def emit(**fields: object) -> None:
    os.write(1, f"{json.dumps(fields)}\n".encode())


def sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(full.detach().numpy().tobytes())
    return digest.hexdigest()


def hybrid(steps: int, rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 1))
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    with Checkpointer(model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            inputs = torch.randn(16, 32)
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            emit(rank=rank, step=step, loss=loss.item())
            checkpointer.step(step)
            while (checkpointer.watermark or (0, 0))[1] < step:
                time.sleep(0.001)
        digest = sha256(model)
        if rank == 0:
            emit(params_sha256=digest)


def mixed(steps: int, rank: int, thaw: int) -> None:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 300), nn.Linear(300, 16)
    )
    model[0].requires_grad_(False)
    critic = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    alone = nn.Linear(16, 1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    judge = DistributedDataParallel(critic)
    optimizers = {
        "generator": torch.optim.Adam(model[1:].parameters(), lr=1e-3),
        "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=1e-3, momentum=0.9),
        "alone_optimizer": torch.optim.AdamW(alone.parameters(), lr=1e-3),
        "thawed": torch.optim.SGD(model[0].parameters(), lr=1e-3),
    }
    torch.manual_seed(100 + rank)
    seen = {"samples": torch.zeros(()), "mean": torch.zeros(16)}
    with Checkpointer(
        model=model, critic=critic, average=average, alone=alone, **optimizers, seen=seen
    ) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            if step == thaw:
                model[0].requires_grad_(True)
                parallel = DistributedDataParallel(model)
            inputs = torch.randn(8, 16)
            real = judge(inputs).square().mean()
            fake = parallel(inputs)
            loss = judge(fake).square().mean() + real + (fake - inputs).square().mean()
            loss.backward()
            if step > 3:
                alone(inputs).square().mean().backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            average.update_parameters(model)
            seen["samples"] += 8
            seen["mean"] += inputs.mean(dim=0)
            emit(rank=rank, step=step, loss=loss.item())
            checkpointer.step(step)


def uneven(steps: int, rank: int) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    epoch = {"left": torch.rand(500 + 100 * rank)}
    first = {"average": average} if rank == 0 else {}
    with Checkpointer(**first, epoch=epoch, model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            inputs = torch.randn(8, 16) + epoch["left"][:8, None]
            epoch["left"] = epoch["left"][8:]
            loss = (parallel(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            emit(rank=rank, step=step, loss=loss.item())
            checkpointer.step(step)
            while (checkpointer.watermark or (0, 0))[1] < step:
                time.sleep(0.001)
        digest = sha256(model)
        if rank == 0:
            emit(params_sha256=digest)


def main() -> None:
    loop, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    emit(rank=rank, pid=os.getpid())
    torch.manual_seed(1)
    if loop == "hybrid":
        hybrid(steps, rank, size)
    elif loop == "uneven":
        uneven(steps, rank)
    else:
        mixed(steps, rank, int(sys.argv[3]))
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
