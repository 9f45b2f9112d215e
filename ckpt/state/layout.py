"""What a restarted script has to make before it restores: the tensors of modules, and the groups of optimizers.

A script that changes them in the middle trains on, and only its restart would find that nothing fits. So it is told.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

Layout = Mapping[str, object]
"""Path → shape and dtype of a tensor of a module, None while it has none; or the sizes of an optimizer's groups."""


def layout(
    states: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
) -> Layout:
    """Return the layout of a state.

    Args:
        states: What `state_dict()` returned, by the name of the object.
        modules: Those of the objects that are modules.
        optimizers: Those that an object is or holds.
    """
    found: dict[str, object] = {
        f"{name}.{key}": None if is_lazy(value) else (value.shape, value.dtype)
        for name in modules
        for key, value in states[name].items()
        if isinstance(value, torch.Tensor)
    }
    for name, several in optimizers.items():
        found[name] = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in several]
    return found


def difference(before: Layout, now: Layout) -> str | None:
    """Return what to tell of a layout that is not as it was at `restore()`, None if it is."""
    if before == now:
        return None
    new = (f"{path} is new" for path in now if path not in before)
    gone = (f"{path} is gone" for path in before if path not in now)
    other = (
        f"{path} has other {'groups' if isinstance(now[path], list) else 'shapes'}"
        for path in now
        if before.get(path) is not None and before[path] != now[path]
    )
    change = next(chain(new, gone, other), None)
    return change and (
        f"{change} since restore(): a restarted script must make that change before it calls restore(), or its "
        "recovery is refused. checkpointer.planned_step says there which step it goes on from"
    )
