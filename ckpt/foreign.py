"""Libraries that keep training state where no `state_dict()` shows it: one that no registered object covers is refused.

An adapter of ours says by `covers()` of which objects it keeps all.
"""

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


_MEGATRON: Final = (
    "Register it: Checkpointer(megatron=MegatronState(model, optimizer, scheduler)), from "
    "resilient_run.integrations.megatron"
)
_KINDS: Final = (
    _ForeignClass(
        module="deepspeed.runtime.engine",
        name="DeepSpeedEngine",
        reason="keeps fp32 weights, optimizer states, loss scale and counters in partitions and attributes of its own",
        remedy="Register it: Checkpointer(engine=EngineState(engine)), after deepspeed.initialize(), from "
        "resilient_run.integrations.deepspeed",
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


def foreign(objects: Iterable[Any] = ()) -> str | None:
    """Return why this process cannot have checkpoints, None if it can.

    All objects of the process are looked at, because what is registered need not show who trains it: ZeRO leaves a
    plain module in the script's hands. Where none of the libraries is imported, nothing is looked at.

    Args:
        objects: The registered ones.
    """
    kinds = [(base, kind) for kind in _KINDS if (base := getattr(sys.modules.get(kind.module), kind.name, None))]
    if not kinds:
        return None
    covered = {id(each) for item in objects if hasattr(type(item), "covers") for each in item.covers()}
    classes = {id(type(item)): type(item) for item in gc.get_objects() if id(item) not in covered}
    # The first kind that there is, whatever order the objects have: an optimizer tells more than a tracker.
    for base, kind in kinds:
        for found in classes.values():
            if any(each is base for each in found.__mro__):
                return (
                    f"{found.__module__}.{found.__qualname__} {kind.reason}, and a checkpoint would not have all of "
                    f"it. {kind.remedy}"
                )
    return None
