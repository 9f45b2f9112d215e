"""Metrics of sparse gradients on inputs whose numbers are known."""

import pytest
import sparsity
import torch
from baselines.rows import Even

from resilient_run.comm.zen.partition import Balanced, join
from resilient_run.comm.zen.sparse import Sparse, merge

TABLE_3_1 = {
    "LSTM": (20_000_000, 0.0113),
    "DeepFM": (20_000_000, 0.028),
    "NMT": (18_000_000, 0.0247),
    "BERT": (23_000_000, 0.0106),
}
"""Elements of the embedding (scaled; BERT whole) and density of one worker's gradient."""


def test_density_counts_what_is_not_zero() -> None:
    gradient = torch.tensor([[0.0, 1.0, torch.nan, -0.0], [0.0, torch.inf, 0.0, 0.0]])
    assert sparsity.density(gradient) == 3 / 8
    assert sparsity.density(gradient.to_sparse(1)) == 3 / 8
    assert sparsity.density(torch.zeros(0)) == 0.0
    assert sparsity.nonzero(gradient, 2).tolist() == [0, 1, 2]


def test_overlap_and_densification() -> None:
    one, same, other = torch.tensor([1.0, 1, 0, 0]), torch.tensor([-1.0, 2, 0, 0]), torch.tensor([0.0, 0, 1, 1])
    assert sparsity.overlap_ratio(one, same) == 1.0
    assert sparsity.overlap_ratio(one, other) == 0.0
    assert sparsity.overlap_ratio(one, torch.zeros(4)) == 0.0
    assert sparsity.densification([one, same, one]) == [1, 1, 1]
    assert sparsity.densification([one, other]) == [1, 2]
    assert sparsity.densities([one, same, other]) == [0.5, 0.5, 1.0]


def test_skewness_is_one_when_even_and_the_parts_when_all_is_in_one() -> None:
    assert sparsity.skewness(torch.ones(64), 8) == 1.0
    assert sparsity.skewness(torch.cat([torch.ones(8), torch.zeros(56)]), 8) == 8.0
    assert sparsity.skewness(torch.zeros(64), 8) == 1.0


@pytest.mark.parametrize("skew", [1.0, 8.0])
@pytest.mark.parametrize("model", TABLE_3_1)
def test_shares_are_balanced(model: str, skew: float) -> None:
    """At the densities of Table 3.1, for tensors of about their size or smaller."""
    length, density = TABLE_3_1[model]
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        places = torch.rand(round(density * length), generator=generator, dtype=torch.float64).pow(skew)
        return torch.unique((places * length).long().clamp_(max=length - 1))

    indices = [draw() for _ in range(3)]
    for servers in (2, 16, 128):
        cut = Balanced(length=length, servers=servers)
        assert sparsity.push_imbalance(indices, servers, cut.spread.owners) < 1.1
        assert sparsity.pull_imbalance(indices, servers, cut.spread.owners) < 1.1
        even = Even(length=length, servers=servers)
        if skew > 1:
            # What all others would have to live with.
            first = torch.tensor([part.count for part in even.split(_rows(indices[0], length))])
            assert servers * first.max() / indices[0].numel() > 1.5


def _rows(indices: torch.Tensor, length: int) -> Sparse:
    return Sparse(indices=indices.int(), values=torch.ones(indices.numel(), 1), length=length)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 1000, 4099])
@pytest.mark.parametrize("servers", [1, 2, 7, 16])
@pytest.mark.parametrize("width", [1, 3])
def test_every_partition_gives_back_what_it_split(length: int, servers: int, width: int) -> None:
    indices = (torch.rand(length, generator=torch.Generator().manual_seed(1)) < 0.4).nonzero().view(-1).int()
    given = Sparse(indices=indices, values=torch.randn(indices.numel(), width), length=length)
    cuts = [
        Even(length=length, servers=servers),
        Balanced(length=length, servers=servers, seed=5),
        Balanced(length=length, servers=servers, seed=5, how="hash"),
    ]
    for cut in cuts:
        assert sum(cut.size(server) for server in range(servers)) == length
        parts = cut.split(given)
        assert all(bool((part.indices.diff() > 0).all()) for part in parts), "not ascending"
        back = join(cut, parts, length)
        order = back.indices.argsort()
        assert torch.equal(back.indices[order], given.indices)
        assert torch.equal(back.values[order], given.values)
    exact, hashed = (cut.split(given) for cut in cuts[1:])
    for one, other in zip(exact, hashed, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_in_the_order_of_parts_and_none_is_left_out(density: float, dtype: torch.dtype) -> None:
    random, length, width = torch.Generator().manual_seed(1), 500, 3
    parts, expected = [], torch.zeros(length, width)
    for _ in range(4):
        indices = (torch.rand(length, generator=random) < density).nonzero().view(-1)
        values = torch.randn(indices.numel(), width, generator=random).to(dtype)
        parts.append(Sparse(indices=indices.int(), values=values, length=length))
        expected[indices] += values.float()
    first = parts[0]
    cancelled = Sparse(indices=first.indices, values=-first.values, length=length)
    for given, total in ((parts, expected), ([first, cancelled], torch.zeros(length, width))):
        found = merge(given)
        union = torch.cat([part.indices for part in given]).unique()
        assert found.indices.dtype == torch.int32
        assert torch.equal(found.indices, union)
        assert torch.equal(found.values, total[union].to(dtype))
