"""Addresses of memory: what is there, unions of them, and which this process may write."""

import ctypes
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from ..format.manifest import TensorSpec
from .tree import Extent, Leaf, bytes_of


def memory(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, which the caller sees to it that they stay there.

    Of a script's tensor nothing but this is read: `numpy()` and DLPack would make its storage one that can never be
    resized again.
    """
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def leaf_of(spec: TensorSpec, data: torch.Tensor) -> Leaf:
    """Return the leaf of which `data` (uint8, on the CPU) is the content, arrays and tensors as views of it."""
    if spec.kind == "bytes":
        return data.numpy().tobytes()
    if spec.kind == "numpy":
        return np.ndarray(spec.shape, dtype=np.dtype(spec.dtype), buffer=data.numpy())
    dtype = getattr(torch, spec.dtype)
    return data.view(dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype, device="cpu")


def content_of(leaf: Leaf) -> torch.Tensor:
    """Return the content of a leaf as bytes of the CPU, contiguous; those of a tensor may be its memory."""
    if isinstance(leaf, torch.Tensor):
        return bytes_of(leaf)
    data = leaf if isinstance(leaf, bytes) else leaf.tobytes()
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the content of a strided tensor."""
    plain = bytes_of(tensor)
    return xxhash.xxh3_128_hexdigest(memory(plain.data_ptr(), len(plain)))


def digest_of(tensor: torch.Tensor) -> str:
    """Return what tells a strided tensor from others: its dtype, its shape and a hash of its content."""
    return f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}"


class Extents:
    """A union of memory."""

    def __init__(self, extents: Iterable[Extent | None] = ()) -> None:
        self._merged: list[Extent] = []
        for each in sorted(each for each in extents if each is not None):
            self.add(each)

    def add(self, extent: Extent) -> None:
        """Take `extent` into it."""
        begin, end = extent
        first = bisect_left(self._merged, (begin,))
        if first and self._merged[first - 1][1] >= begin:
            first -= 1
        last = first
        while last < len(self._merged) and self._merged[last][0] <= end:
            last += 1
        if first < last:
            begin, end = min(begin, self._merged[first][0]), max(end, self._merged[last - 1][1])
        self._merged[first:last] = [(begin, end)]

    def overlap(self, extent: Extent | None) -> bool:
        """Tell whether some of `extent` is in it."""
        return extent is not None and overlap(self._before(extent[1]), extent)

    def covers(self, extent: Extent) -> bool:
        """Tell whether all of `extent` is in it."""
        begin, end = self._before(extent[1])
        return begin <= extent[0] and extent[1] <= end

    def _before(self, address: int) -> Extent:
        """Return the last piece that begins before `address`."""
        at = bisect_left(self._merged, (address,)) - 1
        return self._merged[at] if at >= 0 else (0, 0)


def overlap(one: Extent, other: Extent) -> bool:
    """Tell whether two pieces of memory have a byte in common."""
    return one[0] < other[1] and other[0] < one[1]


def writable() -> list[Extent]:
    """Return the memory of this process that may be written."""
    with open("/proc/self/maps") as file:
        fields = [line.split(maxsplit=2) for line in file]
    places = [place.split("-") for place, rights, *_ in fields if "w" in rights]
    return [(int(begin, 16), int(end, 16)) for begin, end in places]
