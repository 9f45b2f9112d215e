"""Reading the persistent tier with `torch.distributed.checkpoint`, into any world size."""

import tempfile
from pathlib import Path
from typing import Any

from resilient_run.ckpt.convert.export import merge_slots
from resilient_run.ckpt.dcp import ItemReader
from resilient_run.daemon.tier.slots import fetch_slots
from resilient_run.daemon.tier.tier import Tier


class PersistedReader(ItemReader):
    """Reads a published step of a run; needs no daemon, only access to the target.

    Every rank fetches the whole step to a temporary directory, from where only what it loads is read. With many ranks
    `resilientctl export` once, and load that.
    """

    def __init__(self, target: str, run_id: str, *, step: int | None = None) -> None:
        """Read `step`, or the newest one, of the run `run_id` from the directory or fsspec URL `target`."""
        super().__init__(self._fetch)
        self._tier = Tier(target, run_id, of_others=True)
        self._step = step

    def _fetch(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="resilient-load-") as scratch:
            # The files stay mapped, and take their space, until the last tensor of them is gone.
            _, slots = fetch_slots(self._tier, self._step, Path(scratch))
            return merge_slots(slots)
