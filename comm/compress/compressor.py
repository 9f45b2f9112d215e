"""What gradient compressors have in common: a tensor becomes a message, and a message a tensor again."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..net.entries import check_density, kept_count, to_message, unchecked
from ..ops.coo import Coo, coo_decode
from ..ops.scatter import scatter_add


class Compressor(ABC):
    """Turns 1-D floating-point tensors into smaller messages (1-D uint8, see `transport`).

    Compressors keep nothing between steps; what they leave out is a matter of `feedback`. If the tensor has an inf or a
    nan, so has what the message decodes to.
    """

    name: ClassVar[str]
    """How users, plans and benchmarks call it."""

    differs: ClassVar[frozenset[str]] = frozenset()
    """Attributes in which ranks differ."""

    fixed_size: ClassVar[bool] = True
    """Whether the messages of tensors of one size and type have one size, whatever the values."""

    @abstractmethod
    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the message of a tensor; `seed`, of 32 bits, is the same on all ranks."""

    @abstractmethod
    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return the tensor of `numel` elements of `dtype` that `compress` made a message of with the same seed.

        Raises:
            CommError: The message is not of such a tensor.
        """

    def summed_as(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype as which messages of one seed can be summed before they are decoded, None for none."""
        return None

    def add(self, message: Tensor, total: Tensor, *, seed: int) -> None:
        """Add what a message decodes to, to the 1-D tensor `total`, in place."""
        total += self.decompress(message, total.numel(), total.dtype, seed=seed)

    def subtract(self, message: Tensor, dense: Tensor, dtype: torch.dtype, *, seed: int) -> None:
        """Subtract what a message of a tensor of `dtype` decodes to from `dense`, which may be wider, in place."""
        dense -= self.decompress(message, dense.numel(), dtype, seed=seed)


class Sparsifier(Compressor):
    """A compressor that sends some elements with their indices.

    Args:
        density: Share of the elements that is sent, k / numel; at least one element is.

    Raises:
        CommError: The density is not in (0, 1].
    """

    def __init__(self, density: float = 0.01) -> None:
        self.density = check_density(density)

    @abstractmethod
    def select(self, dense: Tensor, k: int, *, seed: int) -> Coo:
        """Return (about) `k` elements of a tensor."""

    def count(self, numel: int, density: float | None = None) -> int:
        """Return k for a tensor of `numel` elements."""
        return kept_count(numel, self.density if density is None else density)

    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the indices and values of the selected elements."""
        return to_message(self.select(dense, self.count(dense.numel()), seed=seed))

    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return the dense tensor with the selected elements, 0 elsewhere."""
        return coo_decode(*unchecked(message, dtype), numel)

    def add(self, message: Tensor, total: Tensor, *, seed: int) -> None:
        """Add the selected elements to `total`, in place."""
        scatter_add(total, *unchecked(message, total.dtype))

    def subtract(self, message: Tensor, dense: Tensor, dtype: torch.dtype, *, seed: int) -> None:
        """Subtract the selected elements from `dense`, in place."""
        entries = unchecked(message, dtype)
        scatter_add(dense, entries.indices, -entries.values.to(dense.dtype))
