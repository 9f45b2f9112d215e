"""The slots of all ranks of one published step, read from the persistent tier by who is no daemon."""

from functools import partial

from resilient_run.ckpt.convert.captures import Captures, only
from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.pair import is_import

from .tier import Tier


def published_slots(tier: Tier, step: int | None) -> Captures:
    """Return what the ranks captured at `step`, or at the newest one.

    Raises:
        SlotError: It is not published, or damaged.
        TierError: The storage does not answer.
    """
    published = [pair for pair in tier.published() if not is_import(pair)]
    fitting = [pair for pair in published if step is None or pair[1] == step]
    if not fitting:
        raise SlotError(
            f"{tier.shown} has {'no step' if step is None else f'not step {step}'} of this run; "
            f"published: {', '.join(str(pair[1]) for pair in published) or 'nothing'}"
        )
    manifest = tier.manifest(fitting[-1])
    ask = only(partial(tier.read_ranges, manifest.pair), f"what {tier.shown} has is damaged")
    return Captures(ask, run_id=manifest.run_id, pair=manifest.pair, world_size=manifest.world_size)
