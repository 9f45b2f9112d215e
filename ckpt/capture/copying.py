"""Copying a state into a slot behind training, with a proof that what was copied is what `step()` saw.

`CapturePlan.stage` runs inside `step()`. It copies small leaves, and takes a *fingerprint* of large ones: the XXH3-64
of each of their pieces. `Copier.copy` reads the large ones later, while training goes on, and believes no byte of them
before what arrived in the slot has that fingerprint. Whoever wrote to them meanwhile, by whatever means, makes the
fingerprints differ, and the capture is given up. Leaves on a GPU have fingerprints of another kind: see `device.py`.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ..format.manifest import encode_tensors, leaf_parts, leaf_paths, object_name, plan_payload
from ..format.slot import CHUNK_BYTES, chunk_count
from ..state.memory import memory
from ..state.tree import Flattener, Leaf, raw
from .device import WORD_BYTES, DeviceCapture, DeviceLeaves, GpuStreams, device_of
from .slots import MappedSlot

_SMALL_BYTES: Final = 64 << 10
"""Leaves up to this are copied inside `step()`: that takes no longer than a fingerprint and its bookkeeping."""

CudaEvents = list[tuple[torch.device, torch.cuda.Event]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """The payload bytes from `start` to `end`, within one chunk.

    Attributes:
        leaf: Index of the live leaf that they are part of, None if they are staged.
        offset: Where they begin in that leaf, or in the staging memory.
    """

    start: int
    end: int
    leaf: int | None
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """One state at the moment of its `step()`, ready to be copied.

    Attributes:
        live: The live leaves on the host by index, which stay allocated for that; none once they have been copied.
        addresses: Where each of them was, by index.
        fingerprints: One XXH3-64 per piece of a live leaf on the host, in the order of the pieces.
        captures: Of the live leaves on each device that has some.
        ready: Per CUDA device in use, the event after which the staged copies are right.
    """

    live: dict[int, torch.Tensor]
    addresses: dict[int, int]
    fingerprints: list[int]
    captures: list[DeviceCapture]
    ready: CudaEvents

    def hold(self) -> None:
        """Let whatever training puts on its current streams from now on wait for copies under way; does not wait."""
        for capture in self.captures:
            capture.hold()

    def let_go(self) -> None:
        """Keep nothing of training allocated any more: no copy begins, and those under way are waited for."""
        self.live.clear()
        for capture in self.captures:
            capture.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What `Copier.copy` made.

    Attributes:
        checksums: The XXH3-64 of each chunk; meaningless if a leaf changed.
        changed: The path of a live leaf that is not what it was in `step()`, None if all are.
    """

    checksums: npt.NDArray[np.uint64]
    changed: str | None


class CapturePlan:
    """How the captures of one structure are made; it serves as long as `matches` says so.

    Attributes:
        specs: What each leaf takes.
        layout: Where it lies in the payload.
        tensors: The tensors' part of the manifest, encoded.
        paths: The dotted path of each leaf, by index.
        live: Indices of the leaves that are read behind training; the other ones are staged.
        on_devices: How those of them are captured that are on devices.
        chunks: The pieces of each chunk of the payload, but for those of `on_devices`.
        live_pieces: Chunk, leaf and piece of each live one among them, in their order.
        staged_pieces: The other ones.
        whole: Of each chunk, whether it is one piece of a live leaf, whose fingerprint is then its checksum.
        devices: The CUDA devices that hold leaves.
    """

    def __init__(self, flat: Flattener, *, eager: Collection[str] = ()) -> None:
        """Plan captures of the structure of `flat`.

        Args:
            flat: A flattened state.
            eager: Names of registered objects of which every leaf is staged; "*" stands for all of them.
        """
        self.specs = flat.specs()
        paths = leaf_paths(flat.node)
        self.layout = plan_payload(self.specs, leaf_parts(paths).values())
        self.tensors = encode_tensors(self.specs, self.layout)
        self.paths = {index: path.removeprefix("objects.") for path, index in paths.items()}
        self.live = [
            index
            for index, leaf in enumerate(flat.leaves)
            if self.specs[index].nbytes > _SMALL_BYTES
            and is_plain(leaf)
            and "*" not in eager
            and object_name(self.paths[index]) not in eager
        ]
        self.devices = sorted({_tensor(leaf).device for leaf in flat.leaves if _is_cuda(leaf)}, key=str)
        self._keys = flat.keys
        by_device: dict[GpuStreams, dict[int, tuple[int, int]]] = {}
        for index in self.live:
            if (device := device_of(_tensor(flat.leaves[index]))) is not None:
                start = self.layout.offsets[index]
                by_device.setdefault(device, {})[index] = (start, start + self.specs[index].nbytes)
        self.on_devices = [DeviceLeaves(device, places) for device, places in by_device.items()]
        elsewhere = {index for places in by_device.values() for index in places}
        self._on_host = [index for index in self.live if index not in elsewhere]
        self._staging: dict[int, torch.Tensor] = {}
        self._staging_address = 0
        self.chunks: list[list[_Piece]] = [[] for _ in range(chunk_count(self.layout.payload_bytes))]
        # Later steps write to its memory as well, in whatever mode this one is.
        with torch.inference_mode(False):
            self._cut()
        cut = [(chunk, piece) for chunk, pieces in enumerate(self.chunks) for piece in pieces]
        self.live_pieces = [(chunk, piece.leaf, piece) for chunk, piece in cut if piece.leaf is not None]
        self.staged_pieces = [piece for _, piece in cut if piece.leaf is None]
        ends = [
            min(end, self.layout.payload_bytes)
            for end in range(CHUNK_BYTES, CHUNK_BYTES * (len(self.chunks) + 1), CHUNK_BYTES)
        ]
        self.whole = [
            len(pieces) == 1
            and pieces[0].leaf is not None
            and (pieces[0].start, pieces[0].end) == (index * CHUNK_BYTES, end)
            for index, (pieces, end) in enumerate(zip(self.chunks, ends, strict=True))
        ]

    def matches(self, flat: Flattener) -> bool:
        """Tell whether `flat` has the planned structure, and its live leaves can be read as they lie in memory."""
        return flat.keys == self._keys and all(is_plain(flat.leaves[index]) for index in self.live)

    def stage(self, flat: Flattener) -> Staged:
        """Copy the staged leaves of `flat` and take the fingerprints of the live ones.

        CUDA copies are only put on the current streams, where whatever training puts there later comes after them.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, staging in self._staging.items():
            leaf = flat.leaves[index]
            if _is_cuda(leaf):
                staging.copy_(raw(_tensor(leaf).detach()), non_blocking=True)
            elif isinstance(leaf, torch.Tensor):
                targets.append(staging)
                sources.append(raw(leaf))
            elif isinstance(leaf, np.ndarray):
                np.ndarray(leaf.shape, dtype=leaf.dtype, buffer=staging.numpy())[...] = leaf
            else:
                staging.numpy()[:] = np.frombuffer(leaf, dtype=np.uint8)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)  # one call each would take longer than the copies
        ready = [(device, torch.cuda.current_stream(device).record_event()) for device in self.devices]
        tensors = {index: _tensor(flat.leaves[index]) for index in self.live}
        captures = [each.fingerprint(tensors) for each in self.on_devices]
        # Aliases of their own keep the memory there, whatever the tensors themselves are made to refer to.
        live = {index: tensors[index].detach() for index in self._on_host}
        addresses = {index: leaf.data_ptr() for index, leaf in live.items()}
        views = {index: memory(address, self.specs[index].nbytes) for index, address in addresses.items()}
        fingerprints = [
            xxhash.xxh3_64_intdigest(views[leaf][piece.offset : piece.offset + piece.end - piece.start])
            for _, leaf, piece in self.live_pieces
        ]
        return Staged(live=live, addresses=addresses, fingerprints=fingerprints, captures=captures, ready=ready)

    def staged_address(self, piece: _Piece) -> int:
        """Return where the staged bytes of `piece` are."""
        return self._staging_address + piece.offset

    def _cut(self) -> None:
        """Cut the payload into pieces, and make staging memory that mirrors each run of staged leaves with its gaps."""
        live, on_host = set(self.live), set(self._on_host)
        filled = [index for index, spec in enumerate(self.specs) if spec.nbytes]
        ends = {index: self.layout.offsets[index] + self.specs[index].nbytes for index in filled}
        staged: list[tuple[int, list[int]]] = []
        staging_bytes = 0
        for is_live, group in groupby(filled, key=live.__contains__):
            run = list(group)
            if is_live:
                for index in filter(on_host.__contains__, run):
                    self._add(self.layout.offsets[index], ends[index], index, 0)
                continue
            start = self.layout.offsets[run[0]]
            self._add(start, ends[run[-1]], None, staging_bytes)
            staged.append((staging_bytes - start, run))
            # As aligned as the payload, so that every leaf can be viewed as its dtype.
            staging_bytes += -(-(ends[run[-1]] - start) // 64) * 64
        buffer = torch.zeros(staging_bytes, dtype=torch.uint8, device="cpu", pin_memory=bool(self.devices))
        self._staging_address = buffer.data_ptr()
        for shift, run in staged:
            for index in run:
                spec, start = self.specs[index], self.layout.offsets[index] + shift
                data = buffer[start : start + spec.nbytes]
                is_torch = spec.kind == "torch"
                self._staging[index] = raw(data.view(getattr(torch, spec.dtype))).view(spec.shape) if is_torch else data

    def _add(self, start: int, end: int, leaf: int | None, offset: int) -> None:
        while start < end:
            chunk = start // CHUNK_BYTES
            stop = min(end, (chunk + 1) * CHUNK_BYTES)
            self.chunks[chunk].append(_Piece(start=start, end=stop, leaf=leaf, offset=offset))
            offset += stop - start
            start = stop


class _Proof:
    """The checksums of what has arrived in a slot, made where that is compared with what `step()` saw."""

    def __init__(self, plan: CapturePlan, target: MappedSlot) -> None:
        self.checksums = np.zeros(len(plan.chunks), dtype=np.uint64)
        self._plan = plan
        self._target = target
        start = target.slot.payload_offset
        self._payload = target.slot.buffer[start : start + plan.layout.payload_bytes]

    def piece(self, chunk: int, piece: _Piece) -> int:
        """Return the hash of a piece, which is the checksum of its chunk if it is all of that."""
        digest = xxhash.xxh3_64_intdigest(self._payload[piece.start : piece.end])
        self.checksums[chunk] = digest
        return digest

    def rest(self, staged: Staged) -> int | None:
        """Add the checksums of all other chunks; return a leaf on a device of which one has not what it had, if any."""
        for chunk, whole in enumerate(self._plan.whole):
            if whole:
                continue
            arrived = self._payload[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            self.checksums[chunk] = xxhash.xxh3_64_intdigest(arrived)
            # After the checksum, so that nothing can change between this proof and what vouches for it later.
            differ = (capture.differs(self._target.payload, chunk) for capture in staged.captures)
            if (changed := next((leaf for leaf in differ if leaf is not None), None)) is not None:
                return changed
        return None


class Copier:
    """Copies staged states into slots and computes the chunk checksums, in the thread that calls it."""

    def __init__(self) -> None:
        """Prepare the copy functions."""
        # Large copies run without the interpreter lock. Small ones keep it: giving it up and taking it again would
        # cost more than the copy, and up to a switch interval when the training thread runs Python.
        self._copy_large, self._write_large = _functions(ctypes.CDLL(None, use_errno=True))
        self._copy_small, self._write_small = _functions(ctypes.PyDLL(None, use_errno=True))

    def copy(
        self,
        plan: CapturePlan,
        staged: Staged,
        target: MappedSlot,
        *,
        hurries: Callable[[], bool],
        on_released: Callable[[], None],
        on_copied: Callable[[], None],
    ) -> Copied:
        """Copy `staged` into `target`, which is marked WRITING, as far as it is what `step()` saw.

        Args:
            plan: The plan that made `staged`.
            staged: What to copy.
            target: Where to.
            hurries: Tells whether somebody waits for `on_released`: then what need not happen before it is put off.
            on_released: Called once no live leaf on the host is read any more; `staged.hold` covers all others.
            on_copied: Called once the staged copies may be overwritten.
        """
        proof = _Proof(plan, target)
        try:
            target.zero_gaps(plan.specs, plan.layout)
            moved = [capture.begin(target.payload) for capture in staged.captures]
            changed, put_off = self._copy_live(plan, staged, target, proof, hurries)
            staged.live.clear()
            on_released()
            if changed is None:
                changed = next((leaf for chunk, leaf, piece, saw in put_off if proof.piece(chunk, piece) != saw), None)
            changed = next((leaf for leaf in moved if leaf is not None), changed)
            for _, ready in staged.ready:
                ready.synchronize()
            if changed is None:
                for piece in plan.staged_pieces:
                    self._move(target.address + piece.start, plan.staged_address(piece), piece.end - piece.start)
            on_copied()
            for capture in staged.captures:
                capture.finish()
            if changed is None:
                changed = proof.rest(staged)
            return Copied(checksums=proof.checksums, changed=None if changed is None else plan.paths[changed])
        finally:
            # Whatever happened: nothing may arrive in a slot that is used for something else, or is gone.
            staged.let_go()

    def _copy_live(
        self, plan: CapturePlan, staged: Staged, target: MappedSlot, proof: "_Proof", hurries: Callable[[], bool]
    ) -> tuple[int | None, list[tuple[int, int, _Piece, int]]]:
        """Copy the live leaves; return the first that changed, if any, and what training did not wait to see proven."""
        put_off: list[tuple[int, int, _Piece, int]] = []
        for (chunk, leaf, piece), fingerprint in zip(plan.live_pieces, staged.fingerprints, strict=True):
            address = staged.addresses[leaf]
            if staged.live[leaf].data_ptr() != address or not self._write(piece, address, target):
                return leaf, put_off
            # While it is in the processor's cache, unless training waits.
            if hurries():
                put_off.append((chunk, leaf, piece, fingerprint))
            elif proof.piece(chunk, piece) != fingerprint:
                return leaf, put_off
        return None, put_off

    def _write(self, piece: _Piece, address: int, target: MappedSlot) -> bool:
        """Copy a piece of the live leaf at `address`; False when there is no such memory any more.

        The system copies it, because a storage may be resized at any moment: reading what is unmapped then is an error
        for the system, but the end of a process that does it by itself.
        """
        size, place = piece.end - piece.start, target.slot.payload_offset + piece.start
        write = self._write_large if size > _SMALL_BYTES else self._write_small
        written = write(target.descriptor, address + piece.offset, size, place)
        if written < 0 and (number := ctypes.get_errno()) != errno.EFAULT:
            raise OSError(number, os.strerror(number), str(target.slot.path))
        return bool(written == size)

    def _move(self, target: int, source: int, size: int) -> None:
        (self._copy_large if size > _SMALL_BYTES else self._copy_small)(target, source, size)


def is_plain(leaf: Leaf) -> bool:
    """Tell whether a leaf's memory is, byte for byte, what the slot shall hold, and can be read behind training."""
    return (
        isinstance(leaf, torch.Tensor)
        and (leaf.is_cpu or (leaf.data_ptr() % WORD_BYTES == 0 and device_of(leaf) is not None))
        and leaf.is_contiguous()
        and not leaf.is_conj()
        and not leaf.is_neg()
    )


def _functions(library: ctypes.CDLL) -> tuple[Callable[[int, int, int], None], Callable[[int, int, int, int], int]]:
    """Return C's `memmove` and `pwrite`."""
    copy, write = library.memmove, library.pwrite
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    copy.restype = None
    write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    write.restype = ctypes.c_ssize_t
    return copy, write


def _is_cuda(leaf: Leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda


def _tensor(leaf: Leaf) -> torch.Tensor:
    assert isinstance(leaf, torch.Tensor)
    return leaf
