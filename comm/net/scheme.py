"""What every way to sum gradients over ranks has in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import CommError
from .transport import Transport

Stage = Literal["prepare", "communicate", "settle"]


class Reduction(ABC):
    """A sum over all ranks that is on its way; the stages come in this order, from any thread."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to do)
        """Do what CPUs do before the ranks meet."""

    @abstractmethod
    def communicate(self) -> None:
        """Do what all ranks do together, in the same order for all keys; may return before the network has finished."""

    def settle(self) -> None:  # noqa: B027
        """Do what CPUs do after that."""

    @abstractmethod
    def total(self) -> Tensor:
        """Do what is left, which concerns this rank alone, and return the sum."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield what the next stage reads."""


class Scheme:
    """Sums gradients over all ranks of a transport; has its own `reduce` or `reduce_together`.

    All ranks call `reduce` for the same keys in the same order. What a scheme remembers between steps (residuals,
    seeds, adaptive sizes) is kept by key and is part of its state dict, so that a restored run goes on bit for bit.

    Args:
        transport: The ranks, and where bytes are counted.
    """

    name: ClassVar[str]
    """How users and benchmarks call it."""

    beside: Transport | None = None
    """Ranks that sum other shares of the same gradients, each with own ranks; `is_all_reduced` is the same there."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum of `gradient` over all ranks, equal on all of them.

        Args:
            key: Name of the parameter, the same on all ranks; state is kept by it, never by position.
            gradient: Floating point, of any shape, the same shape and dtype on all ranks. It may be overwritten.

        Returns:
            A tensor of the shape, dtype and device of `gradient`; may be `gradient` itself.
        """
        return self.reduce_together([(key, gradient)])[0]

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return what `reduce` returns for each of these keys and gradients; some schemes need fewer rounds for all.

        No key comes twice. Which gradients come together may change from step to step.
        """
        return [self.reduce(key, gradient) for key, gradient in gradients]

    def is_all_reduced(self, key: str) -> bool:
        """Tell whether this gradient is only all-reduced from now on, so that it may be so together with others."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must remember for the next step; tensors are not copied."""
        return {}

    def check_own(self, state: dict[str, Any]) -> None:
        """Raise CommError unless `state` names this scheme, as the state of one that remembers anything does."""
        if state.get("scheme") != self.name:
            raise CommError(f"{self.name} cannot go on from the state of {state.get('scheme')!r}; name the same scheme")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is not of this scheme.
        """
        if state:
            raise CommError(
                f"{self.name} keeps no state, but is to load {sorted(state)}; name the scheme that saved it"
            )


def split_as(flat: Tensor, shapes: Iterable[torch.Size]) -> list[Tensor]:
    """Return the tensors of these shapes that stand one after the other in `flat`, which has one dimension."""
    shapes = list(shapes)
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def laid_out(total: Tensor, gradient: Tensor) -> Tensor:
    """Return a dense tensor as it is if `gradient` is dense, too, and else with its sparse dimensions.

    Rows of zeros are left out. torch's `to_sparse` needs hundreds of times as long for rows.
    """
    if not gradient.is_sparse:
        return total
    given, sparse_dim = total.ne(0), gradient.sparse_dim()
    if sparse_dim < total.dim():
        given = given.any(tuple(range(sparse_dim, total.dim())))
    return torch.sparse_coo_tensor(
        given.nonzero().T, total[given], total.shape, is_coalesced=True, check_invariants=False
    )


class Dense(Scheme):
    """The library's own all-reduce."""

    name = "dense"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks, in place where `gradient` is dense and contiguous."""
        contiguous = gradient.to_dense().contiguous()
        self.transport.all_reduce(contiguous)
        return laid_out(contiguous, gradient)

    def is_all_reduced(self, key: str) -> bool:
        """Return whether a gradient may be all-reduced together with others."""
        return True
