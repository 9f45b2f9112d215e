"""Deep Gradient Compression before a scheme for sparse gradients."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..compress.compressors import SampledTopK
from ..compress.feedback import MomentumCorrection
from ..net.scheme import Scheme, laid_out
from ..net.transport import Transport
from ..schemes import named


class Dgc(Scheme):
    """Keeps the greatest elements of each gradient, with momentum correction, and lets another scheme sum them.

    What is left out is added to the next gradient (Lin et al., 2018); sums of what is sent lose nothing.

    Args:
        transport: The ranks.
        scheme: Name of the scheme that sums.
        density: Share of the elements that is sent.
        momentum: Of the correction, in place of the optimizer's own; 0 is plain error feedback. Gradients that do not
            come here, as small ones in a `GradientHook`, still need the optimizer's.
        masking: Whether elements that are sent lose their momentum, as published.
        clip_norm: Of one parameter's gradient; None does not clip.
        warm_up_steps: Over which the density falls to its final value.
        options: Of `scheme`.

    Raises:
        CommError: An argument is out of its range.
    """

    name = "dgc"

    def __init__(
        self,
        transport: Transport,
        *,
        scheme: str = "zen",
        density: float = 0.05,
        momentum: float = 0.0,
        masking: bool = False,
        clip_norm: float | None = None,
        warm_up_steps: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(transport)
        self.between = named(scheme, transport, **options)
        self.memory = MomentumCorrection(
            SampledTopK(density),
            ranks=transport.size,
            momentum=momentum,
            masking=masking,
            clip_norm=clip_norm,
            warm_up_steps=warm_up_steps,
        )

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums over all ranks of what each has selected; they go together through the scheme that sums."""
        sums = self.between.reduce_together([(key, self._chosen(key, gradient)) for key, gradient in gradients])
        totals = []
        for (key, each), total in zip(gradients, sums, strict=True):
            self.memory.undo_unless_finite([key], total)
            totals.append(laid_out(total, each))
        return totals

    def _chosen(self, key: str, gradient: Tensor) -> Tensor:
        """Return the gradient with zeros for what stays."""
        flat = gradient.to_dense().reshape(-1)
        message, seed = self.memory.compress(key, flat)
        return self.memory.compressor.decompress(message, flat.numel(), flat.dtype, seed=seed).view(gradient.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return residuals, momentum, and the state of the scheme that sums."""
        return {"scheme": self.name, "memory": self.memory.state_dict(), "between": self.between.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is of another scheme.
        """
        self.check_own(state)
        self.memory.load_state_dict(state["memory"])
        self.between.load_state_dict(state["between"])
