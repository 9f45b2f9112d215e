"""Accelerate: a Checkpointer that registers what `Accelerator.prepare` made, and knows the place in its loaders."""

import itertools
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, IterableDataset

from ..checkpointer import Checkpointer
from ..errors import StateError
from ..state.state import Stateful
from .common import framework, warn_of_buckets
from .deepspeed import EngineState
from .position import PositionedLoader
from .samples import UNKNOWN, Share, share_of

_SUPPORTED: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_OURS: Final = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


class AcceleratorCheckpointer(Checkpointer):
    """Keeps what an `Accelerator` prepared, and goes on in the middle of an epoch.

    Example:
        ```
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        checkpointer = AcceleratorCheckpointer(accelerator)
        checkpointer.restore()
        for epoch in checkpointer.epochs(EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    train_on(batch)
                    checkpointer.step()
        ```

    Registered are models, optimizers, schedulers, loaders and the scaler, the objects of `register_for_checkpointing`,
    the count of accumulated batches, and the random generators.
    """

    def __init__(self, accelerator: Any, *, rng: bool = True, **objects: Any) -> None:
        """Attach to the daemon of this host, after `accelerator.prepare`.

        Args:
            accelerator: An `accelerate.Accelerator`.
            rng: Whether the random number generators of Python, NumPy and torch are part of the state.
            objects: What else is state, as for a `Checkpointer`.

        Raises:
            ImportError: Accelerate is not installed.
            StateError: Something that was prepared could not be brought back exactly, or as for a `Checkpointer`.
        """
        framework("accelerate")
        if accelerator.distributed_type not in _SUPPORTED:
            raise StateError(
                f"{accelerator.distributed_type} through Accelerate is not supported: use DDP, FSDP or DeepSpeed"
            )
        if not accelerator._optimizers:
            raise StateError(
                "the Accelerator has prepared no optimizer: call prepare() before AcceleratorCheckpointer()"
            )
        warn_of_buckets(accelerator._models, "DistributedDataParallelKwargs(find_unused_parameters=True)")
        self._accelerator = accelerator
        self._epoch = 0
        self._in_epochs = False
        self._healthy = True  # as far as the micro-batches of the next step tell
        self._loaders = [PreparedLoader(loader) for loader in accelerator._dataloaders]
        self._knows_place = bool(accelerator._custom_objects) or any(
            isinstance(each, Stateful) for each in objects.values()
        )
        self._stepped: int | None = None
        engines = accelerator.distributed_type == "DEEPSPEED"
        prepared: dict[str, Any] = {
            "models": [EngineState(each) if engines else each for each in accelerator._models],
            "optimizers": [] if engines else list(accelerator._optimizers),
            "schedulers": [getattr(each, "scheduler", each) for each in accelerator._schedulers],
            "loaders": self._loaders,
            "custom": list(accelerator._custom_objects),
            "scaler": accelerator.scaler,
            "loop": _Loop(self),
        }
        if taken := sorted(objects.keys() & prepared.keys()):
            raise StateError(f"{', '.join(taken)}: AcceleratorCheckpointer has this name itself, choose another one")
        super().__init__(rng=rng, **{name: each for name, each in prepared.items() if each}, **objects)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs below `count` (without it, for ever), from the one that was interrupted."""
        self._in_epochs = True
        try:
            for epoch in itertools.count(self._epoch) if count is None else range(self._epoch, count):
                self._epoch = epoch
                yield epoch
                # A loop over further epochs may follow.
                self._epoch = epoch + 1
        finally:
            self._in_epochs = False

    def step(self, n: int | None = None, *, healthy: bool | torch.Tensor = True) -> None:
        """Record that a step of the optimizer is completed; where gradients were accumulated only, keep `healthy`.

        Raises:
            StateError: This is not in a loop over `epochs()`, or the second step of an epoch whose place in the data
                nothing knows, or as for a `Checkpointer`.
        """
        if not self._in_epochs:
            raise StateError(
                "step() outside of epochs(): after a restart the loop would begin with another epoch than the one that "
                "was interrupted. Write `for epoch in checkpointer.epochs(EPOCHS):` around it, for one epoch too"
            )
        self._healthy = self._healthy and bool(healthy)
        if not self._accelerator.sync_gradients:
            return
        if (
            self._stepped == self._epoch
            and not self._knows_place
            and not any(each.positioned.in_epoch for each in self._loaders)
        ):
            raise StateError(
                f"epoch {self._epoch} makes steps, and no prepared loader is iterated, so a restart would begin it at "
                "its beginning. Let Accelerate prepare what is iterated before AcceleratorCheckpointer(), and skip "
                "nothing of it by skip_first_batches(); or register, by name, an object that knows the place"
            )
        self._stepped = self._epoch
        is_healthy, self._healthy = self._healthy, True
        super().step(n, healthy=is_healthy)


class _Loop:
    """What an Accelerator and the loop count."""

    def __init__(self, checkpointer: AcceleratorCheckpointer) -> None:
        self._checkpointer = checkpointer

    def reshard(self, states: Mapping[int, Mapping[str, int]], rank: int, world_size: int) -> dict[str, int]:
        """A step ends a round of accumulation, of which another number of ranks may want others."""
        del rank, world_size
        first = states[min(states)]
        if any(state["epoch"] != first["epoch"] for state in states.values()):
            raise StateError("ranks were in different epochs")
        return {**first, "accumulated": 0}

    def state_dict(self) -> dict[str, int]:
        accelerator = self._checkpointer._accelerator
        saved = accelerator.project_configuration.iteration
        return {"accumulated": accelerator.step, "epoch": self._checkpointer._epoch, "saved": saved}

    def load_state_dict(self, state: dict[str, int]) -> None:
        accelerator = self._checkpointer._accelerator
        accelerator.step = state["accumulated"]
        accelerator.project_configuration.iteration = state["saved"]
        self._checkpointer._epoch = state["epoch"]


class PreparedLoader:
    """The position in a loader that Accelerate prepared.

    Attributes:
        positioned: Knows it; of this its `given` is how many batches of this epoch the loop was given.
    """

    def __init__(self, prepared: Any) -> None:
        """Let `prepared` iterate a `PositionedLoader`.

        Raises:
            ImportError: Accelerate is not installed.
            StateError: A position in it could not be brought back exactly.
        """
        kinds = framework("accelerate.data_loader")
        self._prepared = prepared
        if not isinstance(prepared.base_dataloader, PositionedLoader):
            made = type(prepared)
            if made not in (kinds.DataLoaderShard, kinds.DataLoaderDispatcher):
                raise StateError(
                    f"the position in a {made.__qualname__} is not known: let Accelerate prepare a DataLoader"
                )
            kind = _Dispatched if made is kinds.DataLoaderDispatcher else _ShardedLoader
            prepared.base_dataloader = kind(prepared, prepared.base_dataloader)
            # It says that it is of the class of the DataLoader inside, which nobody can set.
            vars(object)["__class__"].__set__(prepared, type(made.__name__, (_Asked, made), {}))
        self.positioned = prepared.base_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"iteration": self._prepared.iteration, "given": self.positioned.given, **self.positioned.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from there."""
        self._prepared.iteration = state["iteration"]
        self.positioned.go_to(state)

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the position of `rank` of `world_size`, of those that another number of ranks had, by rank.

        Raises:
            StateError: Some of the epoch would be lost or given twice.
        """
        made: dict[str, Any] = self.positioned.reshard(states, rank, world_size)
        return made


class _Asked:
    """What a prepared loader becomes: one whose first iterator after a restore goes on, whether it is used or not.

    Its iterators are generators, which do nothing until they are: `zip` does not begin the second of two if the first
    is at its end.
    """

    base_dataloader: PositionedLoader

    def __iter__(self) -> Iterator[Any]:
        self.base_dataloader.ask()
        return super().__iter__()  # type: ignore[misc,no-any-return]


class _ShardedLoader(PositionedLoader):
    """What a `DataLoaderShard` iterates, one batch ahead."""

    def __init__(self, prepared: Any, loader: Any) -> None:
        super().__init__(loader, ahead=1)
        self._prepared = prepared
        self._skipped = prepared.skip_batches

    @property
    def share(self) -> Share:
        # One process alone gets what there is from Accelerate as it is.
        alone = framework("accelerate.state").PartialState().num_processes == 1
        of_indices = type(self.loader.batch_sampler) is BatchSampler and not isinstance(
            self.loader.dataset, IterableDataset
        )
        if alone and of_indices:
            return 0, 1, False, True
        return share_of(self.loader) or UNKNOWN

    @property
    def given(self) -> int:
        at = self.position()["at"]
        if at is None:
            return 0
        return int(at.get("given", 0) + max(0, at["drawn"] - (not at["finished"]) - self._skipped))

    def __iter__(self) -> Iterator[Any]:
        at = self.position()["at"] if self.pending else None
        if at is not None and (at["finished"] or self.batches(at) == self.given):
            # Of an iterator that gives nothing it does not count the iteration.
            self._prepared.iteration += 1
        if at is not None and at.get("skipped") and self._prepared.remainder >= 0:
            # How many samples of the last round are no repetition, which gather_for_metrics() asks.
            left = len(self.loader.dataset) - at["skipped"]
            self._prepared.remainder = left % self._prepared.total_batch_size
        # Where it goes on, those are over.
        self._prepared.skip_batches = 0 if self.pending else self._skipped
        return super().__iter__()


class _Dispatched(PositionedLoader):
    """What a `DataLoaderDispatcher` iterates: on process 0 alone, for all, and one batch of theirs ahead.

    The first batch of an epoch may complete its last one, so going on is to let it have all again.
    """

    def __init__(self, prepared: Any, loader: Any) -> None:
        super().__init__(loader, whole=True)
        self._prepared = prepared
        self._skipped = prepared.skip_batches
        self._fetch = prepared._fetch_batches
        self._fetched = self._restored = 0
        prepared._fetch_batches = self._count

    @property
    def share(self) -> Share:
        return UNKNOWN

    @property
    def given(self) -> int:
        if self.pending:
            return self._restored
        return max(0, self._fetched - (not self._prepared.end_of_dataloader) - self._skipped) if self.in_epoch else 0

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        # Only process 0 draws from its generators.
        drawn = states[min(states)]["generators"]
        return super().reshard(
            {other: {**state, "generators": drawn} for other, state in states.items()}, rank, world_size
        )

    def go_to(self, position: Mapping[str, Any]) -> None:
        super().go_to(position)
        self._restored = position["given"]

    def __iter__(self) -> Iterator[Any]:
        self._prepared.skip_batches = self._skipped + (self.given if self.pending else 0)
        self._fetched = 0
        return super().__iter__()

    def _count(self, iterator: Any) -> Any:
        batch, information = self._fetch(iterator)
        self._fetched += information[0] is not None
        return batch, information


def launch() -> None:
    """Run `[OPTION…] SCRIPT [ARGUMENT…]`, as `accelerate launch` takes them, in this process.

    Accelerate's launcher passes its configuration on by environment variables alone. Ranks are resilient-run's.

    Raises:
        ImportError: Accelerate is not installed.
        SystemExit: An option is unknown.
    """
    command = framework("accelerate.commands.launch")
    prepare = framework("accelerate.utils.launch")
    asked, *_ = command._validate_launch_command(command.launch_command_parser().parse_args())
    asked.num_machines, asked.main_process_port = 1, 0
    if asked.use_deepspeed and not asked.cpu:
        _, environ = prepare.prepare_deepspeed_cmd_env(asked)
    elif asked.use_fsdp or asked.use_megatron_lm or asked.multi_gpu:
        environ = prepare.prepare_multi_gpu_env(asked)
    else:
        _, environ = prepare.prepare_simple_launcher_cmd_env(asked)
    os.environ.update({name: value for name, value in environ.items() if name not in _OURS})
    sys.argv = [asked.training_script, *asked.training_script_args]
    if asked.module:
        runpy.run_module(asked.training_script, run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.abspath(asked.training_script))
        runpy.run_path(asked.training_script, run_name="__main__")
