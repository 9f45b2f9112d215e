"""What the daemon of an owner says to that of a placement peer: "fetch this"."""

from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.format.slot import SlotHeader

from ..base.fields import Fields
from ..run.commit import Agreed
from ..run.rounds import Pair, pair_value
from ..slots.slots import Geometry

_MAX_PATIENCE_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A capture that a peer is to hold.

    Attributes:
        rank: Whose state.
        pair: Which capture.
        geometry: Of a slot that can hold it.
        agreed: What the owner's host knows to be agreed.
        patience_s: How much longer than usual each range may take, because the owner waits for idle spans.
    """

    rank: int
    pair: Pair
    geometry: Geometry
    agreed: Agreed
    patience_s: float

    @classmethod
    def of(cls, header: SlotHeader, *, agreed: Agreed, patience_s: float) -> Self:
        """Return the offer of the capture with this header."""
        return cls(
            rank=header.rank,
            pair=(header.generation, header.step),
            geometry=Geometry(capacity_bytes=header.used_bytes, payload_offset=header.payload_offset),
            agreed=agreed,
            patience_s=min(patience_s, _MAX_PATIENCE_S),
        )

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Return the offer in a peer's message.

        Raises:
            DaemonError: It is none.
        """
        return cls(
            rank=fields.integer("rank"),
            pair=fields.pair(),
            geometry=Geometry.parse(fields, "used_bytes"),
            agreed=Agreed.parse(fields),
            patience_s=fields.number("patience_s", high=_MAX_PATIENCE_S),
        )

    def to_message(self) -> dict[str, Any]:
        """Return the fields of the message."""
        return {
            "rank": self.rank,
            **pair_value(self.pair),
            "used_bytes": self.geometry.capacity_bytes,
            "payload_offset": self.geometry.payload_offset,
            **self.agreed.message(),
            "patience_s": self.patience_s,
        }
