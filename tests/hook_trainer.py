"""One rank of small training runs with gradient hooks: prints JSON lines.

    torchrun … tests/hook_trainer.py none zen zen+sparse …

Each variant is a scheme, or none for plain DDP, and switches: sparse (gradients of the table), hosts (two ranks each),
accumulate (two backward passes per step), nan (one appears), bruck (between two teams of SparDL), hsdp (FSDP2 with two
replicas instead of DDP; then also the scheme topk and the switches three, for three replicas, tensor, which replaces
shards by tensor parallelism, and hold, which accumulates before the reduce-scatter), columns (DDP among even and among
odd ranks, each with data and parameters of its own).
Variants are trained one after the other, but side by side under `resilient-run`: one checkpoint has them all.
`--cuda`: all ranks share one GPU, and talk over NCCL.
"""

import argparse
import hashlib
import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from resilient_run import Checkpointer
from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import TopK
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.hook import register
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.replicate import register_replicated
from resilient_run.comm.runtime.bucket import BucketSum

WORDS = 4000
# NCCL refuses two ranks of a host on one GPU: each says that it is a host of its own.
SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TENSOR_PARALLEL = {"hidden": ColwiseParallel(), "out": RowwiseParallel()}


class Model(nn.Module):
    """A bag of words with a large table, of which each batch touches little."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 32, sparse=sparse)
        self.hidden = nn.Linear(32, 600)
        self.out = nn.Linear(600, 8)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.table(words).mean(1))))


def emit(**line: Any) -> None:
    os.write(1, f"{json.dumps(line)}\n".encode())


def join(*, cuda: bool) -> torch.device:
    """Join the process group and return where tensors are."""
    torch.set_num_threads(1)
    if not cuda:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ.update(SHARED_GPU, NCCL_HOSTID=os.environ["RANK"])
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    return torch.device("cuda", 0)


def topk(ranks: Transport) -> Scheme:
    return Compressed(ranks, ErrorFeedback(TopK(0.02)))


def parallelized(model: "Model", scheme: str, switches: list[str]) -> tuple[nn.Module, BucketSum | None]:
    if "hsdp" in switches:
        kind = model.out.weight.device.type
        replicas = 3 if "three" in switches else 2
        each = dist.get_world_size() // replicas
        if "tensor" in switches:
            whole = init_device_mesh(kind, (replicas, 1, each), mesh_dim_names=("replicate", "shard", "tensor"))
            mesh = whole["replicate", "shard"]
            parallelize_module(model, whole["tensor"], TENSOR_PARALLEL)
        else:
            mesh = init_device_mesh(kind, (replicas, each), mesh_dim_names=("replicate", "shard"))
        for layer in (model.table, model.hidden):
            fully_shard(layer, mesh=mesh)
        sharded = fully_shard(model, mesh=mesh)
        if scheme == "none":
            return sharded, None
        made = topk if scheme == "topk" else scheme
        return sharded, register_replicated(sharded, made, least_elements=1000)
    column = None
    if "columns" in switches:
        dist.new_group([0])  # one more for rank 0, as for the ranks that lead hosts
        columns = [dist.new_group(list(range(first, dist.get_world_size(), 2))) for first in (0, 1)]
        column = columns[dist.get_rank() % 2]
    # Several buckets, so that their layout changes after the first step.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.05, process_group=column)
    if scheme == "none":
        return parallel, None
    gather = {"gather": "bruck", "teams": 2} if "bruck" in switches else {}
    return parallel, register(parallel, scheme, ranks_per_host=2 if "hosts" in switches else 1, **gather)


def accumulating(parallel: nn.Module, switches: list[str], *, last: bool) -> AbstractContextManager[None]:
    if not isinstance(parallel, FSDPModule):
        return nullcontext() if last else parallel.no_sync()
    if "hold" in switches:
        parallel.set_requires_gradient_sync(last)
    else:
        parallel.set_requires_all_reduce(last)
    return nullcontext()


def local(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


class Training:
    """A variant as it is before its first step."""

    def __init__(self, variant: str, device: torch.device) -> None:
        self.variant, self.device = variant, device
        scheme, *self.switches = variant.split("+")
        torch.manual_seed(dist.get_rank() % 2 if "columns" in self.switches else 0)
        self.model = Model(sparse="sparse" in self.switches).to(device)
        self.parallel, self.hook = parallelized(self.model, scheme, self.switches)
        blank = self.hook.state_dict() if self.hook is not None else {}
        # The layout of the first step is another one and adds in another order: get it over with.
        self.parallel(torch.zeros(1, 1, dtype=torch.long, device=device)).sum().backward()
        self.parallel.zero_grad()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if self.hook is not None:
            self.hook.load_state_dict(blank)

    def objects(self) -> dict[str, Any]:
        """Return what a checkpoint has of this training, by names that begin with the variant."""
        found = {"model": self.model, "optimizer": self.optimizer, "hook": self.hook}
        return {f"{self.variant} {name}": each for name, each in found.items() if each is not None}

    def step(self, step: int, *, poisoned: bool) -> float:
        """Train on this rank's batch of the step and return its loss, which is a NaN on rank 0 if so."""
        rank = dist.get_rank()
        if "tensor" in self.switches:
            rank //= dist.get_world_size() // 2  # ranks of a replica have one batch
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for last in (False, True) if {"accumulate", "hold"} & set(self.switches) else (True,):
            words = torch.randint(WORDS, (16, 6), generator=generator).to(self.device)
            with accumulating(self.parallel, self.switches, last=last):
                loss = F.cross_entropy(self.parallel(words), words[:, 0] % 8)
                if poisoned and rank == 0:
                    loss = loss * torch.nan
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def finish(self) -> str:
        """Print what came of the training and return the digest of this rank's parameters."""
        state = b"".join(local(parameter).cpu().numpy().tobytes() for parameter in self.model.parameters())
        digest = hashlib.sha256(state).hexdigest()
        emit(
            variant=self.variant,
            rank=dist.get_rank(),
            digest=digest,
            nans=sum(local(parameter).isnan().sum().item() for parameter in self.model.parameters()),
            rounds=self.hook.world.traffic.rounds if self.hook else None,
            keys=sorted(self.hook.state_dict().get("keys", ())) if self.hook else [],
        )
        if self.hook is not None:
            self.hook.close()
        del self.parallel
        return digest


def train(variants: list[str], device: torch.device, *, steps: int, checkpointed: bool, kill_at: int | None) -> str:
    """Train variants side by side, with one checkpoint for all, and return their digests."""
    rank = dist.get_rank()
    trainings = [Training(variant, device) for variant in variants]
    first, checkpointer = 1, None
    if checkpointed:
        objects = [training.objects() for training in trainings]
        checkpointer = Checkpointer(**{name: each for found in objects for name, each in found.items()})
        first = checkpointer.restore() + 1
    for step in range(first, steps + 1):
        losses = {
            each.variant: each.step(step, poisoned="nan" in each.switches and step == steps) for each in trainings
        }
        emit(rank=rank, step=step, loss=losses)
        if checkpointer is not None:
            checkpointer.step(step)
        if step == kill_at and rank == 1 and os.environ.get("RESILIENT_GENERATION") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    if checkpointer is not None:
        checkpointer.close()
    return " ".join(training.finish() for training in trainings)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    device = join(cuda=options.cuda)
    emit(rank=dist.get_rank(), pid=os.getpid())
    checkpointed = "RESILIENT_SOCKET" in os.environ
    for variants in [options.variants] if checkpointed else [[variant] for variant in options.variants]:
        digests = train(variants, device, steps=options.steps, checkpointed=checkpointed, kill_at=options.kill_at)
        if dist.get_rank() == 0:
            emit(params_sha256=digests)
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
