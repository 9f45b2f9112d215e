"""Lightning: a callback that goes on in the middle of an epoch, with the loops' progress and what was logged so far."""

import contextlib
import functools
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import torch

from ..checkpointer import Checkpointer
from ..errors import StateError
from ..state.state import Stateful, get_rng, set_rng
from .common import AfterRestore, all_alike, framework, warn_of_buckets
from .position import PositionedLoader
from .remembered import Attributes, is_repeated, own_modules

if TYPE_CHECKING:
    _Callback: Any
else:
    _Callback = framework("lightning.pytorch").Callback

_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_CHANGING: Final = ("BaseFinetuning", "BatchSizeFinder", "LearningRateFinder")
_CLOCK_S: Final = 0.01
"""How much older than it is a file may look that the kernel stamps with its last tick."""
_META: Final = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


class ResilientCallback(_Callback):
    """Keeps the state of `Trainer.fit` after every step of the optimizer, and goes on from it.

    A step is completed once all that belongs to its batch is done, which for some is a validation.

    Example:
        ```
        Trainer(max_epochs=3, callbacks=[ResilientCallback()]).fit(module, loader)
        ```
    """

    def __init__(self, **objects: Any) -> None:
        """Make the callback of one `Trainer.fit`.

        Args:
            objects: What else is state, as for a `Checkpointer`.
        """
        self._objects = objects
        self._fit: Fit | None = None
        self._pause: AbstractContextManager[None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Follow the loops of this `fit`.

        Raises:
            StateError: Something about it could not be brought back exactly.
        """
        refuse(trainer)
        self._fit = Fit(trainer, self._objects)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation may take its time."""
        if self._fit is not None and self._fit.checkpointer is not None:
            self._pause = self._fit.checkpointer.pause()
            self._pause.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """It is over."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.__exit__(None, None, None)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach: what comes now is no step."""
        if self._fit is not None:
            self._fit.close()
            self._fit = None


class Fit:
    """One call of `fit`: what its state is beside that of module, optimizers and schedules.

    It takes the place of four methods of the loops, of these objects alone: hooks of callbacks come before a step is
    over, and before the loops have set their counters to 0.
    """

    def __init__(self, trainer: Any, objects: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._objects = objects
        self._loop = trainer.fit_loop
        self._epoch_loop = self._loop.epoch_loop
        self._loader: PositionedLoader | None = None
        self._resumed: dict[str, Any] | None = None
        self._rng = get_rng()
        self._completed = 0
        self._limit: int | float | None = None
        self._restored: AfterRestore | None = None
        self.checkpointer: Checkpointer | None = None
        hooks = (
            (self._loop, "_load_combined_loader_states", self._begin),
            (self._epoch_loop, "reset", self._reset),
            (self._epoch_loop, "on_run_start", self._start_epoch),
            (self._epoch_loop, "on_advance_end", self._end_batch),
        )
        self._hooked: list[tuple[Any, str]] = []
        for owner, name, hook in hooks:
            self._hook_in(owner, name, functools.partial(hook, getattr(owner, name)))

    def _hook_in(self, owner: Any, name: str, replacement: Any) -> None:
        setattr(owner, name, replacement)
        self._hooked.append((owner, name))

    def close(self) -> None:
        """Give the loops their methods back, and detach."""
        for owner, name in self._hooked:
            delattr(owner, name)
        if self.checkpointer is not None:
            self.checkpointer.close()

    def _begin(self, original: Any) -> None:
        original()
        self._attach()

    def _attach(self) -> None:
        """Restore, when the loader is there and was not iterated."""
        combined = self._loop._combined_loader
        if len(combined.flattened) != 1:
            raise StateError(
                f"{len(combined.flattened)} training loaders: the position in several is not kept, give one"
            )
        (loader,), (limit,) = combined.flattened, combined.limits
        # Lightning draws ahead where it cannot count.
        length = framework("lightning.fabric.utilities.data").sized_len(loader)
        sized = length is not None or limit != float("inf")
        self._loader = PositionedLoader(loader, ahead=0 if sized else 1)
        combined.flattened = [self._loader]
        trainer = self._trainer
        warn_of_buckets([trainer.strategy.model], 'Trainer(strategy="ddp_find_unused_parameters_true")')
        module, optimizers = trainer.lightning_module, list(trainer.optimizers)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.attributes = self._attributes()
        others = {"schedulers": schedulers} if schedulers else {}
        self.checkpointer = self._make_checkpointer(
            model=module, optimizers=optimizers, **others, fit=self, attributes=self.attributes, **self._objects
        )
        self._completed = self.checkpointer.restore()
        self._rng = get_rng()
        if self._loader.batches(self._loader.position()["at"]) is not None:
            # In this epoch alone.
            self._limit, combined.limits = limit, [len(self._loader)]
        if self._resumed is not None:
            own = [each for each in self._objects.values() if isinstance(each, Stateful)]
            self._restored = AfterRestore([module], optimizers, [*schedulers, *own])

    def _make_checkpointer(self, **objects: Any) -> Checkpointer:
        return Checkpointer(**objects)

    def _reset(self, original: Any) -> None:
        original()
        if self._resumed is not None and self._restored is not None:
            self._apply(self._resumed)
            # What hooks did to it since then was done before.
            self._restored.put_back()
            self._restored = None
        if self.checkpointer is not None:
            self.attributes.begin()

    def _attributes(self) -> Attributes:
        assert self._loader is not None
        trainer, module = self._trainer, self._trainer.lightning_module
        base = framework("lightning.pytorch").Callback
        others = [each for each in trainer.callbacks if not type(each).__module__.startswith(("lightning.", "resili"))]
        silent = [each for each in others if type(each).state_dict is base.state_dict]
        silent += [each for each in trainer.callbacks if is_repeated(each)]
        managed = [*module.modules(), *trainer.optimizers, *trainer.callbacks, trainer, self._loader.loader]
        managed += [config.scheduler for config in trainer.lr_scheduler_configs]
        managed += [getattr(self._loader.loader, name, None) for name in ("dataset", "collate_fn", "sampler")]
        things = [*own_modules(module), *filter(None, [trainer.datamodule]), *silent]
        return Attributes(things, [each for each in (*managed, *self._objects.values()) if each is not None])

    def _start_epoch(self, original: Any, data_fetcher: Any) -> None:
        if self._resumed is None:
            if self._limit is not None:
                self._put_back_limit(self._limit)
            original(data_fetcher)
            return
        self._resumed = None
        # The iterator was made by `_FitLoop.setup_data`, and goes on.
        self._epoch_loop._restarting = True
        original(data_fetcher)
        self._epoch_loop._restarting = False
        set_rng(self._rng)

    def _put_back_limit(self, limit: int | float) -> None:
        self._loop._combined_loader.limits, self._limit = [limit], None
        self._loop.max_batches = limit
        if not isinstance(self._trainer.val_check_interval, int):
            self._trainer.val_check_batch = max(1, int(limit * self._trainer.val_check_interval))

    def _end_batch(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        if self._trainer.global_step > self._completed and self.checkpointer is not None:
            self._completed = self._trainer.global_step
            self.checkpointer.step(self._completed)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the loops, what they have logged, and the position."""
        if self._resumed is not None:
            return self._resumed
        trainer, connector = self._trainer, self._trainer._logger_connector
        call = framework("lightning.pytorch.trainer.call")
        assert self._loader is not None
        return {
            "position": self._loader.position(),
            "accumulation": trainer.accumulate_grad_batches,
            "at_s": time.time(),
            "loops": self._loop.state_dict(),
            "should_stop": trainer.should_stop,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "precision": trainer.precision_plugin.state_dict(),
            "data": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "first": connector._first_loop_iter,
            "results": {key: _result_state(metric) for key, metric in self._epoch_loop._results.items()},
        }

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return what `rank` of `world_size` loads of what another number of ranks had, by rank.

        Raises:
            StateError: They decided differently, or some of the epoch would be lost or given twice.
        """
        assert self._loader is not None
        position = self._loader.reshard({each: state["position"] for each, state in states.items()}, rank, world_size)
        if position["at"] is not None and self._loop._combined_loader.limits != [len(self._loader)]:
            raise StateError(
                "limit_train_batches ends the epoch before all samples were read: change the number of ranks between "
                "two epochs"
            )
        same = all_alike(("loops", "should_stop", "callbacks", "precision", "data", "first"), states)
        first = states[min(states)]
        if (at := position["at"]) is not None and "given" in at:
            # A step has ended a round of accumulation, of which another number of ranks may want others.
            accumulated = _accumulated(self._trainer, same["loops"]["epoch_progress"]["current"]["processed"])
            given = -(-at["given"] // first.get("accumulation", accumulated)) * accumulated
            position = {**position, "at": {**at, "given": given}}
            progress = same["loops"]["epoch_loop.batch_progress"]
            current = dict.fromkeys(("ready", "started", "processed", "completed"), given)
            progress = {**progress, "current": {**progress["current"], **current}}
            same["loops"] = {**same["loops"], "epoch_loop.batch_progress": progress}
        # What was logged without sync_dist is a rank's own.
        metrics = states.get(rank, first)["metrics"]
        results = {
            key: _shared_result(
                key, [state["results"][key] for state in states.values() if key in state["results"]], world_size
            )
            for key in dict.fromkeys(key for state in states.values() for key in state["results"])
        }
        return {**first, **same, "position": position, "metrics": metrics, "results": results}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the epoch that comes next."""
        self._resumed = dict(state)
        assert self._loader is not None
        # Of the rest, all that comes until then sees the number of the epoch only.
        self._loop.epoch_progress.load_state_dict(state["loops"]["epoch_progress"])
        set_epoch = framework("lightning.fabric.utilities.data")._set_sampler_epoch
        set_epoch(self._loader, self._loop.epoch_progress.current.processed)
        self._loader.go_to(state["position"])
        self._untangle(self._loop)

    def _apply(self, state: dict[str, Any]) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        call = framework("lightning.pytorch.trainer.call")
        self._loop.load_state_dict(state["loops"])
        self._untangle(self._loop)
        self._take_up_files(state["at_s"])
        trainer.should_stop = state["should_stop"]
        for each in trainer.checkpoint_callbacks:
            # Loggers give each process a directory of its own, and what it kept in another one it does not take back.
            if "dirpath" in (before := state["callbacks"].get(each.state_key, {})):
                each.dirpath = before["dirpath"]
        call._call_callbacks_load_state_dict(trainer, {"callbacks": state["callbacks"]})
        trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        for name in _METRICS:
            setattr(connector, name, dict(state["metrics"][name]))
        connector._first_loop_iter = state["first"]
        self._epoch_loop._results.update({key: self._result(each) for key, each in state["results"].items()})

    def _take_up_files(self, since_s: float) -> None:
        """Let checkpoint callbacks write again what they wrote after the step that training goes on from.

        To them a file that they do not know is somebody else's, which they put another one beside.

        Args:
            since_s: When that step was kept.
        """
        for each in self._trainer.checkpoint_callbacks:
            if hasattr(each, "file_exists"):
                self._hook_in(each, "file_exists", functools.partial(_exists, each, since_s, time.time()))

    def _untangle(self, loop: Any) -> None:
        """Let a loop go on as if it had been there all the time: Lightning's own restarts pass over parts of it."""
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()
        for child in vars(loop).values():
            if isinstance(child, framework("lightning.pytorch.loops.loop")._Loop):
                self._untangle(child)

    def _result(self, state: dict[str, Any]) -> Any:
        """Return what the loop has logged under a name in this epoch, to go on adding to."""
        module = framework("lightning.pytorch.trainer.connectors.logger_connector.result")
        meta = module._Metadata(reduce_fx=state["reduce"], **state["meta"])
        should, only_zero = state["sync"]
        meta.sync = module._Sync(fn=self._trainer.strategy.reduce, _should=should, rank_zero_only=only_zero)
        metric = module._ResultMetric(meta, state["tensor"])
        if state["tensor"]:
            metric.value = state["value"].clone()
            if meta.is_mean_reduction:
                metric.cumulated_batch_size = state["batches"].clone()
        elif meta.metric_attribute is not None:
            metric.value = functools.reduce(getattr, meta.metric_attribute.split("."), self._trainer.lightning_module)
        metric.has_reset, metric._update_count = state["reset"], state["updates"]
        metric._forward_cache = state["cache"]
        return metric


def _exists(callback: Any, since_s: float, until_s: float, path: Any, trainer: Any) -> bool:
    """Do what `ModelCheckpoint.file_exists` does, but for files written in between that no such callback knows."""
    exists = False
    if trainer.is_global_zero and (exists := callback._fs.exists(path)):
        kept = [each for each in trainer.checkpoint_callbacks if hasattr(each, "best_k_models")]
        known = {known for each in kept for known in (each.last_model_path, each.best_model_path, *each.best_k_models)}
        if path not in known:
            with contextlib.suppress(NotImplementedError, KeyError):
                written_s = callback._fs.modified(path).timestamp()
                exists = not since_s - _CLOCK_S <= written_s <= until_s
    return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))


def _accumulated(trainer: Any, epoch: int) -> int:
    """Return of how many batches an epoch accumulates gradients."""
    scheduler = framework("lightning.pytorch.callbacks").GradientAccumulationScheduler
    schedules = [each for each in trainer.callbacks if isinstance(each, scheduler)]
    count = schedules[0].get_accumulate_grad_batches(epoch) if schedules else trainer.accumulate_grad_batches
    return int(count)


def _shared_result(key: str, several: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Return what each of so many ranks goes on with of what ranks have logged under a name: its part of the sums.

    Raises:
        StateError: It is no sum, mean, minimum or maximum.
    """
    first = several[0]
    if not first["tensor"]:
        return first  # its metric is kept with the module
    values = torch.stack([each["value"] for each in several])
    match first["reduce"]:
        case "sum" | "mean":
            batches = (
                first["batches"] if first["batches"] is None else sum(each["batches"] for each in several) / world_size
            )
            return {**first, "value": values.sum(0) / world_size, "batches": batches}
        case "min" | "max" as reduce:
            return {**first, "value": getattr(values, f"a{reduce}")(0)}
        case other:
            raise StateError(f"{key} is logged with reduce_fx={other}: another number of ranks has no share of it")


def _result_state(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "tensor": metric.is_tensor,
        "value": metric.value if metric.is_tensor else None,
        "batches": getattr(metric, "cumulated_batch_size", None),
        "reset": metric.has_reset,
        "updates": metric._update_count,
        "cache": metric._forward_cache if isinstance(metric._forward_cache, torch.Tensor) else None,
    }


def refuse(trainer: Any) -> None:
    """Refuse what cannot be brought back.

    Raises:
        StateError: It names the setting and the remedy.
    """
    _refuse_strategy(trainer.strategy)
    if trainer.reload_dataloaders_every_n_epochs:
        raise StateError("reload_dataloaders_every_n_epochs: the loaders of an epoch are not kept. Leave it out")
    if trainer._val_check_time_interval is not None:
        raise StateError("val_check_interval by time cannot be repeated: give a number of batches")
    if _takes_iterator(trainer.lightning_module):
        raise StateError("training_step(dataloader_iter): what it draws is not known. Let it take a batch")
    lightning = framework("lightning.pytorch")
    _refuse_callbacks(trainer.callbacks, lightning.Callback)
    if type(trainer.lightning_module).on_save_checkpoint is not lightning.LightningModule.on_save_checkpoint:
        warnings.warn(
            "checkpoints here lack what the module's on_save_checkpoint() adds to a file. If training depends on "
            "it, give ResilientCallback(name=object) an object with state_dict() that has it",
            RuntimeWarning,
            stacklevel=2,
        )


def _refuse_strategy(strategy: Any) -> None:
    strategies = framework("lightning.pytorch.strategies")
    known = (strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy)
    if type(strategy) not in known:
        raise StateError(
            f"{type(strategy).__qualname__} is not supported: use one device, strategy='ddp', or FSDP2 by "
            "ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1) and fully_shard() in "
            "configure_model()"
        )
    if type(strategy) is strategies.ModelParallelStrategy and strategy.device_mesh["tensor_parallel"].size() > 1:
        raise StateError(
            f"tensor_parallel_size={strategy.device_mesh['tensor_parallel'].size()}: only FSDP2 is supported. Use "
            "ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)"
        )


def _refuse_callbacks(callbacks: list[Any], base: Any) -> None:
    """Refuse callbacks, made from the framework's class `base`, whose state cannot be kept."""
    changing = framework("lightning.pytorch.callbacks")
    for each in callbacks:
        if isinstance(each, tuple(getattr(changing, name) for name in _CHANGING)):
            raise StateError(
                f"{type(each).__qualname__} makes other optimizers, schedules or steps on the way, which are not kept: "
                "leave it out, or do what it does in the module"
            )
        if type(each).on_save_checkpoint is not base.on_save_checkpoint and not is_repeated(each):
            raise StateError(
                f"{type(each).__qualname__} has its state by on_save_checkpoint(), which is for files: give it "
                "state_dict() and load_state_dict(), or leave it out"
            )


def _takes_iterator(module: Any) -> bool:
    utilities = framework("lightning.pytorch.utilities.signature_utils")
    return bool(utilities.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True))
