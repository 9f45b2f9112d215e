"""torchtitan: an override of its config that keeps every step in memory, beside the files of its checkpoint manager."""

from functools import partial
from itertools import chain
from typing import Any, Final

import torch

from ..checkpointer import Checkpointer
from ..state.held import local
from .common import framework

_override: Final = framework("torchtitan.config.override")
_managers: Final = framework("torchtitan.components.checkpointer")
_Loader: Final = framework("torchtitan.components.dataloader").ParallelAwareDataloader


class MemoryManager:
    """A checkpoint manager of torchtitan that has another one write the files, and keeps every step in memory."""

    def __init__(self, build: Any, *, dataloader: Any, states: dict[str, Any], **parts: Any) -> None:
        self._trainer = states["train_state"]
        if isinstance(dataloader, torch.utils.data.DataLoader):
            dataloader.generator = torch.Generator()  # a new iterator of it then draws nothing from torch's
        self._memory = Checkpointer(
            model=_Parts(parts["model_parts"]),
            optimizer=parts["optimizers"],
            scheduler=parts["lr_schedulers"],
            loader=_Position(dataloader) if isinstance(dataloader, _Loader) else dataloader,
            **states,
        )
        self._files = build(dataloader=dataloader, states=states, **parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def load(self, step: int = -1) -> bool:
        """Go on where the run was, else load files as configured."""
        if not (completed := self._memory.restore()):
            return bool(self._files.load(step))
        trainer = self._trainer
        # It comes after the step: the step was kept, and whether the validation was completed is not known.
        if trainer.config.validator.enable and trainer.validator.should_validate(completed):
            trainer.validator.validate(trainer.model_parts, completed)
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Write files if they are due, then keep the step: a run that is killed in between writes them again."""
        saved = bool(self._files.save(curr_step, last_step))
        self._memory.step(curr_step)
        return saved

    def close(self) -> None:
        """Close both."""
        self._files.close()
        self._memory.close()


class _Parts:
    """Parameters and buffers of the parts of a model as they are: `state_dict()` of some gathers fused weights."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": tensor
            for number, part in enumerate(self._parts)
            for name, tensor in chain(part.named_parameters(), part.named_buffers())
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            local(tensor).copy_(local(state[name]))


class _Position:
    """The place in a loader, not pickled: torchtitan's own loaders pickle it."""

    def __init__(self, loader: Any) -> None:
        self._of: Any = super(_Loader, loader)

    def state_dict(self) -> dict[str, Any]:
        return self._of.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._of.load_state_dict(state)


def every_step(config: Any) -> Any:
    """Return the config of a checkpoint manager of torchtitan, for one that keeps every step in memory too.

    Name it in `--override.imports`, or call it where the config is made.
    """
    build = partial(_build, type(config)._owner)
    members = {"__slots__": (), "_owner": staticmethod(build)}
    return _override.derive(config, type("MemoryConfig", (type(config),), members))


def _build(owner: Any, *, config: Any, **parts: Any) -> MemoryManager:
    return MemoryManager(partial(owner, config=config), **parts)


every_step.__module__ = "resilient_run.integrations.torchtitan"  # torchtitan finds an override by that and its name
_override.override(target=_managers.BaseCheckpointManager.Config, fqns=["checkpoint"])(every_step)
