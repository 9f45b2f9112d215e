"""Sums the gradients that a framework hands over together: large ones by a scheme, all others as one tensor."""

from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..net.scheme import Scheme, split_as
from ..net.transport import Transport

LEAST_ELEMENTS: Final = 1 << 14


class BucketSum:
    """Sums buckets of named gradients over ranks.

    Each gradient that is large enough goes to the scheme under its own name; all others of a bucket, and those for
    which the scheme does nothing but all-reduce, are all-reduced as one. What the scheme remembers is the state of this
    object, which is a named object of a `Checkpointer`: it does not depend on the layout of buckets.

    Args:
        scheme: Sums large gradients.
        world: All ranks, for everything else.
        least_elements: From how many elements on a gradient is large.

    Attributes:
        scheme: As given.
        world: As given.
    """

    def __init__(self, *, scheme: Scheme, world: Transport, least_elements: int = LEAST_ELEMENTS) -> None:
        self.scheme = scheme
        self.world = world
        self._least_elements = least_elements

    def state_dict(self) -> dict[str, Any]:
        """Return what the scheme remembers."""
        return self.scheme.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the scheme go on from a saved state.

        Raises:
            CommError: It is of another scheme.
        """
        self.scheme.load_state_dict(state)

    def sum_bucket(self, buffer: Tensor, gradients: Sequence[tuple[str, Tensor]], unused: Collection[str] = ()) -> None:
        """Sum a dense bucket in place.

        Args:
            buffer: All gradients, contiguous.
            gradients: Name → its view of `buffer`, the same names in the same order on all ranks.
            unused: Names whose sums nobody takes, the same on all ranks: the scheme sends, and forgets, nothing of
                them.
        """
        chosen = {name for name, gradient in gradients if name not in unused and self.is_large(name, gradient)}
        if not chosen or buffer.is_complex():
            self.world.all_reduce(buffer)
            return
        small = [gradient for name, gradient in gradients if name not in chosen]
        if small:
            together = torch.cat([gradient.reshape(-1) for gradient in small])
            self.world.all_reduce(together)
            sums = iter(split_as(together, (gradient.shape for gradient in small)))
        large = iter(self.scheme.reduce_together([each for each in gradients if each[0] in chosen]))
        for name, gradient in gradients:
            gradient.copy_(next(large) if name in chosen else next(sums))

    def is_large(self, name: str, gradient: Tensor) -> bool:
        """Tell whether a gradient goes to the scheme."""
        return gradient.numel() >= self._least_elements and not self.scheme.is_all_reduced(name)
