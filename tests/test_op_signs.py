"""Signs and means, and Random-k: what each backend writes is what the reference writes, for every kind of tensor."""

import math

import pytest
import torch
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.op import Backend
from resilient_run.comm.ops.random import random_indices, random_place, random_select
from resilient_run.comm.ops.signs import signs_decode, signs_encode

BACKENDS: tuple[Backend, ...] = ("reference", "cpu", "cuda")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on(backend: Backend, tensor: Tensor) -> Tensor:
    """Put a tensor where `backend` works; without a GPU CUDA kernels run in the simulator, on CPU tensors."""
    return tensor.to(DEVICE) if backend == "cuda" else tensor


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(3)
    found = {
        "empty": torch.empty(0),
        "one": torch.tensor([-3.0]),
        "zeros": torch.zeros(17),
        "negative": -torch.rand(9) - 1,
        "signed zeros": torch.tensor([0.0, -0.0, 1.0, -1.0]),
        "normal": torch.randn(1003),
        "strided": torch.randn(30, 4)[:, ::2],
        "huge": torch.tensor([1e4, -1e4, 2.0]),
    }
    return {name: tensor.to(dtype) for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_signs_and_means(backend: Backend, dtype: torch.dtype) -> None:
    for name, tensor in tensors(dtype).items():
        found = signs_encode.on(backend)(on(backend, tensor))
        wide = tensor.double().flatten()
        below = wide < 0
        means = [wide[~below].mean(), wide[below].mean(), wide.abs().mean()]
        expected = torch.tensor([0.0 if math.isnan(mean) else float(mean) for mean in means])
        torch.testing.assert_close(found.means.cpu(), expected, rtol=1e-6, atol=0, msg=name)
        levels = torch.tensor([2.5, -1.5], dtype=dtype)
        back = signs_decode(found.bitmap, on(backend, levels), tensor.numel())
        assert back.dtype == dtype
        assert torch.equal(back.cpu(), torch.where(below, levels[1], levels[0])), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_shows_in_the_means(backend: Backend) -> None:
    """A step that overflowed must be seen on all ranks."""
    means = signs_encode.on(backend)(on(backend, torch.tensor([1.0, math.nan, -2.0]))).means
    assert means.isnan().tolist() == [True, False, True]
    means = signs_encode.on(backend)(on(backend, torch.tensor([1.0, -math.inf]))).means
    assert means.tolist() == [1.0, -math.inf, math.inf]


@pytest.mark.parametrize("backend", BACKENDS)
def test_signs_of_another_size_are_refused(backend: Backend) -> None:
    found = signs_encode.on(backend)(on(backend, torch.ones(9)))
    with pytest.raises(OpError, match="bitmap of 17 elements is 1-D uint8 of 3 bytes"):
        signs_decode(found.bitmap, found.means[:2], 17)
    with pytest.raises(OpError, match="levels are two floating-point numbers"):
        signs_decode(found.bitmap, found.means, 9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("numel", "k"), [(0, 0), (1, 1), (5, 0), (7, 7), (1000, 13), (1003, 500)])
def test_random_k_takes_and_places_what_the_seed_says(backend: Backend, numel: int, k: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense = on(backend, torch.arange(1, numel + 1).to(dtype))
        drawn = random_indices.on(backend)(dense, numel, k, seed=7).cpu()
        assert torch.equal(drawn, random_indices.on("reference")(dense.cpu(), numel, k, seed=7))
        indices = drawn.long()
        values = random_select(dense, k, seed=7)
        assert torch.equal(values.cpu(), dense.cpu()[indices])
        placed = random_place(values, numel, seed=7).cpu()
        assert torch.equal(placed[indices], values.cpu())
        assert int((placed != 0).sum()) == k


def test_random_k_draws_each_element_alike() -> None:
    numel, k, draws = 60, 7, 4000
    counts = torch.zeros(numel)
    for seed in range(draws):
        indices = random_indices(counts, numel, k, seed=seed)
        assert (indices.diff() > 0).all()
        counts[indices.long()] += 1
    assert (counts.sum(), counts.numel()) == (k * draws, numel)
    # Strides of 8 and 9 elements: the chances differ by that; four standard deviations around.
    assert counts.min() > draws / 9 - 4 * math.sqrt(draws / 9)
    assert counts.max() < draws / 8 + 4 * math.sqrt(draws / 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_k_out_of_range_is_refused(backend: Backend) -> None:
    dense = on(backend, torch.ones(4))
    for k, seed in [(5, 0), (-1, 0), (1, 2**32), (1, -1)]:
        with pytest.raises(OpError, match="random_k: k"):
            random_indices.on(backend)(dense, 4, k, seed=seed)
    with pytest.raises(OpError, match="random_k: k 4 of 3 elements"):
        random_place(dense, 3, seed=0)
