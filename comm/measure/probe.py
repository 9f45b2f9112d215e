"""Measures what planners must know of a job's ranks: links by collective, and compressors by size."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..compress.compressor import Compressor
from ..compress.feedback import ErrorFeedback
from ..net.collectives import carry_dense
from ..net.transport import Transport
from ..plan.tree import Routine
from ..runtime.pieces import Message, Pieces, carry_pieces

# A batch lasts about so long: more than what shaped links and buffers take in at once.
_BATCH_S = 0.05
_GREATEST_BATCH = 200

PROBED = (
    Routine.ALL_REDUCE,
    Routine.REDUCE_SCATTER,
    Routine.ALL_GATHER,
    Routine.REDUCE,
    Routine.BROADCAST,
)
"""The collectives of dense tensors that `probe_link` can measure."""

PROBED_COMPRESSED = (Routine.ALL_GATHER, Routine.ALL_TO_ALL, Routine.GATHER, Routine.BROADCAST)
"""Those of compressed data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoderPoints:
    """What a compressor takes, medians in seconds for each size of a tensor.

    Attributes:
        compress: With error feedback.
        decompress: Of one message into zeros.
        accumulate: Of one more message onto the sum.
        ratio: Message bytes over dense bytes, of the largest tensor.
    """

    compress: tuple[float, ...]
    decompress: tuple[float, ...]
    accumulate: tuple[float, ...]
    ratio: float


def probe_coder(
    compressor: Compressor,
    sizes_bytes: Sequence[int],
    *,
    device: torch.device | str,
    transport: Transport,
    gradients_on: torch.device | str | None = None,
    repeats: int = 10,
) -> CoderPoints:
    """Return what `compressor` takes on `device` for made-up gradients, one after the other as in `probe_link`.

    Args:
        compressor: What is measured.
        sizes_bytes: Of float32 gradients, ascending.
        device: Where it works.
        transport: Its ranks do the same at the same time, as in training, where they may share processors; the slowest
            counts.
        gradients_on: Where gradients and messages are, if elsewhere: what is copied from there and back counts too.
        repeats: As of `probe_link`.
    """
    home = torch.device(device if gradients_on is None else gradients_on)

    def seconds(size_bytes: int) -> tuple[float, float, float, float]:
        """Return those of `compress`, `decompress` and `accumulate`, and the ratio."""
        dense = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(0)).to(home)
        memory, total = ErrorFeedback(compressor), torch.zeros_like(dense, device=device)
        message, seed = memory.compress("probe", dense.to(device))
        message = message.to(home)

        def compress() -> None:
            memory.compress("probe", dense.to(device))[0].to(home)
            memory.undo_unless_finite(["probe"], dense)

        def decompress() -> None:
            compressor.decompress(message.to(device), dense.numel(), dense.dtype, seed=seed).to(home)

        def accumulate() -> None:
            compressor.add(message.to(device), total, seed=seed)

        def mean_s(work: Callable[[], object]) -> float:
            return _mean_s(work, device=home, repeats=repeats, transport=transport)

        return mean_s(compress), mean_s(decompress), mean_s(accumulate), message.numel() / dense.nbytes

    compress, decompress, accumulate, ratios = zip(*map(seconds, sizes_bytes), strict=True)
    return CoderPoints(
        compress=compress,
        decompress=decompress,
        accumulate=accumulate,
        ratio=ratios[-1],
    )


def probe_link(
    transport: Transport,
    routine: Routine,
    sizes_bytes: Sequence[int],
    *,
    repeats: int = 5,
    compressor: Compressor | None = None,
    everyone: Transport | None = None,
) -> tuple[float, ...]:
    """Return the seconds of a collective of tensors of each size, on the slowest rank.

    Collectives follow each other without a pause, as those of many tensors do: what a link lets pass at once after a
    pause would make it look faster than it is, and the time of a single short one differs by more than its length.

    The size is what a rank holds before the collective. All ranks call this together and get the same.

    Args:
        transport: The ranks.
        routine: One of `PROBED`, or of `PROBED_COMPRESSED`.
        sizes_bytes: Rounded up to whole elements for each rank.
        repeats: Batches of each size; the median of their means counts.
        compressor: The tensors are messages of this one, which travel with what decodes them.
        everyone: The ranks that do the same in groups of their own, and share links; they begin each batch together.
    """
    found = []
    for size_bytes in sizes_bytes:
        each = -(-size_bytes // (4 * transport.size))
        tensor = torch.zeros(each * transport.size, device=transport.device)

        def call(tensor: Tensor = tensor) -> None:
            waits = routine is Routine.BROADCAST and transport.rank > 0
            if compressor is None:
                dense = None if waits else tensor
                carry_dense(routine, dense, transport, root=0, numel=tensor.numel(), dtype=tensor.dtype)
            else:
                pieces = None if waits else _pieces(tensor, transport.size if routine is Routine.ALL_TO_ALL else 1)
                carry_pieces(routine, pieces, transport, root=0, alike=compressor.fixed_size)

        found.append(_mean_s(call, device=transport.device, repeats=repeats, transport=everyone or transport))
    return tuple(found)


def _mean_s(work: Callable[[], object], *, device: torch.device, repeats: int, transport: Transport) -> float:
    """Return the seconds of `work` when it is done again and again, all ranks beginning together; the slowest counts.

    The median of `repeats` batches.
    """

    def batch_s(count: int) -> float:
        _greatest_s(transport, 0.0)
        return _greatest_s(transport, _seconds(lambda: [work() for _ in range(count)], device))

    once_s = min(batch_s(1), batch_s(1))  # the first one allocates, and compiles kernels
    count = max(1, min(_GREATEST_BATCH, round(_BATCH_S / once_s)))
    return median(batch_s(count) / count for _ in range(repeats))


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


def _greatest_s(transport: Transport, seconds: float) -> float:
    return float(transport.gather_numbers(torch.tensor([seconds], dtype=torch.float64)).max())
