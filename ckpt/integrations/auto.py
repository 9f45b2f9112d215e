"""`resilient-run --rr-auto`: protects trainers of frameworks in scripts that do not ask for it, where that is safe.

Safe means: where something is refused before the first step, the script trains without us. What a restart restores is
compared with the training that begins there. Once the training has returned nothing is restored any more, because
nobody can tell what the script has made of it.
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol

import torch

from .. import checkpointer as checkpointers
from ..checkpointer import Checkpointer
from ..errors import DaemonError, InjectedFault, StateError
from ..format.manifest import parse
from ..format.pair import Pair, is_import
from ..format.slot import Slot
from ..state.tree import entries, plain
from .position import excuses
from .remembered import Remembered

_WATCHED: Final = {
    "transformers.trainer": ("train", ".auto_transformers"),
    "lightning.pytorch.trainer.trainer": ("fit", ".auto_lightning"),
    "pytorch_lightning.trainer.trainer": ("fit", None),
}
_END_S: Final = 30.0


class Hook(Protocol):
    """What is used of `launcher.workers.import_hook.ImportHook`."""

    restores: bool
    is_taken: bool

    def training(self) -> AbstractContextManager[None]:
        """While the block runs, optimizers step for a trainer."""

    def is_here(self) -> bool:
        """Tell whether this is the worker, and no fork of it."""

    def say(self, text: str) -> None:
        """Log a line, once."""

    def protects_nothing(self, reason: str) -> None:
        """Report why not."""

    def leaves_alone(self) -> None:
        """Report that the script protects itself."""


def watch(module: ModuleType, hook: Hook) -> None:
    """Let the Trainer of a framework's module, which was just imported, be protected whenever it begins to train."""
    method, integration = _WATCHED[module.__name__]
    original = getattr(module.Trainer, method)

    @functools.wraps(original)
    def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with hook.training():
            if not hook.is_here():
                return original(trainer, *args, **kwargs)
            with _protected(trainer, args, kwargs):
                return original(trainer, *args, **kwargs)

    def _protected(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        framework = module.__name__.partition(".")[0]
        try:
            if integration is not None:
                protected: AbstractContextManager[None]
                protected = import_module(integration, __package__).protected(trainer, hook, args, kwargs)
                return protected
            hook.protects_nothing(f"{framework} is not supported: import lightning.pytorch in its place")
        except Exception as error:  # noqa: BLE001 - of another version, for example
            hook.protects_nothing(f"{framework}.Trainer: {short(error)}")
        return nullcontext()

    setattr(module.Trainer, method, watched)


def may_begin(hook: Hook, *, protects_itself: bool) -> bool:
    """Tell whether a training that begins now may be protected, and say why not."""
    if protects_itself or os.getpid() in checkpointers._open:
        hook.leaves_alone()
    elif hook.is_taken:
        hook.say("--rr-auto protects only the first training of a script: a run has one sequence of steps")
    else:
        return True
    return False


class Over(Exception):
    """What is to be restored is the end of a training that has returned."""


class UnaskedCheckpointer(Checkpointer):
    """A Checkpointer that ends no training which would go on without it.

    What goes wrong before a restore is raised; what goes wrong in a step is said, and nothing more is kept.
    """

    def __init__(
        self,
        hook: Hook,
        what: str,
        training: Mapping[str, Any],
        remembered: Remembered,
        **objects: Any,
    ) -> None:
        """Attach, as a `Checkpointer` does.

        Args:
            hook: Says what there is to say.
            what: The trainer, as people know it.
            training: What this training is told by from others, plain and the same in each start of the script.
            remembered: What belongs to it and is in no checkpoint.
            objects: As for a `Checkpointer`.

        Raises:
            Over: There is something to restore, and nothing left to train.
            DaemonError: There is no daemon; and all that a `Checkpointer` raises.
        """
        self._hook = hook
        self._what = what
        self._remembered = remembered
        self._has_left = False
        self._late: str | Exception | None = None
        self._is_called_back = False
        described = {name: repr(value) for name, value in training.items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            super().__init__(auto={"training": described, "over": ""}, **objects)
        if self._link is None:
            raise DaemonError(str(caught[-1].message) if caught else "there is no daemon")
        if caught:
            super().close()
            raise StateError(str(caught[0].message))
        hook.is_taken = True
        excuses.hear = lambda error: self._doubt(str(error))

    def begin(self) -> None:
        """Report that this training is protected from now on."""
        self._hook.say(f"--rr-auto protects {self._what}: every step, with its place in the data and its random states")

    def step(self, n: int | None = None, *, healthy: bool | torch.Tensor = True) -> None:
        """Keep a step if that can be done."""
        if self._has_left:
            return
        try:
            if isinstance(self._late, str):
                self._doubt(self._late)
            elif self._late is not None:
                raise self._late
            # What counts steps is seen at the first one, before anything is kept; what changes later, later.
            if changed := self._remembered.changed():
                self._doubt(changed)
            if not self._has_left:
                super().step(n, healthy=healthy)
        except InjectedFault:
            raise
        except Exception as error:  # noqa: BLE001 - the script has not asked for any of this
            self.leave(error)

    def end(self) -> None:
        """Let no restart restore this training: it returns now, and what the script then does is its own business.

        Every rank waits here for the commit that says so.
        """
        if self._step and not self._has_left:
            if not self.values["auto"]["over"]:
                self.values["auto"]["over"] = "end"
            last, until_s = self._step, time.monotonic() + _END_S
            while (self.watermark is None or self.watermark[1] <= last) and not self._has_left:
                if time.monotonic() > until_s:
                    self._hook.say("--rr-auto: the end of the training is not committed; a restart may go on before it")
                    break
                # Ranks that wait for the same commit make the step that is named next.
                assert self._capturer is not None
                if (named := self._capturer.named) > self._step:
                    self.step(named)
                else:
                    time.sleep(0.002)
        self.close()

    def leave(self, reason: object) -> None:
        """Keep nothing more, and say why."""
        if not self._has_left:
            self._has_left = True
            self._hook.say(f"--rr-auto does not protect {self._what} any more: {short(reason)}")
        self.close()

    def _doubt(self, reason: str) -> None:
        """Something was seen that no restore would bring back: what is committed from now on is not restored."""
        if self._has_left:
            return
        if self._step == 0:
            self.leave(reason)
        elif not self.values["auto"]["over"]:
            self.values["auto"]["over"] = reason
            self._hook.say(f"--rr-auto does not protect {self._what} any more: {short(reason)}")

    def _warn(self, text: str | None) -> None:
        if text is not None and self._is_called_back:
            self._late = text
        elif text is not None:
            self._doubt(text)

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        # An optimizer must not lose a hook while it calls it, so `step` closes.
        self._is_called_back = True
        try:
            return super()._before_optimizer_step(optimizer, args, kwargs)
        except Exception as error:  # noqa: BLE001 - as in `step`
            self._late = error
            return None
        finally:
            self._is_called_back = False

    def _load(self, slot: Slot) -> None:
        header = slot.header()
        self._check(header)
        values = entries(parse(slot.manifest(), header.payload_bytes).tree)["values"]
        kept = plain(values).get("auto")
        if kept is None:
            raise StateError("the checkpoint is not one of --rr-auto: start a new run id, or without --rr-auto")
        if kept["over"] == "end":
            raise Over
        if kept["over"]:
            raise StateError(f"nothing can be restored, so start a new run id: {kept['over']}")
        before, now = kept["training"], self.values["auto"]["training"]
        others = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        if others:
            raise StateError(
                "another training begins than the one whose step was to be restored: "
                + ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in others[:3])
                + ". Protect it in the script (docs/frameworks.md), or start a new run id"
            )
        super()._load(slot)

    def _check_made(self, plan: Pair) -> None:
        if is_import(plan):
            raise StateError("an import is restored by a Checkpointer in the script only: leave out --rr-auto")
        raise StateError(
            f"step {plan[1]} is of {self._made_by} ranks, and --rr-auto goes on with no other number, because the "
            "place in the data is each rank's own: start as many ranks as before, or protect the training in the script"
        )


def begun(
    hook: Hook, make: Callable[[], Any], checkpointer: Callable[[], UnaskedCheckpointer | None], what: str
) -> Any | None:
    """Return what `make` returns, None if the training goes on without protection, which is said.

    Args:
        hook: Says it.
        make: Attaches and restores.
        checkpointer: Returns what `make` has made until then.
        what: The trainer, as people know it.

    Raises:
        Exception: There is something to restore, and this rank alone would begin at the beginning.
    """
    try:
        made = make()
    except Over:
        reason: object = (
            "the run was restarted after its training had returned, and nobody can tell what the script does now; it "
            "starts over, as under torchrun"
        )
    except Exception as error:
        # What refuses a training before it is attached does so in each generation alike.
        if hook.restores and (hook.is_taken or not isinstance(error, StateError)):
            raise
        reason = error
    else:
        return made
    found = checkpointer()
    if found is not None:
        found._has_left = True
        found.close()
    excuses.hear = _pass
    hook.protects_nothing(f"{what}: {short(reason)}")
    return None


def short(reason: object) -> str:
    """Return what an error says in one line."""
    text = str(reason) if isinstance(reason, str | StateError | ImportError | DaemonError) else repr(reason)
    return " ".join(text.split())


def _pass(error: StateError) -> None:
    """Do nothing: the training goes on without protection, and was told so."""
