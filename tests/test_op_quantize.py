"""Blocks of int8 and fp8, on all backends: the same bits, near enough, and nothing that is not finite is lost."""

import math
from typing import get_args

import pytest
import torch
from op_cases import DTYPES, EACH_GRADIENT, RUNNERS, Runner, same
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.kernels import bits
from resilient_run.comm.ops.quantize import BLOCK, Format, dequantize, quantize

KINDS: tuple[Format, ...] = get_args(Format)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
SEEDS = pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])


def randn(numel: int, *, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def of_each_block(tensor: Tensor, block: int) -> Tensor:
    """Return the greatest magnitude of the block that each element is in."""
    return torch.cat([part.abs().max().expand(part.numel()) for part in tensor.split(block)])


@RUNNERS
@EACH_GRADIENT
@EACH_KIND
@SEEDS
def test_all_that_a_gradient_can_hold(run: Runner, gradient: Tensor, kind: Format, seed: int | None) -> None:
    flat = gradient.detach().reshape(-1).float()
    found = run(quantize, gradient, kind, block=5, seed=seed)
    same(found, quantize.on("reference")(gradient, kind, block=5, seed=seed))
    back = run(dequantize, *found, flat.numel(), block=5)
    assert back.dtype == torch.float32
    assert back.shape == flat.shape
    steps = (254 if kind == "int8" else 28) / (1 if seed is None else 2)
    for own, theirs in zip(back.split(5), flat.split(5), strict=True) if flat.numel() else ():
        if theirs.isfinite().all():
            assert ((own - theirs).abs() <= 1.001 * theirs.abs().max() / steps).all()
            assert (own[theirs == 0] == 0).all()
        else:
            assert own.isnan().all(), "an inf or a NaN is seen"


@EACH_KIND
@SEEDS
@pytest.mark.parametrize("block", [1, 7, 256, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_is_its_reference(kind: Format, seed: int | None, block: int, dtype: torch.dtype) -> None:
    """Also of numbers whose magnitudes have nothing in common, so that all codes occur."""
    for numel in (1, 255, 4099):
        wide = randn(numel) * torch.exp2(randn(numel, seed=1) * 4)
        for dense in (wide, randn(numel), wide * 2.0**-10):
            given = dense.to(dtype)
            found = quantize(given, kind, block=block, seed=seed)
            same(found, quantize.on("reference")(given, kind, block=block, seed=seed))
            back = dequantize(*found, numel, block=block)
            each = found.scales.repeat_interleave(block)[:numel]
            same([back.nan_to_num()], [(found.codes.float() * each).nan_to_num()])
            assert torch.equal(back.isnan(), each.isnan())


def test_fp8_is_rounded_as_torch_rounds() -> None:
    """Every number of e4m3, halfway between two, and around there; the block is so scaled that its scale is 1."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (values[:-1] + values[1:]) / 2
    around = torch.cat([halfway, halfway.nextafter(values[1:]), halfway.nextafter(values[:-1])])
    dense = torch.cat([values, around, -values, -around, torch.tensor([448.0])])
    found = quantize(dense, "fp8", block=dense.numel())
    assert found.scales.tolist() == [1.0]
    assert torch.equal(found.codes.view(torch.uint8), dense.to(torch.float8_e4m3fn).view(torch.uint8))


@EACH_KIND
def test_what_codes_stand_for_comes_back_as_it_was(kind: Format) -> None:
    """Quantized once more, nothing changes: what one rank has rounded, the next one does not round again."""
    first = quantize(randn(5000), kind)
    once = dequantize(*first, 5000)
    again = quantize(once, kind)
    same([dequantize(*again, 5000)], [once])


@EACH_KIND
@SEEDS
def test_least_and_greatest_numbers(kind: Format, seed: int | None) -> None:
    limits = torch.finfo(torch.float32)
    denormal = torch.tensor([limits.smallest_normal, 2.0**-149, -(2.0**-140), 2.0**-127])
    greatest = torch.tensor([limits.max, -limits.max, 1.0, 0.0])
    for dense in (denormal, denormal[1:], greatest, torch.cat([greatest, denormal])):
        found = quantize(dense, kind, block=4, seed=seed)
        same(found, quantize.on("reference")(dense, kind, block=4, seed=seed))
        same(found, quantize.on("cuda")(dense, kind, block=4, seed=seed) if not torch.cuda.is_available() else found)
        back = dequantize(*found, dense.numel(), block=4)
        assert back.isfinite().all()
        assert ((back - dense).abs() <= (of_each_block(dense, 4) / 16).clamp(min=2.0**-126)).all()


@EACH_KIND
@pytest.mark.parametrize("value", [1.0, -3e-5, 1e30, 0.0])
def test_block_of_one_value_is_that_value(kind: Format, value: float) -> None:
    dense = torch.full((600,), value)
    back = dequantize(*quantize(dense, kind), 600)
    torch.testing.assert_close(back, dense, rtol=1e-6, atol=0)


@EACH_KIND
def test_stochastic_rounding_is_right_on_average(kind: Format) -> None:
    dense = torch.linspace(-1, 1, 300)
    draws = torch.stack([dequantize(*quantize(dense, kind, seed=seed), 300) for seed in range(2000)])
    step = of_each_block(dense, BLOCK) / (127 if kind == "int8" else 14)
    # Of 2000 draws with a deviation of at most half a step: five standard deviations.
    assert ((draws.double().mean(0) - dense).abs() <= 5 * step / 2 / math.sqrt(2000)).all()
    assert (draws.std(0) > 0).float().mean() > 0.9, "it draws"
    nearest = dequantize(*quantize(dense, kind), 300)
    assert (draws - nearest).abs().max() <= 1.001 * step.max()


def test_one_bad_element_spoils_only_its_block() -> None:
    dense = randn(3 * BLOCK)
    dense[BLOCK + 3] = math.inf
    for kind in KINDS:
        back = dequantize(*quantize(dense, kind), dense.numel())
        assert back.isnan().nonzero().view(-1).tolist() == [*range(BLOCK, 2 * BLOCK)]


@RUNNERS
def test_wrong_arguments_are_refused(run: Runner) -> None:
    dense = torch.ones(9)
    for wrong in ({"kind": "int4"}, {"block": 0}, {"seed": -1}, {"seed": 2**32}):
        with pytest.raises(OpError, match="quantize: kind"):
            run(quantize, dense, **{"kind": "int8", **wrong})  # type: ignore[arg-type]
    with pytest.raises(OpError, match="floating point"):
        run(quantize, torch.ones(9, dtype=torch.int32), "int8")
    found = run(quantize, dense, "int8", block=4)
    with pytest.raises(OpError, match=r"8 elements in blocks of 4 come with codes torch.int8 of shape \(9,\)"):
        run(dequantize, *found, 8, block=4)
    with pytest.raises(OpError, match="9 elements in blocks of 2 have 5 float32 scales"):
        run(dequantize, *found, 9, block=2)
    with pytest.raises(OpError, match=r"codes torch.uint8"):
        run(dequantize, bits(found.codes).view(torch.uint8), found.scales, 9, block=4)
