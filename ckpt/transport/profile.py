"""Watches the collectives of the first iterations, whatever the parallelism, to learn when the network is idle.

torch announces every communication operation as an event of the *user scope*: Gloo's from its start to its end in
Gloo's own thread, whoever asked for it (DDP's reducer, FSDP2, a pipeline, the script). So one profiler session
that listens to the user scope only sees them all, and costs nothing measurable, because the many thousand operators of
an iteration are of another scope. NCCL's events end when the operation is enqueued; there the kernels that the GPU ran
are taken. Other sources are no use: a flight recorder knows no ends under Gloo, hooks see one kind of parallelism.
"""

import logging
import os
import threading
import time
from typing import Any, Final

import torch
from torch._C._autograd import (
    DeviceType,
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity

from ..format.idle import WARM_UP, IdleProfile, Iteration, typical

_HOST_PREFIX: Final = "gloo:"
_DEVICE_PREFIX: Final = "nccl"
_PATIENCE: Final = 10
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_log = logging.getLogger(__name__)


class Profiler:
    """Looks at some iterations of the thread that calls it; gives way to a profiler of the script's.

    Attributes:
        result: The typical iteration, None while it is not known, and when there is none.
        done: Whether the profiler has stopped looking.
        reason: Why `result` is what it is, once `done`.
    """

    def __init__(self, steps: int) -> None:
        """Prepare to look at `steps` iterations, of many times as many at most; `iteration_begins` starts."""
        self.result: IdleProfile | None = None
        self.done = False
        self.reason = "the network is being profiled"
        self._steps = steps
        self._patience = _PATIENCE * steps
        self._thread: int | None = None
        self._bounds: list[tuple[float, float]] = []
        self._began_s = 0.0
        self._offset_ns = 0

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._began_s > 0

    @property
    def needs_quiet(self) -> bool:
        """Whether the iteration that begins is one of those whose traffic makes the profile."""
        return self._thread == threading.get_ident() and len(self._bounds) >= WARM_UP

    def iteration_begins(self) -> None:
        """Record that the training thread leaves `Checkpointer.step()`."""
        if self.done:
            return
        if self._thread is None and not _profiler_enabled():
            self._start()
        self._began_s = time.monotonic()

    def iteration_ends(self, *, counts: bool = True) -> None:
        """Record that the training thread enters `Checkpointer.step()`.

        Args:
            counts: Whether the iteration had the traffic of training alone.
        """
        if self.done or not self.has_begun:
            return
        self._patience -= 1
        if self._thread == threading.get_ident():
            if not _owns_session():
                # The script's own profiler took over; what we had is lost.
                self._thread, self._bounds = None, []
            elif counts:
                self._bounds.append((self._began_s, time.monotonic()))
            if len(self._bounds) == self._steps or (self._patience <= 0 and len(self._bounds) > WARM_UP):
                self._finish()
        if not self.done and self._patience <= 0:
            self._end(None, "another profiler was active, or older replicas were under way, all the time")

    def close(self) -> None:
        """Stop looking."""
        if not self.done:
            self._end(None, "training ended before the network was profiled")

    def _start(self) -> None:
        activities = {ProfilerActivity.CPU}
        if torch.cuda.is_available():
            activities.add(ProfilerActivity.CUDA)
        config = ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
        with _quiet():
            _prepare_profiler(config, activities)
        _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        self._thread = threading.get_ident()
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def _finish(self) -> None:
        self._thread = None
        busy = sorted(
            ((event.start_ns() - self._offset_ns) / 1e9, (event.end_ns() - self._offset_ns) / 1e9)
            for event in _disable_profiler().events()
            if _is_communication(event)
        )
        iterations = []
        for begin_s, end_s in self._bounds:
            inside = [(start, end) for start, end in busy if begin_s <= start < end_s]
            iterations.append(
                Iteration(
                    length_s=end_s - begin_s,
                    busy=tuple((start - begin_s, end - begin_s) for start, end in inside),
                )
            )
        self._end(*typical(iterations))

    def _end(self, result: IdleProfile | None, reason: str) -> None:
        if self._thread == threading.get_ident() and _owns_session():
            _disable_profiler()
        self.result, self.reason, self.done = result, reason, True
        self._thread, self._bounds = None, []
        _log.info("the training network: %s", reason)


def _owns_session() -> bool:
    # A profiler of the script's takes the session of the thread over, and says so here.
    return _profiler_enabled() and not torch_profiler._is_profiler_enabled


def _is_communication(event: Any) -> bool:
    name = event.name()
    if event.device_type() == DeviceType.CPU:
        return bool(name.startswith(_HOST_PREFIX))
    return bool(name.lower().startswith(_DEVICE_PREFIX) and "kernel" in name.lower())


class _quiet:
    """Keep the profiler's library from reporting its start on stderr; it reads the variable when first used."""

    def __enter__(self) -> None:
        self._said = os.environ.get(_LOG_LEVEL)
        os.environ.setdefault(_LOG_LEVEL, "99")

    def __exit__(self, *exception: object) -> None:
        if self._said is None:
            del os.environ[_LOG_LEVEL]
