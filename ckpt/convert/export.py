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
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch

from ..errors import StateError, some
from ..format.manifest import Node, leaf_paths
from ..state.flat import FLAT, Range
from ..state.tree import entries, plain, unflatten
from .assembly import Assembly, Flat, Rule, has_key, is_leaf, is_optimizer, items_of
from .captures import Captures

Format = Literal["dcp", "torch"]

RANKS = "resilient_ranks"
"""Key below which a checkpoint has what is not the same on every rank: rank → values, generators, other leaves."""


_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

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
        StateError: Shards do not belong to one tensor, or are not the whole one.
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
        raise StateError(some(united.refused, between="; "))
    return united, tree


class _United(Assembly):
    """What all ranks have, together."""

    def __init__(self, captures: Captures, is_partial: bool) -> None:
        super().__init__(captures)
        self.unites, self.is_partial = True, is_partial
        self._rule = Rule(is_whole=True)
        self._differences: dict[int, dict[str, Node]] = {rank: {} for rank in self._saved}

    def tree(self) -> Node:
        of_ranks = {rank: entries(node) for rank, node in self._nodes("objects").items()}
        made: dict[str, Node] = {}
        for name in dict.fromkeys(name for objects in of_ranks.values() for name in objects):
            nodes = {rank: objects[name] for rank, objects in of_ranks.items() if name in objects}
            if all(has_key(node, FLAT) and not has_key(node, "masters") for node in nodes.values()):
                made[name] = self._fsdp1(name, nodes)
            elif is_optimizer(nodes[min(nodes)]) and any(
                key in self._flats[self._first] for group in self._trained(self._first, name) for key in group
            ):
                made[name] = self._optimizer(name, nodes)
            else:
                made[name] = self._walk(name, nodes, self._rule)
        ranks = []
        for rank, saved in self._saved.items():
            parts = {part: self._walk(part, {rank: saved[part]}, self._rule) for part in ("values", "rng")}
            own = {path: self._walk(path, {rank: node}, self._rule) for path, node in self._differences[rank].items()}
            ranks.append(_node({**parts, "objects": _node(own)}))
        return _node({**made, RANKS: ["d", [str(rank) for rank in self._saved], ranks]})

    def _trained(self, rank: int, name: str) -> list[list[str | None]]:
        """Return the names of the parameters in each group of an optimizer."""
        saved = self._saved[rank]
        found = plain(entries(saved["order"]).get(name, ["l"])) if "order" in saved else []
        return cast(list[list[str | None]], found)

    def _fsdp1(self, name: str, nodes: Mapping[int, Node]) -> Node:
        """The state of a module, with whole parameters by their own names."""
        made: dict[str, Node] = {}
        keys = dict.fromkeys(key for node in nodes.values() for key in entries(node) if key != FLAT)
        for key in keys:
            path = f"{name}.{key}"
            found = {rank: entries(node)[key] for rank, node in nodes.items() if has_key(node, key)}
            plain = key
            for wrapper in _WRAPPERS:
                plain = plain.replace(wrapper, "")
            made |= self._unfolded(path, found, path) or {plain: self._walk(path, found, self._rule)}
        return _node(made)

    def _unfolded(self, path: str, nodes: Mapping[int, Node], at: str, *, once: bool = False) -> dict[str, Node]:
        """Return the whole parameters, by name, of what lies as the flat tensor `at`; none if it does not."""
        held = []
        for rank, node in nodes.items():
            flat = self._flats[rank].get(at)
            if (
                flat is None
                or not is_leaf(node)
                or flat.shape != self._captures.ranks[rank].manifest.tensors[node[1]].shape
            ):
                return {}
            held.append((rank, node[1], flat.ranges))
        return {
            name: self._flat(path, held, Flat(index=0, shape=shape, ranges=whole), (path, name))
            for name, shape in self._parameters(at, once=once).items()
            for whole in [(Range(name, shape, 0, 0, prod(shape)),)]
        }

    def _parameters(self, at: str, *, once: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of which ranks have parts in the flat tensor `at`.

        `once`: one that has several names is there with its first.
        """
        found: dict[str, tuple[int, ...]] = {}
        for flats in self._flats.values():
            ranges = flats[at].ranges if at in flats else ()
            if isinstance(ranges, str):
                self.refused.append(f"{at}: {ranges}")
            else:
                places: dict[int, str] = {}
                several = [part for part in ranges if places.setdefault(part.at, part.name) == part.name or not once]
                found |= {part.name: part.shape for part in several}
        return found

    def _optimizer(self, name: str, nodes: Mapping[int, Node]) -> Node:
        """The state of an optimizer of flat tensors by parameters' names, as that which FSDP1 gathers."""
        held = {rank: items_of(node) for rank, node in nodes.items()}
        states = {rank: items_of(parts["state"]) for rank, parts in held.items()}
        state: dict[str, Node] = {}
        trained: list[list[Node]] = []
        first = min(nodes)
        of_ranks = {rank: parts["param_groups"] for rank, parts in held.items()}
        for number, keys in enumerate(self._trained(first, name)):
            trained.append([])
            for position, key in enumerate(keys):
                if key not in self._flats[first]:
                    self.refused.append(f"{name}: {key or 'a parameter'} is none of FSDP1's, beside some that are")
                    continue
                parameters = self._parameters(key, once=True)
                trained[-1] += parameters
                found = {}
                for rank, groups in of_ranks.items():
                    place = items_of(groups[1 + number])["params"][1 + position]
                    if place in states[rank]:
                        found[rank] = items_of(states[rank][place])
                for entry in dict.fromkeys(entry for each in found.values() for entry in each):
                    several = {rank: each[entry] for rank, each in found.items() if entry in each}
                    path = f"{name}.state.{key}.{entry}"
                    parts = self._unfolded(path, several, key, once=True)
                    parts = parts or dict.fromkeys(parameters, self._walk(path, several, self._rule))
                    for parameter, node in parts.items():
                        state.setdefault(parameter, ["d", [], []])[1].append(entry)
                        state[parameter][2].append(node)
        groups = self._groups(f"{name}.param_groups", of_ranks, trained, self._rule)
        return _node({"state": _node(state), "param_groups": groups})

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
