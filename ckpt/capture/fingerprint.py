"""Fingerprints of memory that are equal on CPUs and GPUs: what a GPU hashes in `step()` a CPU proves in the slot.

A *fragment* of n bytes, at most `FRAGMENT_BYTES`, is read once, as little-endian words x_i of 32 bits, the last one
filled up with zeros. Its fingerprint has two lanes of 64 bits, with weights w_i of 64 random bits each:

    (n + Σ w_i · x_i) mod 2^64    and    (n + Σ w_(i+1) · x_i) mod 2^64

**Why it can be trusted.** This is the multilinear family (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014), shifted by one weight for the second lane. Let two fragments differ, last in word k, by δ with
0 < |δ| < 2^32. If t is the number of zero bits at the end of δ, at most 31, then of the 2^64 values of w_k at most 2^t
make the first lanes equal, whatever the other weights are: a chance of at most 2^-33. In the second lane w_(k+1) stands
at δ, and nowhere in the first one, so that its chance is 2^-33 again, given any outcome of the first: 2^-66 together.
(Fragments of different length and otherwise equal words always differ, by n.) For words of 64 bits t could be 63: two
numbers that differ in their top bit alone, as x and -x do, would collide with a chance of 1/2. Hence 32 bits of data
under 64 bits of weight. Weights must be uniform; odd ones would be worse.

The bound holds for any two contents that do not depend on the weights. These are drawn by the operating system's random
generator, once per process, never leave it, and are true random numbers, not a generator's: the proof needs nothing of
cryptography. It is no defence against somebody who can read them, and need not be: he could write to the slot as well.

**Why it is fast.** Each 4 bytes take two products of 32 by 64 bits, less work than it takes the memory of a GPU to
deliver them. Fragments are short so that all weights (8 KiB) stay in the first cache. Sums modulo 2^64 can be made in
any order, so that all threads of a GPU work at once; XXH3 has a fixed one.

Two implementations of one operation, for CPUs and for GPUs, that take and return the same; this module imports numba.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numba import config, cuda, njit, uint64
from numpy.typing import NDArray
from torch import Tensor

FRAGMENT_BYTES: Final = 4 << 10
"""The longest fragment."""

_WORD_BYTES: Final = 4
_LANES: Final = 2
# A warp for each fragment, so that its threads read words that lie side by side.
_FRAGMENT_THREADS: Final = 4 if config.ENABLE_CUDASIM else 32
_BLOCK_FRAGMENTS: Final = 2 if config.ENABLE_CUDASIM else 8
_BLOCK_THREADS: Final = _BLOCK_FRAGMENTS * _FRAGMENT_THREADS
_SUMS: Final = _BLOCK_FRAGMENTS * _LANES

_F = TypeVar("_F", bound=Callable[..., Any])


@functools.lru_cache(maxsize=1)
def weights() -> Tensor:
    """Return the weights of this process: int64, on the CPU, one more than a fragment has words."""
    return torch.frombuffer(bytearray(os.urandom(8 * (FRAGMENT_BYTES // _WORD_BYTES + 1))), dtype=torch.int64)


def fingerprint_cpu(words: Tensor, starts: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
    """Return the fingerprints of fragments of `words`, int64, [fragments, 2]; without the interpreter's lock.

    Args:
        words: Memory of the CPU, int32, 1-D; beyond the last bytes of a fragment nothing of it matters.
        starts: The word with which each fragment begins, int64.
        sizes: The bytes of each fragment, int64, 0 to `FRAGMENT_BYTES`.
        weights: int64, `FRAGMENT_BYTES` // 4 + 1 of them.
    """
    found = torch.empty(len(starts), _LANES, dtype=torch.int64, device="cpu")
    _sum_on_cpu(_words(words), starts.numpy(), sizes.numpy(), _unsigned(weights), _unsigned(found))
    return found


def fingerprint_cuda(words: Tensor, starts: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
    """Return what `fingerprint_cpu` does, on torch's current stream of the GPU; does not wait for it.

    In numba's simulator tensors are on the CPU.
    """
    found = torch.empty(len(starts), _LANES, dtype=torch.int64, device=words.device)
    if not len(starts):
        return found
    blocks = -(-len(starts) // _BLOCK_FRAGMENTS)
    # Numba warns of small grids, which small states have by nature.
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
    if config.ENABLE_CUDASIM:
        arrays = (_words(words), starts.numpy(), sizes.numpy(), _unsigned(weights), _unsigned(found))
        _sum_on_cuda[blocks, _BLOCK_THREADS](*arrays)
        return found
    with torch.cuda.device(words.device):
        stream = cuda.external_stream(torch.cuda.current_stream(words.device).cuda_stream)
        tensors = (words.view(torch.uint32), starts, sizes, weights.view(torch.uint64), found.view(torch.uint64))
        _sum_on_cuda[blocks, _BLOCK_THREADS, stream](*map(cuda.as_cuda_array, tensors))
    return found


def _words(tensor: Tensor) -> NDArray[np.uint32]:
    return tensor.view(torch.uint32).numpy()


def _unsigned(tensor: Tensor) -> NDArray[np.uint64]:
    return tensor.view(torch.uint64).numpy()


def _cpu_kernel(function: _F) -> _F:
    """Compile `function` at its first call; the machine code is kept on disk where a directory can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        kept: _F = njit(cache=True, **options)(function)
        return kept
    except RuntimeError:  # numba found no directory for its cache
        compiled: _F = njit(**options)(function)
        return compiled


@_cpu_kernel
def _sum_on_cpu(
    words: NDArray[np.uint32],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    weights: NDArray[np.uint64],
    found: NDArray[np.uint64],
) -> None:
    for f in range(starts.size):
        size = sizes[f]
        whole = size // _WORD_BYTES
        fragment = words[starts[f] : starts[f] + whole]
        first = second = np.uint64(size)
        for i in range(whole):
            first += weights[i] * np.uint64(fragment[i])
            second += weights[i + 1] * np.uint64(fragment[i])
        if size % _WORD_BYTES:
            mask = (np.uint64(1) << np.uint64(8 * (size % _WORD_BYTES))) - np.uint64(1)
            last = np.uint64(words[starts[f] + whole]) & mask
            first += weights[whole] * last
            second += weights[whole + 1] * last
        found[f, 0] = first
        found[f, 1] = second


@cuda.jit
def _sum_on_cuda(words, starts, sizes, weights, found):  # type: ignore[no-untyped-def]
    partial = cuda.shared.array((_LANES, _BLOCK_THREADS), uint64)
    thread = cuda.threadIdx.x
    f = cuda.blockIdx.x * _BLOCK_FRAGMENTS + thread // _FRAGMENT_THREADS
    first = second = np.uint64(0)
    if f < starts.size:
        start, size = np.uint64(starts[f]), sizes[f]
        whole = size // _WORD_BYTES
        # Unsigned, because numba would ask for each signed index whether it counts from the end.
        i, end = np.uint64(thread % _FRAGMENT_THREADS), np.uint64(whole)
        while i < end:
            word = np.uint64(words[start + i])
            first += weights[i] * word
            second += weights[i + np.uint64(1)] * word
            i += np.uint64(_FRAGMENT_THREADS)
        if thread % _FRAGMENT_THREADS == 0:
            first += np.uint64(size)
            second += np.uint64(size)
            if size % _WORD_BYTES:
                mask = (np.uint64(1) << np.uint64(8 * (size % _WORD_BYTES))) - np.uint64(1)
                word = np.uint64(words[start + end]) & mask
                first += weights[whole] * word
                second += weights[whole + 1] * word
    partial[0, thread] = first
    partial[1, thread] = second
    cuda.syncthreads()
    if thread < _SUMS:
        f = cuda.blockIdx.x * _BLOCK_FRAGMENTS + thread // _LANES
        if f < starts.size:
            total = np.uint64(0)
            for part in range(_FRAGMENT_THREADS):
                total += partial[thread % _LANES, thread // _LANES * _FRAGMENT_THREADS + part]
            found[f, thread % _LANES] = total
