"""All-reduce in 8 bits, in two steps: ranks exchange shares, and then gather the sums of shares."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..errors import CommError
from ..net.rounds import Rounds, RoundScheme, all_to_all, bruck_gather
from ..net.scheme import laid_out
from ..net.transport import Transport, from_bytes, to_bytes
from ..ops.quantize import BLOCK, DTYPES, Format, dequantize, quantize, scale_count
from ..ops.spread import murmur
from .compressor import Compressor
from .feedback import ErrorFeedback

Rounding = Literal["nearest", "stochastic"]


class EightBits(Compressor):
    """All elements in 8 bits, in blocks with a float32 scale each (`ops.quantize`).

    A block with an inf or a nan is all nan.

    Args:
        kind: Of the numbers.
        block: Elements of a block.
        rounding: Nearest has the smaller error; stochastic errs in no direction, also where nothing remembers errors.
        rank: Of the ranks, which round stochastically each in its own way.

    Raises:
        CommError: There is no such rounding, or a block has no elements.
    """

    differs = frozenset({"_rank"})

    def __init__(self, kind: Format, *, block: int = BLOCK, rounding: Rounding = "nearest", rank: int = 0) -> None:
        if rounding not in get_args(Rounding) or block < 1:
            known = " or ".join(get_args(Rounding))
            raise CommError(f"rounding {rounding!r}, block {block}: give {known}, and at least one element")
        self.block = block
        self._kind: Format = kind
        self._stochastic = rounding == "stochastic"
        self._rank = rank

    @property
    def name(self) -> str:  # type: ignore[override]
        """The kind of the numbers."""
        return self._kind

    def compress(self, dense: Tensor, *, seed: int) -> Tensor:
        """Return the scales and the codes."""
        own = int(murmur(torch.tensor([self._rank]), seed)) if self._stochastic else None
        codes, scales = quantize(dense, self._kind, block=self.block, seed=own)
        return to_bytes(scales, codes)

    def decompress(self, message: Tensor, numel: int, dtype: torch.dtype, *, seed: int) -> Tensor:
        """Return each code times its block's scale."""
        scales, codes = self._parts(message, numel)
        return dequantize(codes, scales, numel, block=self.block).to(dtype)

    def message_bytes(self, numel: int) -> int:
        """Return the size of messages."""
        return torch.float32.itemsize * scale_count(numel, self.block) + numel

    def split(self, message: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """Return a message for each part of a tensor, which ends where the next one begins, at a whole block."""
        scales, codes = self._parts(message, bounds[-1])
        return [
            to_bytes(scales[scale_count(start, self.block) : scale_count(end, self.block)], codes[start:end])
            for start, end in pairwise(bounds)
        ]

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        counts = scale_count(numel, self.block)
        scales, codes = from_bytes(message, (torch.float32, counts), (DTYPES[self._kind], numel))
        return scales, codes


class TwoStep(RoundScheme):
    """All-reduce in 8 bits, as gradients are summed by ZeRO++ (Wang et al., 2023, section 4.3, qgZ).

    Each rank sends every other one its share of the gradient, adds up in float32 what it gets, and all gather the sums.
    What each of the two roundings takes away, the first one on each rank, the second one where the sum is, is added in
    the next step. So with what ranks remember, sums lose nothing.

    Args:
        transport: The ranks.
        block: Elements that share a scale.
        rounding: "nearest", or "stochastic".

    Raises:
        CommError: An argument is out of its range.
    """

    kind: ClassVar[Format]

    def __init__(self, transport: Transport, *, block: int = BLOCK, rounding: Rounding = "nearest") -> None:
        super().__init__(transport)
        self._compressor = EightBits(self.kind, block=block, rounding=rounding, rank=transport.rank)
        self._own = ErrorFeedback(self._compressor)
        self._sums = ErrorFeedback(self._compressor)

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum what was sent, equal on all ranks; a sparse gradient is dense on the way."""
        if gradient.numel() == 0:
            return gradient
        flat, rank, size = gradient.to_dense().reshape(-1), self.transport.rank, self.transport.size
        numel, dtype, block = flat.numel(), flat.dtype, self._compressor.block
        blocks = scale_count(numel, block)
        bounds = [min(numel, blocks * share // size * block) for share in range(size + 1)]
        numels = [end - start for start, end in pairwise(bounds)]
        sizes_bytes = [self._compressor.message_bytes(share) for share in numels]

        message, seed = self._own.compress(key, flat)
        shares = yield from all_to_all(
            rank, self._compressor.split(message, bounds), sizes_bytes=[sizes_bytes[rank]] * size
        )
        exact = torch.promote_types(dtype, torch.float32)
        share = torch.zeros(numels[rank], dtype=exact, device=flat.device)
        for received in shares:  # in the order of ranks
            share += self._compressor.decompress(received, share.numel(), dtype, seed=seed)
        message, seed = self._sums.compress(key, share, dtype=dtype)
        sums = yield from bruck_gather(rank, range(size), message, sizes_bytes=sizes_bytes)
        total = torch.cat(
            [
                self._compressor.decompress(received, count, dtype, seed=seed)
                for received, count in zip(sums, numels, strict=True)
            ]
        )
        self._own.undo_unless_finite([key], total)
        self._sums.undo_unless_finite([key], total)
        return laid_out(total.view(gradient.shape), gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return what both roundings took away."""
        return {"scheme": self.name, "own": self._own.state_dict(), "sums": self._sums.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is not of this scheme.
        """
        self.check_own(state)
        self._own.load_state_dict(state["own"])
        self._sums.load_state_dict(state["sums"])


class Int8(TwoStep):
    """All-reduce in int8."""

    name = "int8"
    kind = "int8"


class Fp8(TwoStep):
    """All-reduce in fp8 (e4m3), which keeps small elements of a block more exactly than int8, and large ones less."""

    name = "fp8"
    kind = "fp8"
