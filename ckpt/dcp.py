"""`torch.distributed.checkpoint` over the memory of the hosts: what `dcp.save` writes and `dcp.load` reads is a slot.

Every rank keeps all that it has in its own slot, as a `Checkpointer` does: DCP's deduplication would make a rank need
the memory of others to come back. Nothing that is read is unpickled.
"""

import io
import os
from collections.abc import Callable
from math import prod
from typing import Any, Final, Self

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .checkpointer import Checkpointer
from .convert.assembly import opened, read
from .convert.captures import Captures, in_memory
from .convert.export import unite
from .convert.payload import Made
from .convert.pieces import missing
from .errors import DaemonError, StateError
from .format.pair import Pair, is_import
from .format.slot import Slot
from .link.env import TrainerEnv
from .state.state import TrainingState
from .state.tree import Flattener

_CAPTURE_S: Final = 600.0
_COMMIT_S: Final = 600.0


class MemoryTier:
    """This rank's place in the memory of its hosts, for DCP; one for each process, in place of a `Checkpointer`.

    Example:
        ```
        with MemoryTier() as memory:
            if memory.step:
                dcp.load(state, storage_reader=MemoryReader(memory))
            for n in range(memory.step, steps):
                train_one_step()
                dcp.save(state, storage_writer=MemoryWriter(memory, step=n + 1))
        ```
    """

    def __init__(self) -> None:
        """Attach to the daemon of this host.

        Raises:
            DaemonError: This process was not started by resilient-run, or the daemon is away or refused.
        """
        self._rank = _RankCheckpointer()

    @property
    def step(self) -> int:
        """Completed steps of the newest save or, before the first one, of what is there to load; 0 if nothing is."""
        return self._rank.newest

    def close(self) -> None:
        """Detach; also done at the end of the process, and by `with`."""
        self._rank.close()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()


class ItemReader(StorageReader):
    """Reads captures, for any sharding of which they hold all parts."""

    def __init__(self, open_: Callable[[], Captures], *, is_partial: bool = False) -> None:
        """Take `open_`, which is called once for each load; `is_partial`: its captures are not of all ranks."""
        self._open = open_
        self._is_partial = is_partial
        self._items: dict[str, Any] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP cannot choose this reader by the name of a checkpoint."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; the name says nothing here."""
        self._items = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what there is to load.

        Raises:
            CheckpointError: It cannot be read.
        """
        self._captures = self._open()
        united, tree = unite(self._captures, is_partial=self._is_partial)
        items: dict[str, Any] = {}

        def visit(path: tuple[Any, ...], value: Any) -> None:
            items[".".join(map(str, path))] = value

        traverse_state_dict(opened(self._captures, tree, united.made), visit, lambda value: isinstance(value, Made))
        self._items = items
        return Metadata(state_dict_metadata={name: _describe(item) for name, item in items.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy everything in `plan` to its place.

        Raises:
            StateError: Parts are not there; nothing was loaded.
            RestoreError: Something is damaged; what was read before it is loaded.
        """
        self._check_parts(plan, planner)
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        for item, found in zip(tensors, read(self._captures, map(self._part, tensors)), strict=True):
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                # DCP takes an object that is no tensor as a pickle only; this one is of plain data made here.
                data = io.BytesIO()
                torch.save(_read_all(self._captures, self._items[item.storage_index.fqn]), data)
                data.seek(0)
                planner.load_bytes(item, data)
        self._items = {}
        del self._captures
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: ReadItem) -> Made:
        assert item.storage_index.offset is not None
        made: Made = self._items[item.storage_index.fqn]
        begins = zip(item.storage_index.offset, item.storage_offsets, strict=True)
        return made.box([sum(pair) for pair in begins], item.lengths)

    def _check_parts(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Check what DCP does not: that the parts that are there fill every tensor of the plan."""
        partial = {name for name, item in self._items.items() if isinstance(item, Made) and _holes(name, item)}
        if not partial:
            return
        if not isinstance(planner, DefaultLoadPlanner):
            raise StateError(f"{type(planner).__name__}: parts of a state load with a DefaultLoadPlanner only")
        found: dict[str, int] = {}
        for item in plan.items:
            found[item.dest_index.fqn] = found.get(item.dest_index.fqn, 0) + prod(item.lengths)
        for name in sorted(partial & planner.state_dict.keys()):
            target = planner.state_dict[name]
            local = target.to_local() if hasattr(target, "to_local") else target
            if found.get(name, 0) != local.numel():
                raise StateError(
                    f"{name}: this rank holds {found.get(name, 0)} of the {local.numel()} elements that it must load; "
                    "shard the state as it was when it was saved, or load with PersistedReader"
                )


class MemoryReader(ItemReader):
    """Reads what all ranks agreed to continue from, out of this rank's own slot.

    It may load as often as you like before the first save, in the world size and sharding of the save.
    """

    def __init__(self, memory: MemoryTier) -> None:
        """Read from `memory`."""
        super().__init__(memory._rank.restored, is_partial=True)


class MemoryWriter(StorageWriter, AsyncStager):
    """Keeps one step; `dcp.save` returns when it is committed (`DaemonError` after 600 s). Each save needs a new one.

    With `dcp.async_save` it is the stager too: the state is copied to memory of this host (page-locked if it is on a
    GPU) before `async_save` returns, and training goes on while that is moved to the slot and committed. Wait for its
    future before the next save.
    """

    def __init__(self, memory: MemoryTier, *, step: int) -> None:
        """Keep the state after `step` steps, more than at the last save and the same on every rank."""
        self._rank = memory._rank
        self._step = step
        self._captured = False
        self._used = False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP cannot choose this writer by the name of a checkpoint."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin the save; the name says nothing here.

        Raises:
            StateError: This writer has saved already.
        """
        if self._used:
            raise StateError(f"this MemoryWriter has saved step {self._step} already: make one for each save")
        self._used = True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, and return it as it was: of that, only names and shapes are looked at from now on.

        Raises:
            StateError: It holds something that cannot be captured.
            MemoryBudgetError: It does not fit in the memory budget of the host.
        """
        self._capture(unflatten_state_dict(*flatten_state_dict(state_dict)))
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing: the state is copied already."""

    def close(self) -> None:
        """Do nothing: the memory belongs to the `MemoryTier`."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Capture the whole state of this rank, unless it is staged already, and wait until the slot is complete.

        Raises:
            StateError: It holds something that cannot be captured, or the planner is another than DCP's own.
            MemoryBudgetError: It does not fit in the memory budget of the host.
            DaemonError: It was not captured.
        """
        if not self._captured:
            if type(planner) is not DefaultSavePlanner:
                raise StateError(f"{type(planner).__name__}: the memory tier saves with a DefaultSavePlanner only")
            state = planner.state_dict
            self._capture(unflatten_state_dict(state, planner.mappings) if planner.flatten_state_dict else state)
        if not self._rank.wait(_CAPTURE_S):
            raise DaemonError(f"step {self._step} was not captured within {_CAPTURE_S:.0f} s: see resilientd's log")
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Return when the step is committed.

        Raises:
            DaemonError: That takes longer than 600 s.
        """
        if not self._rank.wait_committed(_COMMIT_S):
            raise DaemonError(
                f"step {self._step} is captured, but was not committed within {_COMMIT_S:.0f} s: "
                "see `resilientctl status`"
            )

    def _capture(self, state: dict[str, Any]) -> None:
        self._rank.capture(self._step, state)
        self._captured = True


class _RankCheckpointer(Checkpointer):
    """A Checkpointer whose state is given to it at each step, and returned by `restored` as data."""

    def __init__(self) -> None:
        if TrainerEnv.from_environ(os.environ) is None:
            raise DaemonError("there is no memory tier: start this script with `resilient-run` in place of `torchrun`")
        super().__init__(rng=False)
        if self._link is None:
            raise DaemonError("there is no memory tier: no daemon; start resilientd, or let resilient-run start one")
        self._captures: Captures | None = None

    @property
    def newest(self) -> int:
        return max(self._step, 0 if self._plan is None else self._plan[1])

    def restored(self) -> Captures:
        if self._plan is None:
            raise StateError("there is nothing to load in memory: call dcp.load only if MemoryTier.step is not 0")
        if not self._restored:
            self.restore()
        if self._captures is None:
            raise StateError("what was restored is gone after the first save: load before it")
        return self._captures

    def capture(self, step: int, state: dict[str, Any]) -> None:
        if self._link is None or self._capturer is None:
            raise DaemonError("the MemoryTier is closed")
        if step <= self.newest:
            raise StateError(f"step {step} after step {self.newest}: steps of saves must increase")
        if self._plan is not None and not self._restored:
            raise StateError(f"a save before dcp.load: this run continues from step {self._plan[1]}")
        self._capturer.wait(_CAPTURE_S)
        self._step, self._captures = step, None
        self._link.notify("progress", step=step)
        self._capturer.submit(step, _Given(state), eager=True)

    def wait_committed(self, timeout_s: float) -> bool:
        if self._capturer is None or self._env is None or not self._capturer.wait_decided(timeout_s):
            return False
        return self.watermark is not None and self.watermark >= Pair(self._env.generation, self._step)

    def _check_made(self, plan: Pair) -> None:
        if is_import(plan):
            raise StateError(
                f"step {self.newest} is an import, which a Checkpointer begins with: load the DCP checkpoint that it "
                "was made of with dcp.load itself, and start a run id without it"
            )
        raise StateError(
            f"step {plan[1]} is of {self._made_by} ranks, and a MemoryTier loads what this rank itself has saved: "
            "start as many ranks as before, or load an export of it, or PersistedReader, with dcp.load in a new run id"
        )

    def _load(self, slot: Slot) -> None:
        header = slot.header()
        self._check(header)
        # The slot is not ours any more after this.
        self._captures = in_memory({header.rank: memoryview(bytes(slot.buffer[: header.used_bytes]))}, header)


class _Given(TrainingState):
    """A state dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__({}, rng=False)
        self._given = state

    def flatten(self) -> Flattener:
        return Flattener({"objects": self._given, "values": {}, "rng": None})


def _read_all(captures: Captures, value: Any) -> Any:
    """Return `value`, of which DCP makes one item, as it does of a tuple, with the tensors in it."""
    if isinstance(value, Made):
        return next(read(captures, [value]))
    if isinstance(value, dict):
        return type(value)({key: _read_all(captures, item) for key, item in value.items()})
    return type(value)(_read_all(captures, item) for item in value) if type(value) in (list, tuple) else value


def _holes(name: str, made: Made) -> int:
    return missing(name, made.spec.shape, [(piece.offset, piece.size) for piece in made.regions[0].pieces])


def _describe(item: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(item, Made):
        return BytesStorageMetadata()
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(piece.offset), sizes=torch.Size(piece.size))
        for piece in item.regions[0].pieces
    ]
    properties = TensorProperties(dtype=getattr(torch, item.spec.dtype))
    return TensorStorageMetadata(properties=properties, size=torch.Size(item.spec.shape), chunks=chunks)
