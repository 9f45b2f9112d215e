"""Libraries that keep training state where only an object made for them shows it: without one, such a process is refused."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForeignClass:
    """A class whose instances hold such state.

    Attributes:
        module: Where the class is defined. It is looked up and never imported.
        name: Of the class; subclasses count.
        reason: What is wrong with it, after the name of the instance's class.
        remedy: What a person may do.
    """

    module: str
    name: str
    reason: str
    remedy: str


_RESTARTS: Final = "resilient-run restarts the workers as torchrun does"
_MEGATRON: Final = (
    f"Leave the Checkpointer out and keep Megatron's own checkpoints: {_RESTARTS}. Or train with fully_shard (FSDP2) "
    "and one of torch's optimizers"
)
_KINDS: Final = (
    _ForeignClass(
        module="deepspeed.runtime.engine",
        name="DeepSpeedEngine",
        reason="keeps fp32 weights, optimizer states, loss scale and counters in partitions and attributes of its own",
        remedy="After deepspeed.initialize(), register it: Checkpointer(engine=EngineState(engine)), where EngineState is "
        "from resilient_run.integrations.deepspeed",
    ),
    _ForeignClass(
        module="megatron.core.optimizer.optimizer",
        name="MegatronOptimizer",
        reason="keeps fp32 weights, optimizer states and random states where no state_dict() has all of them",
        remedy=_MEGATRON,
    ),
    _ForeignClass(
        module="megatron.core.tensor_parallel.random",
        name="CudaRNGStatesTracker",
        reason="keeps random states of its own",
        remedy=_MEGATRON,
    ),
)


def foreign(registered: Iterable[Any] = ()) -> str | None:
    """Return why this process cannot have checkpoints, None if it can.

    All objects of the process are looked at, because what is registered need not show who trains it: ZeRO leaves a
    plain module in the script's hands. Where none of the libraries is imported, nothing is looked at.

    Args:
        registered: Objects; what the `covers()` of one returns is shown by it.
    """
    kinds = {id(found): kind for kind in _KINDS if (found := getattr(sys.modules.get(kind.module), kind.name, None))}
    covered = {id(each) for item in registered if hasattr(type(item), "covers") for each in item.covers()}
    known: dict[type, _ForeignClass | None] = {}
    for item in gc.get_objects() if kinds else ():
        found = type(item)
        if found not in known:
            known[found] = next((kinds[id(base)] for base in found.__mro__ if id(base) in kinds), None)
        if (kind := known[found]) and id(item) not in covered:
            return (
                f"{found.__module__}.{found.__qualname__} {kind.reason}, and a checkpoint would not have all of "
                f"it. {kind.remedy}"
            )
    return None
