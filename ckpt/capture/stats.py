"""What captures cost the training, for whoever looks at `Checkpointer.stats`."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class CaptureStats:
    """What captures cost so far.

    Attributes:
        stall_s: Seconds that the training thread spent in `step()` and, for GPUs, waiting before optimizer steps.
        waited_s: Those of them in which it waited for replicas, as the scheme `blocking` does.
        capture_s: Seconds that the capture thread spent completing captures.
        captures: Complete captures.
        skipped: Steps that were not captured, the discarded ones included.
        discarded: Captures that were given up because a tensor on a GPU changed while it was being copied.
        bytes: Payload bytes of all complete captures.
    """

    stall_s: float = 0.0
    waited_s: float = 0.0
    capture_s: float = 0.0
    captures: int = 0
    skipped: int = 0
    discarded: int = 0
    bytes: int = 0
