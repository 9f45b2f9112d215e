"""All ranks of a run one after the other in one process, for tests of what they make of each other's slots."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_export import TOPOLOGY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient_run.ckpt.convert.assembly import Assembled
from resilient_run.ckpt.convert.captures import Answer, Captures
from resilient_run.ckpt.convert.reshape import reshape
from resilient_run.ckpt.errors import RestoreError
from resilient_run.ckpt.format.digests import Digester
from resilient_run.ckpt.format.manifest import encode, encode_tensors, leaf_parts, leaf_paths, plan_payload
from resilient_run.ckpt.format.slot import Slot, plan_layout
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import bytes_of

PAIR = (1, 3)


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be this rank; collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def capture(path: Path, state: TrainingState, *, rank: int, world_size: int) -> Slot:
    """Return a slot with what a Checkpointer captures of `state`."""
    flat = state.flatten()
    specs = flat.specs()
    layout = plan_payload(specs, leaf_parts(leaf_paths(flat.node)).values())
    digester = Digester(specs, layout, flat.node, rank=rank, trained=state.trained, apart=state.apart)
    manifest = encode(encode_tensors(specs, layout), flat.node)
    payload_offset, capacity_bytes = plan_layout(len(manifest) + digester.encoded_bytes, layout.payload_bytes)
    slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    payload = slot.buffer[payload_offset : payload_offset + layout.payload_bytes]
    for leaf, spec, offset in zip(flat.leaves, specs, layout.offsets, strict=True):
        data = bytes_of(leaf).numpy().tobytes() if isinstance(leaf, torch.Tensor) else bytes(memoryview(leaf).cast("B"))
        payload[offset : offset + spec.nbytes] = data
    manifest, checksums = digester.extend(manifest, digester.hashes(payload))
    slot.publish(
        run_id="run", topology=TOPOLOGY, rank=rank, world_size=world_size, generation=PAIR[0], step=PAIR[1],
        payload_bytes=layout.payload_bytes, manifest=manifest, checksums=checksums,
    )  # fmt: skip
    return slot


@dataclass
class Holders:
    """Hosts that hold slots: by name, and by rank.

    Attributes:
        asked: What was asked for.
    """

    slots: dict[str, dict[int, Slot]]

    def __post_init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def ask(self, wanted: list[dict[str, Any]]) -> Answer:
        data, sources = bytearray(), []
        self.asked += wanted
        for each in wanted:
            able = [name for name, held in self.slots.items() if each["rank"] in held and name not in each["avoid"]]
            if not able:
                raise RestoreError(f"no verified copy of rank {each['rank']} is left")
            buffer, numbers = self.slots[able[0]][each["rank"]].buffer, each["ranges"]
            for offset, size in zip(numbers[::2], numbers[1::2], strict=True):
                data += buffer[offset : offset + size]
            sources.append(able[0])
        return Answer(data=memoryview(bytes(data)), sources=sources, host="a")

    def load(self, state: TrainingState, rank: int, world_size: int, made_by: int) -> tuple[Assembled, Captures]:
        """Load into `state` what `rank` is to have."""
        captures = Captures(self.ask, run_id="run", pair=PAIR, world_size=made_by)
        made = reshape(state, captures, rank=rank, world_size=world_size)
        state.load(made.manifest, made.payload)
        return made, captures

    def close(self) -> None:
        for held in self.slots.values():
            for slot in held.values():
                slot.close()


def layers(seed: int, rows: int = 7) -> nn.Sequential:
    """Return layers of 7, 2 and 1 rows, which few numbers of ranks divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 2), nn.Linear(2, 1))


def fsdp(seed: int, world_size: int) -> nn.Module:
    return fully_shard(layers(seed), mesh=init_device_mesh("cpu", (world_size,)))


def hsdp(seed: int, world_size: int) -> nn.Module:
    rows = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (rows, world_size // rows), mesh_dim_names=("replicate", "shard"))
    return fully_shard(layers(seed), mesh=mesh)


def fsdp_with_tp(seed: int, world_size: int) -> nn.Module:
    columns = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // columns, columns), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(layers(seed, rows=8), mesh["tp"], plan, src_data_rank=None)
    return fully_shard(model, mesh=mesh["dp"])


def replicated(seed: int, world_size: int) -> nn.Module:
    """What a DistributedDataParallel has inside."""
    return nn.Sequential(layers(seed), nn.BatchNorm1d(1))


def objects(make: Callable[[int, int], nn.Module], seed: int, world_size: int) -> dict[str, Any]:
    """Return a model, its optimizer with two groups, and its schedule, with other numbers for each seed."""
    model = make(seed, world_size)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.02 + seed / 100, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return what `like` has of a whole tensor, as torch shares it out."""
    mesh = like.device_mesh.mesh
    # Not the mesh's own, which torch remembers from the rank before.
    at = (mesh == dist.get_rank()).nonzero()[0].tolist()
    for placement, count, index in zip(like.placements, mesh.shape, at, strict=True):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, count, with_padding=False, contiguous=True)[0][index]
    return whole


def train(held: dict[str, Any], steps: int = 3) -> None:
    """Take steps with gradients that are the same whatever the number of ranks."""
    for step in range(steps):
        for number, parameter in enumerate(held["model"].parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                local, placed = part_of(gradient, parameter), (parameter.device_mesh, parameter.placements)
                gradient = DTensor.from_local(local, *placed, shape=parameter.shape, stride=parameter.stride())
            parameter.grad = gradient
        held["optimizer"].step()
        held["schedule"].step()
