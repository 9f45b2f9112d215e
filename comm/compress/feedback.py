"""What a rank remembers of its gradients between steps, so that compression loses nothing for good.

Both memories keep their state by the parameter's key, in float32 (float64 for float64 gradients). An inf or a nan is
sent on, be it of the gradient or of a message that overflows, so that all ranks see it in the sum; then
`undo_unless_finite` takes back what all of them remembered of that gradient. A rank that leaves a parameter out in a
step (`no_sync`, gradient accumulation) calls nothing.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import all_finite, check_residual, rounded, to_message
from ..ops.spread import murmur
from .compressor import Compressor, Sparsifier


class Memory(ABC):
    """Compresses gradients and remembers, by key, what that left out.

    Args:
        compressor: What makes messages.
    """

    kind: ClassVar[str]
    """What states are of."""

    differs: ClassVar[frozenset[str]] = frozenset({"_steps", "_kept", "_before"})
    """Attributes in which ranks differ: the root of a sum remembers more than the others."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._steps: dict[str, int] = {}
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._before: dict[str, tuple[Tensor, ...]] = {}

    def compress(self, key: str, gradient: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, int]:
        """Return the message of a gradient, and the seed that decodes it; the same seed on all ranks.

        Give the sum that the message goes into to `undo_unless_finite`: until then what was remembered before is kept
        beside.

        Args:
            key: Name of the parameter (or of a part of it), the same on all ranks.
            gradient: 1-D, floating point; is not changed.
            dtype: As which the message is decoded; None for the gradient's.

        Raises:
            CommError: What is remembered is of a tensor of another size.
        """
        step = self._steps.get(key, 0)
        # A seed for each parameter and step; the same on all ranks, and after a restore.
        seed = int(murmur(torch.tensor([step]), zlib.crc32(key.encode())))
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        kept = tuple(tensor.to(wide.device) for tensor in self._kept.get(key, ())) or self._empty(wide)
        check_residual(key, kept[0], wide)
        message, self._kept[key] = self._compress(wide, dtype or gradient.dtype, kept, step, seed)
        self._before[key] = kept
        self._steps[key] = step + 1
        return message, seed

    def undo_unless_finite(self, keys: Iterable[str], total: Tensor) -> None:
        """Take back what the last `compress` of `keys` remembered, if an optimizer must not take the step.

        Args:
            keys: Of what went into the sum.
            total: The sum, equal on all ranks, so that all decide alike: an inf or a nan takes back.
        """
        finite = all_finite(total)
        for key in keys:
            after, before = self._kept[key], self._before.pop(key)
            if not finite:
                self._kept[key] = before
            for tensor in (*after, *before):
                if tensor.is_cuda:  # it may be of the stream that communicates
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))

    @abstractmethod
    def _empty(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return what is remembered before the first step."""

    @abstractmethod
    def _compress(
        self, gradient: Tensor, dtype: torch.dtype, kept: tuple[Tensor, ...], step: int, seed: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the message, of elements of `dtype`, and what is to be remembered; `kept` is not changed."""

    def forget(self, keys: Iterable[str]) -> None:
        """Begin anew for `keys`."""
        for key in keys:
            del self._kept[key], self._steps[key]

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered; tensors are not copied."""
        kept = {key: list(tensors) for key, tensors in self._kept.items()}
        return {"kind": self.kind, "steps": dict(self._steps), "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is not of this kind of memory.
        """
        match state:
            case {"kind": self.kind, "steps": dict(steps), "kept": dict(kept)} if steps.keys() == kept.keys() and all(
                map(self._is_kept, kept.values())
            ):
                self._steps = dict(steps)
                self._kept = {key: tuple(tensors) for key, tensors in kept.items()}
            case {"kind": str(kind)} if kind != self.kind:
                raise CommError(f"a state of {kind} cannot go on as {self.kind}; take the memory that saved it")
            case _:
                raise CommError(f"this is not a state of {self.kind}; load one that this memory saved")

    def _is_kept(self, tensors: Any) -> bool:
        """Tell whether `tensors` may be what is remembered of one parameter."""
        like = self._empty(torch.empty(0))
        return (
            isinstance(tensors, list | tuple)
            and len(tensors) == len(like)
            and all(isinstance(tensor, Tensor) and tensor.dim() == 1 for tensor in tensors)
            and len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1
        )


class ErrorFeedback(Memory):
    """Adds to each gradient what compression left out of those before (Karimireddy et al., 2019, Algorithm 2)."""

    kind = "error feedback"

    def _empty(self, gradient: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradient),)

    def _compress(
        self, gradient: Tensor, dtype: torch.dtype, kept: tuple[Tensor, ...], step: int, seed: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        corrected = gradient + kept[0]
        message = self.compressor.compress(rounded(corrected, dtype), seed=seed)
        self.compressor.subtract(message, corrected, dtype, seed=seed)
        return message, (corrected,)


class MomentumCorrection(Memory):
    """Deep Gradient Compression (Lin et al., 2018, section 3): momentum before compression, clipping, warm-up.

    The optimizer must not have momentum of its own for these parameters: the sum of what is sent has it already. That
    sum and the residual are the sum of momentum SGD's steps, unless `masking` takes from it.

    Args:
        compressor: What selects elements.
        ranks: Number of ranks, N.
        momentum: m of u = m u + g.
        masking: Momentum factor masking, as published: elements that are sent leave u as well as the residual. Guards
            against momentum that waited for too long; what is sent every few steps loses most of its momentum.
        clip_norm: A parameter's gradient is scaled down to this norm over sqrt(N), as local clipping; None for none.
        warm_up_steps: Over so many steps the density falls from 25 % by a quarter each fourth of them, to the
            compressor's; 0 for none.

    Raises:
        CommError: An argument is out of its range, or the compressor selects no elements by their values.
    """

    kind = "momentum correction"

    def __init__(
        self,
        compressor: Sparsifier,
        *,
        ranks: int,
        momentum: float = 0.9,
        masking: bool = False,
        clip_norm: float | None = None,
        warm_up_steps: int = 0,
    ) -> None:
        super().__init__(compressor)
        if not isinstance(compressor, Sparsifier):
            raise CommError(f"momentum correction of {compressor.name} is not defined; take topk or dgc")
        clippable = clip_norm is None or 0 < clip_norm < inf
        if not 0 <= momentum < 1 or not clippable or warm_up_steps < 0 or ranks < 1:
            raise CommError(
                f"momentum {momentum}, clip_norm {clip_norm}, warm_up_steps {warm_up_steps}, ranks {ranks}: give a "
                f"momentum in [0, 1), a positive norm or None, no negative number of steps, and at least one rank"
            )
        self._sparsifier = compressor
        self._momentum = momentum
        self._masking = masking
        self._limit = None if clip_norm is None else clip_norm / sqrt(ranks)
        self._warm_up_steps = warm_up_steps

    def density(self, step: int) -> float:
        """Return the share of elements that is sent in the step after `step` steps."""
        if step >= self._warm_up_steps:
            return self._sparsifier.density
        return max(self._sparsifier.density, 0.25 ** (1 + step * 4 // self._warm_up_steps))

    def _empty(self, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(gradient), torch.zeros_like(gradient)

    def _compress(
        self, gradient: Tensor, dtype: torch.dtype, kept: tuple[Tensor, ...], step: int, seed: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self._limit is not None:
            gradient = gradient * (self._limit / gradient.norm().clamp(min=self._limit))
        velocity = self._momentum * kept[0] + gradient
        residual = kept[1] + velocity
        k = self._sparsifier.count(residual.numel(), self.density(step))
        entries = self._sparsifier.select(rounded(residual, dtype), k, seed=seed)
        at = entries.indices.long()
        residual[at] -= entries.values
        if self._masking:
            velocity[at] = 0
        return to_message(entries), (velocity, residual)
