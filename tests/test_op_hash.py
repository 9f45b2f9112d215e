"""The hierarchical hash: the same sets as the exact partition, whatever collides."""

import pytest
import torch
import zen_hash
from hash_kernels import Hashed, HashMemory, hash_cpu, hash_op
from op_cases import RUNNERS, Runner, lists, same, sparse

from resilient_run.comm.ops.coo import coo_encode
from resilient_run.comm.ops.spread import Spread, murmur
from resilient_run.comm.zen.hash import hierarchical_hash
from resilient_run.comm.zen.histogram import Parts, partition


def assert_complete(found: Hashed, expected: Parts) -> None:
    """Each part has the entries of `expected`, in any order."""
    assert found.parts.counts == expected.counts
    for ours, theirs in zip(lists(found.parts), lists(expected), strict=True):
        order = ours.indices.argsort()
        same((ours.indices[order], ours.values[order]), theirs)


CASES = {
    "empty": (0, 0.0),
    "one": (1, 1.0),
    "all zero": (30, 0.0),
    "sparse": (60, 0.3),
    "dense": (30, 1.0),
}


@RUNNERS
@pytest.mark.parametrize(("numel", "density"), CASES.values(), ids=CASES.keys())
def test_equals_the_partition(run: Runner, numel: int, density: float) -> None:
    spread = Spread(numel=numel, parts=3, seed=1)
    gradient = sparse(numel, density).view(-1, 1)
    indices, values = coo_encode(gradient)
    found = run(hash_op, gradient, indices, spread, HashMemory.of(spread, max(density, 0.1)))
    assert_complete(found, partition(indices, values, spread))


@RUNNERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_index_0_and_every_type(run: Runner, dtype: torch.dtype) -> None:
    spread = Spread(numel=12, parts=2)
    gradient = torch.arange(1, 13).to(dtype)
    indices, values = coo_encode(gradient)
    found = run(hash_op, gradient, indices, spread, HashMemory(slots=12, serial=2))
    assert_complete(found, partition(indices, values, spread))


@RUNNERS
def test_too_little_memory_is_doubled_and_nothing_lost(run: Runner) -> None:
    spread = Spread(numel=60, parts=2)
    gradient = torch.ones(60)
    indices, values = coo_encode(gradient)
    found = run(hash_op, gradient, indices, spread, HashMemory(slots=2, serial=1, rounds=2))
    assert found.memory.slots > 2
    assert found.memory == HashMemory(slots=found.memory.slots, serial=found.memory.slots // 2, rounds=2)
    assert found.spilled <= 2 * found.memory.serial
    assert_complete(found, partition(indices, values, spread))


@pytest.mark.parametrize("seed", range(6))
def test_random_gradients_of_any_density(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    numel, parts = (int(torch.randint(1, high, (), generator=random)) for high in (30000, 64))
    spread = Spread(numel=numel, parts=parts, seed=seed)
    gradient = sparse(numel, float(torch.rand((), generator=random)), seed=seed)
    indices, values = coo_encode(gradient)
    # The planned density is too small for half of them.
    memory, expected = HashMemory.of(spread, 0.4), partition(indices, values, spread)
    for implementation in (hash_cpu, hash_op.reference):
        assert_complete(implementation(gradient, indices, spread, memory), expected)
    places = torch.split(expected.places, expected.counts)
    for slots in (1, memory.slots):
        found = hierarchical_hash(indices, spread, slots)
        for part, (ours, theirs) in enumerate(zip(found, places, strict=True)):
            assert ours.dtype == torch.int32
            assert torch.equal(ours, spread.indices(theirs, part))


@pytest.mark.parametrize(("rounds", "spilled"), [(1, 0.213), (2, 0.075), (3, 0.030), (4, 0.012)])
def test_spills_as_the_theory_says_and_loses_none_of_a_million(rounds: int, spilled: float) -> None:
    # Memory of 2|G|d/n slots: the share that finds none free in k tries.
    spread = Spread(numel=100_000_000, parts=16, seed=rounds)
    random = torch.Generator().manual_seed(rounds)
    indices = torch.randint(0, spread.numel, (1_000_000,), generator=random, dtype=torch.int32).unique()
    memory = HashMemory(slots=2 * indices.numel() // 16, serial=indices.numel() // 16, rounds=rounds)
    gradient = torch.zeros(1).expand(spread.numel)
    found = hash_cpu(gradient, indices, spread, memory)
    assert found.memory == memory
    assert found.spilled / indices.numel() == pytest.approx(spilled, rel=0.05)
    parts = enumerate(lists(found.parts))
    assert torch.equal(torch.cat([spread.indices(places, part) for part, (places, _) in parts]).sort().values, indices)


def test_the_strawman_of_the_benchmark_keeps_one_index_of_each_place() -> None:
    gradient = sparse(5000, 0.2)
    indices, _ = coo_encode(gradient)
    kept, values, ends = zen_hash.strawman(gradient, indices, 3200)
    places = (murmur(indices, 0) * 3200) >> 32
    assert 0 < kept.numel() == places.unique().numel() < indices.numel()
    assert torch.isin(kept, indices).all()
    same((kept, values), (kept, gradient[kept]))
    owners = ((murmur(kept, 0) * 3200) >> 32) * zen_hash.PARTS // 3200
    assert torch.bincount(owners, minlength=zen_hash.PARTS).cumsum(0).tolist() == ends.tolist()


def test_sizes_are_per_partition() -> None:
    assert HashMemory.of(Spread(numel=10_000, parts=4), 0.05) == HashMemory(slots=250, serial=25, rounds=3)
