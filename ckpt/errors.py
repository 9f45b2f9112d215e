"""Errors of the checkpoint layer. Each message names the value at fault and what to do about it."""

from collections.abc import Iterable


class CheckpointError(Exception):
    """Base of every error that `resilient_run.ckpt` raises on purpose."""


class WireError(CheckpointError):
    """A peer sent bytes that are not a message of this protocol; the connection cannot be used further."""


class SlotError(CheckpointError):
    """A slot cannot be read: torn, corrupt, or not a slot of this format version."""


class StateError(CheckpointError):
    """State that cannot be captured or restored: an unsupported type, or changed names, shapes or dtypes."""


class TopologyError(CheckpointError):
    """A checkpoint was made by another topology (world size or device mesh) than the one that asks for it."""


class MemoryBudgetError(CheckpointError):
    """The slots that a job needs do not fit in the host's memory budget."""


class SlotSizeError(MemoryBudgetError):
    """No slot of the size that a job needs can ever be made on this host."""


class RestoreError(CheckpointError):
    """The planned step exists, but no verified copy of it can be had."""


class InjectedFault(CheckpointError):
    """Somebody let this step fail on purpose, with `resilient-inject`."""


class StoppedError(CheckpointError):
    """Another worker has failed; raised in `Checkpointer.step()` so that `resilient_run.loop` can begin again."""


class DaemonError(CheckpointError):
    """The daemon refused a request for a reason that has no error class of its own."""


BY_NAME: dict[str, type[CheckpointError]] = {
    cls.__name__: cls
    for cls in (SlotError, StateError, TopologyError, MemoryBudgetError, SlotSizeError, RestoreError, DaemonError)
}
"""Errors that travel over the trainer link by name and are raised again on the other side."""


def some(found: Iterable[str], most: int = 5, *, between: str = ", ") -> str:
    """Return the first of `found`, at most so many, and how many more there are."""
    listed = list(found)
    more = len(listed) - most
    return between.join(listed[:most]) + (f" and {more} more" if more > 0 else "")
