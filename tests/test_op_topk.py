"""Top-k by magnitude, exact and sampled, on all backends."""

import pytest
import torch
from op_cases import DTYPES, EACH_GRADIENT, RUNNERS, Runner, huge, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.ops.topk import reach, sample, sampled_topk, topk

NAN, INF = float("nan"), float("inf")


def expected_topk(gradient: Tensor, k: int) -> Coo:
    """Return the first k by (nan first, magnitude, index), in plain Python."""
    flat = gradient.detach().reshape(-1)
    numbers = flat.tolist()
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i] == numbers[i], -abs(numbers[i]), i))
    # nan compares with nothing, so its ties are sorted apart.
    nans = [i for i in range(len(numbers)) if numbers[i] != numbers[i]]
    chosen = sorted((nans + [i for i in order if i not in nans])[:k])
    return Coo(torch.tensor(chosen, dtype=torch.int32), flat[chosen])


@RUNNERS
@EACH_GRADIENT
@pytest.mark.parametrize("k", [0, 1, 5, 1000])
def test_the_largest_in_order(run: Runner, gradient: Tensor, k: int) -> None:
    if run.simulated and k == 1000 and gradient.numel() > 20:
        pytest.skip("slow in the simulator")
    same(run(topk, gradient, k), expected_topk(gradient, k))


@RUNNERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(run: Runner, dtype: torch.dtype) -> None:
    gradient = torch.tensor([1, -2, 2, 1, -2, 2, 0, -1], dtype=dtype)
    assert [run(topk, gradient, k).indices.tolist() for k in (1, 3, 4, 5)] == [
        [1],
        [1, 2, 4],
        [1, 2, 4, 5],
        [0, 1, 2, 4, 5],
    ]


@RUNNERS
def test_nan_of_any_kind_is_larger_than_inf(run: Runner) -> None:
    quiet = torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    gradient = torch.cat([torch.tensor([INF, 1.0]), quiet])
    assert run(topk, gradient, 2).indices.tolist() == [2, 3]
    assert run(topk, gradient, 4).indices.tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("seed", range(12))
def test_kernel_is_its_reference(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    numel = int(torch.randint(1, 20000, (), generator=random))
    k = int(torch.randint(0, numel + 1, (), generator=random))
    gradient = sparse(numel, 0.6, seed=seed, dtype=DTYPES[seed % 4]) * 10.0 ** (seed % 3)
    if seed % 5 == 0:
        gradient = gradient.round()
    same(topk(gradient, k), topk.on("reference")(gradient, k))
    threshold = max(1, int(sample(gradient.detach().reshape(-1), seed=seed).min()))
    same(reach(gradient, threshold, numel), reach.on("reference")(gradient, threshold, numel))


@EACH_GRADIENT
def test_a_sample_of_few_elements_still_takes_about_k(gradient: Tensor) -> None:
    assert min(gradient.numel(), 4) <= sampled_topk(gradient, 5, seed=1).indices.numel() <= 6


@pytest.mark.parametrize("seed", range(5))
def test_sampled_threshold_is_close(seed: int) -> None:
    gradient = torch.randn(200_000, generator=torch.Generator().manual_seed(seed))
    found = sampled_topk(gradient, 10_000, seed=seed)
    assert 8_000 <= found.indices.numel() <= 12_500
    # All that reach the smallest of them are there.
    least = found.values.abs().min()
    assert torch.equal(found.indices, (gradient.abs() >= least).nonzero().view(-1).int())
    assert not torch.equal(found.indices, sampled_topk(gradient, 10_000, seed=seed + 1).indices)


@RUNNERS
@EACH_GRADIENT
def test_what_reaches_a_magnitude(run: Runner, gradient: Tensor) -> None:
    flat = gradient.reshape(-1)
    for threshold in sorted({*sample(gradient.detach().reshape(-1), seed=4).tolist(), 1} - {0}):
        least = torch.tensor(threshold, dtype={4: torch.int32, 2: torch.int16, 8: torch.int64}[gradient.itemsize])
        chosen = (flat.abs() >= least.view(gradient.dtype)) | flat.isnan()
        expected = Coo(chosen.nonzero().view(-1).int(), flat[chosen])
        same(run(reach, gradient, threshold, gradient.numel()), expected)
        if expected.indices.numel():
            assert run(reach, gradient, threshold, expected.indices.numel() - 1) is None


def test_a_sample_is_of_the_gradient_s_magnitudes() -> None:
    gradient = -torch.arange(1.0, 5000.0)
    drawn = sample(gradient.detach().reshape(-1), seed=1)
    assert drawn.numel() == 256
    assert set(drawn.view(torch.float32).tolist()) <= set((-gradient).tolist())
    assert not torch.equal(drawn, sample(gradient.detach().reshape(-1), seed=2))


def test_exact_where_the_sample_misleads() -> None:
    # All but a few elements are equal, so no threshold takes about k.
    gradient = torch.ones(100_000)
    gradient[::1000] = 2
    for k in (1, 50, 200, 50_000):
        same(sampled_topk(gradient, k, seed=0), topk(gradient, k))


@RUNNERS
def test_wrong_arguments(run: Runner) -> None:
    with pytest.raises(OpError, match="k is -1"):
        run(topk, torch.ones(2), -1)
    if run.device == "cpu":
        with pytest.raises(OpError, match="split the tensor"):
            run(topk, huge(), 1)
    with pytest.raises(OpError, match="sampled_topk: seed -1"):
        sampled_topk(torch.ones(2), 1, seed=-1)
