"""Captures: `step()` copies the state of the host into a slot; one thread completes and announces it behind training.

If no slot is free, `step()` copies into memory of its own, and the thread moves that into a slot when the news of a
commit frees one. What is on GPUs is copied behind training: that what is committed is what `step()` saw is proven by
fingerprints (`copying.py`), not by the waits here. They only make captures succeed: the streams of training wait for a
copy under way before an optimizer changes what is being read. A capture that has not begun when it must is skipped and
counted.
"""

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal

import numpy as np
import torch

from ..errors import CheckpointError, DaemonError, SlotSizeError
from ..format.digests import Digester, Hashes
from ..format.manifest import encode, object_name
from ..format.pair import Pair
from ..format.slot import plan_layout
from ..format.wire import MAX_EAGER_BYTES, Message
from ..link.env import TrainerEnv
from ..link.link import Link
from ..state.state import TrainingState, no_collection
from ..state.tree import Leaf
from .copying import CapturePlan, Copier, Staged
from .slots import MappedSlot, RankSlots
from .stats import CaptureStats
from .stopped import stopped

_ALLOCATE_S: Final = 300.0
_GROW_S: Final = 5.0
_REFUSED_S: Final = 10.0
_MOST_WASTED: Final = 16
_log = logging.getLogger(__name__)


class _Phase(IntEnum):
    PENDING = 0  # waits for a slot; training may cancel it
    STAGING = 1  # `step()` copies into the slot that it has taken; the capture thread leaves all slots alone
    COPYING = 2  # the thread completes it; a change to what is on devices makes the capture fail
    RELEASED = 3  # what is on devices may change after `Staged.hold`
    COPIED = 4  # the memory beside the slots may be used again
    COMPLETE = 5
    SKIPPED = 6


@dataclass(kw_only=True, slots=True, eq=False)
class _Capture:
    step: int
    manifest: bytes
    plan: CapturePlan
    thread: int = field(default_factory=threading.get_ident)
    digester: Digester
    phase: _Phase = _Phase.PENDING
    hashes: Hashes | None = None
    target: MappedSlot | None = None
    staged: Staged | None = None


class Capturer:
    """Captures the states that are submitted to it; made for one generation of one rank.

    Attributes:
        stats: What it cost; written by the training thread and the capture thread, read by anybody.
    """

    def __init__(self, env: TrainerEnv, *, topology: int) -> None:
        """Prepare; `start` begins."""
        self.stats = CaptureStats()
        self._env = env
        self._topology = topology
        self._slots = RankSlots(env)
        self._copier = Copier()
        self._changed = threading.Condition()
        self._newest = 0
        self._told: Message | None = None  # the capture that was missed last, as the daemon knows
        self._capture: _Capture | None = None
        self._busy = False  # the capture thread maps slots, or writes to one and publishes it
        self._closing = False
        self._preferred_offset = 0
        self._stale = True  # the slots must be asked for, again after each attachment
        self._lacked = 0  # the step for which that was done because none was free
        self._refused: CapturePlan | None = None
        self._refused_s = 0.0
        self._wasted = 0  # captures in a row for which the slots were much too large
        self._patience_spent = False  # larger slots did not come in time; not waited for again before they do
        self._failure: CheckpointError | None = None
        self._plan: tuple[CapturePlan, Digester] | None = None
        # Memory for captures that no slot is free for in their step().
        self._beside: tuple[CapturePlan, torch.Tensor] | None = None
        self._eager: set[str] = set()  # registered objects that were seen to change behind a capture
        self._on_complete: Callable[[str, Pair], None] = lambda path, version: None
        self._thread = threading.Thread(target=self._run, name="resilient-capture", daemon=True)

    @property
    def watermark(self) -> Pair | None:
        """The newest committed generation and step that this rank heard of."""
        return self._slots.watermark

    @property
    def named(self) -> int:
        """The step that the root wants captured next, to this rank's knowledge."""
        with self._changed:
            return self._slots.next

    @property
    def reads(self) -> bool:
        """Whether a capture reads memory of devices, or waits for a slot and then will."""
        capture = self._capture
        return capture is not None and capture.phase < _Phase.COMPLETE and bool(capture.plan.live)

    def on_attached(self, eager: Collection[str]) -> None:
        """Take the news of an attachment: slots may be other files now, and may have room again.

        Args:
            eager: What the daemon knows of objects that change behind captures, from this process or one before it.
        """
        with self._changed:
            self._stale = True
            self._refused = None
            self._told = None
            unknown = self._eager.difference(eager)
            self._eager.update(eager)
        for name in unknown:
            self._tell_eager(name)

    def on_agreed(self, watermark: Pair | None, next_: Pair, older: Collection[Pair] = ()) -> None:
        """Take the news of a commit, or of the next capture."""
        with self._changed:
            if self._slots.hear(watermark, next_, older):
                # Older pairs are given up: there is room for larger slots, or for those of others.
                self._stale, self._refused = True, None
            capture = self._capture
            if capture is not None and capture.phase is _Phase.PENDING and capture.step < self._slots.next:
                self._skip(capture)
            self._tell_missed()
            self._changed.notify_all()

    def prefer(self, payload_offset: int) -> None:
        """Ask for slots with this payload offset if it leaves room enough: the daemon has one that it can keep."""
        self._preferred_offset = payload_offset

    def start(self, link: Link, on_complete: Callable[[str, Pair], None] | None = None) -> None:
        """Begin to capture, with slots from the daemon behind `link`.

        Args:
            link: To the daemon.
            on_complete: Called in the capture thread with the path and version of each complete capture.
        """
        self._link = link
        self._on_complete = on_complete or self._on_complete
        self._thread.start()

    def submit(self, step: int, state: TrainingState, *, eager: bool = False) -> None:
        """Begin the capture of `state` as it is now, after `step` steps; large leaves on devices are read later.

        Args:
            step: Completed steps.
            state: What to capture.
            eager: Whether all of it is copied at once.

        Raises:
            StateError: The state holds something that cannot be captured.
            CheckpointError: The daemon refused the memory for the first capture.
        """
        self.release()
        self._raise_failure()
        with self._changed:
            self._newest = step
            if self._refused is not None and time.monotonic() - self._refused_s > _REFUSED_S:
                self._refused = None  # there may be room by now
            self._give_up_waiting()
            if self._slots.slots and not self._slots.wants(step):
                self._pass(step)
                return
        try:
            with no_collection():
                capture, leaves = self._begun(step, state, eager=eager)
            with self._changed:
                self._changed.wait_for(lambda: self._capture is None or self._capture.phase >= _Phase.COPIED)
                self._capture = capture
                self._wasted = self._wasted + 1 if self._slots.wastes(capture.plan.layout.payload_bytes) else 0
                self._changed.notify_all()
                self._await_slots(capture)
                if not self._slots.slots or (capture.plan is self._refused and self._outgrown(capture)):
                    self._skip(capture)
                elif capture.phase is _Phase.PENDING and not self._busy and not self._must_allocate(capture):
                    self._claim(capture, _Phase.STAGING)
            self._stage(capture, leaves)
        except BaseException:
            # The script may catch it and go on: then the other ranks must not wait for this capture.
            with self._changed:
                begun = self._current
                if begun is None:
                    self._pass(step, failed=True)
                elif begun.phase < _Phase.COPYING:  # else the capture thread has all of it
                    for device in begun.plan.devices:  # nothing may arrive in a slot that is used for something else
                        torch.cuda.synchronize(device)
                    self._skip(begun, failed=True)
            raise
        self._raise_failure()

    def omit(self, step: int) -> None:
        """Leave `step` out: without the capture of this rank nobody's is committed.

        Raises:
            CheckpointError: The daemon refused the memory for the first capture.
        """
        self.release()
        self._raise_failure()
        with self._changed:
            self._newest = step
            self._give_up_waiting()
            self._pass(step, failed=True)

    def _begun(self, step: int, state: TrainingState, *, eager: bool) -> tuple[_Capture, list[Leaf]]:
        """Return a capture of `state`, and its leaves; of all else that is made of a state nothing outlives this."""
        flat = state.flatten()
        planned = self._plan  # the capture thread takes it away when a capture is discarded
        if planned is None or not planned[0].matches(flat):
            plan = CapturePlan(flat, eager={"*"} if eager else self._eager)
            rank, trained, apart = self._env.rank, state.trained, state.apart
            digester = Digester(plan.specs, plan.layout, flat.node, rank=rank, trained=trained, apart=apart)
            planned = self._plan = plan, digester
        plan, digester = planned
        return _Capture(step=step, manifest=encode(plan.tensors, flat.node), plan=plan, digester=digester), flat.leaves

    def _stage(self, capture: _Capture, leaves: Sequence[Leaf]) -> None:
        """Copy what is on the host: into the slot if there is one, else beside it."""
        plan, target = capture.plan, capture.target
        if target is not None:
            self._beside = None
            target.held = None
            target.slot.begin()
            target.zero_gaps(plan.specs, plan.layout)
            memory = target.payload
        elif capture.phase is _Phase.PENDING:
            if self._beside is None or self._beside[0] is not plan:
                # Only what is written takes memory.
                pages = mmap.mmap(-1, max(1, plan.layout.payload_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with torch.inference_mode(False):  # later steps write to it as well, in whatever mode this one is
                    self._beside = plan, torch.frombuffer(pages, dtype=torch.uint8)
            memory = self._beside[1]
        else:
            return
        hashes = capture.digester.hashes(memory.numpy().data[: plan.layout.payload_bytes])
        staged = self._copier.stage(plan, leaves, memory, hashes)
        with self._changed:
            if capture.phase is not _Phase.SKIPPED:
                capture.staged, capture.hashes = staged, hashes if hashes.complete else None
            if capture.phase is _Phase.STAGING:
                capture.phase = _Phase.COPYING
            self._changed.notify_all()

    def _await_slots(self, capture: _Capture) -> None:
        """Wait for the first slots, so that all ranks begin with the same step; shorter for larger ones in their place.

        A state that grows with every step would else never have slots before the step after it.
        """
        first = not self._slots.slots and not self._refused_s
        if not first and (not self._outgrown(capture) or self._patience_spent or self._slots.uncommitted is not None):
            return
        arrived = self._changed.wait_for(
            lambda: (
                capture.phase is not _Phase.PENDING
                or capture.plan is self._refused
                or (bool(self._slots.slots) and not self._outgrown(capture) and not self._busy)
            ),
            _ALLOCATE_S if first else _GROW_S,
        )
        # A daemon that is away must not stop every step.
        self._patience_spent = not arrived

    def release(self) -> None:
        """Let training change what is on devices: give up a copy that has not begun; streams wait for one under way.

        What is put on the current streams from then on waits for it. What is on the host may change at any time.
        """
        with self._changed:
            capture = self._capture
            if capture is None or not capture.plan.live:
                return
            self._give_up_waiting()
            self._changed.wait_for(lambda: capture.phase >= _Phase.RELEASED)
            staged = capture.staged
        if staged is not None:
            staged.hold()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the newest submitted step is captured, waiting up to `timeout_s` for it.

        Raises:
            CheckpointError: The daemon refused the memory for the first capture.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None or (capture := self._current) is None or capture.phase >= _Phase.COMPLETE
                ),
                timeout_s,
            )
            captured = (capture := self._current) is not None and capture.phase is _Phase.COMPLETE
        self._raise_failure()
        return captured

    def wait_decided(self, timeout_s: float) -> bool:
        """Return whether the newest submitted step is committed, or never will be, within `timeout_s`."""
        with self._changed:
            capture = self._current
            return capture is None or self._changed.wait_for(
                lambda: capture.phase is _Phase.SKIPPED or self._slots.next > capture.step, timeout_s
            )

    @property
    def uncommitted(self) -> int | None:
        """The step of the newest capture while it may yet be committed, None otherwise."""
        with self._changed:
            return self._slots.uncommitted

    def close(self) -> None:
        """Let a copy under way end, and give up a waiting one; then close the link and unmap the slots."""
        with self._changed:
            self._closing = True
            capture = self._capture
            interrupts = capture is not None and capture.phase is _Phase.STAGING and self._is_mine(capture)
            self._give_up_waiting()
            self._changed.wait_for(lambda: capture is None or capture.phase >= _Phase.COMPLETE)
            self._changed.notify_all()
        self._link.close()
        self._thread.join()
        if interrupts:
            return  # to a `step()` that may go on to copy: its slot stays this rank's until the process ends
        self._copier.close()
        self._slots.close()

    @property
    def _current(self) -> _Capture | None:
        """The capture of the newest submitted step, None without one."""
        return self._capture if self._capture is not None and self._capture.step == self._newest else None

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            with self._changed:
                while (action := self._next_action()) is None:
                    self._changed.wait()
                capture = self._capture
                self._busy = True
            if action == "stop" or capture is None:
                return
            try:
                with _device(capture.plan):
                    if action == "allocate":
                        self._allocate(capture)
                    else:
                        self._copy(capture)
            except Exception:  # noqa: BLE001 - the boundary of this thread: training goes on without the capture
                _log.exception("the capture of step %d failed", capture.step)
                with self._changed:
                    if action == "allocate":
                        self._refused, self._refused_s, self._stale = capture.plan, time.monotonic(), True
                    if capture.phase is not _Phase.STAGING:
                        self._skip(capture)
            finally:
                with self._changed:
                    self._busy = False
                    if capture.phase >= _Phase.COMPLETE:
                        capture.staged = capture.hashes = None  # with what it refers to on devices
                    self._changed.notify_all()

    def _next_action(self) -> Literal["stop", "allocate", "copy"] | None:
        """Return what the capture thread does next, None if it waits; what it copies has claimed its slot."""
        capture = self._capture
        if capture is None:
            return "stop" if self._closing else None
        allocates = self._must_allocate(capture)
        if capture.phase is _Phase.PENDING and capture.staged is not None and not allocates:
            self._claim(capture, _Phase.COPYING)
        if capture.phase is _Phase.COPYING:
            return "copy"
        if capture.phase is _Phase.STAGING:
            return None
        if self._closing:
            return "stop"
        # At once also those in use, so that the daemon hears what they hold.
        return "allocate" if allocates else None

    def _must_allocate(self, capture: _Capture) -> bool:
        # Slots of another size once they can be used: until then the commit that is awaited may need the room.
        resized = self._slots.uncommitted is None and (self._outgrown(capture) or self._wasted >= _MOST_WASTED)
        return capture.plan is not self._refused and (self._stale or resized)

    def _outgrown(self, capture: _Capture) -> bool:
        return not self._slots.fits(len(capture.plan.tensors), capture.plan.layout.payload_bytes)

    def _claim(self, capture: _Capture, phase: _Phase) -> None:
        if not self._outgrown(capture):
            capture.target = self._slots.take(capture.step)
            if capture.target is None and self._slots.lacks(capture.step) and self._lacked < capture.step:
                # Older pairs were in files of another size when these were asked for; those may have gone since.
                self._lacked, self._stale = capture.step, True
        if capture.target is not None:
            capture.phase = phase

    def _give_up_waiting(self) -> None:
        """Skip a capture that has not begun, or that this very thread was interrupted in."""
        capture = self._capture
        if capture is not None and (
            capture.phase is _Phase.PENDING or (capture.phase is _Phase.STAGING and self._is_mine(capture))
        ):
            self._skip(capture)

    @staticmethod
    def _is_mine(capture: _Capture) -> bool:
        return capture.thread == threading.get_ident()

    def _skip(self, capture: _Capture, *, failed: bool = False) -> None:
        if capture.phase < _Phase.COMPLETE:
            capture.phase = _Phase.SKIPPED
            capture.staged = capture.hashes = None
            self._pass(capture.step, failed=failed)
        self._changed.notify_all()

    def _pass(self, step: int, *, failed: bool = False) -> None:
        self.stats.skipped += 1
        self._slots.give_up(step, failed=failed)
        self._tell_missed()

    def _tell_missed(self) -> None:
        missed = self._slots.missed
        if missed is not None and missed != self._told:
            self._told = missed
            self._link.notify("missed", **missed)

    def _allocate(self, capture: _Capture) -> None:
        with self._changed:
            self._stale = False
        try:
            slots = self._slots.map(self._ask_slots(capture), pin=bool(capture.plan.devices))
        except (CheckpointError, OSError) as error:
            self._refuse(capture, error)
            return
        with self._changed:
            self._slots.use(slots)
            self._wasted = 0
            self._tell_missed()
            self._changed.notify_all()
        for mapped in slots:
            if mapped.held is not None and mapped.held[0] == self._env.generation:
                # The daemon may have missed it while it was away.
                self._announce(mapped)

    def _ask_slots(self, capture: _Capture) -> list[str]:
        """Return the paths of slots that the daemon has for captures like `capture`."""
        manifest_bytes = len(capture.manifest) + capture.digester.encoded_bytes
        payload_bytes = capture.plan.layout.payload_bytes
        with self._changed:
            waits = self._slots.uncommitted is not None
        fits = self._slots.fits(manifest_bytes, payload_bytes) and not self._slots.wastes(payload_bytes)
        if self._slots.slots and (waits or fits):
            first = self._slots.slots[0].slot
            return self._lend(first.payload_offset, first.capacity_bytes)
        preferred_offset = 0 if self._slots.slots else self._preferred_offset
        return self._lend(*plan_layout(manifest_bytes, payload_bytes, preferred_offset=preferred_offset))

    def _lend(self, payload_offset: int, capacity_bytes: int) -> list[str]:
        answer = self._link.request(
            "allocate", within_s=_ALLOCATE_S, capacity_bytes=capacity_bytes, payload_offset=payload_offset
        )
        paths: list[str] = answer["paths"]
        return paths

    def _refuse(self, capture: _Capture, error: CheckpointError | OSError) -> None:
        with self._changed:
            self._refused, self._refused_s = capture.plan, time.monotonic()
            self._stale = True  # the daemon has removed what was too small and free; a smaller state may fit again
            # A run that goes on trains on without captures, as it did before a failure.
            if not self._slots.slots and (self.watermark is None or isinstance(error, SlotSizeError)):
                if isinstance(error, SlotSizeError):
                    # No restart cures this one: the launcher shall not try.
                    self._link.notify("refused", message=str(error))
                self._failure = error if isinstance(error, CheckpointError) else DaemonError(str(error))
            self._changed.notify_all()
            if self._closing:
                return
        _log.error("no slots of the size that captures need now (%s); captures are skipped", error)

    def _copy(self, capture: _Capture) -> None:
        target, plan, staged = capture.target, capture.plan, capture.staged
        assert target is not None
        assert staged is not None
        started_s = time.monotonic()
        if staged.memory is not target.payload:
            target.held = None
            target.slot.begin()
            target.zero_gaps(plan.specs, plan.layout)
        self._copier.finish(
            plan,
            staged,
            target,
            on_released=lambda: self._advance(capture, _Phase.RELEASED),
            on_copied=lambda: self._advance(capture, _Phase.COPIED),
        )
        digester = capture.digester
        if not self._slots.fits(len(capture.manifest) + digester.encoded_bytes, plan.layout.payload_bytes):
            with self._changed:
                self._stale = True
                self._skip(capture)
            return
        payload = target.slot.buffer[target.slot.payload_offset :][: plan.layout.payload_bytes]
        manifest, checksums = digester.extend(capture.manifest, capture.hashes or digester.hashes(payload))
        changed = self._copier.prove(plan, staged, target)
        if changed is not None:
            self._discard(capture, changed)
            return
        if (plan.devices or plan.live) and stopped.is_set():
            with self._changed:
                self._skip(capture)
            return
        target.slot.publish(
            run_id=self._env.run_id,
            topology=self._topology,
            rank=self._env.rank,
            world_size=self._env.world_size,
            generation=self._env.generation,
            step=capture.step,
            payload_bytes=plan.layout.payload_bytes,
            manifest=manifest,
            checksums=checksums,
        )
        target.held = Pair(self._env.generation, capture.step)
        self._announce(target)
        self.stats.captures += 1
        self.stats.bytes += plan.layout.payload_bytes
        self.stats.capture_s += time.monotonic() - started_s
        self._advance(capture, _Phase.COMPLETE)

    def _discard(self, capture: _Capture, changed: str) -> None:
        name = object_name(changed)
        _log.warning(
            "step %d was not captured: %s changed while it was being copied behind training; "
            "from now on all of %r is copied inside step()",
            capture.step,
            changed,
            name,
        )
        with self._changed:
            self._eager.add(name)
            self._plan = None
            self.stats.discarded += 1
            self._skip(capture)
        self._tell_eager(name)

    def _tell_eager(self, name: str) -> None:
        """Let whoever comes after this process know, too, unless the name is none for a message."""
        if name.isprintable() and len(name.encode(errors="replace")) <= MAX_EAGER_BYTES:
            self._link.notify("eager", name=name)

    def _announce(self, mapped: MappedSlot) -> None:
        assert mapped.held is not None
        generation, step = mapped.held
        self._link.notify("complete", path=str(mapped.slot.path), generation=generation, step=step)
        self._on_complete(str(mapped.slot.path), mapped.held)

    def _advance(self, capture: _Capture, phase: _Phase) -> None:
        with self._changed:
            capture.phase = phase
            self._busy = phase < _Phase.COMPLETE
            self._changed.notify_all()


def one_bool(given: object) -> bool | None:
    """Return what a bool of Python, NumPy or torch says, None for anything else: a loss that is NaN counts as true."""
    if isinstance(given, torch.Tensor) and given.dtype == torch.bool and given.numel() == 1:
        return bool(given)
    return bool(given) if isinstance(given, bool | np.bool_) else None


def _device(plan: CapturePlan) -> contextlib.AbstractContextManager[object]:
    # A new thread would otherwise make a CUDA context on the first device of the host.
    return torch.cuda.device(plan.devices[0]) if plan.devices else contextlib.nullcontext()
