"""What all schemes that send a part of the gradient share: density, residuals, and steps that must not be kept."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..net.entries import all_finite, check_density, check_residual
from ..net.rounds import Rounds, RoundScheme
from ..net.scheme import laid_out
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


class SparseScheme(RoundScheme):
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
        self.density = check_density(density)
        self._residuals: dict[str, Tensor] = {}
        self._memories: dict[str, Any] = {}

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Return the sum of what was selected, equal on all ranks; the rest stays for the next step.

        A contiguous gradient is overwritten with it.
        """
        if not gradient.numel():
            return gradient
        dense = gradient.to_dense()
        flat = dense.detach().reshape(-1).contiguous()
        done = yield from self._synchronize(key, self._accumulated(key, flat), flat)
        if all_finite(done.values):
            self._residuals[key] = done.residual
            if done.memory is not None:
                self._memories[key] = done.memory
        return laid_out(dense if dense.is_contiguous() else flat.view(gradient.shape), gradient)

    def _accumulated(self, key: str, flat: Tensor) -> Tensor:
        """Return gradient and residual together, in memory of its own."""
        exact = torch.promote_types(flat.dtype, torch.float32)
        residual = self._residuals.get(key)
        if residual is None:
            return flat.to(exact, copy=True)
        wide = flat.to(exact)
        return wide + check_residual(key, residual, wide)

    @abstractmethod
    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        """Sum over all ranks.

        Args:
            key: Of the gradient.
            accumulated: Gradient and residual, flat; may be overwritten.
            total: Contiguous and flat, to have the sum, which is equal on all ranks; until then it may have anything.
                Values travel in its dtype.
        """

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
