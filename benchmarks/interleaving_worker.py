"""One rank of `interleaving.py`: layers that compute and communicate over the network, one after the other.

With "all-reduce" a bucket is summed after each layer, as in data parallelism. With "fsdp2" the layers are sharded, as
by ZeRO-3: each is gathered before it computes, in both directions, and its gradient is scattered behind that.

Computing is a pause, because the measured machine has fewer cores than hosts and a GPU's work takes no CPU either. The
collectives, the optimizer, the captures and their replicas are real.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workload import emit

from resilient_run import Checkpointer

layers, compute_s, bucket_bytes, state_bytes, steps = (float(argument) for argument in sys.argv[1:6])
parallel = sys.argv[6]


class _Compute(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(compute_s / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * compute_s / 3)
        return gradients[0]


class Layer(nn.Module):
    """Parameters of `bucket_bytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(bucket_bytes) // 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + _Compute.apply(self.weight.mean() * x)


def reduced() -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Return the parameters of this rank's state, and an iteration up to the optimizer's step."""
    parameters = [nn.Parameter(torch.zeros(int(state_bytes) // 16)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    bucket = torch.ones(int(bucket_bytes) // 4)

    def iterate() -> None:
        for _ in range(int(layers)):
            time.sleep(compute_s)
            dist.all_reduce(bucket)
        time.sleep(compute_s)

    return parameters, iterate


def sharded() -> tuple[list[nn.Parameter], Callable[[], None]]:
    """The same with layers that FSDP2 shards; the state is theirs, and `state_bytes` of a rank's own besides."""
    own = nn.Parameter(torch.zeros(int(state_bytes) // 4))
    model = nn.Sequential(*(Layer() for _ in range(int(layers))))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def iterate() -> None:
        model(torch.ones(1, requires_grad=True)).sum().backward()
        own.grad = torch.full_like(own, 1e-3)

    return [*model.parameters(), own], iterate


torch.set_num_threads(1)
dist.init_process_group("gloo")
parameters, iterate = {"all-reduce": reduced, "fsdp2": sharded}[parallel]()
optimizer = torch.optim.SGD(parameters, lr=0.1)
checkpointer = Checkpointer(parameters=dict(enumerate(parameters)), optimizer=optimizer)
began_s = time.monotonic()
for step in range(checkpointer.restore(), int(steps)):
    iterate()
    optimizer.step()
    checkpointer.step(step + 1)
    ended_s = time.monotonic()
    if dist.get_rank() == 0:
        stats = checkpointer.stats
        line = {"step": step + 1, "seconds": ended_s - began_s, "captures": stats.captures, "stall_s": stats.stall_s}
        emit(json.dumps(line))
    began_s = ended_s
checkpointer.close()
dist.destroy_process_group()
