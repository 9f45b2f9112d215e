"""transformers: a `Trainer` that goes on in the middle of an epoch, with what it logs, counts and decides by.

A `TrainerCallback` cannot do it. It is called first when the epoch to begin with and the batches to skip are fixed
already, as local variables of `Trainer`, and what it restores is changed again before the first step. So these are
methods of the Trainer itself.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ..checkpointer import Checkpointer
from ..errors import StateError
from ..state.state import get_rng, set_rng
from .accelerate import PreparedLoader
from .common import REQUIREMENTS, AfterRestore, alike, all_alike, framework, replaced, warn_of_buckets
from .deepspeed import EngineState
from .remembered import Attributes, own_modules

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object

_HERE: Final = "resilient-run"
"""In place of a directory to resume from."""
_OWN: Final = ("_begin_run", "_end_run")
"""Methods of `ResilientMixin` that override none of Trainer's."""
_COUNTS: Final = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
)


_TOTALS: Final = {"_tr_loss": "mean", "current_flos": "sum"}
"""Attributes of Trainer of which the mean or the sum over ranks is logged."""
_OF_SIZE: Final = ("max_steps", "logging_steps", "eval_steps", "save_steps")


def protect(trainer: Any) -> Any:
    """Let a `transformers.Trainer` keep its state after every step, and go on from it; call it before `train()`.

    Returns:
        The same trainer, whose class is now one of its own, a subclass of `ResilientMixin` and of what it was.

    Raises:
        ImportError: transformers is not installed, or of a version whose Trainer is another one.
        StateError: Something about it could not be brought back exactly.
    """
    trainer_module()
    if not isinstance(trainer, ResilientMixin):
        trainer.__class__ = derived(ResilientMixin, type(trainer))
    refuse(trainer)
    return trainer


def derived(mixin: type, made: type) -> type:
    """Return a class of both, which goes by the name of `made`: some write it into what they save."""
    names = {"__module__": made.__module__, "__qualname__": made.__qualname__, "__doc__": made.__doc__}
    return type(made.__name__, (mixin, made), names)


class ResilientMixin(_Trainer):
    """What `protect` gives a Trainer. As a base class, `class MyTrainer(ResilientMixin, Trainer)`, it does the same."""

    _run: "Run"
    _resizes = True

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Remember the loader, which the optimizer is made with before Trainer does it."""
        self._loader = dataloader
        epochs, *others = super().set_initial_training_values(args, dataloader)
        self._epochs = epochs
        flow = framework("transformers.trainer_callback").DefaultFlowCallback
        ends = any(isinstance(each, flow) for each in self.callback_handler.callbacks)
        if self._resizes and args.max_steps > 0 and ends:
            # It ends with that step; after more ranks, whose epochs were shorter, it takes more epochs than it seems.
            epochs = max(epochs, args.max_steps)
        return epochs, *others

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Restore: only now is the epoch to begin with not yet fixed."""
        trainer_module()
        refuse(self, trial)
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, self._epochs, resume, trial
        )
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume)
        run = self._begin_run()
        if run is None:
            return begin
        self._run = run
        return begin if run.resumed is None else (run.resumed["epoch"], 0)

    def _begin_run(self) -> "Run | None":
        return Run(self, Checkpointer)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        prepared, self._prepared = self._prepared, None
        return prepared

    def _run_epoch(
        self,
        *,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        resume_from_checkpoint: Any,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **others: Any,
    ) -> None:
        run = self._run
        resumed = run.begin(epoch)
        if resumed is not None:
            resume_from_checkpoint, epochs_trained = _HERE, epoch
            steps_trained_in_current_epoch = resumed["skipped"] + resumed["loader"]["given"]
            if (batches := run.loader.positioned.batches(resumed["loader"]["at"])) is not None:
                steps_in_epoch = batches
                per_epoch = others["num_update_steps_per_epoch"]
                accumulated = self.args.gradient_accumulation_steps
                others["num_update_steps_per_epoch"] = -(-steps_in_epoch // accumulated)
                if resumed.get("resized") and self.args.max_steps <= 0:
                    # As many steps as the rest of all epochs takes.
                    left = -(-(steps_in_epoch - steps_trained_in_current_epoch) // accumulated)
                    self.state.max_steps += self.state.global_step - (epoch + 1) * per_epoch + left
                    run.shift = run.planned - self.state.max_steps
            run.over = self.control.should_epoch_stop or self.control.should_training_stop
            run.over |= steps_trained_in_current_epoch >= steps_in_epoch
            run.shift_schedule()
        else:
            run.follow(train_dataloader, skipped=0)
        module = trainer_module()
        original = module.skip_first_batches

        def skip(loader: Any, count: int) -> Any:
            if resumed is None or resumed["skipped"]:
                count = count if resumed is None else resumed["skipped"]
                loader = original(loader, count)
            else:
                count = 0
            run.follow(loader, skipped=count)
            if resumed is not None:
                # Of an epoch at its end nothing is drawn again, but the next one goes on with its generators.
                run.loader.load_state_dict(resumed["loader"] | ({"at": None} if run.over else {}))
            return loader

        ignores = self.args.ignore_data_skip and resumed is None
        with (
            replaced(module, "skip_first_batches", skip),
            replaced(self.args, "ignore_data_skip", ignores),
        ):
            super()._run_epoch(
                epoch=epoch,
                train_dataloader=train_dataloader,
                steps_in_epoch=steps_in_epoch,
                resume_from_checkpoint=resume_from_checkpoint,
                epochs_trained=epochs_trained,
                steps_trained_in_current_epoch=steps_trained_in_current_epoch,
                **others,
            )
        run.over = False
        if run.shift is None and self.args.max_steps > 0 and epoch + 1 >= self._epochs:
            self.control.should_training_stop = True

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return no batches where a restart finds that the epoch was at its end."""
        return ([], None) if self._run.over else super().get_batch_samples(epoch_iterator, num_batches, device)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != _HERE:  # the loader sets it, at the batch that follows
            super()._load_rng_state(checkpoint)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._run.resumed is not None:  # args.eval_on_start
            return {}
        with self._run.checkpointer.pause():
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._run.checkpointer.pause():
            super()._save_checkpoint(model, trial)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *others: Any, learning_rate: float | None = None
    ) -> None:
        """After an evaluation, which may decide by what training goes on, the step is completed."""
        run = self._run
        if learning_rate is None:  # no step of this epoch since then, as where a restart finds nothing left of it
            grad_norm, learning_rate = run.logged
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *others, learning_rate=learning_rate)
        # The norm of FSDP2 is a sum over ranks that is yet to be made.
        run.logged = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm, learning_rate
        run.step()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        with self._run.checkpointer.pause():
            output = super()._finalize_training(trial, num_train_samples, start_time)
        self._end_run()
        return output

    def _end_run(self) -> None:
        self._run.checkpointer.close()


class Run:
    """One call of `train()`: what its state is beside that of model, optimizer and schedule.

    Attributes:
        checkpointer: Keeps all of it.
        attributes: What the trainer's class, its model and its callbacks hold.
        resumed: What was restored, until its epoch begins.
        loader: The position in the epoch.
        over: Whether the epoch that is gone on with has no more steps.
        planned: How many steps this number of ranks would take from the beginning.
        shift: How many steps ahead of its own the learning rate's schedule is; None if there were never other ranks.
        logged: The norm of gradients and the learning rate that this epoch has given to be logged.
    """

    def __init__(self, trainer: Any, make: Callable[..., Checkpointer]) -> None:
        self._trainer = trainer
        self._epoch = self._skipped = self._completed = 0
        self._is_training = True
        self._history = ""
        self._entries = 0
        self._rng = get_rng()
        self._arguments = _plain(trainer.args)
        self.resumed: dict[str, Any] | None = None
        self.over = False
        self.planned = trainer.state.max_steps
        self.shift: int | None = None
        self.logged: tuple[Any, float | None] = (None, None)
        self.follow(trainer._loader, skipped=0)
        warn_of_buckets([trainer.model_wrapped], "TrainingArguments(ddp_find_unused_parameters=True)")
        stateful = _stateful(trainer)
        others: dict[str, Any] = {"scaler": trainer.accelerator.scaler, "callbacks": stateful}
        self.attributes = _attributes(trainer)
        self.checkpointer = make(
            **_trained(trainer),
            scheduler=trainer.lr_scheduler,
            trainer=self,
            attributes=self.attributes,
            **{name: found for name, found in others.items() if found},
        )
        with _training(trainer.model_wrapped):
            self._completed = self.checkpointer.restore()
        self._rng = get_rng()
        self._restored: AfterRestore | None = None
        if self.resumed is not None:
            self._restored = AfterRestore([trainer.model], [trainer.optimizer], [trainer.lr_scheduler, *stateful])

    def follow(self, loader: Any, *, skipped: int) -> None:
        """Record what is iterated: the loader of an epoch, of which Trainer itself has skipped so many batches."""
        self.loader = PreparedLoader(loader)
        self._skipped = skipped

    def begin(self, epoch: int) -> dict[str, Any] | None:
        """Begin an epoch, and return what it goes on from, None if it begins at the beginning."""
        self._epoch = epoch
        resumed, self.resumed = self.resumed, None
        if resumed is None:
            self.logged = None, None
        elif self._restored is not None:
            # What callbacks did to it since then was done before.
            self._apply(resumed)
            self.shift = resumed.get("shift")
            self._trainer.model.train(resumed["training"])
            self._restored.put_back()
        self.attributes.begin()
        if self._restored is not None:
            self._restored = None
            set_rng(self._rng)
        return resumed

    def shift_schedule(self) -> None:
        """Let a schedule that was made for `planned` steps end with the last one, as this many samples were trained."""
        schedules = getattr(self._trainer.lr_scheduler, "lr_lambdas", [])
        for index, schedule in enumerate(schedules):
            if self.shift and getattr(schedule, "keywords", {}).get("num_training_steps") == self.planned:
                schedules[index] = functools.partial(_shifted, schedule, self.shift)

    def step(self) -> None:
        """Record that a step is completed, if one is."""
        if self._trainer.state.global_step > self._completed:
            self._completed = self._trainer.state.global_step
            self._is_training = self._trainer.model.training
            with _training(self._trainer.model_wrapped):
                self.checkpointer.step(self._completed)

    def state_dict(self) -> dict[str, Any]:
        """Return what Trainer counts and decides by, and the position."""
        if self.resumed is not None:
            return self.resumed
        trainer = self._trainer
        return {
            "epoch": self._epoch,
            "skipped": self._skipped,
            "shift": self.shift,
            "accumulation": trainer.args.gradient_accumulation_steps,
            "loader": self.loader.state_dict(),
            "logged": self.logged,
            "training": self._is_training,
            "counts": {name: getattr(trainer.state, name) for name in _COUNTS},
            "history": self._log_history(),
            "control": dict(vars(trainer.control)),
            "callbacks": [callback.state()["attributes"] for callback in _exportable(trainer)],
            "changed": {
                name: value for name, value in _plain(trainer.args).items() if self._arguments.get(name) != value
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the epoch that comes next."""
        self.resumed = dict(state)
        self._apply(self.resumed)

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return what `rank` of `world_size` loads of what another number of ranks had, by rank.

        Raises:
            StateError: They decided differently, or some of the epoch would be lost or given twice.
        """
        first = states[min(states)]
        if any(state["skipped"] for state in states.values()):
            raise StateError(
                "resume_from_checkpoint has begun this epoch in its middle: change the number of ranks in a later one"
            )
        same = all_alike(("epoch", "control", "callbacks", "changed", "training"), states)
        counts = alike("counts", {other: _sizeless(state["counts"]) for other, state in states.items()})
        loader = self.loader.reshard({other: state["loader"] for other, state in states.items()}, rank, world_size)
        accumulated = self._trainer.args.gradient_accumulation_steps
        if (at := loader["at"]) is not None and "given" in at:
            # A step has ended a round of accumulation, of which another number of ranks may want others.
            rounds = -(-at["given"] // first.get("accumulation", accumulated))
            given = rounds * accumulated
            loader = {**loader, "given": given, "at": {**at, "given": given}}
        # What is logged has times of a rank's own.
        return {**states.get(rank, first), **same, "counts": counts, "loader": loader, "resized": True, "shift": 0}

    def _apply(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        self.logged = tuple(state["logged"])
        for name, value in state["counts"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = [json.loads(line) for line in state["history"].splitlines()]
        self._history, self._entries = state["history"], len(trainer.state.log_history)
        vars(trainer.control).update(state["control"])
        for callback, attributes in zip(_exportable(trainer), state["callbacks"], strict=True):
            # It is applied twice, and callbacks change their lists where they are.
            vars(callback).update(copy.deepcopy(attributes))
        vars(trainer.args).update(state["changed"])

    def _log_history(self) -> str:
        """Return the entries of the log as lines; only new ones are written each time."""
        history = self._trainer.state.log_history
        if len(history) < self._entries:
            self._history, self._entries = "", 0
        self._history += "".join(f"{json.dumps(entry, default=float)}\n" for entry in history[self._entries :])
        self._entries = len(history)
        return self._history


def _shifted(schedule: Callable[[int], float], shift: int, step: int) -> float:
    return schedule(max(0, step + shift))


def _sizeless(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return counts without those that follow from the number of ranks."""
    return {name: value for name, value in counts.items() if name not in _OF_SIZE}


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """Let a model be one that is trained, which Trainer makes it at each step: evaluations and files leave it another.

    That is nothing to warn of after a restart.
    """
    modes = [(each, each.training) for each in model.modules()]
    model.train()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def _trained(trainer: Any) -> dict[str, Any]:
    """Return model and optimizer, by the names that they are registered with."""
    if not trainer.is_deepspeed_enabled:
        return {"model": trainer.model, "optimizer": trainer.optimizer}
    return {"engine": EngineState(trainer.model_wrapped)}


def _plain(arguments: Any) -> dict[str, Any]:
    """Return the settings that a callback may change on the way."""
    # The one that is left out is patched while an epoch runs.
    return {
        name: value
        for name, value in vars(arguments).items()
        if type(value) in (bool, int, float, str) and name != "ignore_data_skip"
    }


def _exportable(trainer: Any) -> list[Any]:
    """Return the callbacks that tell their state as Trainer wants it, such as early stopping."""
    kind = framework("transformers.trainer_callback").ExportableState
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]


def _stateful(trainer: Any) -> list[Any]:
    """Return the callbacks with a `state_dict`."""
    exportable = _exportable(trainer)
    callbacks = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if callback not in exportable and hasattr(callback, "state_dict")]


def _attributes(trainer: Any) -> Attributes:
    told = [*_exportable(trainer), *_stateful(trainer)]
    callbacks = [each for each in trainer.callback_handler.callbacks if not type(each).__module__.startswith("transf")]
    silent = [each for each in callbacks if each not in told]
    model, optimizer, loader = trainer.model, trainer.optimizer, trainer._loader
    managed = [*trainer.model_wrapped.modules(), optimizer, getattr(optimizer, "optimizer", None), trainer.lr_scheduler]
    managed += [trainer.train_dataset, trainer.eval_dataset, trainer.data_collator, trainer.processing_class, *told]
    return Attributes(
        [trainer, *own_modules(model), *silent],
        [*managed, loader, trainer.args, trainer.state, trainer.control, trainer.accelerator],
        _TOTALS,
    )


def trainer_module() -> ModuleType:
    """Return `transformers.trainer`.

    Raises:
        ImportError: It is not there, or its Trainer has other methods than those that are overridden.
    """
    module = framework("transformers.trainer")
    overridden = [name for name, found in vars(ResilientMixin).items() if callable(found) and name not in _OWN]
    missing = [name for name in overridden if not hasattr(module.Trainer, name)]
    if missing or not hasattr(module, "skip_first_batches"):
        raise ImportError(
            f"the Trainer of this transformers has no {', '.join(missing) or 'skip_first_batches'}: "
            f"pip install '{REQUIREMENTS['transformers']}'"
        )
    return module


def refuse(trainer: Any, trial: Any = None) -> None:
    """Refuse what cannot be brought back.

    Raises:
        StateError: It names the setting and the remedy.
    """
    refused = (
        (trial is not None, "hyperparameter_search()", "a run has one sequence of steps: protect what comes after it"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size=True", "set per_device_train_batch_size"),
    )
    for found, setting, remedy in refused:
        if found:
            raise StateError(f"{setting} is not supported: {remedy}")
