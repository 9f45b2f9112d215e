"""Writing an import to the persistent tier: the whole state that a run begins with."""

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.import_manifest import CHECKSUMS, DATA, INDEX, ImportManifest
from resilient_run.ckpt.format.pair import IMPORT_GENERATION, Pair, is_import
from resilient_run.ckpt.format.slot import CHUNK_BYTES

from .tier import Tier, TierError


def write_import(
    tier: Tier, *, run_id: str, step: int, source: str, strict: bool, index: bytes, payload: Iterator[memoryview]
) -> ImportManifest:
    """Write and publish an import; what an attempt before left of it unpublished is replaced.

    Args:
        tier: Of the run.
        run_id: The run.
        step: Completed steps of the state.
        source: Where it comes from, for people.
        strict: Whether the run must refuse it when something is absent.
        index: A slot's manifest.
        payload: What it describes, in pieces of any size.

    Raises:
        DaemonError: The tier has something of this run already, which it would not begin with then.
        TierError: The storage refuses; nothing is published.
    """
    _refuse_published(tier, run_id)
    pair, checksums = Pair(IMPORT_GENERATION, step), list[int]()

    def checksummed() -> Iterator[bytes | memoryview]:
        for chunk in _chunks(payload):
            checksums.append(xxhash.xxh3_64_intdigest(chunk))
            yield chunk

    data_bytes = _write(tier, pair, DATA, checksummed())
    table = np.array(checksums, dtype="<u8").tobytes()
    _write(tier, pair, CHECKSUMS, [table])
    _write(tier, pair, INDEX, [index])
    manifest = ImportManifest(
        run_id=run_id,
        step=step,
        source=source,
        strict=strict,
        index_bytes=len(index),
        index_checksum=xxhash.xxh3_64_intdigest(index),
        table_checksum=xxhash.xxh3_64_intdigest(table),
        data_bytes=data_bytes,
    )
    # Reading and writing may have taken long.
    _refuse_published(tier, run_id)
    tier.publish(manifest)
    return manifest


def _write(tier: Tier, pair: Pair, name: str, chunks: Iterable[bytes | memoryview]) -> int:
    file = tier.create(pair, name)
    try:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()
    except BaseException:
        with contextlib.suppress(TierError):
            file.abandon()
        raise


def _refuse_published(tier: Tier, run_id: str) -> None:
    published: list[Pair] = tier.published()
    if not published:
        return
    if is_import(published[-1]):
        raise DaemonError(
            f"run {run_id!r} has an import of step {published[-1][1]} in {tier.shown} already: delete "
            f"{tier.url(published[-1])}, or choose another --run-id"
        )
    raise DaemonError(
        f"run {run_id!r} has published step {published[-1][1]} in {tier.shown} and goes on from there: "
        "choose another --run-id"
    )


def _chunks(pieces: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of `pieces` in chunks of `CHUNK_BYTES`, the last one shorter."""
    pending = bytearray()
    for piece in pieces:
        at = min(len(piece), (CHUNK_BYTES - len(pending)) % CHUNK_BYTES) if pending else 0
        pending += piece[:at]
        if len(pending) == CHUNK_BYTES:
            yield bytes(pending)
            pending.clear()
        if pending:
            continue
        whole = at + (len(piece) - at) // CHUNK_BYTES * CHUNK_BYTES
        yield from (piece[start : start + CHUNK_BYTES] for start in range(at, whole, CHUNK_BYTES))
        pending += piece[whole:]
    if pending:
        yield bytes(pending)
