"""What decides which scheme is best: density, overlap, densification, skew, imbalance (thesis 3.2.2, 3.3.2)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mapping = Callable[[Tensor], Tensor]
"""Indices → the server of each, 0 … parts - 1."""


def nonzero(gradient: Tensor, width: int = 1) -> Tensor:
    """Return the indices of rows of `width` elements that are not all zero, ascending; also of a sparse COO tensor."""
    return gradient.to_dense().reshape(-1, width).ne(0).any(1).nonzero().view(-1)


def density(gradient: Tensor) -> float:
    """Return the share of elements that are not zero (Definition 3.1's d_G); 0 for an empty tensor."""
    return nonzero(gradient).numel() / gradient.numel() if gradient.numel() else 0.0


def overlap_ratio(one: Tensor, other: Tensor) -> float:
    """Return |I1 ∩ I2| / min(|I1|, |I2|) of two gradients (Definition 3.3); 0 when one is all zero."""
    first, second = nonzero(one), nonzero(other)
    smaller = min(first.numel(), second.numel())
    return torch.isin(first, second).sum().item() / smaller if smaller else 0.0


def densities(gradients: Sequence[Tensor], width: int = 1) -> list[float]:
    """Return the density of the sum of the first 1, 2, … of the gradients, of rows of `width` elements.

    Sums that cancel to zero count as not zero.
    """
    rows = gradients[0].numel() // width
    seen = torch.zeros(rows, dtype=torch.bool, device=gradients[0].device)
    found = []
    for gradient in gradients:
        seen[nonzero(gradient, width)] = True
        found.append(seen.sum().item() / rows if rows else 0.0)
    return found


def densification(gradients: Sequence[Tensor]) -> list[float]:
    """Return γ¹, γ², …: how many times denser the sum of the first 1, 2, … gradients is than one (Definition 3.4).

    One is the mean over all of them. Full overlap gives 1 everywhere, none gives γᵏ = k.
    """
    alone = sum(density(gradient) for gradient in gradients) / len(gradients)
    return [together / alone if alone else 1.0 for together in densities(gradients)]


def skewness(gradient: Tensor, parts: int) -> float:
    """Return how much denser the densest of `parts` even ranges is than the whole (Definition 3.5); 1 if all zero."""
    length = gradient.numel()
    return push_imbalance([nonzero(gradient)], parts, lambda indices: indices * parts // max(1, length))


def push_imbalance(index_sets: Sequence[Tensor], parts: int, mapping: Mapping) -> float:
    """Return the greatest n·|I_i^j| / |I_i| over workers i and servers j (Definition 3.6); 1 is balanced."""
    return max((_imbalance(indices, parts, mapping) for indices in index_sets), default=1.0)


def pull_imbalance(index_sets: Sequence[Tensor], parts: int, mapping: Mapping) -> float:
    """Return the greatest n·|I_j| / |I| over servers j, I the union of all workers' indices (Definition 3.6)."""
    return _imbalance(torch.unique(torch.cat(list(index_sets))), parts, mapping)


def _imbalance(indices: Tensor, parts: int, mapping: Mapping) -> float:
    if not indices.numel():
        return 1.0
    loads = torch.bincount(mapping(indices), minlength=parts)
    return parts * loads.max().item() / indices.numel()
