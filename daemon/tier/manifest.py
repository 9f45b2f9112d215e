"""The manifest that publishes a pair in the persistent tier."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair

from ..base.codec import Record, limited
from ..base.fields import Fields
from ..run.rounds import MAX_WORLD_SIZE
from ..slots.slots import MAX_SLOT_BYTES, Geometry

_RANK_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile(Geometry):
    """One rank's slot in the tier: the geometry of a slot that has room for it, and its stored size."""

    stored_bytes: int = limited(high=2 * MAX_SLOT_BYTES)


def read_files(values: Fields, name: str) -> dict[int, RankFile]:
    """Return the object `name`, by rank its file; what is not the number of a rank is left out."""
    files = Fields(values.object(name), f"{values.what}, {name}")
    return {
        int(rank): RankFile.parse(files.object(rank), f"{files.what}, rank {rank}")
        for rank in files.values
        if rank.isdecimal() and len(rank) <= _RANK_DIGITS and rank == str(int(rank))
    }


def files_value(ranks: Mapping[int, RankFile]) -> dict[str, Any]:
    """Return what `read_files` reads."""
    return {str(rank): file.to_value() for rank, file in sorted(ranks.items())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Persisted(Record):
    """What the manifest of a published pair says.

    Attributes:
        run_id: The run.
        pair: Generation and step.
        world_size: Ranks of the run.
        ranks: By rank, its file.
    """

    version: int = 1
    run_id: str
    pair: Pair = limited(inline=True)
    world_size: int = limited(low=1, high=MAX_WORLD_SIZE)
    ranks: Mapping[int, RankFile] = limited(read=read_files, write=files_value)

    def dump(self) -> bytes:
        """Return the manifest file."""
        return json.dumps(self.to_value(), indent=1).encode()

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
            raise SlotError("it is not a manifest that this release reads")
        if "files" in value:
            raise SlotError("it is an import that an earlier release made: delete it, and import again")
        try:
            found = cls.parse(value, "manifest")
        except DaemonError as error:
            raise SlotError(str(error)) from error
        size = found.world_size
        if (found.run_id, found.pair) != (run_id, pair) or value["ranks"].keys() != set(map(str, range(size))):
            raise SlotError(
                f"it is of {(found.run_id, found.pair)} with {len(value['ranks'])} of {size} ranks, not of "
                f"{(run_id, pair)}"
            )
        return found
