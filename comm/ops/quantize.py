"""Blocks of 8-bit numbers with a scale each: int8, and fp8 of four exponent and three mantissa bits (e4m3).

All backends calculate in float32, with operations that IEEE 754 rounds in one way, none of which compilers may fuse
into something else. What float32 cannot hold is an inf.
"""

import math
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .kernels import CudaKernel, check_numel, cpu_kernel, flat, host
from .op import Op
from .spread import murmur, murmur_cpu, murmur_cuda

Format = Literal["int8", "fp8"]

BLOCK: Final = 256
"""Elements that share a scale."""

DTYPES: Final[dict[Format, torch.dtype]] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_GREATEST: Final[dict[Format, float]] = {"int8": 127.0, "fp8": 448.0}
_INFINITY_BITS = 0x7F800000
_LEAST_SCALE = 2.0**-126
"""The smallest normal number of float32: smaller scales would be rounded themselves."""
_GREATEST_SCALE: Final = {
    kind: float(np.nextafter(np.finfo(np.float32).max / np.float32(greatest), np.float32(0)))
    for kind, greatest in _GREATEST.items()
}
"""With the next one, the greatest code may be an inf."""
_LEAST_EXPONENT = -6
"""Of a normal number of e4m3."""
_GREATEST_CODE = 126


class Quantized(NamedTuple):
    """A tensor of known size in 8 bits an element.

    Attributes:
        codes: int8 or float8_e4m3fn, 1-D.
        scales: float32, one for each block; an element is about its code times its scale. NaN for a block that has an
            inf or a NaN, whose codes are 0.
    """

    codes: Tensor
    scales: Tensor


def scale_count(numel: int, block: int) -> int:
    """Return the number of blocks of a tensor; the last one may be shorter."""
    return -(-numel // block)


def _check_quantize(
    dense: Tensor, kind: Format, *, block: int = BLOCK, seed: int | None = None
) -> tuple[Tensor, Format, int, int | None]:
    """Return `dense`, of any shape, as numbers of 8 bits, so scaled that the greatest of a block just fits.

    Args:
        dense: Floating point.
        kind: Of the codes.
        block: Elements of a block.
        seed: In [0, 2^32): rounds stochastically, up with the chance that makes the mean exact; which elements is a
            matter of the seed and their index alone. None rounds to the nearest, ties to even.

    Raises:
        OpError: An argument is out of its range, or `dense` has more than 2^31-1 elements.
    """
    if kind not in DTYPES or block < 1 or (seed is not None and not 0 <= seed < 2**32):
        raise OpError(
            f"quantize: kind {kind!r}, block {block}, seed {seed}: give {' or '.join(DTYPES)}, at least one element, "
            f"and 32 bits of seed or None"
        )
    return flat("quantize", dense).float(), kind, block, seed


def _quantize_reference(elements: Tensor, kind: Format, block: int, seed: int | None) -> Quantized:
    scales = _scales(elements, kind, block)
    each = scales.repeat_interleave(block)[: elements.numel()]
    finite = each.isfinite()
    steps = (elements.abs() / each).where(finite, 0)
    # In fp8 a step is 2^-9 for the least numbers, and doubles with each exponent from 8 steps on.
    exponents = torch.frexp(steps.clamp(min=2.0**_LEAST_EXPONENT)).exponent - 1
    if kind == "fp8":
        steps = torch.ldexp(steps, 3 - exponents)
    if seed is None:
        counts = steps.round().int()
    else:
        hashed = murmur(torch.arange(elements.numel(), device=elements.device), seed)
        counts = (steps + (hashed >> 8).float() * 2.0**-24).floor().int()
    if kind == "int8":
        return Quantized((counts.clamp(max=127) * elements.sign().where(finite, 0)).to(torch.int8), scales)
    codes = (counts + (exponents - _LEAST_EXPONENT) * 8).clamp(max=_GREATEST_CODE).where(finite, 0)
    codes += 128 * (torch.signbit(elements) & finite)
    return Quantized(codes.to(torch.uint8).view(DTYPES[kind]), scales)


def dequantize(codes: Tensor, scales: Tensor, numel: int, *, block: int = BLOCK) -> Tensor:
    """Return the float32 tensor of `numel` elements that codes and scales stand for.

    Args:
        codes: Of `quantize`.
        scales: With them.
        numel: Number of elements.
        block: Elements of a block.

    Raises:
        OpError: They do not belong together.
    """
    check_numel("dequantize", numel)
    if block < 1 or codes.dtype not in DTYPES.values() or codes.shape != (numel,):
        raise OpError(
            f"dequantize: {numel} elements in blocks of {block} come with codes {codes.dtype} of shape "
            f"{tuple(codes.shape)}; pass the numel and block they were made with"
        )
    if scales.dtype != torch.float32 or scales.shape != (scale_count(numel, block),):
        raise OpError(
            f"dequantize: {numel} elements in blocks of {block} have {scale_count(numel, block)} float32 scales, not "
            f"{scales.dtype} of shape {tuple(scales.shape)}; pass the block they were made with"
        )
    if codes.dtype != torch.int8:
        # fp16 with the same bits is a 256th, for its exponents are larger by 8. torch converts e4m3 much more slowly.
        codes = codes.view(torch.int8).short().mul_(128).bitwise_and_(~0x4000).view(torch.float16)
        scales = scales * 256
    dense, whole = codes.float(), numel // block * block
    dense[:whole].view(-1, block).mul_(scales[: whole // block, None])
    dense[whole:] *= scales[-1:]
    return dense


def _scales(elements: Tensor, kind: Format, block: int) -> Tensor:
    missing = -elements.numel() % block
    padded = torch.nn.functional.pad(elements, (0, missing)) if missing else elements
    greatest = torch.linalg.vector_norm(padded.view(-1, block), ord=math.inf, dim=1)
    # A tensor: on a GPU torch does not divide by a number but multiplies by its reciprocal, which is rounded, too.
    scales: Tensor = (greatest / greatest.new_full((), _GREATEST[kind])).clamp(_LEAST_SCALE, _GREATEST_SCALE[kind])
    return scales.where(greatest.isfinite(), math.nan)


@cpu_kernel
def _uniform(numbers: NDArray[np.float32], seed: int) -> None:
    for i in range(numbers.size):
        numbers[i] = np.float32(murmur_cpu(i, seed) >> 8) * np.float32(2.0**-24)


@cpu_kernel
def _quantize_blocks(
    elements: NDArray[np.float32],
    uniform: NDArray[np.float32],
    is_fp8: bool,
    limits: tuple[float, float],
    block: int,
    codes: NDArray[Any],
    scales: NDArray[np.float32],
) -> None:
    # A loop for each thing to do, so that it is done for several elements at once.
    bits = elements.view(np.int32)
    steps, powers = np.empty(block, np.float32), np.empty(block, np.float32)
    steps_bits, powers_bits = steps.view(np.int32), powers.view(np.int32)
    offsets = np.empty(block, np.int32)
    greatest = np.empty(1, np.float32)
    greatest_code, greatest_scale = np.float32(limits[0]), np.float32(limits[1])
    least = np.int32(127 + _LEAST_EXPONENT)
    for b in range(scales.size):
        start = b * block
        size = min(block, elements.size - start)
        greatest_bits = np.int32(0)
        for i in range(start, start + size):
            greatest_bits = max(greatest_bits, bits[i] & np.int32(0x7FFFFFFF))
        if greatest_bits >= _INFINITY_BITS:
            scales[b] = np.nan
            codes[start : start + size] = 0
            continue
        greatest.view(np.int32)[0] = greatest_bits
        scale = min(max(greatest[0] / greatest_code, np.float32(_LEAST_SCALE)), greatest_scale)
        scales[b] = scale
        for i in range(size):
            steps[i] = abs(elements[start + i]) / scale
        if is_fp8:
            for i in range(size):
                offsets[i] = max(steps_bits[i] >> 23, least)
            for i in range(size):  # 2^(3 - exponent)
                powers_bits[i] = (np.int32(2 * 127 + 3) - offsets[i]) << 23
            for i in range(size):
                steps[i] *= powers[i]
        if uniform.size == 0:
            for i in range(size):
                steps[i] = np.rint(steps[i])
        else:
            for i in range(size):
                steps[i] = np.floor(steps[i] + uniform[start + i])
        if is_fp8:
            for i in range(size):
                code = min(np.int32(steps[i]) + (offsets[i] - least) * np.int32(8), np.int32(_GREATEST_CODE))
                codes[start + i] = code | ((bits[start + i] >> 24) & np.int32(128))
        else:
            for i in range(size):
                code = min(np.int32(steps[i]), np.int32(127))
                codes[start + i] = -code if bits[start + i] < 0 else code


def _quantize_cpu(elements: Tensor, kind: Format, block: int, seed: int | None) -> Quantized:
    uniform = torch.empty(0 if seed is None else elements.numel())
    if seed is not None:
        _uniform(host(uniform), seed)
    codes = torch.empty(elements.numel(), dtype=torch.int8)
    scales = torch.empty(scale_count(elements.numel(), block))
    limits = _GREATEST[kind], _GREATEST_SCALE[kind]
    _quantize_blocks(host(elements), host(uniform), kind == "fp8", limits, block, host(codes), host(scales))
    return Quantized(codes.view(DTYPES[kind]), scales)


@CudaKernel
def _quantize_kernel(elements, scales, is_fp8, block, stochastic, seed, codes):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < elements.size:
        scale = scales[i // block]
        code = 0
        if not math.isnan(scale):
            step = abs(elements[i]) / scale
            offset = 0
            if is_fp8:
                exponent = math.frexp(max(step, 2.0**_LEAST_EXPONENT))[1] - 1
                step = np.float32(math.ldexp(step, 3 - exponent))
                offset = (exponent - _LEAST_EXPONENT) * 8
            if stochastic:
                step = math.floor(step + np.float32(murmur_cuda(i, seed) >> 8) * np.float32(2.0**-24))
            else:
                step = round(step)
            code = min(int(step) + offset, _GREATEST_CODE if is_fp8 else 127)
            if math.copysign(1.0, elements[i]) < 0:
                code = code - 128 if is_fp8 else -code
        codes[i] = code


def _quantize_cuda(elements: Tensor, kind: Format, block: int, seed: int | None) -> Quantized:
    scales = _scales(elements, kind, block)
    codes = torch.empty(elements.numel(), dtype=torch.int8, device=elements.device)
    _quantize_kernel.launch(
        elements.numel(), elements, scales, kind == "fp8", block, seed is not None, seed or 0, codes
    )
    return Quantized(codes.view(DTYPES[kind]), scales)


quantize = Op(
    name="quantize", check=_check_quantize, reference=_quantize_reference, cpu=_quantize_cpu, cuda=_quantize_cuda
)
