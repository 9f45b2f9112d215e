"""Parameters that tensor parallelism has divided, and replicas have shared out: divided and shared out otherwise."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import Holders, capture, rank_of

from resilient_run.ckpt.errors import SlotError, StateError
from resilient_run.ckpt.state.flat import FLAT, Range, divided, encode, parse
from resilient_run.ckpt.state.state import TrainingState


def parts_of(whole: torch.Tensor, dim: int, several: int, size: int, rank: int) -> Iterator[tuple[list[int], Any]]:
    """Yield offset and part of what a rank of `size` has: of each of `several` pieces along `dim`, its own part."""
    for number in range(several):
        index = number * size + rank
        offset = [0] * whole.dim()
        offset[dim] = index * (whole.shape[dim] // (several * size))
        yield offset, whole.chunk(several * size, dim)[index]


class Shards:
    """What a rank has of some parameters, of which replicas have shared out the memory."""

    def __init__(
        self, draw: random.Random, wholes: list[Any], size: int, rank: int, replicas: int, number: int
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.ranges: dict[str, list[Range]] = {}
        for whole, dim, several in wholes:
            name = f"parameter {len(self.ranges)}"
            held = [*parts_of(whole, dim, several, size, rank)] if dim is not None else [([0] * whole.dim(), whole)]
            local = torch.cat([part for _, part in held], dim or 0).flatten()
            cuts = sorted(draw.choices(range(len(local) + 1), k=replicas - 1))
            begin, end = list(pairwise([0, *cuts, len(local)]))[number]
            found: list[Range] = []
            first = 0
            for offset, part in held:
                low, high = max(begin, first), min(end, first + part.numel())
                if low < high:
                    found += divided(name, whole.shape, offset, part.shape, low - first, low - begin, high - low)
                first += part.numel()
            self.ranges[f"masters.{len(self.ranges)}"] = found
            self.tensors.append(local[begin:end].clone())

    def differs_between_ranks(self) -> list[Any]:
        return [self]

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.tensors, FLAT: encode(self.ranges)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = [each.clone() for each in state["masters"]]


def shards(seed: int, wholes: list[Any], size: int, replicas: int) -> list[Shards]:
    """Return what all ranks have; those with one part of everything have it shared out alike."""
    return [
        Shards(random.Random(seed), wholes, size, rank, replicas, number)
        for number in range(replicas)
        for rank in range(size)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_each_rank_gets_its_part_of_whole_parameters(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    wholes: list[Any] = []
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float64))
    for _ in range(4):
        shape = [draw.choice((4, 8, 12)) for _ in range(draw.randint(1, 3))]
        dim = draw.choice((None, *range(len(shape))))
        several = 1
        if dim == 0:
            several = draw.choice((1, 2))
            shape[0] *= several
        wholes.append(
            (torch.randn(shape, generator=torch.Generator().manual_seed(draw.randint(0, 99))).to(dtype), dim, several)
        )
    before, after = draw.sample([(size, replicas) for size in (1, 2, 4) for replicas in (1, 2, 3)], 2)
    if before[0] * before[1] == after[0] * after[1]:
        after = after[0], after[1] + 1
    slots = {}
    had = shards(seed, wholes, *before)
    for rank, each in enumerate(had):
        state = TrainingState({"own": each}, rng=False)
        slots[rank] = capture(tmp_path / str(rank), state, rank=rank, world_size=len(had))
    holders = Holders({"a": slots})
    wanted = shards(seed + 1, wholes, *after)
    for rank, each in enumerate(wanted):
        expected = each.tensors
        each.tensors = [torch.full_like(tensor, 7) for tensor in expected]
        with rank_of(rank, len(wanted)):
            holders.load(TrainingState({"own": each}, rng=False), rank, len(wanted), len(had))
        for number, (found, right) in enumerate(zip(each.tensors, expected, strict=True)):
            assert found.dtype == right.dtype
            assert torch.equal(found, right), (number, before, after, wholes[number][1:], wholes[number][0].shape)
    holders.close()


def test_a_parameter_cut_across_two_dimensions_is_refused(tmp_path: Path) -> None:
    """A rank had the left half of it, and the first rows of something narrower are wanted."""
    left = Shards(random.Random(0), [(torch.arange(16.0).view(4, 4), 1, 1)], 2, 0, 1, 0)
    right = Shards(random.Random(0), [(torch.arange(16.0).view(4, 4), 1, 1)], 2, 1, 1, 0)
    slots = {
        rank: capture(tmp_path / str(rank), TrainingState({"own": each}, rng=False), rank=rank, world_size=2)
        for rank, each in enumerate((left, right))
    }
    holders = Holders({"a": slots})
    left.ranges["masters.0"] = [Range("parameter 0", (4, 4), 0, 0, 1, 8, 2)]
    with pytest.raises(StateError, match="ranks have divided parameter 0 in other dimensions"):
        holders.load(TrainingState({"own": left}, rng=False), 0, 1, 2)
    holders.close()


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 0, 2, 0, 4),
        (0, 0, 2, 5, 4),
        (4, 0, 2, 4, 4),
        (3, 0, 2, 2, 4),
        (0, 0, 2, 2, 3),
        (0, 0, 2, -1, 4),
        (0, 0, 2, 2, 0),
    ],
)
def test_rows_that_cannot_be_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(SlotError, match="does not tell what its flat tensors have"):
        parse(encode({"masters.0": [Range("weight", (4, 4), *numbers)]}))
