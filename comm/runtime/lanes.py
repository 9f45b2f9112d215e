"""Threads beside training: one that does a task after the other, and a pipeline of them for the stages of sums."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ..net.scheme import Reduction, Stage


class Worker:
    """A thread, with a stream of its own on CUDA, that does one task after the other.

    Args:
        name: Of the thread.
        device: Where gradients are.

    Attributes:
        closed: Whether no more tasks are taken.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, task: Callable[[], None], after: Any = None, failed: Callable[[Any], None] | None = None
    ) -> "Future[None]":
        """Return a future of the task; on CUDA it follows the event `after`, or what the current stream has to do.

        The worker calls `failed` with what went wrong in the task or before it.
        """
        done: Future[None] = Future()
        after = after or recorded(self._device)

        def run() -> None:
            try:
                try:
                    if after is not None:
                        self._stream.wait_event(after)
                    task()
                except BaseException as error:
                    if failed is not None:
                        failed(error)
                    raise
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
                done.set_exception(error)
            else:
                done.set_result(None)

        self._tasks.put(run)
        return done

    def follow(self) -> None:
        """Let the current stream wait for what the worker has done."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Take no more tasks, and end the thread after those that are there."""
        self.closed = True
        self._tasks.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while (task := self._tasks.get()) is not None:
                task()


class Lanes:
    """A pipeline: every sum passes each lane, a worker for one stage, in the order of its index.

    Args:
        stages: Of each lane.
        count: How many sums there are in a step. Each is put in and taken out once; then the next step begins.
        device: Where gradients are.
    """

    def __init__(self, stages: Sequence[Stage], count: int, device: torch.device) -> None:
        self._device, self._count = device, count
        self._lanes = [(stage, Worker(f"gradients: {stage}", device)) for stage in stages]
        self._changed = threading.Condition()
        self._next = 0
        self._put: dict[int, tuple[Reduction, Any]] = {}
        self._passed: dict[int, tuple[Reduction, Any]] = {}
        self._error: Exception | None = None

    def put(self, index: int, reduction: Reduction) -> None:
        """Hand over a sum, in any order; what the current stream still does for it comes first."""
        with self._changed:
            self._put[index] = reduction, recorded(self._device)
            while self._next in self._put:
                self._hand_over(0, self._next, *self._put.pop(self._next))
                self._next = (self._next + 1) % self._count

    def take(self, index: int) -> Reduction:
        """Return a sum that has passed all lanes, once it has; the current stream waits for it.

        Raises:
            Exception: What went wrong in a stage, or was passed to `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or index in self._passed)
            if self._error is not None:
                raise self._error
            reduction, event = self._passed.pop(index)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        _keep(reduction.tensors())
        return reduction

    def fail(self, error: Exception) -> None:
        """Let all who wait here raise the error, the first one if there are several."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads."""
        for _, worker in self._lanes:
            worker.close()
            worker.join()

    def _hand_over(self, lane: int, index: int, reduction: Reduction, event: Any) -> None:
        if lane < len(self._lanes):
            self._lanes[lane][1].submit(partial(self._pass, lane, index, reduction), event, self.fail)
            return
        with self._changed:
            self._passed[index] = reduction, event
            self._changed.notify_all()

    def _pass(self, lane: int, index: int, reduction: Reduction) -> None:
        if self._error is None:
            _keep(reduction.tensors())
            getattr(reduction, self._lanes[lane][0])()
            self._hand_over(lane + 1, index, reduction, recorded(self._device))


def recorded(device: torch.device) -> Any:
    """Return an event after what the current stream has to do; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _keep(tensors: Iterable[Tensor]) -> None:
    """Let nobody get the memory of tensors that another stream made before the current one has read them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
