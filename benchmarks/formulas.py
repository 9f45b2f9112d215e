"""Bytes that each scheme must move, from density and densification alone (thesis 3.2.4, 3.2.5 and 3.3.4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """How dense the gradients of n ranks are.

    Attributes:
        dense_bytes: M, the whole gradient in fp32.
        densities: d, d², … dⁿ: density of the sum of 1, 2, … n ranks; so n is its length.
        skew: How much more the fullest of n even ranges holds than the mean (1 is even).
    """

    dense_bytes: float
    densities: Sequence[float]
    skew: float = 1.0

    @property
    def ranks(self) -> int:
        """n."""
        return len(self.densities)


def dense_bytes(found: Sparsity) -> float:
    """Return 2(n-1)/n·M."""
    return 2 * _share(found) * found.dense_bytes


def agsparse_bytes(found: Sparsity) -> float:
    """Return 2(n-1)·d·M."""
    return 2 * (found.ranks - 1) * found.densities[0] * found.dense_bytes


def sparcml_bytes(found: Sparsity) -> float:
    """Return 2·Σ d^(2^(i-1))·M over the ⌊log2 n⌋ rounds; for n no power of two, of a rank that takes no part in the
    fold."""
    rounds = range(found.ranks.bit_length() - 1)
    return 2 * sum(found.densities[(1 << i) - 1] for i in rounds) * found.dense_bytes


def sparse_ps_bytes(found: Sparsity) -> float:
    """Return 2(n-1)/n·(d + dⁿ)·s·M: of the server with the fullest range."""
    return 2 * _share(found) * (found.densities[0] + found.densities[-1]) * found.skew * found.dense_bytes


def zen_bytes(found: Sparsity) -> float:
    """Return (n-1)/n·(2d + dⁿ + 1/32)·M: coordinates in Push, hash bitmaps in Pull."""
    return _share(found) * (2 * found.densities[0] + found.densities[-1] + 1 / 32) * found.dense_bytes


def index_free_bytes(found: Sparsity) -> float:
    """Return (n-1)/n·(d + dⁿ)·M."""
    return _share(found) * (found.densities[0] + found.densities[-1]) * found.dense_bytes


def eight_bits_bytes(found: Sparsity) -> float:
    """Return 2(n-1)/n·(1/4 + 1/256)·M: a byte for each element, and a scale for 256 of them."""
    return 2 * _share(found) * (1 / 4 + 1 / 256) * found.dense_bytes


def scheme_free_bytes(found: Sparsity) -> float:
    """Return d^(n-1)·M: what the other ranks' gradients hold, however they come."""
    return found.densities[-2] * found.dense_bytes if found.ranks > 1 else 0.0


def _share(found: Sparsity) -> float:
    return (found.ranks - 1) / found.ranks


RECEIVED_BYTES: Final[dict[str, Callable[[Sparsity], float]]] = {
    "agsparse": agsparse_bytes,
    "dense": dense_bytes,
    "fp8": eight_bits_bytes,
    "index-free": index_free_bytes,
    "int8": eight_bits_bytes,
    "sparcml": sparcml_bytes,
    "sparse-ps": sparse_ps_bytes,
    "zen": zen_bytes,
}
"""Scheme → bytes that each rank receives in one step, fp32, without headers."""
