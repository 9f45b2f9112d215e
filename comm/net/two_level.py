"""Several ranks on a host: dense among them, a scheme for sparse gradients between hosts."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor
from torch.nn import functional as F

from .collectives import gather_shares, reduce_scatter
from .scheme import Scheme, laid_out
from .transport import Transport

_MOST_PADDING: Final = 1 / 8


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

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums over all ranks of all hosts; between hosts they go together."""
        cuts = {key: _HostShares(gradient, self.within.size) for key, gradient in gradients if gradient.numel()}
        shares = [(key, cut.share(reduce_scatter(self.within, cut.parts()))) for key, cut in cuts.items()]
        sums = dict(zip(cuts, self.between.reduce_together(shares), strict=True))
        wholes = {key: cut.whole(gather_shares(self.within, sums[key].reshape(-1))) for key, cut in cuts.items()}
        return [wholes.get(key, gradient) for key, gradient in gradients]

    def is_all_reduced(self, key: str) -> bool:
        """Return what the scheme between hosts does."""
        return self.between.is_all_reduced(key)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheme between hosts."""
        return self.between.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the scheme between hosts a saved state."""
        self.between.load_state_dict(state)


class _HostShares:
    """How a gradient becomes a share for each rank of a host, of two dimensions and of one size.

    It is cut between rows, so that a share is as sparse by rows as the whole; between columns where there are so few
    rows that filling them up would cost more.

    Args:
        gradient: Dense or sparse.
        ranks: Of the host.
    """

    def __init__(self, gradient: Tensor, ranks: int) -> None:
        self._gradient, self._ranks = gradient, ranks
        dense = gradient.to_dense()
        self._shape = dense.shape
        self._rows = dense.reshape(dense.shape[0] if dense.dim() else 1, -1)
        rows, columns = self._rows.shape
        self._missing_rows, self._missing_columns = -rows % ranks, -columns % ranks
        padding = self._missing_rows * columns
        self._by_columns = _MOST_PADDING * dense.numel() < padding > rows * self._missing_columns

    def parts(self) -> Tensor:
        """Return the shares of all ranks one after the other, in one dimension."""
        if self._by_columns:
            padded = F.pad(self._rows, (0, self._missing_columns))
            return padded.view(len(padded), self._ranks, -1).transpose(0, 1).reshape(-1)
        padded = F.pad(self._rows, (0, 0, 0, self._missing_rows)) if self._missing_rows else self._rows
        return padded.reshape(-1)

    def share(self, flat: Tensor) -> Tensor:
        """Return a share in its two dimensions."""
        return flat.view(len(self._rows), -1) if self._by_columns else flat.view(-1, self._rows.shape[1])

    def whole(self, parts: Tensor) -> Tensor:
        """Return what `parts` came from, as the gradient was."""
        rows, columns = self._rows.shape
        if self._by_columns:
            parts = parts.view(self._ranks, rows, -1).transpose(0, 1).reshape(rows, -1)[:, :columns]
        return laid_out(parts.reshape(-1)[: self._rows.numel()].view(self._shape), self._gradient)
