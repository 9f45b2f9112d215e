"""Live leaves on a GPU: hashed in `step()` on the stream of training, copied later on a stream beside it, then proven.

`step()` puts one kernel on the current stream that reads the leaves once, at the speed of the GPU's memory
(`fingerprint.py`). Training goes on; a side stream waits for the kernel and copies the leaves into the page-locked
slot. What arrived there is hashed by the CPU with the same function. Training's thread waits for no GPU: where the
next optimizer step must not overtake the copy, its stream waits.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..format.slot import CHUNK_BYTES

WORD_BYTES: Final = 4
"""The address of a leaf that a device hashes is a multiple of this."""

_log = logging.getLogger(__name__)


class DeviceLeaves:
    """How the live leaves of one plan on one device are captured."""

    def __init__(self, device: "CudaDevice", places: Mapping[int, tuple[int, int]]) -> None:
        """Plan.

        Args:
            device: Where the leaves are.
            places: From where to where each of them, by index, lies in the payload, ascending; none is empty.
        """
        from .fingerprint import FRAGMENT_BYTES  # numba is imported where there is a GPU, and nowhere else

        self.device = device
        self.places = dict(places)
        leaf, place, size = [], [], []
        for index, (start, end) in self.places.items():
            # So that none lies in two chunks, which are checked one by one.
            first = start // FRAGMENT_BYTES * FRAGMENT_BYTES + FRAGMENT_BYTES
            inner = torch.arange(first, end, FRAGMENT_BYTES, device="cpu")
            edges = torch.nn.functional.pad(inner, (1, 1))
            edges[0], edges[-1] = start, end
            leaf.append(torch.full((len(edges) - 1,), index, device="cpu"))
            place.append(edges[:-1])
            size.append(edges.diff())
        self._leaf, self._place, self._size = torch.cat(leaf), torch.cat(place), torch.cat(size)
        self._addresses: dict[int, int] = {}

    def fingerprint(self, leaves: Mapping[int, Tensor]) -> "DeviceCapture":
        """Put the kernel that reads `leaves`, by index, on the current stream."""
        addresses = {index: leaves[index].data_ptr() for index in self.places}
        if addresses != self._addresses:
            # One launch for all leaves: they are parts of the memory that lies between the first and the last.
            first = min(addresses.values())
            last = max(addresses[index] + end - start for index, (start, end) in self.places.items())
            shifts = torch.zeros(max(addresses) + 1, dtype=torch.int64, device="cpu")
            for index, (start, _) in self.places.items():
                shifts[index] = addresses[index] - first - start
            self._words = self.device.words(first, last - first)
            self._starts = self.device.upload((self._place + shifts[self._leaf]) // WORD_BYTES)
            self._sizes = self.device.upload(self._size)
            self._uploaded = self.device.record()
            self._addresses = addresses
        self.device.hold(self._uploaded)  # the current stream may be another one than it was then
        found = self.device.fingerprint(self._words, self._starts, self._sizes)
        return DeviceCapture(self, {index: leaves[index] for index in self.places}, addresses, found)

    def differs(self, payload: Tensor, chunk: int, expected: Tensor) -> int | None:
        """Return a leaf of which the bytes in a chunk of `payload` have not the fingerprints `expected`, if any."""
        from .fingerprint import fingerprint_cpu, weights

        bounds = torch.tensor([chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES])
        part = slice(*torch.searchsorted(self._place, bounds).tolist())
        words = payload[: len(payload) // WORD_BYTES * WORD_BYTES].view(torch.int32)
        found = fingerprint_cpu(words, self._place[part] // WORD_BYTES, self._size[part], weights())
        wrong = (found != expected[part]).any(1).nonzero()
        return int(self._leaf[part][wrong[0]]) if len(wrong) else None


class DeviceCapture:
    """The live leaves of one device at the moment of one `step()`."""

    def __init__(
        self, plan: DeviceLeaves, leaves: Mapping[int, Tensor], addresses: Mapping[int, int], found: Tensor
    ) -> None:
        """Take leaves, which stay allocated until `finish`, and what the kernel on this stream will find."""
        self._plan = plan
        self._leaves = leaves
        self._addresses = addresses
        self._found = found
        self._ready = plan.device.record()
        self._copied: torch.cuda.Event | None = None
        self._moved: int | None = None

    def begin(self, payload: Tensor) -> None:
        """Put the copy into `payload` on the side stream, unless a leaf has moved: its memory may be gone."""
        self._moved = next(
            (index for index, at in self._addresses.items() if self._leaves[index].data_ptr() != at), None
        )
        if self._moved is not None:
            return
        self._expected = torch.empty(self._found.shape, dtype=self._found.dtype, pin_memory=self._found.is_cuda)
        self._copied = self._plan.device.beside(self._ready, lambda: self._copy(payload))

    def hold(self) -> None:
        """Let whatever is put on the current stream from now on wait for the copy, if it has begun."""
        if self._copied is not None:
            self._plan.device.hold(self._copied)

    def finish(self) -> None:
        """Wait for the copy, if it has begun, and let go of the leaves."""
        if self._copied is not None:
            self._copied.synchronize()
        self._leaves = {}

    def differs(self, payload: Tensor, chunk: int) -> int | None:
        """Return a leaf of which the bytes that arrived in a chunk are not those that `step()` saw, if any."""
        return self._plan.differs(payload, chunk, self._expected) if self._moved is None else self._moved

    def _copy(self, payload: Tensor) -> None:
        self._expected.copy_(self._found, non_blocking=True)
        for index, (start, end) in self._plan.places.items():
            leaf = self._leaves[index].detach()
            payload[start:end].copy_(leaf.reshape(-1).view(torch.uint8), non_blocking=True)
            if leaf.is_cuda:
                # Should its storage be freed under it, then nobody else gets that memory before the copy is done.
                leaf.record_stream(torch.cuda.current_stream(leaf.device))


class CudaDevice:
    """What is asked of a GPU: two streams, the one that training is on and one beside it, and a kernel."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel.

        Raises:
            Exception: Whatever numba raises where it cannot be had.
        """
        from .fingerprint import weights

        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._weights = weights().to(device)
        self.fingerprint(self._weights.view(torch.int32), *self._weights.new_tensor([[0], [WORD_BYTES]]))

    def words(self, address: int, nbytes: int) -> Tensor:
        """Return the memory of the device from `address` on as int32, whoever it belongs to."""
        interface = {"data": (address, False), "shape": (-(-nbytes // WORD_BYTES),), "typestr": "<i4", "version": 2}
        memory: Any = type("Memory", (), {"__cuda_array_interface__": interface})()
        return torch.as_tensor(memory, device=self._device)

    def upload(self, numbers: Tensor) -> Tensor:
        """Return a copy of a tensor of the CPU for work that is put on the current stream from now on."""
        return numbers.pin_memory().to(self._device, non_blocking=True)

    def fingerprint(self, words: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
        """Put `fingerprint.fingerprint_cuda` with the weights of this process on the current stream."""
        from .fingerprint import fingerprint_cuda

        for table in (starts, sizes):
            table.record_stream(torch.cuda.current_stream(self._device))  # it may be freed before the kernel has run
        return fingerprint_cuda(words, starts, sizes, self._weights)

    def record(self) -> torch.cuda.Event:
        """Return when all that is on the current stream by now will be done."""
        moment: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return moment

    def beside(self, after: torch.cuda.Event, copy: Callable[[], None]) -> torch.cuda.Event:
        """Put `copy` on the side stream, after `after`; return when it will be done."""
        self._side.wait_event(after)
        try:
            with torch.cuda.stream(self._side):
                copy()
        except BaseException:
            self._side.synchronize()  # what is on its way already must not arrive after this capture has failed
            raise
        moment: torch.cuda.Event = self._side.record_event()
        return moment

    def hold(self, until: torch.cuda.Event) -> None:
        """Let whatever is put on the current stream from now on wait for `until`."""
        torch.cuda.current_stream(self._device).wait_event(until)


def device_of(leaf: Tensor) -> CudaDevice | None:
    """Return what hashes and copies `leaf` behind training: None on a CPU, and where nothing can."""
    return _cuda_device(leaf.device) if leaf.is_cuda else None


@functools.cache
def _cuda_device(device: torch.device) -> CudaDevice | None:
    try:
        return CudaDevice(device)
    except Exception as error:  # noqa: BLE001 - numba, its CUDA part and the driver each have errors of their own
        _log.info(
            "all that is on %s is copied inside step(), because its memory cannot be hashed there (%s): "
            "pip install 'numba-cuda>=0.20' 'numpy<2.5'",
            device,
            error,
        )
        return None
