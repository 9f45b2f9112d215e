"""What the integrations share: the framework, which nobody has to install who does not use it, and two precautions."""

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import StateError
from ..state.held import local, whole_state
from ..state.memory import digest
from ..state.shown import form_of
from ..state.tree import is_strided
from ..uncaught import install as show_refusals

REQUIREMENTS: Final = {
    "accelerate": "accelerate>=1.15",
    "deepspeed": "deepspeed>=0.19.8",
    "lightning": "lightning>=2.6",
    "megatron": "megatron-core>=0.16",
    "torchtitan": "torchtitan>=0.3",
    "transformers": "transformers>=5.23",
}
"""Package of a framework → what pip installs."""


def framework(name: str) -> ModuleType:
    """Return the module `name` of one of these frameworks.

    Raises:
        ImportError: It is not installed; the message has the command that installs it.
    """
    show_refusals()
    try:
        return import_module(name)
    except ImportError as error:
        requirement = REQUIREMENTS[name.partition(".")[0]]
        raise ImportError(
            f"{name} is needed here and cannot be imported ({error}): pip install '{requirement}'"
        ) from error


def frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained."""
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: Collection[str]) -> None:
    """Train all parameters but these."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name not in names


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without its parameters."""
    return [{name: option for name, option in group.items() if name != "params"} for group in groups]


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object or a module another attribute while the block runs."""
    original = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, original)


def warn_of_buckets(models: Iterable[Any], remedy: str) -> None:
    """Warn if DDP sums in another order after a restart, until its first backward pass has laid out the buckets anew.

    Args:
        models: What the framework trains.
        remedy: How it is told to look for unused parameters, which keeps the layout.
    """
    rebuilt = [
        model for model in models if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
    ]
    if rebuilt and dist.get_world_size() > 2:
        warnings.warn(
            "a run that is restarted may differ in the last bit: with more than two ranks DDP's first backward pass of "
            f"a process sums gradients in another order than the later ones. {remedy} avoids it",
            RuntimeWarning,
            stacklevel=3,
        )


def all_alike(names: Iterable[str], states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all ranks have in their states by these names; StateError if they have it differently."""
    return {name: alike(name, {rank: state[name] for rank, state in states.items()}) for name in names}


def alike(name: str, states: Mapping[int, Any]) -> Any:
    """Return what all ranks have.

    Raises:
        StateError: They have it differently; `name` says what it is.
    """
    first = states[min(states)]
    if any(form_of(state) != form_of(first) for state in states.values()):
        raise StateError(
            f"ranks have {name} differently, and another number of ranks would not know what to take: let all have it "
            "alike, or start as many ranks as before"
        )
    return first


class AfterRestore:
    """What a restore has brought, against hooks that a framework calls again before training goes on."""

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[Any], others: Iterable[Any]) -> None:
        """Remember it.

        Args:
            modules: Those that were restored.
            optimizers: Their groups' options are remembered.
            others: Objects with `state_dict()` and `load_state_dict()`.
        """
        self._modules = list(modules)
        self._digests = dict(self._digest())
        self._groups = [
            (group, {key: (value, copy.deepcopy(value)) for key, value in group.items() if key != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]

    def put_back(self) -> None:
        """Make it what it was again.

        Raises:
            StateError: A hook has changed a parameter or a buffer.
        """
        for group, options in self._groups:
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            for key, (value, content) in options.items():
                group[key] = value.copy_(content) if isinstance(value, torch.Tensor) else content
        for other, state in self._others:
            other.load_state_dict(state)
        for name, now in self._digest():
            if self._digests.get(name, now) != now:
                raise StateError(
                    f"{name} is not what was restored: a hook that begins the training or the epoch, which is called "
                    "again after a restart, has changed it. Do that where the epoch ends, or at the first step"
                )

    def _digest(self) -> Iterator[tuple[str, str]]:
        for module in self._modules:
            for name, tensor in whole_state(module).items():
                if isinstance(tensor, torch.Tensor) and is_strided(local(tensor)):
                    yield name, digest(local(tensor))
