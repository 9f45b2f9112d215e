"""Top-k by magnitude: exact, and with the sampled threshold of Deep Gradient Compression (Lin et al., section 3.1)."""

from functools import cache
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numba import cuda, int32
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import BYTES_PER_THREAD, ends_of, first_marked, marked, reaching
from .coo import Coo
from .kernels import CudaKernel, bits, cpu_kernel, flat, host_bits, magnitude_mask
from .op import Op
from .spread import murmur, write_samples

SLACK = 1.25
"""How many times more or fewer elements than were wanted a sampled threshold may select."""
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_HISTOGRAM_THREADS = 1 << 18
_DIGIT_THREADS = 128
_PREFIX, _LEFT = 0, 1
"""Places in what a GPU finds of the k-th largest magnitude: its first bits, and how many with them are of the k."""
_LANES = 4
_SAMPLED = 0.01
_MIN_SAMPLES = 256
_MAX_SAMPLES = 1 << 14
_MIN_SAMPLED = 1 << 15
_MIN_SPARSITY = 16
_PER_SAMPLE = 32


def _topk_reference(dense: Tensor, k: int) -> Coo:
    """Return the `k` elements of `dense` of the largest magnitude, ascending by index; all where it has no more.

    Of equal magnitudes the lower index is taken. Inf is larger than every number and nan larger than inf (all nan are
    equal), so neither is lost unseen. Zeros are taken where there are fewer than `k` other elements.

    Raises:
        OpError: `k` is negative, `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = _checked("topk", dense, k)
    order = _magnitudes(elements).sort(descending=True, stable=True).indices[:k].sort().values
    return Coo(order.int(), elements[order])


def _sampled_reference(dense: Tensor, k: int, *, seed: int) -> Coo:
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
    limits = _limits(elements.numel(), k, seed)
    if limits is None:
        return _topk_reference(elements, k)
    found = _reach_reference(elements, _sampled_threshold(elements, k, seed), limits[1])
    return _topk_reference(elements, k) if found is None or found.indices.numel() < limits[0] else found


def _reach_reference(dense: Tensor, threshold: int, most: int) -> Coo | None:
    """Return the elements of `dense` whose magnitude reaches `threshold`, ascending by index; None if more than `most`.

    Args:
        dense: Floating point, of any shape.
        threshold: A magnitude as an integer, as `sample` returns them; 1 or more.
        most: How many are too many to be written.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = _checked("reach", dense, most)
    chosen = _magnitudes(elements) >= threshold
    if int(chosen.sum()) > most:
        return None
    found = chosen.nonzero().view(-1)
    return Coo(found.int(), elements[found])


def sample(dense: Tensor, k: int, *, seed: int) -> Tensor:
    """Return the magnitudes of elements drawn at random, with repetitions, as integers that are ordered as they are.

    One of a hundred is drawn, but at least 256.

    Args:
        dense: Floating point, of any shape.
        k: How many elements will be wanted.
        seed: In [0, 2^32): which sample.

    Raises:
        OpError: `k` is negative, `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = _checked("sample", dense, k)
    count, _ = _sample_size(elements.numel(), k)
    chosen = (murmur(torch.arange(count, device=elements.device), seed) * elements.numel()) >> 32
    return _magnitudes(elements[chosen])


def _checked(name: str, dense: Tensor, k: int) -> Tensor:
    if k < 0:
        raise OpError(f"{name}: k is {k}; give 0 or more")
    return flat(name, dense)


def _limits(numel: int, k: int, seed: int) -> tuple[int, int] | None:
    """Return how few and how many elements will do; None where there is nothing to choose."""
    if not 0 <= seed < 2**32:
        raise OpError(f"sampled_topk: seed {seed}; give one of 32 bits")
    return (ceil(k / SLACK), floor(k * SLACK)) if 0 < k < numel else None


def _magnitudes(elements: Tensor) -> Tensor:
    return (bits(elements) & magnitude_mask(elements)).clamp(max=_nan_magnitude(elements.dtype))


@cache
def _nan_magnitude(dtype: torch.dtype) -> int:
    infinity = torch.tensor(torch.inf, dtype=dtype)
    return int(bits(infinity)) + 1


def _sample_size(numel: int, k: int) -> tuple[int, int]:
    """Return how many elements to sample, and which of the largest of them is the threshold."""
    count = min(numel, max(_MIN_SAMPLES, ceil(numel * _SAMPLED)))
    return count, max(1, round(k * count / max(1, numel)))


def _sampled_threshold(elements: Tensor, k: int, seed: int) -> int:
    _, rank = _sample_size(elements.numel(), k)
    return int(sample(elements, k, seed=seed).topk(rank).values[-1])


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


def _likely(elements: Tensor, k: int) -> Coo | None:
    """Return the `k` largest elements and some more; None where a sample does not tell which those may be.

    Of the sample, those are taken that would be among the k largest, and as many more as four standard deviations.
    """
    numel = elements.numel()
    if numel < _MIN_SAMPLED or k * _MIN_SPARSITY > numel:
        return None
    chosen = np.empty(min(_MAX_SAMPLES, numel // _PER_SAMPLE), np.int32)
    write_samples(0, numel, chosen)
    expected = k / numel * chosen.size
    rank = ceil(expected + 4 * expected**0.5 + 4)
    threshold, _, _ = _threshold(host_bits(elements)[chosen], _nan_magnitude(elements.dtype), rank)
    found = reaching(elements, threshold, 2 * rank * numel // chosen.size)
    return None if found is None or found[0].numel() < k else Coo(*found)


def _without_later_ties(found: Coo, threshold: int, ties: int) -> Coo:
    """Return `found` with only the first `ties` of the elements whose magnitude is `threshold`."""
    magnitudes = _magnitudes(found.values)
    last = found.indices[magnitudes == threshold][ties - 1]
    kept = (magnitudes > threshold) | (found.indices <= last)
    return Coo(found.indices[kept], found.values[kept])


def _topk_cpu(dense: Tensor, k: int) -> Coo:
    elements = _checked("topk", dense, k)
    k = min(k, elements.numel())
    if k == 0:
        return Coo(torch.empty(0, dtype=torch.int32), elements[:0])
    likely = _likely(elements, k)
    among = elements if likely is None else likely.values
    threshold, ties, equal = _threshold(host_bits(among), _nan_magnitude(elements.dtype), k)
    reached = reaching(among, threshold, k - ties + equal)
    assert reached is not None
    indices, values = reached
    found = Coo(indices if likely is None else likely.indices[indices], values)
    return _without_later_ties(found, threshold, ties) if ties < equal else found


def _sampled_cpu(dense: Tensor, k: int, *, seed: int) -> Coo:
    elements = _checked("sampled_topk", dense, k)
    limits = _limits(elements.numel(), k, seed)
    if limits is None:
        return _topk_cpu(elements, k)
    array = host_bits(elements)
    size, rank = _sample_size(elements.numel(), k)
    chosen = np.empty(size, np.int32)
    write_samples(seed, elements.numel(), chosen)
    threshold, _, _ = _threshold(array[chosen], _nan_magnitude(elements.dtype), rank)
    found = _reach_cpu(elements, threshold, limits[1])
    return _topk_cpu(elements, k) if found is None or found.indices.numel() < limits[0] else found


@CudaKernel
def _histogram_kernel(bits: Any, mask: int, nan: int, shift: int, step: int, found: Any, counts: Any) -> None:
    prefix = found[_PREFIX]
    own = cuda.shared.array(_DIGITS, int32)
    for digit in range(cuda.threadIdx.x, _DIGITS, cuda.blockDim.x):
        own[digit] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), bits.size, cuda.gridsize(1)):
        magnitude = min(bits[i] & mask, nan)
        if magnitude >> (shift + step) == prefix:
            cuda.atomic.add(own, (magnitude >> shift) & ((1 << step) - 1), 1)
    cuda.syncthreads()
    for digit in range(cuda.threadIdx.x, _DIGITS, cuda.blockDim.x):
        if own[digit]:
            cuda.atomic.add(counts, digit, own[digit])


@CudaKernel
def _digit_kernel(counts: Any, step: int, found: Any) -> None:
    """Add the digit of the k-th largest magnitude to its prefix, and take off k what is larger; with one block."""
    sums = cuda.shared.array(_DIGIT_THREADS, int32)
    thread = cuda.threadIdx.x
    digits = 1 << step
    width = -(-digits // _DIGIT_THREADS)
    total = 0
    for digit in range(min(digits, thread * width), min(digits, (thread + 1) * width)):
        total += counts[digit]
    sums[thread] = total
    cuda.syncthreads()
    if thread == 0:
        left = found[_LEFT]
        # Numbers that somebody changes meanwhile must not lead out of memory.
        place = _DIGIT_THREADS - 1
        while place > 0 and sums[place] < left:
            left -= sums[place]
            place -= 1
        digit = min(digits, (place + 1) * width) - 1
        while digit > 0 and counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        found[_PREFIX] = (found[_PREFIX] << step) | digit
        found[_LEFT] = left


@CudaKernel
def _compare_kernel(bits: Any, mask: int, nan: int, found: Any, above: Any, equal: Any) -> None:
    byte = cuda.grid(1)
    if byte < above.size:
        threshold = found[_PREFIX]
        greater = 0
        same = 0
        for i in range(min(8, bits.size - byte * 8)):
            magnitude = min(bits[byte * 8 + i] & mask, nan)
            if magnitude > threshold:
                greater |= 1 << i
            elif magnitude == threshold:
                same |= 1 << i
        above[byte] = greater
        equal[byte] = same


@CudaKernel
def _first_ties_kernel(equal: Any, ends: Any, found: Any, chosen: Any) -> None:
    """Choose the first elements that equal the threshold, as many as are still wanted."""
    thread = cuda.grid(1)
    if thread < ends.size:
        left = found[_LEFT] - (ends[thread - 1] if thread else 0)
        byte = thread * BYTES_PER_THREAD
        while left > 0 and byte < min(equal.size, (thread + 1) * BYTES_PER_THREAD):
            word = 0
            for i in range(8):
                if left > 0 and (equal[byte] >> i) & 1:
                    word |= 1 << i
                    left -= 1
            chosen[byte] |= word
            byte += 1


@CudaKernel
def _reach_kernel(bits: Any, mask: int, nan: int, threshold: int, bitmap: Any) -> None:
    byte = cuda.grid(1)
    if byte < bitmap.size:
        word = 0
        for i in range(min(8, bits.size - byte * 8)):
            if min(bits[byte * 8 + i] & mask, nan) >= threshold:
                word |= 1 << i
        bitmap[byte] = word


def _found_cuda(elements: Tensor, k: int) -> Tensor:
    """Return on the GPU the k-th largest magnitude, and how many elements of just that magnitude belong to the k."""
    mask, nan = magnitude_mask(elements), _nan_magnitude(elements.dtype)
    shift = elements.element_size() * 8 - 1
    threads = min(elements.numel(), _HISTOGRAM_THREADS)
    found = torch.zeros(2, dtype=torch.int64, device=elements.device)
    found[_LEFT].fill_(k)
    while shift > 0:
        step = min(_DIGIT_BITS, shift)
        shift -= step
        counts = torch.zeros(_DIGITS, dtype=torch.int32, device=elements.device)
        _histogram_kernel.launch(threads, bits(elements), mask, nan, shift, step, found, counts)
        _digit_kernel.launch(_DIGIT_THREADS, counts, step, found, block=_DIGIT_THREADS)
    return found


def _topk_cuda(dense: Tensor, k: int) -> Coo:
    # Nobody waits for the GPU: how many there are is known, and all else that is found stays there.
    elements = _checked("topk", dense, k)
    k = min(k, elements.numel())
    if k == 0:
        return Coo(torch.empty(0, dtype=torch.int32, device=elements.device), elements[:0])
    found = _found_cuda(elements, k)
    chosen = torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)
    equal = torch.empty_like(chosen)
    mask, nan = magnitude_mask(elements), _nan_magnitude(elements.dtype)
    _compare_kernel.launch(chosen.numel(), bits(elements), mask, nan, found, chosen, equal)
    ends = ends_of(equal)
    _first_ties_kernel.launch(ends.numel(), equal, ends, found, chosen)
    indices = first_marked(chosen, ends_of(chosen), k)
    return Coo(indices, elements.index_select(0, indices))


def _sampled_cuda(dense: Tensor, k: int, *, seed: int) -> Coo:
    elements = _checked("sampled_topk", dense, k)
    limits = _limits(elements.numel(), k, seed)
    if limits is None:
        return _topk_cuda(elements, k)
    found = _reach_cuda(elements, _sampled_threshold(elements, k, seed), limits[1])
    return _topk_cuda(elements, k) if found is None or found.indices.numel() < limits[0] else found


def _reach_cpu(dense: Tensor, threshold: int, most: int) -> Coo | None:
    found = reaching(_checked("reach", dense, most), threshold, most)
    return None if found is None else Coo(*found)


def _reach_cuda(dense: Tensor, threshold: int, most: int) -> Coo | None:
    elements = _checked("reach", dense, most)
    bitmap = torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)
    mask, nan = magnitude_mask(elements), _nan_magnitude(elements.dtype)
    _reach_kernel.launch(bitmap.numel(), bits(elements), mask, nan, threshold, bitmap)
    indices = marked(bitmap)
    return Coo(indices, elements.index_select(0, indices)) if indices.numel() <= most else None


topk = Op(name="topk", reference=_topk_reference, cpu=_topk_cpu, cuda=_topk_cuda)
sampled_topk = Op(name="sampled_topk", reference=_sampled_reference, cpu=_sampled_cpu, cuda=_sampled_cuda)
reach = Op(name="reach", reference=_reach_reference, cpu=_reach_cpu, cuda=_reach_cuda)
