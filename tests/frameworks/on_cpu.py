"""Let Accelerate, and so `Trainer`, shard on CPUs with Gloo: they do it on GPUs only, and take these for some."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule


def _set_device(self: Any) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = _set_device


def scale_no_sums(model: torch.nn.Module) -> None:
    """Let FSDP2 divide by itself, which Gloo does not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def print_digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, others: Any) -> None:
    """Print, once, a hash of what all ranks have: shards of parameters, buffers, states of the optimizer, `others`."""
    digest = hashlib.sha256(repr(others).encode())
    states = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in (*model.parameters(), *model.buffers(), *states):
        shard = tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "_local_shard", tensor)
        digest.update(shard.detach().float().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if dist.get_rank() == 0:
        print(f"parameters {hashlib.sha256(repr(digests).encode()).hexdigest()}", flush=True)
