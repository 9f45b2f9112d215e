"""The manifest of an import: a whole state, not one rank's, that a run begins with, kept in the persistent tier.

Beside it lie `INDEX`, a slot's manifest without shards (`manifest.py`), `DATA`, the payload that it describes, and
`CHECKSUMS`, one little-endian XXH3-64 for each `CHUNK_BYTES` of it. So a reader verifies whatever part it needs.
"""

import json
from dataclasses import dataclass
from typing import Any, Final, Self

from ..errors import SlotError
from .pair import IMPORT_GENERATION, Pair
from .slot import chunk_count

MANIFEST: Final = "manifest.json"
INDEX: Final = "index.json"
DATA: Final = "data.bin"
CHECKSUMS: Final = "checksums.bin"

MAX_MANIFEST_BYTES: Final = 1 << 16
_MAX_INDEX_BYTES: Final = 1 << 30
_MAX_TEXT: Final = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportManifest:
    """What publishes an import.

    Attributes:
        run_id: The run.
        step: Completed steps of the state.
        source: Where it was imported from, for people.
        strict: Whether a run that registers something that is not there must refuse it.
        index_bytes: Size of `INDEX`.
        index_checksum: XXH3-64 of it.
        table_checksum: XXH3-64 of `CHECKSUMS`.
        data_bytes: Size of `DATA`.
    """

    run_id: str
    step: int
    source: str
    strict: bool
    index_bytes: int
    index_checksum: int
    table_checksum: int
    data_bytes: int

    @property
    def pair(self) -> Pair:
        """Generation and step under which the run knows it."""
        return Pair(IMPORT_GENERATION, self.step)

    @property
    def table_bytes(self) -> int:
        """Size of `CHECKSUMS`."""
        return 8 * chunk_count(self.data_bytes)

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of each file beside the manifest."""
        return {INDEX: self.index_bytes, CHECKSUMS: self.table_bytes, DATA: self.data_bytes}

    def dump(self) -> bytes:
        """Return the manifest file."""
        about = {"version": 1, "run_id": self.run_id, "generation": IMPORT_GENERATION, "step": self.step}
        files: dict[str, dict[str, Any]] = {name: {"bytes": size} for name, size in self.file_bytes.items()}
        files[INDEX]["xxh3_64"] = f"{self.index_checksum:016x}"
        files[CHECKSUMS]["xxh3_64"] = f"{self.table_checksum:016x}"
        origin = {"imported_from": self.source, "strict": self.strict}
        return json.dumps({**about, **origin, "files": files}, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, *, run_id: str, step: int) -> Self:
        """Return the manifest in `data`, which must be of `step` of `run_id`.

        Raises:
            SlotError: It is none of this version, or of something else.
        """
        try:
            value = json.loads(data)
            about = (value["version"], value["run_id"], value["generation"], value["step"])
            files, source, strict = value["files"], value["imported_from"], value["strict"]
            manifest = cls(
                run_id=run_id,
                step=step,
                source=source,
                strict=strict,
                index_bytes=_integer(files[INDEX]["bytes"], _MAX_INDEX_BYTES),
                index_checksum=int(files[INDEX]["xxh3_64"], 16),
                table_checksum=int(files[CHECKSUMS]["xxh3_64"], 16),
                data_bytes=_integer(files[DATA]["bytes"], 2**62),
            )
            sizes = {name: file["bytes"] for name, file in files.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SlotError(f"it is no manifest of an import that this release reads: {error!r}") from error
        if about != (1, run_id, IMPORT_GENERATION, step) or sizes != manifest.file_bytes:
            raise SlotError(f"it is of {about} with {sizes}, not of step {step} of {run_id!r}")
        if not isinstance(strict, bool) or not isinstance(source, str) or len(source) > _MAX_TEXT:
            raise SlotError("it does not say where it was imported from, or how")
        return manifest


def _integer(value: Any, high: int) -> int:
    if type(value) is not int or not 0 <= value <= high:
        raise ValueError(f"{value!r} is not a size")
    return value
