"""One threshold over the parts of a gradient that several ranks hold."""

import pytest
import torch
from op_cases import DTYPES
from ranks import run_ranks
from torch import Tensor

from resilient_run.comm.compress.compressors import SampledTopK
from resilient_run.comm.compress.pooled import PooledTopK
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.ops.topk import topk
from resilient_run.comm.runtime.bucket import check_pool


def normal(numel: int, *, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def select(parts: list[Tensor], density: float, *, seed: int = 3) -> list[Coo]:
    def work(pool: Transport) -> Coo:
        compressor, part = PooledTopK(density, pool), parts[pool.rank]
        return compressor.select(part, compressor.count(part.numel()), seed=seed)

    return run_ranks(len(parts), work)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "numels", [(300_000, 300_000), (400_000, 90_000, 250_000), (500_000, 0), (200_000, 300, 200_000, 1)]
)
def test_one_threshold_for_all_parts(numels: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [normal(numel, seed=i, scale=1 + 2 * i, dtype=dtype) for i, numel in enumerate(numels)]
    found = select(parts, 0.05)
    selected = sum(each.indices.numel() for each in found)
    assert 0.04 * sum(numels) <= selected <= 0.0625 * sum(numels) + len(numels)
    least = min(each.values.abs().min() for each in found if each.values.numel())
    for part, each in zip(parts, found, strict=True):
        assert torch.equal(each.indices, (part.abs() >= least).nonzero().view(-1).int())
        assert torch.equal(each.values, part[each.indices.long()])


def test_a_part_with_larger_elements_sends_more_than_its_share() -> None:
    parts = [normal(200_000, seed=0), normal(200_000, seed=1, scale=10)]
    counts = [each.indices.numel() for each in select(parts, 0.05)]
    assert counts[0] < 1_000 < 15_000 < counts[1]


def test_ranks_with_the_same_part_select_the_same() -> None:
    part = normal(30_000, seed=0)
    first, second = select([part, part], 0.02)
    assert torch.equal(first.indices, second.indices)
    # That of the part alone, up to which of its samples is the threshold.
    alone = SampledTopK(0.02).select(part, 600, seed=3)
    assert abs(alone.indices.numel() - first.indices.numel()) < 30


@pytest.mark.parametrize("kind", ["equal", "few", "nan", "all wanted", "nothing"])
def test_where_no_threshold_selects_the_share_each_part_sends_its_own_largest(kind: str) -> None:
    density = 1.0 if kind == "all wanted" else 0.05
    parts = [torch.zeros(0 if kind == "nothing" else 10_000) for _ in range(2)]
    if kind == "equal":
        parts = [torch.ones(10_000), torch.ones(5_000)]
    elif kind == "few":
        parts[0][:3] = 1
    elif kind == "nan":
        parts[1] = normal(10_000, seed=1)
        parts[1][7] = torch.nan
    found = select(parts, density)
    if kind == "nan":
        assert 7 in found[1].indices
        assert 700 < sum(each.indices.numel() for each in found) < 1300
        return
    for part, each in zip(parts, found, strict=True):
        own = topk(part, SampledTopK(density).count(part.numel()))
        assert torch.equal(each.indices, own.indices)
        assert torch.equal(each.values, own.values)


@pytest.mark.parametrize("other", [(3, torch.bfloat16), (4, torch.float32)])
def test_ranks_that_select_for_different_gradients_are_told(other: tuple[int, torch.dtype]) -> None:
    """Thresholds of unrelated gradients would be wrong without a sign of it."""

    def work(pool: Transport) -> None:
        seed, dtype = other if pool.rank == 2 else (3, torch.float32)
        with pytest.raises(CommError, match="ranks of the pool select from different gradients"):
            PooledTopK(0.1, pool).select(normal(1_000, seed=0, dtype=dtype), 100, seed=seed)

    run_ranks(3, work)


def test_gradients_are_large_on_all_ranks_of_a_pool_or_on_none() -> None:
    def work(pool: Transport) -> str:
        sizes = {"alike": 5, "uneven": 10 - pool.rank, "of one": 3} if pool.rank else {"alike": 5, "uneven": 10}
        check_pool(None, sizes, 10)
        check_pool(pool, sizes, 9 - 4)
        with pytest.raises(CommError) as refused:
            check_pool(pool, sizes, 10)
        return str(refused.value)

    (message,) = set(run_ranks(3, work))
    assert message.startswith("uneven has 10, 9, 8 elements on the ranks of the pool: give a least_elements")
