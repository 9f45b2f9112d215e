"""Megatron in other numbers of data- and tensor-parallel ranks: parameters, fp32 weights, moments are the same bits."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from launchers import run_trainers

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (extra engines)"),
]

RANKS = Path(__file__).with_name("megatron_ranks.py")
EVERY = range(10)
WHOLE = range(5)
"""Of the ways in which it trains, those in which each rank has the whole model."""
BUCKETS = 2
WITH_TENSOR_PARALLELISM = (5, 6)


WITH_PARTS = (7, 8)
"""Of the others, those that give ranks other parameters."""
DIVIDED = (10, 11, 12, 13, 14)


def run(act: str, directory: Path, size: int, numbers: "range | tuple[int, ...]", *options: str) -> None:
    arguments = [str(RANKS), act, str(directory), *map(str, numbers), *options]
    said = run_trainers(arguments, size, timeout_s=800).splitlines()
    assert len([line for line in said if line.startswith(f"{act} ")]) == size * len(numbers), said


@pytest.mark.parametrize(
    ("before", "afters"), [(4, {2: EVERY, 3: WHOLE}), (2, {4: EVERY, 1: WHOLE}), (1, {4: WHOLE})], ids=["4", "2", "1"]
)
def test_ranks_go_on_with_what_others_had(tmp_path: Path, before: int, afters: dict[int, range]) -> None:
    run("make", tmp_path, before, max(afters.values(), key=len))
    for after, numbers in afters.items():
        run("load", tmp_path, after, numbers)


@pytest.mark.parametrize(
    ("before", "afters"),
    [
        ((4, 2), [(2, 1), (2, 2)]),
        pytest.param((2, 2), [(4, 4), (1, 1)], marks=pytest.mark.nightly),
        pytest.param((1, 1), [(4, 2)], marks=pytest.mark.nightly),
        pytest.param((4, 4), [(2, 2), (3, 1)], marks=pytest.mark.nightly),
    ],
    ids=["4-2", "2-2", "1-1", "4-4"],
)
def test_tensor_parallelism_goes_on_otherwise(
    tmp_path: Path, before: tuple[int, int], afters: list[tuple[int, int]]
) -> None:
    """Ranks, and how many of them divide parameters; also compared with what Megatron loads of its own files."""
    for act, (size, tensor) in (("join", before), *(("divide", after) for after in afters)):
        run(act, tmp_path, size, DIVIDED, "--tensor", str(tensor))


def test_what_divides_the_model_otherwise_is_refused(tmp_path: Path) -> None:
    run("make", tmp_path, 2, (BUCKETS, *WITH_TENSOR_PARALLELISM, *WITH_PARTS))
    run("refuse", tmp_path, 2, (BUCKETS, *WITH_TENSOR_PARALLELISM))
    run("refuse", tmp_path, 1, (*WITH_TENSOR_PARALLELISM, *WITH_PARTS))
