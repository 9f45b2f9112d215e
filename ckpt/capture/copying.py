"""Copying a state into a slot: what is on the host inside `step()`, what is on GPUs behind training, with a proof.

`Copier.stage` runs inside `step()` and copies every leaf of the host, so nothing of it is read, or referred to, after
the call. Large leaves on a GPU are hashed there and copied later, while training goes on: `Copier.prove` believes no
byte of them before what arrived in the slot has that hash (`device.py`). Whoever wrote to them meanwhile, by whatever
means, makes the hashes differ, and the capture is given up.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import torch

from ..format.digests import Hashes
from ..format.manifest import encode_tensors, leaf_parts, leaf_paths, object_name, plan_payload
from ..format.slot import CHUNK_BYTES
from ..state.tree import Flattener, Leaf, raw
from .device import WORD_BYTES, CudaDevice, DeviceCapture, DeviceLeaves, device_of
from .slots import MappedSlot

_SMALL_BYTES: Final = 64 << 10
"""Leaves of a GPU up to this are copied inside `step()`, which takes no longer than a fingerprint of them."""

_SHARE_BYTES: Final = 8 << 20
"""With less than this for each of them, threads take longer to begin than they save."""

_MOST_THREADS: Final = 8
"""So many fill the channels of the memory."""

CudaEvents = list[tuple[torch.device, torch.cuda.Event]]
_Piece = tuple[int, int, int, int]
"""Where bytes lie in the payload; the place of their leaf among those that are moved; their offset in it; how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """One state at the moment of its `step()`.

    Attributes:
        memory: Where the leaves of the host are, as in the payload: the payload itself, or memory beside it.
        captures: Of the leaves that are copied behind training, for each device that has some.
        ready: Per CUDA device in use, the event after which `memory` is right.
    """

    memory: torch.Tensor
    captures: list[DeviceCapture]
    ready: CudaEvents

    def hold(self) -> None:
        """Let whatever training puts on its current streams from now on wait for copies under way; does not wait."""
        for capture in self.captures:
            capture.hold()


class CapturePlan:
    """How the captures of one structure are made; it serves as long as `matches` says so.

    Attributes:
        specs: What each leaf takes.
        layout: Where it lies in the payload.
        tensors: The tensors' part of the manifest, encoded.
        paths: The dotted path of each leaf, by index.
        live: Indices of the leaves that are read behind training; all others are copied inside `step()`.
        on_devices: How those of `live` are captured.
        moved: Indices of the leaves whose memory is what the payload shall have, byte for byte.
        others: Indices of the leaves that are copied through views.
        pieces: The pieces in which they are.
        late: The chunks that hold something of `live`.
        on_host: From where to where the payload has leaves that are not `live`.
        devices: The CUDA devices that hold leaves.
    """

    def __init__(self, flat: Flattener, *, eager: Collection[str] = ()) -> None:
        """Plan captures of the structure of `flat`.

        Args:
            flat: A flattened state.
            eager: Names of registered objects of which every leaf is copied inside `step()`; "*" stands for all.
        """
        self.specs = flat.specs()
        paths = leaf_paths(flat.node)
        self.layout = plan_payload(self.specs, leaf_parts(paths).values())
        self.tensors = encode_tensors(self.specs, self.layout)
        self.paths = {index: path.removeprefix("objects.") for path, index in paths.items()}
        self.devices = sorted({_tensor(leaf).device for leaf in flat.leaves if _is_cuda(leaf)}, key=str)
        self._keys = flat.keys
        by_device: dict[CudaDevice, dict[int, tuple[int, int]]] = {}
        self.moved: list[int] = []
        self.others: list[int] = []
        for index, leaf in enumerate(flat.leaves):
            start, end = self._place(index)
            device = (
                device_of(_tensor(leaf))
                if end - start > _SMALL_BYTES
                and _is_readable(leaf)
                and "*" not in eager
                and object_name(self.paths[index]) not in eager
                else None
            )
            if device is not None:
                by_device.setdefault(device, {})[index] = (start, end)
            elif start < end:
                (self.moved if _lies_plain(leaf) and _tensor(leaf).is_cpu else self.others).append(index)
        self.on_devices = [DeviceLeaves(device, places) for device, places in by_device.items()]
        self.live = sorted(index for places in by_device.values() for index in places)
        self.pieces: list[_Piece] = [
            (start, place, start - first, end - start)
            for place, index in enumerate(self.moved)
            for first, last in [self._place(index)]
            for start, end in _by_chunks(first, last)
        ]
        self.late = sorted(
            {
                chunk
                for start, end in map(self._place, self.live)
                for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
            }
        )
        live = set(self.live)
        filled = [index for index, spec in enumerate(self.specs) if spec.nbytes]
        runs = [(is_live, list(run)) for is_live, run in groupby(filled, key=live.__contains__)]
        self.on_host = [(self._place(run[0])[0], self._place(run[-1])[1]) for is_live, run in runs if not is_live]

    def matches(self, flat: Flattener) -> bool:
        """Tell whether `flat` has the planned structure, and devices can read their leaves where they lie now."""
        return flat.keys == self._keys and all(_is_readable(flat.leaves[index]) for index in self.live)

    def _place(self, index: int) -> tuple[int, int]:
        start = self.layout.offsets[index]
        return start, start + self.specs[index].nbytes


class Copier:
    """Copies states into slots."""

    def __init__(self) -> None:
        """Prepare the copy functions."""
        # Large copies run without the interpreter lock. Small ones keep it: giving it up and taking it again would
        # cost more than the copy, and up to a switch interval when another thread runs Python.
        self._move_large, self._move_small = (_memmove(kind(None)) for kind in (ctypes.CDLL, ctypes.PyDLL))
        self._pool: ThreadPoolExecutor | None = None

    def stage(
        self, plan: CapturePlan, leaves: Sequence[Leaf], memory: torch.Tensor, hashes: Hashes | None = None
    ) -> Staged:
        """Copy the leaves that are on the host into `memory`, and let GPUs hash theirs.

        CUDA copies are only put on the current streams, where whatever training puts there later comes after them.
        As many threads copy at once as this rank has cores.

        Args:
            plan: One that the flattened state matches.
            leaves: Of that.
            memory: uint8 of the CPU, as long as the payload, with zeros between the leaves.
            hashes: Of `memory`: made here, while what was copied is in the processor's cache, if this rank has one
                core, which training would share with a thread that hashes later. Else they are left for that, and so
                they are if something of `memory` comes from a device.
        """
        for index in plan.others:
            start = plan.layout.offsets[index]
            _fill(memory[start : start + plan.specs[index].nbytes], leaves[index])
        ready = [(device, torch.cuda.current_stream(device).record_event()) for device in plan.devices]
        tensors = {index: _tensor(leaves[index]) for index in plan.live}
        captures = [each.fingerprint(tensors) for each in plan.on_devices]
        self._share(plan, [_tensor(leaves[index]) for index in plan.moved], memory, None if ready else hashes)
        return Staged(memory=memory, captures=captures, ready=ready)

    def _share(
        self, plan: CapturePlan, leaves: Sequence[torch.Tensor], memory: torch.Tensor, hashes: Hashes | None
    ) -> None:
        """Copy the pieces of `leaves`, with help if they are long; return, or raise, when nobody copies any more."""
        pieces, helpers = iter(plan.pieces), list[Future[None]]()
        cores = _cores()
        threads = min(cores, sum(end - start for start, end in plan.on_host) // _SHARE_BYTES)
        try:
            if threads > 1:
                self._pool = self._pool or ThreadPoolExecutor(cores, "resilient-copy")
                with contextlib.suppress(RuntimeError):  # at the end of the process no thread begins: this one is there
                    for _ in range(1, threads):
                        helpers.append(self._pool.submit(self._copy, pieces, leaves, memory))
            if cores > 1 or plan.live or hashes is None:
                self._copy(pieces, leaves, memory)
            else:
                for to, chunk in groupby(pieces, key=lambda piece: piece[0] // CHUNK_BYTES * CHUNK_BYTES):
                    hashes.upto(to)
                    self._copy(chunk, leaves, memory)
                hashes.upto()
        finally:
            for _ in pieces:
                pass  # whatever happened: nobody begins another one
            _await(helpers)
        for helper in helpers:
            helper.result()

    def finish(
        self,
        plan: CapturePlan,
        staged: Staged,
        target: MappedSlot,
        *,
        on_released: Callable[[], None],
        on_copied: Callable[[], None],
    ) -> None:
        """Complete in `target`, which is marked WRITING, what was staged; `prove` tells whether it is right.

        Args:
            plan: The plan that `staged` was made with.
            staged: What to copy.
            target: Where to.
            on_released: Called once `staged.hold` covers whatever is still read of training's memory.
            on_copied: Called once `staged.memory` may be written, if it is not the slot's.
        """
        try:
            for capture in staged.captures:
                capture.begin(target.payload)
            on_released()
            if staged.memory is not target.payload:
                for _, ready in staged.ready:
                    ready.synchronize()
                for start, end in plan.on_host:
                    self._move_large(target.address + start, staged.memory.data_ptr() + start, end - start)
            on_copied()
        finally:
            # Whatever happened: nothing may arrive in a slot that is used for something else, or is gone.
            for _, ready in staged.ready:
                ready.synchronize()
            for capture in staged.captures:
                capture.finish()

    def prove(self, plan: CapturePlan, staged: Staged, target: MappedSlot) -> str | None:
        """Return the path of a leaf of a device that has not arrived as it was in `step()`, None if all have.

        Call it after the checksums of `target` are made, so that nothing can change between the two.
        """
        differ = (capture.differs(target.payload, chunk) for chunk in plan.late for capture in staged.captures)
        changed = next((leaf for leaf in differ if leaf is not None), None)
        return None if changed is None else plan.paths[changed]

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(self, pieces: Iterator[_Piece], leaves: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        base, move_small, move_large = memory.data_ptr(), self._move_small, self._move_large
        for to, place, offset, size in pieces:
            move = move_large if size > _SMALL_BYTES else move_small
            move(base + to, leaves[place].data_ptr() + offset, size)


def _cores() -> int:
    """Return how many cores this rank has, if those that it may use are shared by all ranks of the host."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks))


def _by_chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut bytes of the payload where its chunks end: one is still in the cache when it is hashed."""
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start, stop
        start = stop


def _await(futures: Sequence[Future[None]]) -> None:
    """Return when they have ended, also if this thread is interrupted meanwhile: then raise."""
    try:
        wait(futures)
    except BaseException:
        _await(futures)
        raise


def _fill(target: torch.Tensor, leaf: Leaf) -> None:
    """Write the content of a leaf to `target`, uint8; of a CUDA tensor only put that on the current stream."""
    if isinstance(leaf, bytes):
        target.numpy()[:] = np.frombuffer(leaf, dtype=np.uint8)
        return
    if isinstance(leaf, np.ndarray):
        np.ndarray(leaf.shape, dtype=leaf.dtype, buffer=target.numpy())[...] = leaf
        return
    source = raw(leaf.detach())
    target.view(source.dtype).view(source.shape).copy_(source, non_blocking=source.is_cuda)


def _lies_plain(leaf: Leaf) -> bool:
    """Tell whether a leaf's memory is, byte for byte, what the slot shall hold."""
    return isinstance(leaf, torch.Tensor) and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()


def _is_readable(leaf: Leaf) -> bool:
    """Tell whether a device can read a leaf behind training."""
    return _lies_plain(leaf) and _tensor(leaf).data_ptr() % WORD_BYTES == 0


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    move = library.memmove
    move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    move.restype = None
    return move


def _is_cuda(leaf: Leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _tensor(leaf: Leaf) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor)
    return leaf
