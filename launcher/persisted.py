"""Reading the persistent tier with `torch.distributed.checkpoint`, into any world size."""

from functools import partial

from resilient_run.ckpt.dcp import ItemReader
from resilient_run.daemon.tier.slots import published_slots
from resilient_run.daemon.tier.tier import Tier


class PersistedReader(ItemReader):
    """Reads a published step of a run, into any world size; a storage reader for `dcp.load`.

    It needs no daemon, only access to the target, and also works under `torchrun`. Every rank reads what it loads.
    """

    def __init__(self, target: str, run_id: str, *, step: int | None = None) -> None:
        """Read `step`, or the newest one, of the run `run_id` from the directory or fsspec URL `target`."""
        super().__init__(partial(published_slots, Tier(target, run_id, of_others=True), step))
