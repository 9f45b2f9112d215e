"""What moves the bytes of a capture over an edge, chunk by chunk through p sub-buffers (Gemini, Section 6.5.2).

The owner decides how long each chunk is and when it leaves, and says its length before it; the receiver follows.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import distributed
from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import WireError

UNLIMITED: Final = timedelta(days=365)
"""No wait on an edge has a limit of its own: a daemon that runs out of patience moves the capture itself."""

Admit = Callable[[int], int]
"""Waits until something may leave; takes how many bytes are left of a capture, and returns how many may leave now."""

_SIZE_TAG: Final = 0
_FIRST_CHUNK_TAG: Final = 1
_MAX_CTAS: Final = 4


class Carrier(Protocol):
    """Moves bytes from the owner of an edge to its receiver; both call with equally many, uint8 on the CPU."""

    def send(self, data: torch.Tensor, admit: Admit) -> None:
        """Send `data` in chunks as long as `admit` says.

        Raises:
            RuntimeError: The edge is broken.
        """

    def receive(self, data: torch.Tensor) -> None:
        """Fill `data`.

        Raises:
            RuntimeError: The edge is broken.
            WireError: A chunk is announced that cannot be.
        """

    def close(self) -> None:
        """Make a call under way fail."""


class HostCarrier:
    """Over Gloo, from mapped slot to mapped slot: a chunk is received where it shall lie, so that nothing is copied.

    Args:
        group: A Gloo group of two, owner and receiver.
        sub_buffers: Chunks on their way at a time, p.
        sub_buffer_bytes: The largest chunk.
    """

    def __init__(self, group: Any, *, sub_buffers: int, sub_buffer_bytes: int) -> None:
        self._group = group
        self._sub_buffers = sub_buffers
        self._sub_buffer_bytes = sub_buffer_bytes

    def send(self, data: torch.Tensor, admit: Admit) -> None:
        """Send `data`, at most p chunks ahead of what has left."""
        leaving: deque[list[Any]] = deque()
        for index, chunk in enumerate(_cut(data, admit, self._sub_buffer_bytes)):
            if len(leaving) == self._sub_buffers:
                _wait(leaving.popleft())
            tag = _FIRST_CHUNK_TAG + index % self._sub_buffers
            leaving.append([_say_size(self._group, chunk), self._group.send([chunk], 1, tag)])
        for works in leaving:
            _wait(works)

    def receive(self, data: torch.Tensor) -> None:
        """Fill `data`, at most p chunks asked for."""
        arriving: deque[list[Any]] = deque()
        for index, chunk in enumerate(_follow(self._group, data, self._sub_buffer_bytes)):
            if len(arriving) == self._sub_buffers:
                _wait(arriving.popleft())
            arriving.append([self._group.recv([chunk], 0, _FIRST_CHUNK_TAG + index % self._sub_buffers)])
        for works in arriving:
            _wait(works)

    def close(self) -> None:
        """Do nothing: the edge closes its group."""


class DeviceCarrier:
    """Over NCCL, through p sub-buffers on each GPU: while one travels, others are copied from or to the pinned slot.

    It has a communicator of its own, in which one side only sends and the other only receives: on the one stream of
    a communicator, two sends towards each other would wait for ever. A kernel that waits for its counterpart takes
    room from training, so the receiver's is launched when a word over Gloo says that a chunk comes.

    Args:
        control: A Gloo group of two, owner and receiver.
        store: Where both ends meet; nobody else uses it.
        device: The GPU of this end.
        sub_buffers: Their number, p.
        sub_buffer_bytes: Size of each, R / p.
    """

    def __init__(
        self, control: Any, store: Store, device: torch.device, *, sub_buffers: int, sub_buffer_bytes: int
    ) -> None:
        options = distributed.ProcessGroupNCCL.Options()
        # Has no public name. When it expires torch ends the process.
        options._timeout = UNLIMITED
        options.config.max_ctas = _MAX_CTAS  # training keeps the other multiprocessors
        self._group: Any = distributed.ProcessGroupNCCL(store, control.rank(), 2, options)
        self._control = control
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sub_buffer_bytes = sub_buffer_bytes
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            whole = torch.empty(sub_buffers, sub_buffer_bytes, dtype=torch.uint8, device=device)
            self._buffers = list(whole)

    def send(self, data: torch.Tensor, admit: Admit) -> None:
        """Copy each chunk of `data`, which is page-locked, to the sub-buffer whose turn it is, and send that."""
        leaving: deque[Any] = deque()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for index, chunk in enumerate(_cut(data, admit, self._sub_buffer_bytes)):
                if len(leaving) == len(self._buffers):
                    # Also keeps this thread no further ahead of the wire than the sub-buffers are.
                    _finish(leaving.popleft())
                buffer = self._buffers[index % len(self._buffers)][: len(chunk)]
                buffer.copy_(chunk, non_blocking=True)
                _wait([_say_size(self._control, chunk)])
                leaving.append(self._group.send([buffer], 1, 0))
            for work in leaving:
                _finish(work)

    def receive(self, data: torch.Tensor) -> None:
        """Receive p chunks ahead, and copy each into `data`, which is page-locked, while the next one travels."""
        arriving: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for index, chunk in enumerate(_follow(self._control, data, self._sub_buffer_bytes)):
                if len(arriving) == len(self._buffers):
                    _put(*arriving.popleft())
                # Begins on the device after the copies that were put on the stream before, so not into a full buffer.
                buffer = self._buffers[index % len(self._buffers)][: len(chunk)]
                arriving.append((chunk, buffer, self._group.recv([buffer], 0, 0)))
            for entry in arriving:
                _put(*entry)
            self._stream.synchronize()

    def close(self) -> None:
        """Abort the communicator: kernels that wait for the other end return."""
        self._group.abort()


def _cut(data: torch.Tensor, admit: Admit, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the chunks of `data`, each when it may leave."""
    start = 0
    while start < len(data):
        end = start + min(admit(len(data) - start), limit_bytes)
        yield data[start:end]
        start = end


def _say_size(group: Any, chunk: torch.Tensor) -> Any:
    return group.send([torch.tensor([len(chunk)])], 1, _SIZE_TAG)


def _follow(group: Any, data: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Yield where in `data` the chunks belong that the owner announces.

    Raises:
        WireError: One is empty, longer than a sub-buffer, or longer than what is left.
    """
    size, start = torch.zeros(1, dtype=torch.int64), 0
    while start < len(data):
        _wait([group.recv([size], 0, _SIZE_TAG)])
        size_bytes, most_bytes = int(size.item()), min(limit_bytes, len(data) - start)
        if not 0 < size_bytes <= most_bytes:
            raise WireError(f"a chunk of {size_bytes} bytes is announced where at most {most_bytes} can follow")
        yield data[start : start + size_bytes]
        start += size_bytes


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait(UNLIMITED)


def _finish(work: Any) -> None:
    """Return once the device is done with `work`; communication that was begun after it goes on."""
    work.wait()
    torch.cuda.current_stream().record_event().synchronize()


def _put(chunk: torch.Tensor, buffer: torch.Tensor, work: Any) -> None:
    work.wait()  # the stream waits, not this thread
    chunk.copy_(buffer, non_blocking=True)
