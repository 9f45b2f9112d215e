"""Gradients of several ranks with chosen density, overlap and skew, for tests of communication schemes."""

import torch
from torch import Tensor


def gradients(
    ranks: int,
    shape: tuple[int, ...],
    *,
    density: float,
    skew: float = 1.0,
    overlap: float = 0.5,
    by_row: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return one gradient per rank.

    Args:
        ranks: How many.
        shape: Of each.
        density: Share of elements (or rows) that are not zero.
        skew: Exponent that draws places towards the beginning; 1 is uniform.
        overlap: Share of places that all ranks have in common.
        by_row: Zero by whole rows of the first dimension.
        seed: Of all that is random.
        dtype: Of the gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    length = shape[0] if by_row else torch.Size(shape).numel()
    wanted = round(density * length)

    def places(count: int) -> Tensor:
        if density >= 1:
            return torch.arange(length)
        return (torch.rand(count, generator=generator).pow(skew) * length).long().clamp_(max=length - 1)

    common = places(round(overlap * wanted))
    made = []
    for _ in range(ranks):
        present = torch.zeros(length, 1, dtype=torch.bool)
        present[torch.cat([common, places(wanted - common.numel())])] = True
        values = torch.randn(length, torch.Size(shape).numel() // length, generator=generator)
        made.append(torch.where(present, values, 0).view(shape).to(dtype))
    return made


def in_order(parts: list[Tensor]) -> Tensor:
    """Return the sum of dense tensors, added one after the other to zero."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
