"""The slots of one rank as the trainer writes them: mapping, pinning, and which of them may be overwritten."""

import fcntl
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import SlotError
from ..format.manifest import Layout, TensorSpec
from ..format.pair import Pair
from ..format.slot import HEADER_BYTES, Slot, chunk_count, is_wasteful, open_file
from ..format.wire import Message
from ..link.env import TrainerEnv

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every device."""

vaults: Final[set[Path]] = set()
"""Directories with the slots of this host that this process has mapped."""


class MappedSlot:
    """One slot, mapped for writing and, if a GPU is in use, page-locked.

    Attributes:
        slot: The slot.
        descriptor: Its open file.
        payload: Its payload area, uint8.
        address: Where the payload begins in this process.
        held: Generation and step of what it holds complete, or None.
        layout: The layout for which the gaps between tensors are zero.
    """

    def __init__(self, path: str, env: TrainerEnv, *, pin: bool) -> None:
        """Map the file `path` that the daemon made for the rank of `env`.

        Raises:
            OSError: The file cannot be mapped or page-locked.
            SlotError: It is not a slot.
        """
        self.descriptor = open_file(path, os.O_RDWR)
        try:
            self.slot = Slot.of(self.descriptor, path, writable=True)
        except (OSError, SlotError):
            os.close(self.descriptor)
            raise
        # Until `close`, or the end of this process: whoever collects slots sees that this one is in use.
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        self.payload = torch.frombuffer(self.slot.buffer, dtype=torch.uint8)[self.slot.payload_offset :]
        self.address = self.payload.data_ptr()
        self.held = _held(self.slot, env)
        self.layout: Layout | None = None
        self._identity = _identity(self.descriptor)
        self._pinned_at = 0
        if pin:
            place = self.address - self.slot.payload_offset
            code = int(_cudart().cudaHostRegister(place, self.slot.capacity_bytes, _PORTABLE))
            if code != 0:
                self.close()
                raise OSError(
                    f"CUDA cannot page-lock the checkpoint slot {path} (error {code}): let --rr-shm-dir be a tmpfs, as "
                    f"/dev/shm is, and `ulimit -l` unlimited"
                )
            self._pinned_at = place

    def is_file(self, path: str) -> bool:
        """Tell whether `path` is still the file that is mapped here."""
        return _identity(path) == self._identity

    def zero_gaps(self, specs: Sequence[TensorSpec], layout: Layout) -> None:
        """Zero the bytes between tensors of `layout`; the slot must be marked WRITING."""
        if layout is self.layout:
            return
        payload, end = self.payload.numpy(), 0
        for spec, offset in zip(specs, layout.offsets, strict=True):
            if end < offset:
                payload[end:offset] = 0
            end = offset + spec.nbytes
        self.layout = layout

    @property
    def is_there(self) -> bool:
        """Whether the file is still in its place: the daemon has not removed it."""
        return self.slot.path.exists() and self.is_file(str(self.slot.path))

    def close(self) -> None:
        """Unlock and unmap the slot; the file stays with the daemon."""
        if self._pinned_at:
            if (code := int(_cudart().cudaHostUnregister(self._pinned_at))) != 0:
                raise OSError(f"CUDA cannot unlock the checkpoint slot {self.slot.path} (error {code})")
            self._pinned_at = 0
        del self.payload
        self.slot.close()
        os.close(self.descriptor)


class RankSlots:
    """All slots of a rank, and the one place that decides whether a step is captured, and into which slot.

    The root says from which step on the next capture is to be made, and all ranks capture the first step that they make
    from there on: the same one. What was captured before is then committed or never will be, so a slot is always free
    for it. A rank that hears of it too late, or whose capture fails, has missed it; that must be told, and another one
    follows. A single rank has nobody to agree with, and captures the first step that it can.

    Attributes:
        watermark: The newest committed generation and step, None before the first.
        next: From this step on the next capture is made.
    """

    def __init__(self, env: TrainerEnv) -> None:
        """Begin with no slots."""
        self._env = env
        self._passed = 0
        self._taken = 0
        self._failed = range(0)  # what may have been asked for when a capture failed
        self.watermark: Pair | None = None
        self.next = 1
        self._older = frozenset[Pair]()
        self.slots: list[MappedSlot] = []

    def hear(self, watermark: Pair | None, next_: Pair, older: Collection[Pair] = ()) -> bool:
        """Take what is agreed, and return whether fewer older pairs stay than before.

        What was said earlier, or for another generation, changes nothing.
        """
        if next_[0] != self._env.generation:
            return False
        if watermark is not None:
            self.watermark = max(watermark, self.watermark or watermark)
        if next_[1] < self.next:
            return False
        before, self.next, self._older = len(self._older), next_[1], frozenset(older)
        return len(self._older) < before

    def map(self, paths: Sequence[str], *, pin: bool) -> list[MappedSlot]:
        """Return the slots at `paths` for `use`, those that are mapped already as they are.

        Raises:
            OSError: A file cannot be mapped or page-locked.
            SlotError: A file is not a slot.
        """
        mapped = []
        for path in paths:
            known = next((slot for slot in self.slots if slot.is_file(path)), None)
            mapped.append(known or MappedSlot(path, self._env, pin=pin))
        return mapped

    def use(self, slots: list[MappedSlot]) -> None:
        """Take `slots` in place of the present ones, which are unmapped unless they are among them."""
        taken = self._env.generation, self._taken
        there = any(mapped.held == taken and mapped.is_there for mapped in (*slots, *self.slots))
        if self._taken >= self.next and not there:
            # The daemon has lost it. Files of another size it keeps for as long as what they hold may be committed.
            self.give_up(self._taken)
        for slot in self.slots:
            if slot not in slots:
                slot.close()
        self.slots = slots
        for slot in slots:
            vaults.add(slot.slot.path.parent.parent)

    def fits(self, manifest_bytes: int, payload_bytes: int) -> bool:
        """Tell whether the slots are there and large enough for such a capture."""
        before_bytes = HEADER_BYTES + manifest_bytes + 8 + 8 * chunk_count(payload_bytes)
        return bool(self.slots) and all(
            before_bytes <= mapped.slot.payload_offset and payload_bytes <= len(mapped.payload) for mapped in self.slots
        )

    def wastes(self, payload_bytes: int) -> bool:
        """Tell whether the slots take much more memory than such a capture needs."""
        slots = [mapped.slot for mapped in self.slots]
        return any(is_wasteful(slot.capacity_bytes, slot.payload_offset + payload_bytes) for slot in slots)

    def wants(self, step: int) -> bool:
        """Tell whether `step`, the newest one, is to be captured, or may be: the first one after a capture."""
        if self._taken >= self.next and self._passed > self._taken:
            return False
        return step >= self.next and self.missed is None

    def take(self, step: int) -> MappedSlot | None:
        """Return the slot for the capture of `step`, the newest one, if it is to be captured and can be now."""
        if not self.wants(step) or self._taken >= self.next:
            return None
        free = next((mapped for mapped in self.slots if not self._is_live(mapped)), None)
        if free is not None:
            self._taken = step
        return free

    def lacks(self, step: int) -> bool:
        """Tell whether no slot is free for the capture of `step`, which is to be made now."""
        return self.wants(step) and self._taken < self.next

    @property
    def uncommitted(self) -> int | None:
        """The step of the newest capture while it may yet be committed, None otherwise."""
        return self._taken if self._taken >= self.next else None

    def give_up(self, step: int, *, failed: bool = False) -> None:
        """Take note that `step` cannot be captured any more: that has `failed`, as it has if it is being captured."""
        if self._taken == step:
            self._taken, self._failed = 0, range(1, step + 1)
        elif failed:
            self._failed = range(self._passed + 1, step + 1)
        self._passed = max(step, self._passed)

    @property
    def missed(self) -> Message | None:
        """That this rank will never make the capture of `next`, as the daemon is told; None if it may."""
        if self._env.world_size == 1 or self._taken >= self.next or self._passed < self.next:
            return None
        return {"next": self.next, "step": self._passed, "late": self.next not in self._failed}

    def close(self) -> None:
        """Unmap the slots."""
        for mapped in self.slots:
            mapped.close()
        self.slots = []

    def _is_live(self, mapped: MappedSlot) -> bool:
        """Tell whether what the slot holds is committed, or may be."""
        if mapped.held is None:
            return False
        if mapped.held == self.watermark or mapped.held in self._older:
            return True
        return mapped.held >= Pair(self._env.generation, self.next)


def _held(slot: Slot, env: TrainerEnv) -> Pair | None:
    header = slot.header_or_none()
    return header.pair if header is not None and (header.run_id, header.rank) == (env.run_id, env.rank) else None


def _identity(file: str | int) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
