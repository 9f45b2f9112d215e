"""Writing an import to the persistent tier: the state that a run begins with, as the slot of a run of one rank."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np
import xxhash

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import IMPORT_GENERATION, Pair, is_import
from resilient_run.ckpt.format.slot import CHUNK_BYTES, slot_head

from .manifest import Persisted, RankFile
from .tier import FRAME_BYTES, Tier, TierError


def write_import(
    tier: Tier, *, run_id: str, step: int, manifest: bytes, payload: Callable[[], Iterable[memoryview]]
) -> Persisted:
    """Write and publish an import; what an attempt before left of it unpublished is replaced.

    Args:
        tier: Of the run.
        run_id: The run.
        step: Completed steps of the state.
        manifest: A slot's.
        payload: Returns what it describes, in pieces of any size; it is read twice, first for checksums.

    Raises:
        DaemonError: The tier has something of this run already, which it would not begin with then.
        TierError: The storage refuses; nothing is published.
    """
    _refuse_published(tier, run_id)
    pair, payload_bytes, checksums = Pair(IMPORT_GENERATION, step), 0, list[int]()
    for chunk in _cut(payload(), CHUNK_BYTES):
        payload_bytes += len(chunk)
        checksums.append(xxhash.xxh3_64_intdigest(chunk))
    table = np.array(checksums, dtype="<u8").tobytes()
    head = slot_head(
        run_id=run_id, topology=0, rank=0, world_size=1, generation=pair[0], step=step, payload_bytes=payload_bytes,
        manifest=manifest, table=table,
    )  # fmt: skip
    file = tier.write(pair, 0)
    try:
        for frame in _cut(chain([memoryview(head)], payload()), FRAME_BYTES):
            file.write(frame)
        stored_bytes = file.finish()
    except BaseException:
        with contextlib.suppress(TierError):
            file.abandon()
        raise
    rank = RankFile(capacity_bytes=len(head) + payload_bytes, payload_offset=len(head), stored_bytes=stored_bytes)
    persisted = Persisted(run_id=run_id, pair=pair, world_size=1, ranks={0: rank})
    # Reading and writing may have taken long.
    _refuse_published(tier, run_id)
    tier.publish(persisted)
    return persisted


def _refuse_published(tier: Tier, run_id: str) -> None:
    published: list[Pair] = tier.published()
    if not published:
        return
    if is_import(published[-1]):
        raise DaemonError(
            f"run {run_id!r} has an import of step {published[-1][1]} in {tier.shown} already: delete "
            f"{tier.shown_pair(published[-1])}, or choose another --run-id"
        )
    raise DaemonError(
        f"run {run_id!r} has published step {published[-1][1]} in {tier.shown} and goes on from there: "
        "choose another --run-id"
    )


def _cut(pieces: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the bytes of `pieces` in parts of `size`, the last one shorter."""
    pending = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), size):
            pending += piece[start : start + size]
            if len(pending) >= size:
                yield memoryview(bytes(pending[:size]))
                del pending[:size]
    if pending:
        yield memoryview(bytes(pending))
