"""The two slots of one rank as the trainer writes them: mapping, pinning, and which of them may be overwritten."""

import os
from collections.abc import Sequence
from typing import Any, Final

import torch

from .env import TrainerEnv
from .errors import SlotError
from .manifest import Layout, TensorSpec
from .slot import HEADER_BYTES, Slot, chunk_count

Version = tuple[int, int]
"""Generation and step; ordered."""

_NEAREST_MEETING: Final = 4
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every device."""


class MappedSlot:
    """One slot, mapped for writing and, if a GPU is in use, page-locked.

    Attributes:
        slot: The slot.
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
        self.slot = Slot.open(path, writable=True)
        self.payload = torch.frombuffer(self.slot.buffer, dtype=torch.uint8)[self.slot.payload_offset :]
        self.address = self.payload.data_ptr()
        self.held = _held(self.slot, env)
        self.layout: Layout | None = None
        self._identity = _identity(path)
        self._pinned_at = 0
        if pin:
            self._pinned_at = self.address - self.slot.payload_offset
            _check_cuda(_cudart().cudaHostRegister(self._pinned_at, self.slot.capacity_bytes, _PORTABLE))

    def is_file(self, path: str) -> bool:
        """Tell whether `path` is still the file that is mapped here."""
        return _identity(path) == self._identity

    def zero_gaps(self, specs: Sequence[TensorSpec], layout: Layout) -> None:
        """Zero the bytes between tensors of `layout`; the slot must be marked WRITING."""
        if layout is self.layout:
            return
        end = 0
        for spec, offset in zip(specs, layout.offsets, strict=True):
            self.payload[end:offset] = 0
            end = offset + spec.nbytes
        self.layout = layout

    def close(self) -> None:
        """Unlock and unmap the slot; the file stays with the daemon."""
        if self._pinned_at:
            _check_cuda(_cudart().cudaHostUnregister(self._pinned_at))
            self._pinned_at = 0
        del self.payload
        self.slot.close()


class SlotPair:
    """Both slots of a rank; of two complete captures the one that may be committed is never given away.

    A slot is free if it holds nothing, or a capture of an earlier generation that is not the watermark: that timeline
    is dead. Otherwise the older one is free once the newer one is committed.

    Ranks that skip different captures can hold versions of which none is common, and would wait for ever. So at
    certain distances from the watermark, the same for all ranks, they meet: some steps before, each gives up a newer
    capture that is still not committed (its daemon sees to it that nobody commits it any more), and captures again
    at the meeting step and not earlier. The first distance is at least twice what the last commit took, and each
    next one is twice as far, so that slow commits still end.
    """

    def __init__(self, env: TrainerEnv) -> None:
        """Begin with no slots."""
        self._env = env
        self._seen: Version | None = None
        self._lag = 0
        self._parted = False
        self.slots: list[MappedSlot] = []

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
        for slot in self.slots:
            if slot not in slots:
                slot.close()
        self.slots = slots

    def fits(self, manifest_bytes: int, payload_bytes: int) -> bool:
        """Tell whether the slots are there and large enough for such a capture."""
        before_bytes = HEADER_BYTES + manifest_bytes + 8 + 8 * chunk_count(payload_bytes)
        return bool(self.slots) and all(
            before_bytes <= mapped.slot.payload_offset and payload_bytes <= len(mapped.payload) for mapped in self.slots
        )

    def free(self, step: int, watermark: Version | None) -> MappedSlot | None:
        """Return the slot that a capture of `step` may overwrite now, or None."""
        self._see(step, watermark)
        live = [mapped for mapped in self.slots if self._is_live(mapped, watermark)]
        if len(live) < len(self.slots):
            if self._parted and step != self._meeting(step, watermark):
                return None
            return next(mapped for mapped in self.slots if mapped not in live)
        older, newer = sorted(live, key=_version)
        return older if watermark is not None and watermark >= _version(newer) else None

    def meets(self, step: int, watermark: Version | None) -> bool:
        """Tell whether this rank must capture `step`, at whatever pace it captures: others may wait for it there."""
        self._see(step, watermark)
        return self._parted and step == self._meeting(step, watermark)

    def to_give_up(self, step: int, watermark: Version | None) -> MappedSlot | None:
        """Return the slot whose capture must be given up before the next meeting step, or None."""
        self._see(step, watermark)
        since = step - _step(watermark)
        near = 4 * since >= 3 * (self._meeting(step, watermark) - _step(watermark))
        if self._env.world_size == 1 or not near or self.free(step, watermark) is not None:
            return None
        live = [mapped for mapped in self.slots if self._is_live(mapped, watermark)]
        return max(live, key=_version) if len(live) == len(self.slots) else None

    def given_up(self, mapped: MappedSlot) -> None:
        """Take note that the capture in `mapped` is gone, and that the other ranks are to be met."""
        mapped.held = None
        self._parted = True

    def close(self) -> None:
        """Unmap the slots."""
        for mapped in self.slots:
            mapped.close()
        self.slots = []

    def _see(self, step: int, watermark: Version | None) -> None:
        if watermark is not None and watermark != self._seen:
            self._seen, self._lag, self._parted = watermark, step - watermark[1], False

    def _meeting(self, step: int, watermark: Version | None) -> int:
        """Return the first step from `step` on at which all ranks capture, whatever they hold."""
        distance = _NEAREST_MEETING
        while distance < max(step - _step(watermark), 2 * self._lag):
            distance *= 2
        return _step(watermark) + distance

    def _is_live(self, mapped: MappedSlot, watermark: Version | None) -> bool:
        return mapped.held is not None and (mapped.held[0] == self._env.generation or mapped.held == watermark)


def _version(mapped: MappedSlot) -> Version:
    assert mapped.held is not None
    return mapped.held


def _step(watermark: Version | None) -> int:
    return 0 if watermark is None else watermark[1]


def _held(slot: Slot, env: TrainerEnv) -> Version | None:
    try:
        header = slot.header()
    except SlotError:
        return None
    ours = (header.run_id, header.rank) == (env.run_id, env.rank)
    return (header.generation, header.step) if ours else None


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda(code: Any) -> None:
    if int(code) != 0:
        raise OSError(f"CUDA cannot page-lock a checkpoint slot: error {int(code)}; raise `ulimit -l`")
