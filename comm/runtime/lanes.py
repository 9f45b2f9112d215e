"""Threads that take sums of gradients through their stages, each thread one stage, one sum after the other."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..net.scheme import Reduction, Stage


class Lanes:
    """A pipeline: every sum passes each lane, a thread (and a stream of its own on CUDA), in the order of its index.

    Args:
        stages: Of each lane.
        count: How many sums there are in a step. Each is put in and taken out once; then the next step begins.
        device: Where gradients are.
    """

    def __init__(self, stages: Sequence[Stage], count: int, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._put: list[Reduction | None] = [None] * count
        self._ready: list[Any] = [None] * count
        self._done = [count] * len(stages)
        self._error: Exception | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(lane, stage), name=f"gradients: {stage}", daemon=True)
            for lane, stage in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, index: int, reduction: Reduction) -> None:
        """Hand over a sum, in any order; what the current stream still does for it comes first."""
        with self._changed:
            if self._done[-1] == len(self._put):
                self._done = [0] * len(self._done)
            self._put[index], self._ready[index] = reduction, self._event()
            self._changed.notify_all()

    def take(self, index: int) -> Reduction:
        """Return a sum that has passed all lanes, once it has; the current stream waits for it.

        Raises:
            Exception: What went wrong in a stage, or was passed to `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._done[-1] > index)
            if self._error is not None:
                raise self._error
            reduction, self._put[index] = self._put[index], None
        assert reduction is not None
        self._follow(index, reduction)
        return reduction

    def fail(self, error: Exception) -> None:
        """Let all who wait here raise the error, the first one if there are several."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self, lane: int, stage: Stage) -> None:
        stream: Any = None
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            while (index := self._next(lane)) is not None:
                reduction = self._put[index]
                assert reduction is not None
                try:
                    self._follow(index, reduction)
                    getattr(reduction, stage)()
                except Exception as error:  # noqa: BLE001 (it belongs to whoever takes the sum)
                    self.fail(error)
                    continue
                with self._changed:
                    self._ready[index] = self._event()
                    self._done[lane] += 1
                    self._changed.notify_all()

    def _next(self, lane: int) -> int | None:
        """Wait for the next sum of a lane and return its index; None when everything ends."""

        def waits() -> bool:
            index = self._done[lane]
            if self._error is not None or index == len(self._put):
                return False
            return self._put[index] is not None if lane == 0 else self._done[lane - 1] > index

        with self._changed:
            self._changed.wait_for(lambda: self._closed or waits())
            return None if self._closed else self._done[lane]

    def _event(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _follow(self, index: int, reduction: Reduction) -> None:
        """Let the current stream wait for the stage before, and keep what it reads until it has read it."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._ready[index])
            _keep_for(stream, reduction.tensors())


def _keep_for(stream: Any, tensors: Iterable[Tensor]) -> None:
    """Let nobody get the memory of tensors that another stream made before `stream` has read them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)
