"""Which server gets what: exact, stable, and balanced whatever the pattern of non-zeros."""

import pytest
import torch
from op_cases import RUNNERS, Runner, lists, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.coo import coo_encode
from resilient_run.comm.ops.spread import Spread, murmur, murmur_cpu, murmur_cuda
from resilient_run.comm.zen.histogram import indices_at, partition

# Density and elements (millions) of the embeddings of Table 3.1.
MODELS = {"LSTM": (0.0113, 406), "DeepFM": (0.028, 214), "NMT": (0.0247, 112), "BERT": (0.0106, 23)}


def all_indices(numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.int32)


@pytest.mark.parametrize(
    ("number", "seed", "digest"),
    [
        (0, 0, 0x2362F9DE),
        (0xFFFFFFFF, 0, 0x76293B50),
        (0x87654321, 0, 0xF55B516B),
        (0x87654321, 0x5082EDEE, 0x2362F9DE),
    ],
)
def test_murmur_is_the_published_one(number: int, seed: int, digest: int) -> None:
    assert murmur(torch.tensor([number]), seed).tolist() == [digest]
    assert murmur_cpu(number, seed) == digest
    assert murmur_cuda.fn(number, seed) == digest if hasattr(murmur_cuda, "fn") else True


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 64, 1001])
@pytest.mark.parametrize("parts", [1, 2, 3, 8, 13])
def test_every_index_has_one_place(numel: int, parts: int) -> None:
    spread = Spread(numel=numel, parts=parts, seed=7)
    owners = spread.owners(all_indices(numel))
    assert torch.bincount(owners, minlength=parts).tolist() == [spread.size(part) for part in range(parts)]
    places = spread.positions(all_indices(numel))
    for part in range(parts):
        own = places[owners == part]
        assert torch.equal(own, all_indices(spread.size(part)))
        assert torch.equal(spread.indices(own, part), all_indices(numel)[owners == part])


@RUNNERS
@pytest.mark.parametrize(("numel", "parts"), [(100, 2), (100, 3), (41, 8), (90, 4), (5, 8)])
def test_stable_and_exact(run: Runner, numel: int, parts: int) -> None:
    spread = Spread(numel=numel, parts=parts, seed=3)
    indices, values = coo_encode(sparse(numel, 0.7))
    found = run(partition, indices, values, spread)
    owners = spread.owners(indices)
    expected = [indices[owners == part] for part in range(parts)]
    assert found.counts == [len(each) for each in expected]
    for mine, part in zip(lists(found), expected, strict=True):
        same(mine, (spread.positions(part), values[torch.isin(indices, part)]))
    for part in range(parts):
        same([run(indices_at, spread.positions(expected[part]), spread, part)], [expected[part]])


@RUNNERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_order_and_type(run: Runner, dtype: torch.dtype) -> None:
    spread = Spread(numel=60, parts=3)
    indices, values = torch.randperm(60, dtype=torch.int32)[:40], torch.randn(40, dtype=dtype)
    same(
        run(partition, indices[::2], values[::2], spread), partition.on("reference")(indices[::2], values[::2], spread)
    )


@RUNNERS
def test_nothing_to_divide(run: Runner) -> None:
    found = run(partition, torch.empty(0, dtype=torch.int32), torch.empty(0), Spread(numel=9, parts=3))
    assert [len(each.indices) for each in lists(found)] == found.counts == [0, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_kernel_is_its_reference(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    numel, parts = (int(torch.randint(1, high, (), generator=random)) for high in (20000, 200))
    spread = Spread(numel=numel, parts=parts, seed=seed)
    entries = coo_encode(sparse(numel, 0.3, seed=seed))
    same(partition(*entries, spread), partition.on("reference")(*entries, spread))


def rows(numel: int, count: int, width: int, random: torch.Generator) -> Tensor:
    """Return the indices of whole embedding rows, most of them at the front as in sorted vocabularies."""
    skewed = (torch.rand(4 * count, generator=random) ** 4 * (numel // width)).long().unique()
    kept = skewed[torch.randperm(skewed.numel(), generator=random)[:count]].sort().values
    return (kept[:, None] * width + torch.arange(width)).view(-1).int()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", ["uniform", "front", "strided", "rows"])
def test_balanced_at_the_densities_of_the_paper(model: str, pattern: str) -> None:
    # As many indices as the smallest model has: balance only gets better with more of them.
    density, millions = MODELS[model]
    numel = millions * 1_000_000
    count, random = min(int(numel * density), 250_000), torch.Generator().manual_seed(1)
    if pattern == "rows":
        chosen = rows(numel, count // 512, 512, random)
    else:
        width = {"uniform": numel, "front": numel // 50, "strided": numel // 128}[pattern]
        chosen = torch.randint(0, width, (count,), generator=random, dtype=torch.int32).unique()
        chosen = chosen * 128 if pattern == "strided" else chosen
    for parts in (2, 3, 16, 100, 128):
        counts = partition(chosen, torch.empty(chosen.numel()), Spread(numel=numel, parts=parts)).counts
        assert max(counts) * parts / sum(counts) < 1.1, (parts, max(counts))


@RUNNERS
def test_indices_of_another_tensor_are_refused(run: Runner) -> None:
    spread = Spread(numel=10, parts=4)
    for wrong in (torch.tensor([10], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)):
        with pytest.raises(OpError, match="do not fit 10 elements"):
            run(partition, wrong, torch.ones(1), spread)
        with pytest.raises(OpError, match="do not fit"):
            run(indices_at, wrong, spread, 0)
    with pytest.raises(OpError, match="part 4 is none of the 4 parts"):
        run(indices_at, torch.empty(0, dtype=torch.int32), spread, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"numel": 2**31}, "elements"),
        ({"parts": 0}, "parts is 0"),
        ({"seed": 2**32}, "seed is"),
    ],
)
def test_spreads_that_cannot_be(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(OpError, match=message):
        Spread(**{"numel": 1, "parts": 1, **wrong})
