"""The manifest that publishes a pair in the persistent tier."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair, pair_value

from ..base.fields import Fields
from ..run.rounds import MAX_WORLD_SIZE
from ..slots.slots import MAX_SLOT_BYTES, Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """One rank's slot in the tier: the geometry that it has once it is read, and its stored size."""

    used_bytes: int
    payload_offset: int
    stored_bytes: int

    @property
    def geometry(self) -> Geometry:
        """Size of a slot that has room for it, and where the payload begins."""
        return Geometry(capacity_bytes=self.used_bytes, payload_offset=self.payload_offset)

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Return what an answer or a manifest says of one rank.

        Raises:
            DaemonError: No slot can have this size.
        """
        geometry = Geometry.parse(fields, "used_bytes")
        return cls(
            used_bytes=geometry.capacity_bytes,
            payload_offset=geometry.payload_offset,
            stored_bytes=fields.integer("stored_bytes", high=2 * MAX_SLOT_BYTES),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Persisted:
    """What the manifest of a published pair says.

    Attributes:
        run_id: The run.
        pair: Generation and step.
        world_size: Ranks of the run.
        ranks: By rank, its file.
    """

    run_id: str
    pair: Pair
    world_size: int
    ranks: Mapping[int, RankFile]

    def dump(self) -> bytes:
        """Return the manifest file."""
        files = {str(rank): asdict(file) for rank, file in sorted(self.ranks.items())}
        value = {"version": 1, "run_id": self.run_id, **pair_value(self.pair)}
        return json.dumps({**value, "world_size": self.world_size, "ranks": files}, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, *, run_id: str, pair: Pair) -> Self:
        """Return the manifest in `data`, which must be of `pair` of `run_id`.

        Raises:
            SlotError: It is none of this version, or of something else, or ranks are missing.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise SlotError(f"it is not JSON: {error}") from error
        if not isinstance(value, dict) or value.get("version") != 1:
            raise SlotError("it is no manifest that this release reads")
        if "files" in value:
            raise SlotError("it is an import that an earlier release made: delete it, and import again")
        try:
            fields = Fields(value, "manifest")
            world_size, files = fields.integer("world_size", low=1, high=MAX_WORLD_SIZE), fields.object("ranks")
            found = (fields.text("run_id"), fields.pair())
            if found != (run_id, pair) or files.keys() != {str(rank) for rank in range(world_size)}:
                raise SlotError(f"it is of {found} with {len(files)} of {world_size} ranks, not of {(run_id, pair)}")
            per_rank = Fields(files, "manifest, ranks")
            ranks = {rank: RankFile.parse(Fields(per_rank.object(str(rank)), "rank")) for rank in range(world_size)}
        except DaemonError as error:
            raise SlotError(str(error)) from error
        return cls(run_id=run_id, pair=pair, world_size=world_size, ranks=ranks)
