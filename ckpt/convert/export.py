"""Turning the slots of all ranks of one step into a checkpoint that plain PyTorch loads.

Shards of DTensors become whole tensors, and state that is the same on every rank is kept once.
"""

import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from ..errors import StateError
from ..format.manifest import Node, leaf_paths
from ..state.flat import FLAT
from ..state.tree import entries, unflatten
from .assembly import Assembly, Rule, has_key
from .captures import Captures

_SHOWN: Final = 5

Format = Literal["dcp", "torch"]

RANKS = "resilient_ranks"
"""Key below which a checkpoint has what is not the same on every rank: rank → values, generators, other leaves."""


STEP = "resilient_step"
"""Key below which a checkpoint has its step."""


def export(captures: Captures, to: Path, format_: Format) -> None:
    """Write the state in `captures` to `to`; nothing is left there by an export that fails.

    Args:
        captures: All ranks of one step.
        to: Directory of a DCP checkpoint, or the file of `torch.save`, which `weights_only=True` loads.
        format_: Which of the two.

    Raises:
        SlotError: A slot does not hold a state of this version.
        RestoreError: Nobody has a verified copy of something.
        StateError: Shards cannot be put together, or are not the whole tensor.
        OSError: `to` cannot be written, or is not free (`is_free`).
    """
    state = gather(captures)
    state[STEP] = captures.pair[1]
    if format_ == "torch":
        # Not through a link that another user has put there.
        with open(to, "xb") as file, _undone(to, to.unlink):
            torch.save(_plain(state), file)
        return
    undo: Callable[[], object] = partial(shutil.rmtree, to)
    try:
        to.mkdir(parents=True)
    except FileExistsError:
        if not is_free(to):
            raise
        undo = partial(_clear, to)
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings(), _undone(to, undo):
        # It warns that this is a single process; that is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=to, no_dist=True)


@contextmanager
def _undone(to: Path, undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block, which writes `to`, raises; any failure but an interrupt becomes an OSError."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            undo()
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        # DCP's own, which is no Exception, ends with what went wrong.
        reason = str(error).strip().rpartition("\n")[2]
        raise OSError(f"{to} cannot be written, and nothing of it is left: {reason}") from error


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def is_free(to: Path) -> bool:
    """Tell whether nothing is at `to` but maybe an empty directory of this user."""
    try:
        about = to.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not any(to.iterdir())


def gather(captures: Captures) -> dict[str, Any]:
    """Return the registered objects' states by name, whole tensors in place of shards, and `RANKS`.

    Of what differs between ranks the lowest rank's is in the object's place, and the other ranks' below `RANKS`.

    Raises:
        StateError: Shards do not belong to one tensor, or are not the whole one, or are those of FSDP1.
        SlotError: A slot does not hold the state of a Checkpointer.
        RestoreError: Nobody has a verified copy of something.
    """
    united, tree = unite(captures)
    return dict(unflatten(tree, united.filled(tree).leaf))


def unite(captures: Captures, *, is_partial: bool = False) -> tuple[Assembly, Node]:
    """Return what `gather` does, not read yet; `is_partial`: parts of tensors may be missing."""
    united = _United(captures, is_partial)
    tree = united.tree()
    if united.refused:
        raise StateError("; ".join(united.refused[:_SHOWN]))
    return united, tree


class _United(Assembly):
    """What all ranks have, together."""

    def __init__(self, captures: Captures, is_partial: bool) -> None:
        super().__init__(captures)
        self.unites, self.is_partial = True, is_partial
        self._rule = Rule(is_whole=True)
        self._differences: dict[int, dict[str, Node]] = {rank: {} for rank in self._saved}

    def tree(self) -> Node:
        objects = self._nodes("objects")
        for name in (name for node in objects.values() for name, held in entries(node).items() if has_key(held, FLAT)):
            self.refused.append(
                f"{name} is in shards of FSDP1, which do not tell how to put them together: let the script save it "
                "under FullyShardedDataParallel.state_dict_type(), or train with fully_shard (FSDP2)"
            )
        _, keys, children = self._walk("", objects, self._rule)
        ranks = []
        for rank, saved in self._saved.items():
            parts = {part: self._walk(part, {rank: saved[part]}, self._rule) for part in ("values", "rng")}
            own = {path: self._walk(path, {rank: node}, self._rule) for path, node in self._differences[rank].items()}
            ranks.append(_node({**parts, "objects": _node(own)}))
        return ["d", [*keys, RANKS], [*children, ["d", [str(rank) for rank in self._saved], ranks]]]

    def _differs(self, path: str, rule: Rule, others: Mapping[int, Node]) -> None:
        for rank, node in others.items():
            if any(self._captures.ranks[rank].manifest.tensors[index].shard for index in leaf_paths(node).values()):
                self.refused.append(f"{path}: rank {rank} holds a shard where another rank has something else")
            self._differences[rank][path] = node


def _node(children: dict[str, Node]) -> Node:
    return ["d", list(children), list(children.values())]


def _plain(value: Any) -> Any:
    """Return `value` with numpy's types replaced by torch's and Python's, which `weights_only=True` allows."""
    match value:
        case dict():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
        case np.ndarray() if value.dtype.kind in "biufc":
            return torch.from_numpy(value)
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case torch.Tensor():
            # A view would take the whole slot into the file.
            return value.clone()
    return value
