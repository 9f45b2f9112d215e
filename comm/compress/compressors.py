"""The compressors: by magnitude, at random, by sign, in half precision, and in 8 bits."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import all_finite, check_density, kept_count
from ..net.transport import from_bytes, to_bytes
from ..ops.bitmap import bitmap_bytes
from ..ops.coo import Coo
from ..ops.random import random_place, random_select
from ..ops.signs import signs_decode, signs_encode
from ..ops.topk import sampled_topk, topk
from .compressor import Compressor, Sparsifier
from .quantized import EightBits


class TopK(Sparsifier):
    """The elements of the largest magnitude, exactly (Aji and Heafield, 2017)."""

    name = "topk"

    def select(self, dense: Tensor, k: int, *, seed: int) -> Coo:
        """Return the `k` elements of the largest magnitude."""
        return topk(dense, k)


class SampledTopK(Sparsifier):
    """The elements above a threshold that a sample gives: Deep Gradient Compression (Lin et al., 2018, section 3.1).

    About k of them: a quarter more or less. With `feedback.MomentumCorrection` this is DGC.
    """

    name = "dgc"
    fixed_size = False

    def select(self, dense: Tensor, k: int, *, seed: int) -> Coo:
        """Return about `k` elements of large magnitude."""
        return sampled_topk(dense, k, seed=seed)


class RandomK(Compressor):
    """Elements drawn at random, the same on all ranks, so that no indices are sent (Stich et al., 2018).

    One value becomes a nan when an element is an inf or a nan, whether that one is drawn or not.

    Args:
        density: Share of the elements that is sent, k / numel; at least one element is.

    Raises:
        CommError: The density is not in (0, 1].
    """

    name = "randomk"

    def __init__(self, density: float = 0.01) -> None:
        self.density = check_density(density)

    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the values that the seed draws, one of them a nan if not all elements are finite."""
        values = random_select(dense, kept_count(dense.numel(), self.density), seed=seed)
        values[:1] = torch.where(all_finite(dense), values[:1], torch.nan)
        return to_bytes(values)

    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return the dense tensor with the values where the seed drew them, 0 elsewhere."""
        (values,) = from_bytes(message, (dtype, kept_count(numel, self.density)))
        return random_place(values, numel, seed=seed)

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return `dtype`: all ranks draw the same elements."""
        return dtype


class OneBit(Compressor):
    """Signs, each as the mean of the elements that have it (1-bit SGD, Seide et al., 2014, with one column)."""

    name = "onebit"
    _means = slice(2)
    """Of `Signs`, what is sent: what each sign stands for, or one mean for both."""

    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the means and the signs."""
        signs = signs_encode(dense)
        return to_bytes(signs.means[self._means], signs.bitmap)

    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return the mean of each element's sign."""
        count = len(range(3)[self._means])
        means, bitmap = from_bytes(message, (torch.float32, count), (torch.uint8, bitmap_bytes(numel)))
        return signs_decode(bitmap, torch.cat([means, -means])[:2].to(dtype), numel)


class EFSignSGD(OneBit):
    """Signs, times the mean magnitude (Karimireddy et al., 2019)."""

    name = "efsignsgd"
    _means = slice(2, 3)


class Half(Compressor):
    """Half precision, fp16 or bf16. What overflows becomes inf, as in training with that type.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the type."""
        return "fp16" if self.dtype is torch.float16 else "bf16"

    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the rounded elements."""
        return to_bytes(dense.to(self.dtype))

    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return the rounded elements, widened."""
        (values,) = from_bytes(message, (self.dtype, numel))
        return values.to(dtype)

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the half precision that messages have."""
        return self.dtype


_FACTORIES: Final[dict[str, Callable[[float], Compressor]]] = {
    "topk": TopK,
    "dgc": SampledTopK,
    "randomk": RandomK,
    "efsignsgd": lambda density: EFSignSGD(),
    "onebit": lambda density: OneBit(),
    "fp16": lambda density: Half(torch.float16),
    "bf16": lambda density: Half(torch.bfloat16),
    "int8": lambda density: EightBits("int8"),
    "fp8": lambda density: EightBits("fp8"),
}
"""Name → what makes the compressor, given the density."""

NAMES: Final = tuple(_FACTORIES)


def named(name: str, *, density: float = 0.01) -> Compressor:
    """Return a compressor by its name, one of `NAMES`; `density` is for those that send a part.

    Raises:
        CommError: There is no such compressor, or the density is not in (0, 1].
    """
    if name not in _FACTORIES:
        raise CommError(f"there is no compressor {name!r}; take one of {', '.join(NAMES)}")
    return _FACTORIES[name](density)
