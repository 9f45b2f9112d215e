"""Several ranks on a host: dense among them, a scheme for sparse gradients between hosts."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .collectives import gather_shares, reduce_scatter
from .scheme import Scheme
from .transport import Transport


class TwoLevel(Scheme):
    """Sums within the host by reduce-scatter, each rank's share between hosts by `between`, and gathers the shares.

    As the thesis does where machines have NVLink (section 3.4.1). A sparse gradient is dense on the way.

    Args:
        within: The ranks of this host, in the same order on every host.
        between: A scheme over the ranks that have this rank's place on other hosts.
    """

    def __init__(self, within: Transport, between: Scheme) -> None:
        super().__init__(between.transport)
        self.within = within
        self.between = between
        between.beside = within

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the scheme between hosts."""
        return self.between.name

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks of all hosts."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        # Cut between rows, so that a share is as sparse by rows as the whole.
        rows = dense.reshape(dense.shape[0] if dense.dim() else 1, -1)
        missing = -rows.shape[0] % self.within.size
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        share = reduce_scatter(self.within, padded.reshape(-1))
        share = self.between.reduce(key, share.view(-1, rows.shape[1]))
        whole = gather_shares(self.within, share.reshape(-1))[: dense.numel()].view(dense.shape)
        return whole.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else whole

    def fuses(self, key: str) -> bool:
        """Return what the scheme between hosts does."""
        return self.between.fuses(key)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheme between hosts."""
        return self.between.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the scheme between hosts a saved state."""
        self.between.load_state_dict(state)
