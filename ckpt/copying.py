"""Copying a state into a slot: what is copied at once, what while training goes on, and the checksums on the way.

Parameters and optimizer state change only in the optimizer's step, so they are read *live*, behind the next forward and
backward. Everything else may change at any moment after `step()` and is *staged* there: copied into host memory.
"""

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from .manifest import encode_tensors, plan_payload
from .slot import CHUNK_BYTES, chunk_count
from .slots import MappedSlot
from .tree import Flattener, Leaf, leaf_paths

_SMALL_BYTES: Final = 64 << 10

CudaEvents = list[tuple[torch.device, torch.cuda.Event]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """One state, ready to be copied.

    Attributes:
        sources: For each leaf the live tensor or the staged copy.
        versions: For each live leaf its version counter; a different one later means that it was changed.
        ready: Per CUDA device in use, the event after which the sources are right.
    """

    sources: list[torch.Tensor]
    versions: list[int]
    ready: CudaEvents


class CapturePlan:
    """How the captures of one structure are made; it serves as long as `matches` says so.

    Attributes:
        specs: What each leaf takes.
        layout: Where it lies in the payload.
        tensors: The tensors' part of the manifest, encoded.
        live: Indices of the live leaves; the other ones are staged.
    """

    def __init__(self, flat: Flattener, owned: Collection[int], volatile: Collection[str]) -> None:
        """Plan captures of the structure of `flat`.

        Args:
            flat: A flattened state.
            owned: Addresses of the storages that only a registered optimizer changes.
            volatile: Paths that were seen to change between steps all the same.
        """
        self.specs = flat.specs()
        self.layout = plan_payload(self.specs)
        self.tensors = encode_tensors(self.specs, self.layout)
        self._keys = flat.keys
        self._paths = {index: path.removeprefix("objects.") for path, index in leaf_paths(flat.node).items()}
        self.live = [
            index
            for index, leaf in enumerate(flat.leaves)
            if _may_be_live(leaf, owned) and self._paths[index] not in volatile
        ]
        self._addresses = [_tensor(flat.leaves[index]).data_ptr() for index in self.live]
        self.devices = sorted({_tensor(leaf).device for leaf in flat.leaves if _is_cuda(leaf)}, key=str)
        self._make_staging(set(range(len(self.specs))) - set(self.live))

    def matches(self, flat: Flattener) -> bool:
        """Tell whether `flat` has the planned structure, with the live leaves where they were."""
        return flat.keys == self._keys and self._addresses == [
            _tensor(flat.leaves[index]).data_ptr() for index in self.live
        ]

    def stage(self, flat: Flattener) -> Staged:
        """Copy the staged leaves of `flat`; CUDA copies are only put on the current streams."""
        sources: list[Any] = list(flat.leaves)
        for index, staging in self._staging.items():
            leaf = flat.leaves[index]
            if isinstance(leaf, torch.Tensor):
                staging.copy_(leaf.detach(), non_blocking=True)
            elif isinstance(leaf, np.ndarray):
                np.ndarray(leaf.shape, dtype=leaf.dtype, buffer=staging.numpy())[...] = leaf
            else:
                staging.numpy()[:] = np.frombuffer(leaf, dtype=np.uint8)
            sources[index] = staging
        ready = [(device, torch.cuda.current_stream(device).record_event()) for device in self.devices]
        versions = [sources[index]._version for index in self.live]
        return Staged(sources=sources, versions=versions, ready=ready)

    def changed(self, staged: Staged) -> list[str]:
        """Return the paths of live leaves that were changed since they were staged: their copies are torn."""
        pairs = zip(self.live, staged.versions, strict=True)
        return [self._paths[index] for index, version in pairs if staged.sources[index]._version != version]

    def _make_staging(self, indices: Collection[int]) -> None:
        specs = [self.specs[index] for index in sorted(indices)]
        layout = plan_payload(specs)
        buffer = torch.empty(layout.payload_bytes, dtype=torch.uint8, pin_memory=bool(self.devices))
        self._staging = {}
        for index, spec, offset in zip(sorted(indices), specs, layout.offsets, strict=True):
            data = buffer[offset : offset + spec.nbytes]
            if spec.kind == "torch":
                dtype = getattr(torch, spec.dtype)
                data = data.view(dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
            self._staging[index] = data


class Copier:
    """Copies staged states into slots and computes the chunk checksums, in the thread that calls it."""

    def __init__(self) -> None:
        """Prepare the copy functions; CUDA streams are made when they are needed."""
        # Large copies run without the interpreter lock. Small ones keep it: giving it up and taking it again would
        # cost more than the copy, and up to a switch interval when the training thread runs Python.
        self._copy_large = _memmove(ctypes.CDLL(None))
        self._copy_small = _memmove(ctypes.PyDLL(None))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(
        self,
        plan: CapturePlan,
        staged: Staged,
        target: MappedSlot,
        *,
        on_released: Callable[[CudaEvents], None],
        on_copied: Callable[[], None],
    ) -> npt.NDArray[np.uint64]:
        """Copy `staged` into `target`, which is marked WRITING, and return the XXH3-64 of each chunk.

        Args:
            plan: The plan that made `staged`.
            staged: What to copy.
            target: Where to.
            on_released: Called once the live tensors may be changed by work that waits for the given events.
            on_copied: Called once the staged copies may be overwritten.
        """
        target.shape(plan.specs, plan.layout)
        if plan.devices:
            return self._copy_from_devices(plan, staged, target, on_released, on_copied)
        checksums = self._copy_and_hash(plan, staged, target)
        on_released([])
        on_copied()
        return checksums

    def _copy_from_devices(
        self,
        plan: CapturePlan,
        staged: Staged,
        target: MappedSlot,
        on_released: Callable[[CudaEvents], None],
        on_copied: Callable[[], None],
    ) -> npt.NDArray[np.uint64]:
        live = set(plan.live)
        copied: CudaEvents = []
        for device, ready in staged.ready:
            stream = self._stream(device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                for index in plan.live:
                    if staged.sources[index].device == device:
                        target.views[index].copy_(staged.sources[index].detach(), non_blocking=True)
            copied.append((device, stream.record_event()))
        for index in plan.live:
            if staged.sources[index].is_cpu:
                self._copy_leaf(plan, staged, target, index)
        on_released(copied)
        for _, ready in staged.ready:
            ready.synchronize()
        for index in range(len(plan.specs)):
            if index not in live:
                self._copy_leaf(plan, staged, target, index)
        on_copied()
        for _, event in copied:
            event.synchronize()
        buffer = target.slot.buffer[target.slot.payload_offset :]
        size = plan.layout.payload_bytes
        return np.array([_checksum(buffer, start, size) for start in range(0, size, CHUNK_BYTES)], dtype=np.uint64)

    def _copy_leaf(self, plan: CapturePlan, staged: Staged, target: MappedSlot, index: int) -> None:
        source, size = staged.sources[index], plan.specs[index].nbytes
        if size and _is_plain(source):
            self._move(target.address + plan.layout.offsets[index], source.data_ptr(), size)
        elif size:
            target.views[index].copy_(source.detach())

    def _copy_and_hash(self, plan: CapturePlan, staged: Staged, target: MappedSlot) -> npt.NDArray[np.uint64]:
        # Chunk by chunk, so that a chunk is hashed while it is still in the processor's cache.
        size = plan.layout.payload_bytes
        checksums = np.empty(chunk_count(size), dtype=np.uint64)
        buffer = target.slot.buffer[target.slot.payload_offset :]
        index, done = 0, 0
        for chunk in range(len(checksums)):
            end = min((chunk + 1) * CHUNK_BYTES, size)
            while index < len(plan.specs) and plan.layout.offsets[index] + done < end:
                offset, total = plan.layout.offsets[index], plan.specs[index].nbytes
                source = staged.sources[index]
                if _is_plain(source):
                    part = min(total - done, end - offset - done)
                    self._move(target.address + offset + done, source.data_ptr() + done, part)
                    done += part
                elif total:
                    if not done:
                        target.views[index].copy_(source.detach())
                    done = min(total, end - offset)
                if done < total:
                    break
                index, done = index + 1, 0
            checksums[chunk] = _checksum(buffer, chunk * CHUNK_BYTES, size)
        return checksums

    def _move(self, target: int, source: int, size: int) -> None:
        (self._copy_large if size > _SMALL_BYTES else self._copy_small)(target, source, size)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], Any]:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


def _checksum(payload: memoryview, start: int, size: int) -> int:
    return xxhash.xxh3_64_intdigest(payload[start : min(start + CHUNK_BYTES, size)])


def _may_be_live(leaf: Leaf, owned: Collection[int]) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and (leaf.is_cpu or leaf.is_cuda)
        and not leaf.is_inference()
        and leaf.untyped_storage().data_ptr() in owned
    )


def _is_cuda(leaf: Leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's memory is what the slot shall hold."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _tensor(leaf: Leaf) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor)
    return leaf
