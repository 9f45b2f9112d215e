"""What all schemes that send a part of the gradient share: density, residuals, and steps that must not be kept."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CommError
from ..net.scheme import Scheme
from ..net.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Synchronized:
    """What the ranks have agreed on in one step, besides the sum.

    Attributes:
        values: The elements of the sum that are not zero, or more of them.
        residual: Flat: what this rank adds to its next gradient.
        memory: What else the scheme keeps for this parameter, as plain data; None if nothing.
    """

    values: Tensor
    residual: Tensor
    memory: Any = None


class SparseScheme(Scheme):
    """Sums the greatest elements of each gradient and keeps the others, by parameter, for the next step.

    Residuals and sums are float32 (float64 for float64 gradients), messages have the gradient's dtype. If the sum has
    an inf or a NaN, all ranks return it, and none changes what it remembers: the step, which an optimizer must not
    take either, leaves no trace. Each block that is sent includes an inf or a NaN if it has one, so none is missed.

    Args:
        transport: The ranks.
        density: Share of the elements that is sent, k / numel.

    Raises:
        CommError: The density is not in (0, 1].
    """

    def __init__(self, transport: Transport, *, density: float = 0.01) -> None:
        super().__init__(transport)
        if not 0 < density <= 1:
            raise CommError(f"density {density} is not in (0, 1]; 0.01 sends one element of 100")
        self.density = density
        self._residuals: dict[str, Tensor] = {}
        self._memories: dict[str, Any] = {}

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum of what was selected, equal on all ranks; the rest stays for the next step.

        A contiguous gradient is overwritten with it.
        """
        if gradient.is_sparse:
            return self.reduce(key, gradient.to_dense()).to_sparse(gradient.sparse_dim())
        if gradient.numel() == 0:
            return gradient
        exact = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        flat = gradient.detach().reshape(-1).contiguous()
        residual = self._residuals.get(key)
        if residual is None:
            accumulated = flat.to(exact, copy=True)
        elif residual.numel() == gradient.numel() and residual.dtype == exact:
            accumulated = flat + residual
        else:
            raise CommError(
                f"{self.name}: {key} has {gradient.numel()} elements of {exact}, its residual {residual.numel()} of "
                f"{residual.dtype}; load the state of the same model"
            )
        done = self._synchronize(key, accumulated, flat)
        if bool(done.values.isfinite().all()):
            self._residuals[key] = done.residual
            if done.memory is not None:
                self._memories[key] = done.memory
        return gradient if gradient.is_contiguous() else flat.view(gradient.shape)

    @abstractmethod
    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Synchronized:
        """Sum over all ranks.

        Args:
            key: Of the gradient.
            accumulated: Gradient and residual, flat; may be overwritten.
            total: Contiguous and flat, to have the sum, which is equal on all ranks; until then it may have anything.
                Values travel in its dtype.
        """

    def residual(self, key: str) -> Tensor | None:
        """Return what this rank adds to the next gradient of a parameter, flat; None before its first step."""
        return self._residuals.get(key)

    def state_dict(self) -> dict[str, Any]:
        """Return residuals and adaptive values by parameter."""
        return {"scheme": self.name, "residuals": dict(self._residuals), "memories": dict(self._memories)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is not of this scheme.
        """
        self.check_own(state)
        device = self.transport.device
        self._residuals = {key: residual.to(device) for key, residual in state["residuals"].items()}
        self._memories = dict(state["memories"])
