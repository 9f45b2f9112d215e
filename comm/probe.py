"""Measures what planners must know of a job's ranks: links by collective, and compressors by size."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .compressor import Compressor
from .cost import traffic
from .curve import Affine
from .feedback import ErrorFeedback
from .transport import Transport
from .tree import Routine

PROBED = (Routine.ALL_REDUCE, Routine.REDUCE_SCATTER, Routine.ALL_GATHER, Routine.ALL_TO_ALL)
"""The collectives that `probe_link` can measure."""

_CALLS: Mapping[Routine, Callable[[Transport, Tensor], object]] = {
    Routine.ALL_REDUCE: lambda transport, dense: transport.all_reduce(dense),
    Routine.REDUCE_SCATTER: lambda transport, dense: transport.reduce_scatter(dense),
    Routine.ALL_GATHER: lambda transport, dense: transport.all_gather_dense(dense),
    Routine.ALL_TO_ALL: lambda transport, dense: transport.all_to_all(
        list(dense.view(torch.uint8).chunk(transport.size))
    ),
}


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
    compressor: Compressor, sizes_bytes: Sequence[int], *, device: torch.device | str, repeats: int = 10
) -> CoderPoints:
    """Return what `compressor` takes on `device` for made-up gradients; the first run of each is not counted."""
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
            points[name].append(median(_seconds(work, dense.device) for _ in range(repeats + 1)))
    return CoderPoints(
        sizes_bytes=tuple(sizes_bytes),
        compress=tuple(points["compress"]),
        decompress=tuple(points["decompress"]),
        accumulate=tuple(points["accumulate"]),
        ratio=ratio,
    )


def probe_link(
    transport: Transport, routine: Routine, sizes_bytes: Sequence[int], *, repeats: int = 5
) -> tuple[float, ...]:
    """Return the seconds of a collective of dense tensors of each size, on the slowest rank; medians.

    The size is what a rank holds before the collective. All ranks call this together and get the same.

    Args:
        transport: The ranks.
        routine: All-reduce, reduce-scatter, all-gather or all-to-all.
        sizes_bytes: Rounded up to whole elements for each rank.
        repeats: Samples of each size, one more of which is not counted.
    """
    call, found = _CALLS[routine], []
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


def link_of(points: Mapping[Routine, Sequence[float]], sizes_bytes: Sequence[int], ranks: int) -> dict[Routine, Affine]:
    """Return alpha and beta of each collective: of one round, and of each byte that the busiest rank moves."""
    return {
        routine: _fit(
            np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64), *traffic(routine, ranks)
        )
        for routine, seconds in points.items()
    }


def _fit(sizes_bytes: NDArray[np.float64], seconds: NDArray[np.float64], rounds: int, share: float) -> Affine:
    # Relative errors count, so that small sizes say what a round takes; neither is less than nothing.
    design = np.stack([np.full_like(sizes_bytes, rounds), share * sizes_bytes], axis=1) / seconds[:, None]
    alpha_s, beta_s = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
    if alpha_s < 0:
        alpha_s, beta_s = 0.0, float(np.dot(design[:, 1], np.ones_like(seconds)) / np.dot(design[:, 1], design[:, 1]))
    if beta_s < 0:
        alpha_s, beta_s = float(np.median(seconds) / rounds), 0.0
    return Affine(alpha_s=float(alpha_s), beta_s_per_byte=float(beta_s))


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
