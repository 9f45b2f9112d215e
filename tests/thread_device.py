"""A device that is not there: two streams that are threads, memory that is the CPU's, events between them.

It does what CUDA promises and no more: work on a stream is done in order, work on different streams in any order, and
whoever puts work on a stream does not wait for it. Tests hold the streams up where they like.
"""

import ctypes
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from resilient_run.ckpt.capture.fingerprint import fingerprint_cpu, weights

WAIT_S = 30.0


class Moment:
    """An event of a stream."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def synchronize(self) -> None:
        assert self.come.wait(WAIT_S), "a stream stands still"


class Stream:
    """Does one piece of work after another, as soon as `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> Moment:
        moment = Moment()
        self.put(moment.come.set)
        return moment

    def close(self) -> None:
        self.gate.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            assert self.gate.wait(WAIT_S)
            work()


class ThreadDevice:
    """Stands for a `CudaDevice`, and runs `kernel` on the memory of the CPU; `compute` is its current stream."""

    def __init__(self, kernel: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = fingerprint_cpu) -> None:
        self.kernel = kernel
        self.compute, self.side = Stream(), Stream()
        self.uploads = 0

    def words(self, address: int, nbytes: int) -> Tensor:
        # Most of it may belong to nobody: only what fragments name is read.
        memory = (ctypes.c_char * (-(-nbytes // 4) * 4)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.int32)

    def upload(self, numbers: Tensor) -> Tensor:
        self.uploads += 1
        uploaded = torch.zeros_like(numbers)
        self.compute.put(lambda: uploaded.copy_(numbers))
        return uploaded

    def fingerprint(self, words: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
        found = torch.zeros(len(starts), 2, dtype=torch.int64)
        self.compute.put(lambda: found.copy_(self.kernel(words, starts, sizes, weights())))
        return found

    def record(self) -> Moment:
        return self.compute.record()

    def beside(self, after: Moment, copy: Callable[[], None]) -> Moment:
        self.side.put(after.synchronize)
        self.side.put(copy)
        return self.side.record()

    def hold(self, until: Moment) -> None:
        self.compute.put(until.synchronize)

    def close(self) -> None:
        self.compute.close()
        self.side.close()
