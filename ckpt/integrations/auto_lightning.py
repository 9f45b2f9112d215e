"""`--rr-auto` for the `Trainer` of Lightning: a `ResilientCallback` that is there while `fit()` runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ..checkpointer import Checkpointer
from ..errors import StateError
from .auto import Hook, UnaskedCheckpointer, begun, may_begin, short
from .common import framework
from .lightning import Fit, ResilientCallback, refuse
from .remembered import Remembered

_WHAT: Final = "lightning.Trainer"


@contextmanager
def protected(trainer: Any, hook: Hook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Protect the `fit()` that is called in the block, or say why not."""
    has_one = any(isinstance(each, ResilientCallback) for each in trainer.callbacks)
    if not may_begin(hook, protects_itself=has_one):
        yield
        return
    callback = _UnaskedCallback(hook)
    trainer.callbacks.append(callback)
    try:
        yield
    finally:
        callback.close()
        trainer.callbacks = [each for each in trainer.callbacks if each is not callback]


class _UnaskedCallback(ResilientCallback):
    """The callback of one `fit`."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self._hook = hook

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the loops if this training can be brought back."""
        if not self._hook.is_here():
            return
        try:
            refuse(trainer)
            _refuse_files(pl_module)
            self._fit = _UnaskedFit(trainer, self._hook)
        except Exception as error:  # noqa: BLE001 - of another version, for example
            self._hook.protects_nothing(f"{_WHAT}: {short(error)}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let no restart take what comes next for this training."""
        if isinstance(self._fit, _UnaskedFit) and self._fit.unasked is not None:
            self._fit.unasked.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach."""
        self.close()

    def close(self) -> None:
        """Detach, also where the training was left by an exception."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()


class _UnaskedFit(Fit):
    """One call of `fit`."""

    def __init__(self, trainer: Any, hook: Hook) -> None:
        super().__init__(trainer, {})
        self._hook = hook
        self._is_followed = True
        self.unasked: UnaskedCheckpointer | None = None

    def close(self) -> None:
        """Give the loops their methods back, once, and detach."""
        if self._is_followed:
            self._is_followed = False
            super().close()

    def _attach(self) -> None:
        combined = self._loop._combined_loader
        loaders = list(combined.flattened)
        if begun(self._hook, self._attached, lambda: self.unasked, _WHAT) is None:
            combined.flattened = loaders
            self.checkpointer = None
            self.close()
        elif self.unasked is not None:
            self.unasked.begin()

    def _attached(self) -> "_UnaskedFit":
        super()._attach()
        return self

    def _make_checkpointer(self, **objects: Any) -> Checkpointer:
        callbacks = [each for each in self._trainer.callbacks if not isinstance(each, ResilientCallback)]
        assert self._loader is not None
        roots = {"module": self._trainer.lightning_module, "callbacks": callbacks, "loader": self._loader.loader}
        self._remembered = Remembered(roots, objects["attributes"])
        self.unasked = UnaskedCheckpointer(self._hook, _WHAT, self._training(), self._remembered, **objects)
        return self.unasked

    def _start_epoch(self, original: Any, data_fetcher: Any) -> None:
        self._remembered.begin()
        super()._start_epoch(original, data_fetcher)

    def _training(self) -> dict[str, Any]:
        """Return what this training is told by from others."""
        trainer, module = self._trainer, self._trainer.lightning_module
        assert self._loader is not None
        data = self._loader.loader.dataset
        limits = ("max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches", "gradient_clip_val")
        return {
            **{name: getattr(trainer, name) for name in limits},
            "module": type(module).__qualname__,
            "hparams": {
                name: value for name, value in dict(module.hparams).items() if type(value) in (bool, int, float)
            },
            "optimizers": [(type(each).__qualname__, each.defaults) for each in trainer.optimizers],
            "batch_size": self._loader.loader.batch_size,
            "data": (type(data).__qualname__, len(data) if hasattr(data, "__len__") else None),
        }


def _refuse_files(module: Any) -> None:
    """Refuse a module that has more state than is seen here.

    Raises:
        StateError: It adds something to checkpoint files.
    """
    base = framework("lightning.pytorch").LightningModule
    if type(module).on_save_checkpoint is not base.on_save_checkpoint:
        raise StateError(
            "checkpoints here lack what the module's on_save_checkpoint() adds to a file; give it to a "
            "ResilientCallback in the script"
        )
