"""Top-k by magnitude: exact, and with the sampled threshold of Deep Gradient Compression (Lin et al., section 3.1)."""

from functools import cache
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import reaching
from .coo import Coo
from .kernels import bits, cpu_kernel, flat, host_bits, magnitude_mask
from .op import Op
from .spread import murmur

SLACK = 1.25
"""How many times more or fewer elements than were wanted a sampled threshold may select."""
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_LANES = 4
_SAMPLED = 0.01
_MIN_SAMPLES = 256


def _check_topk(dense: Tensor, k: int) -> tuple[Tensor, int]:
    """Return the `k` elements of `dense` of the largest magnitude, ascending by index; all where it has no more.

    Of equal magnitudes the lower index is taken. Inf is larger than every number and nan larger than inf (all nan are
    equal), so neither is lost unseen. Zeros are taken where there are fewer than `k` other elements.

    Raises:
        OpError: `k` is negative, `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = _checked("topk", dense, k)
    return elements, min(k, elements.numel())


def _topk_reference(elements: Tensor, k: int) -> Coo:
    if k in (0, elements.numel()):
        return Coo(torch.arange(k, dtype=torch.int32, device=elements.device), elements[:k])
    magnitudes = _magnitudes(elements)
    threshold = magnitudes.topk(k, sorted=False).values.min()
    above, equal = magnitudes > threshold, magnitudes == threshold
    found = (above | (equal & (equal.cumsum(0) <= k - above.sum()))).nonzero().view(-1)
    return Coo(found.int(), elements[found])


def _check_reach(dense: Tensor, threshold: int, most: int) -> tuple[Tensor, int, int]:
    """Return the elements of `dense` whose magnitude reaches `threshold`, ascending by index; None if more than `most`.

    Args:
        dense: Floating point, of any shape.
        threshold: The bits of a magnitude as an integer, which are ordered as magnitudes are; 1 or more.
        most: How many are too many to be written.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    return _checked("reach", dense, most), threshold, most


def _reach_reference(elements: Tensor, threshold: int, most: int) -> Coo | None:
    chosen = _magnitudes(elements) >= threshold
    if int(chosen.sum()) > most:
        return None
    found = chosen.nonzero().view(-1)
    return Coo(found.int(), elements[found])


def sample(elements: Tensor, *, seed: int) -> Tensor:
    """Return the magnitudes of some of the 1-D elements, drawn by the seed with repetitions, as `reach` takes them.

    One of a hundred is drawn, but at least 256.
    """
    count = min(elements.numel(), max(_MIN_SAMPLES, ceil(elements.numel() * _SAMPLED)))
    return _magnitudes(elements[(murmur(torch.arange(count, device=elements.device), seed) * elements.numel()) >> 32])


def _checked(name: str, dense: Tensor, k: int) -> Tensor:
    if k < 0:
        raise OpError(f"{name}: k is {k}; give 0 or more")
    return flat(name, dense)


def _magnitudes(elements: Tensor) -> Tensor:
    return (bits(elements) & magnitude_mask(elements)).clamp(max=_nan_magnitude(elements.dtype))


@cache
def _nan_magnitude(dtype: torch.dtype) -> int:
    infinity = torch.tensor(torch.inf, dtype=dtype)
    return int(bits(infinity)) + 1


@cpu_kernel
def _threshold(bits: NDArray[Any], nan: int, k: int) -> tuple[int, int, int]:
    """Return the k-th largest magnitude, how many elements of just that magnitude belong to the k, and how many are."""
    mask = np.iinfo(bits.dtype).max
    shift = bits.itemsize * 8 - 1 - _DIGIT_BITS
    # Neighbours are counted apart, since magnitudes fall into few digits and one counter would be a chain of waits.
    counts = np.zeros((_LANES, _DIGITS), np.int32)
    for i in range(bits.size):
        counts[i & (_LANES - 1), (bits[i] & mask) >> shift] += 1
    # Every nan counts as `nan`, whatever it carries.
    digit = nan >> shift
    here = int(counts[:, digit:].sum())
    while here < k:
        k -= here
        digit -= 1
        here = int(counts[:, digit].sum())
    pool = np.empty(here + 1, bits.dtype)
    size = 0
    for i in range(bits.size):
        magnitude = min(bits[i] & mask, nan)
        pool[size] = magnitude
        size += (magnitude >> shift) == digit
    while shift > 0:
        step = min(_DIGIT_BITS, shift)
        shift -= step
        low = (1 << step) - 1
        counts[0] = 0
        for i in range(size):
            counts[0, (pool[i] >> shift) & low] += 1
        digit = low
        while counts[0, digit] < k:
            k -= counts[0, digit]
            digit -= 1
        kept = 0
        for i in range(size):
            magnitude = pool[i]
            pool[kept] = magnitude
            kept += ((magnitude >> shift) & low) == digit
        size = kept
    return pool[0], k, size


def _without_later_ties(found: Coo, threshold: int, ties: int) -> Coo:
    """Return `found` with only the first `ties` of the elements whose magnitude is `threshold`."""
    magnitudes = _magnitudes(found.values)
    last = found.indices[magnitudes == threshold][ties - 1]
    kept = (magnitudes > threshold) | (found.indices <= last)
    return Coo(found.indices[kept], found.values[kept])


def _topk_cpu(elements: Tensor, k: int) -> Coo:
    if k == 0:
        return Coo(torch.empty(0, dtype=torch.int32), elements[:0])
    threshold, ties, equal = _threshold(host_bits(elements), _nan_magnitude(elements.dtype), k)
    reached = reaching(elements, threshold, k - ties + equal)
    assert reached is not None
    found = Coo(*reached)
    return _without_later_ties(found, threshold, ties) if ties < equal else found


def _reach_cpu(elements: Tensor, threshold: int, most: int) -> Coo | None:
    found = reaching(elements, threshold, most)
    return None if found is None else Coo(*found)


topk = Op(name="topk", check=_check_topk, reference=_topk_reference, cpu=_topk_cpu)
reach = Op(name="reach", check=_check_reach, reference=_reach_reference, cpu=_reach_cpu)


def sampled_topk(dense: Tensor, k: int, *, seed: int) -> Coo:
    """Return about `k` elements of large magnitude, ascending by index: all that reach a threshold found by sampling.

    The threshold is the magnitude that the k/numel-th of a sample reaches. Where more than k * `SLACK` or fewer than
    k / `SLACK` elements reach it, the result is that of `topk`, exactly k.

    Args:
        dense: Floating point, of any shape.
        k: How many, at most `SLACK` times more or less.
        seed: In [0, 2^32): which sample; the same one gives the same result on all backends.

    Raises:
        OpError: An argument is out of its range, `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = _checked("sampled_topk", dense, k)
    if not 0 <= seed < 2**32:
        raise OpError(f"sampled_topk: seed {seed}; give one of 32 bits")
    numel = elements.numel()
    if not 0 < k < numel:
        return topk(elements, k)
    drawn = sample(elements, seed=seed)
    rank = max(1, round(k * drawn.numel() / numel))
    found = reach(elements, int(drawn.topk(rank, sorted=False).values.min()), floor(k * SLACK))
    return topk(elements, k) if found is None or found.indices.numel() < ceil(k / SLACK) else found
