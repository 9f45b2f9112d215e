"""Measures what planners must know of a job's ranks: links by collective, and compressors by size."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .compressor import Compressor
from .feedback import ErrorFeedback
from .pieces import Message, Pieces, broadcast_from, gather_all, gather_to, pack, reduce_to, scatter_all, unpack
from .transport import Transport, to_bytes
from .tree import Routine

_Call = Callable[[Transport, Tensor], object]

_DENSE: Mapping[Routine, _Call] = {
    Routine.ALL_REDUCE: lambda transport, dense: transport.all_reduce(dense),
    Routine.REDUCE_SCATTER: lambda transport, dense: transport.reduce_scatter(dense),
    Routine.ALL_GATHER: lambda transport, dense: transport.all_gather_dense(dense),
    Routine.REDUCE: lambda transport, dense: reduce_to(0, dense, transport),
    Routine.BROADCAST: lambda transport, dense: broadcast_from(
        0, None if transport.rank else to_bytes(dense), transport
    ),
}
_COMPRESSED: Mapping[Routine, _Call] = {
    Routine.ALL_GATHER: lambda transport, data: gather_all(_pieces(data, 1), transport),
    Routine.ALL_TO_ALL: lambda transport, data: scatter_all(_pieces(data, transport.size), transport),
    Routine.GATHER: lambda transport, data: gather_to(0, _pieces(data, 1), transport),
    Routine.BROADCAST: lambda transport, data: unpack(
        broadcast_from(0, None if transport.rank else pack(_pieces(data, 1)), transport)
    ),
}

PROBED = tuple(_DENSE)
"""The collectives of dense tensors that `probe_link` can measure."""

PROBED_COMPRESSED = tuple(_COMPRESSED)
"""Those of compressed data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoderPoints:
    """What a compressor takes, medians in seconds, for tensors of `sizes_bytes` dense bytes.

    Attributes:
        sizes_bytes: Of float32 tensors, ascending.
        compress: With error feedback.
        decompress: Of one message into zeros.
        accumulate: Of one more message onto the sum.
        ratio: Message bytes over dense bytes, of the largest tensor.
    """

    sizes_bytes: tuple[int, ...]
    compress: tuple[float, ...]
    decompress: tuple[float, ...]
    accumulate: tuple[float, ...]
    ratio: float


def probe_coder(
    compressor: Compressor,
    sizes_bytes: Sequence[int],
    *,
    device: torch.device | str,
    repeats: int = 10,
    transport: Transport | None = None,
) -> CoderPoints:
    """Return what `compressor` takes on `device` for made-up gradients; the first run of each is not counted.

    With a `transport` its ranks do the same at the same time, as in training, where they may share processors; the
    slowest counts.
    """
    points: dict[str, list[float]] = {"compress": [], "decompress": [], "accumulate": []}
    ratio = 1.0
    for size_bytes in sizes_bytes:
        dense = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(0)).to(device)
        memory = ErrorFeedback(compressor)
        message, seed = memory.compress("probe", dense)
        ratio = message.numel() / dense.nbytes
        total = torch.zeros_like(dense)

        def decompress(
            message: Tensor = message, numel: int = dense.numel(), dtype: torch.dtype = dense.dtype, seed: int = seed
        ) -> None:
            compressor.decompress(message, numel, dtype, seed=seed)

        def accumulate(message: Tensor = message, total: Tensor = total, seed: int = seed) -> None:
            compressor.add(message, total, seed=seed)

        def compress(memory: ErrorFeedback = memory, dense: Tensor = dense) -> None:
            memory.compress("probe", dense)

        for name, work in (("compress", compress), ("decompress", decompress), ("accumulate", accumulate)):
            samples = [
                _seconds(work, dense.device) if transport is None else slowest_s(transport, work)
                for _ in range(repeats + 1)
            ]
            points[name].append(median(samples[1:]))
    return CoderPoints(
        sizes_bytes=tuple(sizes_bytes),
        compress=tuple(points["compress"]),
        decompress=tuple(points["decompress"]),
        accumulate=tuple(points["accumulate"]),
        ratio=ratio,
    )


def probe_link(
    transport: Transport, routine: Routine, sizes_bytes: Sequence[int], *, repeats: int = 5, compressed: bool = False
) -> tuple[float, ...]:
    """Return the seconds of a collective of tensors of each size, on the slowest rank; medians.

    The size is what a rank holds before the collective. All ranks call this together and get the same.

    Args:
        transport: The ranks.
        routine: One of `PROBED`, or of `PROBED_COMPRESSED`.
        sizes_bytes: Rounded up to whole elements for each rank.
        repeats: Samples of each size, one more of which is not counted.
        compressed: The tensors are messages of a compressor, which travel with what decodes them.
    """
    call, found = (_COMPRESSED if compressed else _DENSE)[routine], []
    for size_bytes in sizes_bytes:
        each = -(-size_bytes // (4 * transport.size))
        dense = torch.zeros(each * transport.size, device=transport.device)
        samples = [slowest_s(transport, lambda dense=dense: call(transport, dense)) for _ in range(repeats + 1)]  # type: ignore[misc]
        found.append(median(samples[1:]))
    return tuple(found)


def probe_messages(
    transport: Transport, compressor: Compressor, sizes_bytes: Sequence[int], *, repeats: int = 5
) -> tuple[float, ...]:
    """Return the seconds in which the ranks' messages of tensors of each dense size reach all of them; medians.

    Messages that can be summed are all-reduced, others all-gathered (`compressed.Compressed`).
    """
    found = []
    for size_bytes in sizes_bytes:
        dense = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(0)).to(transport.device)
        message = compressor.compress(dense, seed=0)
        sum_dtype = compressor.summed_as(dense.dtype)

        def send(message: Tensor = message, sum_dtype: torch.dtype | None = sum_dtype) -> None:
            if sum_dtype is None:
                transport.all_gather(message)
            else:
                transport.all_reduce(message.view(sum_dtype))

        found.append(median([slowest_s(transport, send) for _ in range(repeats + 1)][1:]))
    return tuple(found)


def slowest_s(transport: Transport, work: Callable[[], object]) -> float:
    """Return the seconds that `work` took on the slowest rank, all beginning together."""
    _gather(transport, 0.0)
    seconds = _seconds(work, transport.device)
    return max(_gather(transport, seconds))


def _pieces(data: Tensor, count: int) -> Pieces:
    parts = data.view(torch.uint8).chunk(count)
    return Pieces(numel=data.numel() // count, pieces=[[Message(seed=0, data=part)] for part in parts])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    began_s = time.perf_counter()
    work()
    _settle(device)
    return time.perf_counter() - began_s


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(transport: Transport, seconds: float) -> list[float]:
    own = torch.tensor([seconds], dtype=torch.float64, device=transport.device).view(torch.uint8)
    gathered = transport.all_gather(own, sizes_bytes=[own.numel()] * transport.size)
    return [float(message.view(torch.float64)[0]) for message in gathered]
