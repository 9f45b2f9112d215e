"""`--rr-auto` for the `Trainer` of transformers: what `protect(trainer)` does, while `train()` runs."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ..errors import StateError
from .auto import Hook, UnaskedCheckpointer, begun, may_begin, short
from .remembered import Remembered
from .transformers import ResilientMixin, Run, derived, refuse, trainer_module

_WHAT: Final = "transformers.Trainer"
_MAY_OVERRIDE: Final = frozenset({"_evaluate", "_save_checkpoint"})


@contextmanager
def protected(trainer: Any, hook: Hook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Protect the `train()` that is called in the block with these arguments, or say why not."""
    if not isinstance(trainer, _UnaskedMixin) and may_begin(hook, protects_itself=isinstance(trainer, ResilientMixin)):
        refusal = _take(trainer, hook, kwargs.get("trial", args[1] if len(args) > 1 else None))
        if refusal is not None:
            hook.protects_nothing(f"{_WHAT}: {refusal}")
        else:
            try:
                yield
            finally:
                if isinstance(trainer, _UnaskedMixin):
                    _give_back(trainer)
            return
    yield


def _take(trainer: Any, hook: Hook, trial: Any) -> str | None:
    """Make a trainer one of ours; or return why that cannot be, as far as it is known before it trains."""
    try:
        _refuse_overrides(trainer)
        refuse(trainer, trial)
        trainer.__class__ = derived(_UnaskedMixin, type(trainer))
    except Exception as error:  # noqa: BLE001 - a class of the script's may forbid it
        return short(error)
    trainer._hook = hook
    trainer._unasked = None
    return None


def _give_back(trainer: Any) -> UnaskedCheckpointer | None:
    """Make the trainer what it was; return what kept its state."""
    unasked: UnaskedCheckpointer | None = trainer._unasked
    trainer.__class__ = type(trainer).__bases__[1]
    for name in ("_hook", "_unasked", "_remembered", "_run", "_loader", "_prepared", "_epochs"):
        vars(trainer).pop(name, None)
    if unasked is not None:
        unasked.close()
    return unasked


class _UnaskedMixin(ResilientMixin):
    """A Trainer while it trains."""

    _resizes = False
    _hook: Hook
    _unasked: UnaskedCheckpointer | None
    _remembered: Remembered

    def _begin_run(self) -> Run | None:
        hook = self._hook
        run: Run | None = begun(
            hook, lambda: Run(self, functools.partial(self._make, hook)), lambda: self._unasked, _WHAT
        )
        if run is None:
            self._go_on_alone()
        else:
            assert self._unasked is not None
            self._unasked.begin()
        return run

    def _make(self, hook: Hook, **objects: Any) -> UnaskedCheckpointer:
        held = ("model", "data_collator", "train_dataset", "compute_loss_func", "compute_metrics")
        roots = {name: getattr(self, name, None) for name in held}
        self._remembered = Remembered(roots, objects["attributes"])
        self._unasked = UnaskedCheckpointer(hook, _WHAT, _training(self), self._remembered, **objects)
        return self._unasked

    def _go_on_alone(self) -> None:
        """Train as the class that it was, which is not to prepare a second time."""
        prepared = self._prepared
        _give_back(self)

        def handed(*_: Any) -> Any:
            del self._prepare_for_training
            return prepared

        self.__dict__["_prepare_for_training"] = handed

    def _run_epoch(self, **arguments: Any) -> None:
        self._remembered.begin()
        super()._run_epoch(**arguments)

    def _end_run(self) -> None:
        assert self._unasked is not None
        self._unasked.end()


def _training(trainer: Any) -> dict[str, Any]:
    """Return what this training is told by from others."""
    numbers = {
        name: value
        for name, value in vars(trainer.args).items()
        if type(value) in (bool, int, float) and name not in ("local_rank", "ignore_data_skip")
    }
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    data = trainer.train_dataset
    return {
        **numbers,
        "trainer": type(trainer).__qualname__,
        "model": type(trainer.model).__qualname__,
        "optimizer": (type(optimizer).__qualname__, getattr(optimizer, "defaults", None)),
        "train_dataset": (type(data).__qualname__, len(data) if hasattr(data, "__len__") else None),
    }


def _refuse_overrides(trainer: Any) -> None:
    """Refuse a class of the script's own whose loop is not known.

    Raises:
        ImportError: transformers is of a version whose Trainer is another one.
        StateError: It overrides a method that the position and the steps are known by.
    """
    original = trainer_module().Trainer
    loop = {name for name, found in vars(ResilientMixin).items() if callable(found) and hasattr(original, name)}
    for name in sorted({*loop, "_inner_training_loop"} - _MAY_OVERRIDE):
        if getattr(type(trainer), name) is not getattr(original, name) or name in vars(trainer):
            raise StateError(f"{type(trainer).__qualname__} has a {name}() of its own; protect(trainer) in the script")
