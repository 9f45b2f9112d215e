"""The slots of all ranks of one published step, fetched from the persistent tier to read them."""

from pathlib import Path

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot

from .tier import Tier


def fetch_slots(tier: Tier, step: int | None, scratch: Path) -> tuple[Pair, list[Slot]]:
    """Return the pair of `step`, or the newest one, and its verified slots by rank, as files in `scratch`.

    Raises:
        SlotError: It is not published, or damaged.
        TierError: The storage does not answer.
        OSError: `scratch` cannot be written.
    """
    published = [pair for pair in tier.published() if not is_import(pair)]
    fitting = [pair for pair in published if step is None or pair[1] == step]
    if not fitting:
        raise SlotError(
            f"{tier.shown} has {'no step' if step is None else f'not step {step}'} of this run; "
            f"published: {', '.join(str(pair[1]) for pair in published) or 'nothing'}"
        )
    manifest = tier.manifest(fitting[-1])
    slots = []
    for rank in range(manifest.world_size):
        geometry = manifest.ranks[rank].geometry
        slot = Slot.create(
            scratch / f"rank{rank}", capacity_bytes=geometry.capacity_bytes, payload_offset=geometry.payload_offset
        )
        page, start = b"", 0
        for data in tier.read(manifest.pair, rank):
            end = start + len(data)
            if not start:
                page = data[:HEADER_BYTES]
            slot.buffer[max(start, HEADER_BYTES) : end] = data[max(0, HEADER_BYTES - start) :]
            start = end
        header = slot.adopt(page)
        if (header.run_id, header.rank, header.pair, header.world_size) != (
            manifest.run_id,
            rank,
            manifest.pair,
            manifest.world_size,
        ):
            raise SlotError(f"{tier.shown} has another capture in place of rank {rank}")
        slots.append(slot)
    return manifest.pair, slots
