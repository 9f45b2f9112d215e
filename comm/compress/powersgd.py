"""PowerSGD: gradients as products of two narrow matrices (Vogels et al., 2019)."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CommError
from ..net.entries import all_finite, check_residual
from ..net.scheme import Scheme, laid_out, split_as
from ..net.transport import Transport

_LEAST_GAIN = 2
"""A matrix has at least so many times the elements of its factors, else it is all-reduced, as by torch's hook."""


class PowerSGD(Scheme):
    """Sums the best guess of low rank at each gradient, and adds what that leaves out to the next one.

    Algorithms 1 and 2: M, a gradient as a matrix of its rows, plus the residual, is P Qᵀ, where P = M Q of the last
    step's Q, summed and made orthonormal, and Q = Mᵀ P, summed. Gradients that are given together, as those of a bucket
    are, share these two all-reduces. Vectors, and matrices that are hardly larger than their factors, are all-reduced
    in the first one. All ranks decode by the same products, so they are equal bit for bit where ranks compute alike: on
    processors of one kind, with one number of threads.

    Residuals and factors are float32 (float64 for float64 gradients). If the sum of a gradient has an inf or a NaN, all
    ranks return it, and none changes what it remembers of it.

    Args:
        transport: The ranks.
        rank: Columns of the factors.

    Raises:
        CommError: The rank is below 1.
    """

    name = "powersgd"

    def __init__(self, transport: Transport, *, rank: int = 4) -> None:
        super().__init__(transport)
        if rank < 1:
            raise CommError(f"rank {rank} is below 1; 4 sends 4 columns for each factor of a matrix")
        self._rank = rank
        self._residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums of what was sent, equal on all ranks, in two all-reduces for all of them."""
        dense = {key: each.to_dense() for key, each in gradients}
        low = {key: self._corrected(key, each) for key, each in dense.items() if self._is_low(each.shape)}
        before = {key: self._factor(key, matrix) for key, matrix in low.items()}

        left = {key: matrix @ before[key] for key, matrix in low.items()}
        whole = {key: each.to(_exact(each.dtype)) for key, each in dense.items() if key not in low}
        summed = self._summed({**left, **whole})
        left = {key: torch.linalg.qr(summed[key]).Q for key in low}
        right = self._summed({key: matrix.T @ left[key] for key, matrix in low.items()})

        totals = []
        for key, gradient in gradients:
            like = dense[key]
            if key not in low:
                total = summed[key].to(like.dtype)
            else:
                total = (left[key] @ right[key].T).to(like.dtype)
                finite = all_finite(total)
                residual = low[key] - total.to(low[key].dtype) / self.transport.size
                self._residuals[key] = torch.where(finite, residual, self._residual(key, low[key]))
                # A column of zeros would find nothing in the next step either.
                self._factors[key] = torch.where(finite & right[key].any(0), right[key], before[key])
            totals.append(laid_out(total.view(like.shape), gradient))
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and factors by parameter."""
        return {"scheme": self.name, "residuals": dict(self._residuals), "factors": dict(self._factors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is not of this scheme.
        """
        self.check_own(state)
        device = self.transport.device
        self._residuals = {key: residual.to(device) for key, residual in state["residuals"].items()}
        self._factors = {key: factor.to(device) for key, factor in state["factors"].items()}

    def _is_low(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        columns = shape.numel() // shape[0]
        return _LEAST_GAIN * self._rank * (shape[0] + columns) <= shape.numel()

    def _corrected(self, key: str, gradient: Tensor) -> Tensor:
        matrix = gradient.reshape(gradient.shape[0], -1).to(_exact(gradient.dtype))
        return matrix + self._residual(key, matrix)

    def _residual(self, key: str, matrix: Tensor) -> Tensor:
        residual = self._residuals.get(key)
        return torch.zeros_like(matrix) if residual is None else check_residual(key, residual, matrix)

    def _factor(self, key: str, matrix: Tensor) -> Tensor:
        """Return the last step's Q; at first numbers that are the same on all ranks and after a restart."""
        factor = self._factors.get(key)
        if factor is None:
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            drawn = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=matrix.dtype)
            return drawn.to(matrix.device)
        if factor.shape != (matrix.shape[1], self._rank):
            raise CommError(
                f"{self.name}: {key} has factors of rank {factor.shape[1]}; give the rank that its state was saved with"
            )
        return factor

    def _summed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not tensors:
            return {}
        # Of one type: of float64 if any is.
        together = torch.cat([each.reshape(-1) for each in tensors.values()])
        self.transport.all_reduce(together)
        parts = split_as(together, (each.shape for each in tensors.values()))
        return {key: part.to(each.dtype) for (key, each), part in zip(tensors.items(), parts, strict=True)}


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
