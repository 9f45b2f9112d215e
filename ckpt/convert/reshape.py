"""The slot that a rank would have made, out of those of another number of ranks: a manifest and a payload to load.

What it has of tensors that are sharded is where the registered objects have their shards now. All else must be the same
on all ranks; where it is not, each kind of object has a rule (`_Reshaping`), and what has none is refused by name. The
result is loaded as any slot is: exactly, or not at all.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NoReturn

import torch

from ..errors import SlotError, StateError
from ..format.manifest import Manifest, Node, TensorSpec, leaf_paths, plan_payload
from ..state.held import FSDP1, keyed_parameters
from ..state.rng import derived_rng
from ..state.state import TrainingState
from ..state.tree import OPTIONAL_PARTS, Flattener, entries, shard_spec, unflatten
from ..state.unsaved import parse as parse_unsaved
from .captures import Captures
from .export import held_leaf
from .payload import Made, Piece, fill
from .pieces import Box, missing, place

_SHOWN: Final = 5
_BUFFERS: Final = "buffers"
_EXPORT: Final = "start as many ranks as before, or export the step (resilientctl export) and load that in a new run id"
_RESHARD: Final = (
    "Give the object a method reshard(states, rank, world_size), which returns what this rank is to load of the states "
    "of all ranks, or start as many ranks as before"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshaped:
    """What one rank is to load, as a slot has it.

    Attributes:
        manifest: The manifest.
        payload: The payload, uint8 on the CPU.
        told: What a person should know.
    """

    manifest: Manifest
    payload: torch.Tensor
    told: list[str]


def reshape(state: TrainingState, captures: Captures, *, rank: int, world_size: int) -> Reshaped:
    """Return what `rank` of `world_size` is to load of `captures`; nothing is loaded yet.

    Raises:
        StateError: Something has no rule, or does not fit; the message names it.
        SlotError: A slot does not hold the state of a Checkpointer.
        RestoreError: Nobody has a verified copy of something.
    """
    current = state.flatten()
    while True:
        # What has to be compared and is not here yet counts as equal, until it is.
        reshaping = _Reshaping(state, current, captures, rank, world_size)
        tree = reshaping.tree()
        if not captures.fetch():
            break
    if reshaping.refused:
        raise StateError(
            f"the checkpoint of {len(captures.ranks)} ranks does not fit {world_size}, nothing was loaded: "
            f"{'; '.join(reshaping.refused[:_SHOWN])}"
        )
    return reshaping.filled(tree)


class _Reshaping:
    """One attempt to make the tree of a rank.

    Attributes:
        refused: What does not fit, and what to do about it.
        told: What a person should know.
    """

    def __init__(
        self, state: TrainingState, current: Flattener, captures: Captures, rank: int, world_size: int
    ) -> None:
        self.refused: list[str] = []
        self.told: list[str] = []
        self._state = state
        self._captures = captures
        self._rank = rank
        self._world_size = world_size
        self._shards = {
            path.removeprefix("objects."): current.shards[index]
            for path, index in leaf_paths(current.node).items()
            if index in current.shards
        }
        self._order = entries(current.node)["order"]
        self._parameters = keyed_parameters(state.modules)
        self._saved = {each: entries(captured.manifest.tree) for each, captured in captures.ranks.items()}
        for each, parts in self._saved.items():
            if parts.keys() - OPTIONAL_PARTS != {"objects", "values", "rng"}:
                raise SlotError(f"the manifest of rank {each} has the parts {list(parts)}, not objects, values and rng")
        self._first = min(self._saved)
        self._made: list[Made] = []
        self._known: dict[Hashable, int] = {}
        self._origins: dict[tuple[int, int], int] = {}
        self._others: list[str] = []  # of which the lowest rank's is taken
        self._rebuilt: set[str] = set()

    def tree(self) -> Node:
        """Return the tree; the leaves in it are `_made`."""
        saved = self._saved[self._first]
        made: dict[str, Node] = {"objects": self._objects()}
        made["values"] = self._walk("values", self._nodes("values"), _Rule(shards=self._shards))
        made["rng"] = self._rng()
        made |= {name: saved[name] for name in saved if name not in made}
        if "order" in saved:
            made["order"] = self._order
        if "unsaved" in saved:
            made["unsaved"] = Flattener(self._unsaved()).node
        for name in ("shared", "kinds"):
            if name in saved:
                made[name] = Flattener(self._places(name, list(saved))).node
        if self._others:
            more = f" and {len(self._others) - _SHOWN} more" if len(self._others) > _SHOWN else ""
            self.told.append(
                f"ranks had {', '.join(self._others[:_SHOWN])}{more} differently, and all go on with what rank "
                f"{self._first} had"
            )
        return ["d", list(saved), [made[name] for name in saved]]

    def filled(self, tree: Node) -> Reshaped:
        """Return what is to be loaded, which is read now."""
        leaves = [replace(each, spec=self._placed(each.spec)) for each in self._made]
        specs = tuple(each.spec for each in leaves)
        layout = plan_payload(specs)
        payload = fill(self._captures, leaves, layout)
        manifest = Manifest(tree=tree, tensors=specs, offsets=layout.offsets)
        return Reshaped(manifest=manifest, payload=payload, told=self.told)

    # Parts of the tree.

    def _objects(self) -> Node:
        found = {rank: entries(parts["objects"]) for rank, parts in self._saved.items()}
        names = list(dict.fromkeys(name for objects in found.values() for name in objects))
        children = []
        for name in names:
            nodes = {rank: objects[name] for rank, objects in found.items() if name in objects}
            if len(nodes) < len(found):
                self.refused.append(f"{name} is in the checkpoint of only some ranks: {_EXPORT}")
            item = self._state.objects.get(name)
            # FSDP2's modules have a method of that name.
            if hasattr(type(item), "reshard") and not isinstance(item, torch.nn.Module):
                children.append(self._resharded(name, item, nodes))
            elif _has_key(nodes[min(nodes)], FSDP1):
                self.refused.append(
                    f"{name} is in shards of FSDP1, which do not tell how to put them together: train with "
                    f"fully_shard (FSDP2), or {_EXPORT}"
                )
                children.append(nodes[min(nodes)])
            elif name in self._state.apart:
                self.refused.append(f"{name} differs between ranks on purpose. {_RESHARD}")
                children.append(nodes[min(nodes)])
            elif isinstance(item, torch.nn.Module):
                children.append(self._module(name, nodes))
            elif name in self._state.held and all(map(_is_optimizer, nodes.values())):
                children.append(self._optimizer(name, nodes))
            else:
                children.append(self._walk(name, nodes, _Rule(shards=self._shards)))
        return ["d", names, children]

    def _nodes(self, part: str) -> dict[int, Node]:
        return {rank: parts[part] for rank, parts in self._saved.items()}

    def _module(self, name: str, nodes: dict[int, Node]) -> Node:
        """Buffers may differ, as those of BatchNorm do; ranks may have different parts of the model."""
        states = {rank: entries(node) for rank, node in nodes.items()}
        keys = list(dict.fromkeys(key for state in states.values() for key in state))
        if any(state.keys() != set(keys) for state in states.values()):
            self._rebuilt.add(name)
        rule = _Rule(shards=self._shards, is_whole=True, may_differ=lambda path: path not in self._parameters)
        return [
            "d",
            keys,
            [
                self._walk(f"{name}.{key}", {rank: state[key] for rank, state in states.items() if key in state}, rule)
                for key in keys
            ],
        ]

    def _optimizer(self, name: str, nodes: dict[int, Node]) -> Node:
        """Each parameter's state is where its name is, in the ranks that have it and in this one."""
        states = {rank: _entries(node) for rank, node in nodes.items()}
        orders = {
            rank: unflatten(entries(parts["order"]).get(name, ["l"]), _no_leaf) if "order" in parts else []
            for rank, parts in self._saved.items()
        }
        before = {rank: _numbers(states[rank]["param_groups"], orders[rank]) for rank in states}
        parameters = [group["params"] for group in self._state.held[name][0].param_groups]
        counts = {len(state["param_groups"]) - 1 for state in states.values()}
        named = unflatten(entries(self._order)[name], _no_leaf)[: len(parameters)]
        now = _keys([len(group) for group in parameters], named)
        if any(found.keys() != before[self._first].keys() for found in before.values()):
            lacking = [key for key in now if not any(key in found for found in before.values())]
            self._rebuilt.add(name)
        else:
            lacking = [key for key in [*now, *before[self._first]] if (key in now) != (key in before[self._first])]
            lacking += [key for key in now if key not in lacking and now[key][0] != before[self._first][key][0]]
            if [number for _, number in before[self._first].values()] != [
                before[self._first][key][1] for key in now if key in before[self._first]
            ]:
                self._rebuilt.add(name)
        if lacking or counts != {len(parameters)}:
            self.refused.append(
                f"{name}: the parameter groups are others than in the checkpoint"
                + (f", as with {lacking[0][0]}" if lacking else "")
                + ": make the optimizer of the same parameters in the same groups"
            )
            return nodes[self._first]
        tensors = dict(zip(now, (parameter for group in parameters for parameter in group), strict=True))
        kept: dict[int, Node] = {}
        for number, key in enumerate(now):
            found = {
                rank: held[old]
                for rank, state in states.items()
                if key in before[rank] and (old := before[rank][key][1]) in (held := _by_number(state["state"]))
            }
            if found:
                rule = _Rule(like=tensors[key])
                kept[number] = self._walk(f"{name}.state.{key[0] if key[0] is not None else number}", found, rule)
        made = {}
        for key in states[self._first]:
            path, of_ranks = f"{name}.{key}", {rank: state[key] for rank, state in states.items() if key in state}
            if key == "state":
                others = {rank: _without_numbers(node) for rank, node in of_ranks.items()}
                rest = self._walk(path, others, _Rule())
                if rest[1]:
                    self._rebuilt.add(name)
                # In the order that it had: places in the tree are counted.
                numbers = sorted(kept, key=[*_by_number(of_ranks[self._first]), *kept].index)
                made[key] = ["d", [*numbers, *rest[1]], [*(kept[number] for number in numbers), *rest[2]]]
            elif key == "param_groups":
                made[key] = self._groups(path, of_ranks, [len(group) for group in parameters])
            else:
                made[key] = self._walk(path, of_ranks, _Rule())
        return ["d", list(made), list(made.values())]

    def _groups(self, path: str, nodes: dict[int, Node], sizes: list[int]) -> Node:
        """Return the parameter groups with the options that they had and the numbers that parameters have now."""
        groups = []
        for number, size in enumerate(sizes):
            begin = sum(sizes[:number])
            options = {rank: _without(node[1 + number], "params") for rank, node in nodes.items()}
            made = self._walk(f"{path}.{number}", options, _Rule())
            # Where it was: places in the tree are counted.
            at = nodes[self._first][1 + number][1].index("params")
            keys, values = list(made[1]), list(made[2])
            keys.insert(at, "params")
            values.insert(at, ["l", *range(begin, begin + size)])
            groups.append(["d", keys, values])
        return ["l", *groups]

    def _resharded(self, name: str, item: Any, nodes: dict[int, Node]) -> Node:
        self._rebuilt.add(name)
        try:
            states = {rank: self._value(rank, node) for rank, node in sorted(nodes.items())}
            if not any(each is _LATER for each in states.values()):
                flat = Flattener({name: item.reshard(states, self._rank, self._world_size)})
                if flat.shards:
                    raise StateError("reshard() returned a DTensor: return plain tensors")
                return self._given(flat, entries(flat.node)[name])
        except StateError as error:
            self.refused.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 - a method of the script may raise anything
            self.refused.append(f"{name}: its reshard() failed: {type(error).__name__}: {error}")
        return nodes[min(nodes)]

    def _value(self, rank: int, node: Node) -> Any:
        """Return what `node` of a rank is, `_LATER` if it is not all here."""
        later = False

        def leaf(index: int) -> Any:
            nonlocal later
            spec, data = self._captures.ranks[rank].manifest.tensors[index], self._bytes(rank, index)
            later = later or data is None
            if spec.shard is not None:
                raise StateError("reshard() gets no shards of tensors: let state_dict() leave them out")
            return None if data is None else held_leaf(spec, torch.tensor(bytearray(data), dtype=torch.uint8))

        value = unflatten(node, leaf)
        return _LATER if later else value

    def _rng(self) -> Node:
        """A rank goes on with its own generators; one that there was not derives its own from those of the first."""
        if self._world_size > len(self._saved) and self._saved[self._first]["rng"] is not None:
            self.told.append(
                f"ranks from {len(self._saved)} on are new, and their random number generators begin with what is "
                "derived from those of rank 0"
            )
        if self._rank in self._saved:
            return self._walk("rng", {self._rank: self._saved[self._rank]["rng"]}, _Rule())
        state = self._value(self._first, self._saved[self._first]["rng"])
        if state is None or state is _LATER:
            return None
        flat = Flattener({"rng": derived_rng(state, self._rank)})
        return self._given(flat, entries(flat.node)["rng"])

    def _unsaved(self) -> dict[str, dict[str, str]]:
        """Return the digests of what no state has, which ranks must have had alike to be compared with what is now."""
        found = [parse_unsaved(parts["unsaved"]) for parts in self._saved.values() if "unsaved" in parts]
        kept: dict[str, dict[str, str]] = {}
        for kind in dict.fromkeys(kind for each in found for kind in each):
            kept[kind] = {}
            for path in dict.fromkeys(path for each in found for path in each.get(kind, {})):
                digests = {each[kind][path] for each in found if path in each.get(kind, {})}
                if len(digests) == 1:
                    kept[kind][path] = digests.pop()
                elif kind != _BUFFERS:
                    self.refused.append(
                        f"{path} is in no registered object's state as it is, and ranks have had it differently: "
                        f"{_EXPORT}"
                    )
        return kept

    def _places(self, name: str, parts: Sequence[str]) -> Any:
        """Return the places in the tree that the first rank's manifest has, without those in objects made anew."""
        objects = list(entries(self._saved[self._first]["objects"]))
        rebuilt: set[tuple[int, ...]] = {(parts.index("rng"),)}
        rebuilt |= {(parts.index("objects"), objects.index(each)) for each in self._rebuilt if each in objects}
        found = unflatten(self._saved[self._first][name], _no_leaf)
        if name == "shared":
            return [places for places in found if not any(_is_below(place_, rebuilt) for place_ in places)]
        return [[place_, kind] for place_, kind in found if not _is_below(place_, rebuilt)]

    # Nodes and leaves.

    def _walk(self, path: str, nodes: Mapping[int, Node], rule: "_Rule") -> Node:
        """Return one node for those that ranks have at `path`."""
        first = min(nodes)
        node = nodes[first]
        tags = {each[0] if isinstance(each, list) else None for each in nodes.values()}
        tag = tags.pop() if len(tags) == 1 else None
        if tag == "x":
            return self._leaf(path, {rank: each[1] for rank, each in nodes.items()}, rule)
        if tag in ("l", "t") and len({len(each) for each in nodes.values()}) == 1:
            return [
                tag,
                *(
                    self._walk(f"{path}.{number}", {rank: each[1 + number] for rank, each in nodes.items()}, rule)
                    for number in range(len(node) - 1)
                ),
            ]
        if tag in ("d", "C") and all(repr(each[1]) == repr(node[1]) for each in nodes.values()):
            return [
                tag,
                node[1],
                [
                    self._walk(f"{path}.{key}", {rank: each[2][number] for rank, each in nodes.items()}, rule)
                    for number, key in enumerate(node[1])
                ],
            ]
        if all(repr(each) == repr(node) for each in nodes.values()):
            return node
        self._differs(path, rule)
        return self._walk(path, {first: node}, rule) if isinstance(node, list) else node

    def _differs(self, path: str, rule: "_Rule") -> None:
        if rule.may_differ is not None and rule.may_differ(path):
            self._others.append(path)
        else:
            self.refused.append(f"ranks have {path} differently. {_RESHARD}")

    def _leaf(self, path: str, indices: Mapping[int, int], rule: "_Rule") -> Node:
        first = min(indices)
        specs = {rank: self._captures.ranks[rank].manifest.tensors[index] for rank, index in indices.items()}
        spec, shape = specs[first], _shape(specs[first])
        others = {rank: (each.kind, each.dtype, _shape(each), each.shard is None) for rank, each in specs.items()}
        if any(other != others[first] for other in others.values()):
            self._differs(path, rule)
            return self._leaf(path, {first: indices[first]}, rule)
        target = rule.target(path, shape)
        if spec.shard is None and (target is None or not shape):
            return self._plain(path, indices, spec, rule)
        if target is None and not rule.is_whole_here(shape):
            self.refused.append(f"{path} is a shard in the checkpoint, and no DTensor of its shape is there now")
            return ["x", self._make(first, indices[first], Made(spec=spec))]
        try:
            return self._part(path, indices, specs, target)
        except StateError as error:
            self.refused.append(str(error))
            return ["x", self._make(first, indices[first], Made(spec=spec))]

    def _plain(self, path: str, indices: Mapping[int, int], spec: TensorSpec, rule: "_Rule") -> Node:
        """A leaf of which each rank has all: any one's, if it is the same on all."""
        first = min(indices)
        may_differ = rule.may_differ is not None and rule.may_differ(path)
        if may_differ and indices[first] not in self._captures.ranks[first].digests:
            # A counter of BatchNorm: to compare it would be to read its surroundings from all ranks.
            equal = len(indices) == 1
        else:
            equal = all(self._same((first, indices[first]), (rank, index)) for rank, index in indices.items())
            if not equal:
                self._differs(path, rule)
        rank = min(indices, key=self._distance) if equal else first
        piece = Piece(rank=rank, index=indices[rank], offset=(0,) * len(spec.shape), size=spec.shape)
        made = Made(spec=spec, pieces=(piece,), offset=piece.offset, size=piece.size)
        return ["x", self._make(first, indices[first], made)]

    def _part(self, path: str, indices: Mapping[int, int], specs: Mapping[int, TensorSpec], target: Any) -> Node:
        """The part of a sharded tensor that this rank has now; all of it if `target` is None.

        Raises:
            StateError: Shards do not belong to one tensor, or do not fit what is there now.
        """
        first = min(indices)
        spec, shape = specs[first], _shape(specs[first])
        parts: dict[tuple[int, ...], Piece] = {}
        for rank in sorted(indices, key=self._distance):
            shard, size = specs[rank].shard, specs[rank].shape
            offset: tuple[int, ...] = (0,) * len(shape)
            if shard is not None:
                offset, size = place(path, shard, rank, size)
            if 0 in size:
                continue
            piece = Piece(rank=rank, index=indices[rank], offset=offset, size=size)
            known = parts.setdefault(offset, piece)
            if known.size != size or not self._same((known.rank, known.index), (rank, piece.index)):
                raise StateError(f"{path}: ranks {known.rank} and {rank} hold different values of the same part")
        if holes := missing(path, shape, [(piece.offset, piece.size) for piece in parts.values()]):
            raise StateError(f"{path}: no rank holds {holes} of its {prod(shape)} elements")
        box: Box = ((0,) * len(shape), shape)
        made_spec = replace(spec, shape=shape, shard=None, stride=None, within=None)
        if target is not None:
            if tuple(target.shape) != shape:
                raise StateError(f"{path} is {spec} in the checkpoint, {list(target.shape)} now")
            now, local = shard_spec(target), tuple(target.to_local().shape)
            box = place(path, now, self._rank, local)
            made_spec = replace(made_spec, shape=local, shard=now)
        made = Made(spec=made_spec, pieces=tuple(parts.values()), offset=tuple(box[0]), size=tuple(box[1]))
        return ["x", self._make(first, indices[first], made)]

    def _distance(self, rank: int) -> tuple[bool, int]:
        """Order ranks by how near their slots are; those that are elsewhere are shared out."""
        return rank not in self._captures.local, (rank - self._rank) % len(self._saved)

    def _same(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Tell whether two leaves have the same bytes, by their digests where they can be compared."""
        if one == other:
            return True
        left, right = (self._captures.ranks[rank].digests.get(index) for rank, index in (one, other))
        if left is not None and right is not None and left[0] == right[0]:
            return left[1] == right[1]
        before, after = self._bytes(*one), self._bytes(*other)
        return before is None or after is None or before == after

    def _bytes(self, rank: int, index: int) -> bytes | None:
        manifest = self._captures.ranks[rank].manifest
        start = manifest.offsets[index]
        return self._captures.data(rank, start, start + manifest.tensors[index].nbytes)

    def _make(self, rank: int, index: int, made: Made) -> int:
        """Return the index of a leaf to be made, the same for what was one tensor and is one now."""
        key = (rank, index, made.spec.shard)
        if key not in self._known:
            self._known[key] = len(self._made)
            self._origins[rank, index] = len(self._made)
            # Numbers in a manifest are of that manifest.
            self._made.append(made if rank == self._first else replace(made, spec=replace(made.spec, within=None)))
        return self._known[key]

    def _placed(self, spec: TensorSpec) -> TensorSpec:
        """Return `spec` with the number that the first leaf which it shares memory with has now."""
        if spec.within is None:
            return spec
        first = self._origins.get((self._first, spec.within[0]))
        return replace(spec, within=None if first is None else (first, spec.within[1]))

    def _given(self, flat: Flattener, node: Node) -> Node:
        begin = len(self._made)
        for leaf, spec in zip(flat.leaves, flat.specs(), strict=True):
            self._made.append(Made(spec=replace(spec, within=None), given=leaf))
        return _shifted(node, begin)


_LATER: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """What becomes of the leaves of an object.

    Attributes:
        shards: The DTensors that are there now, by path.
        like: The parameter whose state this is: what has its shape lies as it does.
        is_whole: Whether what was sharded may be whole now.
        may_differ: Tells of a path whether the lowest rank's is right for all.
    """

    shards: Mapping[str, Any] | None = None
    like: torch.Tensor | None = None
    is_whole: bool = False
    may_differ: Callable[[str], bool] | None = None

    def target(self, path: str, shape: tuple[int, ...]) -> Any:
        """Return the DTensor in which what is at `path` goes, None if there is none."""
        if self.like is not None:
            return self.like if hasattr(self.like, "to_local") and tuple(self.like.shape) == shape else None
        return None if self.shards is None else self.shards.get(path)

    def is_whole_here(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a sharded tensor of this shape is whole now."""
        return self.is_whole or (
            self.like is not None and not hasattr(self.like, "to_local") and tuple(self.like.shape) == shape
        )


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.shape if spec.shard is None else spec.shard.shape


def _has_key(node: Node, key: str) -> bool:
    return isinstance(node, list) and node[0] == "d" and key in node[1]


def _is_optimizer(node: Node) -> bool:
    return _has_key(node, "state") and _has_key(node, "param_groups")


def _entries(node: Node) -> dict[Any, Node]:
    return dict(zip(node[1], node[2], strict=True))


def _by_number(node: Node) -> dict[int, Node]:
    """Return the states of parameters by number."""
    return {key: child for key, child in zip(node[1], node[2], strict=True) if type(key) is int}


def _without_numbers(node: Node) -> Node:
    pairs = [(key, child) for key, child in zip(node[1], node[2], strict=True) if type(key) is not int]
    return [node[0], [key for key, _ in pairs], [child for _, child in pairs]]


def _without(node: Node, name: str) -> Node:
    pairs = [(key, child) for key, child in zip(node[1], node[2], strict=True) if key != name]
    return [node[0], [key for key, _ in pairs], [child for _, child in pairs]]


_Key = tuple[str | None, int, int]
"""A parameter's name, or else its group and its place in that."""


def _keys(sizes: Sequence[int], names: Sequence[Sequence[str | None]]) -> dict[_Key, tuple[int, int]]:
    """Return group and number of the parameters of groups of these `sizes`."""
    found: dict[_Key, tuple[int, int]] = {}
    for group, size in enumerate(sizes):
        for position in range(size):
            known = names[group] if group < len(names) else ()
            name = known[position] if position < len(known) else None
            key = (None, group, position) if name is None or (name, -1, -1) in found else (name, -1, -1)
            found[key] = group, len(found)
    return found


def _numbers(groups: Node, names: Sequence[Sequence[str | None]]) -> dict[_Key, tuple[int, int]]:
    """Return the same of the groups in a manifest, whose parameters have numbers there."""
    numbers = [_entries(group)["params"][1:] for group in groups[1:]]
    keys = _keys([len(each) for each in numbers], names)
    in_order = [number for each in numbers for number in each]
    return {key: (group, in_order[number]) for key, (group, number) in keys.items()}


def _shifted(node: Node, by: int) -> Node:
    """Return `node` with all indices of leaves `by` higher."""
    if not isinstance(node, list):
        return node
    if node[0] == "x":
        return ["x", node[1] + by]
    if node[0] in ("l", "t"):
        return [node[0], *(_shifted(child, by) for child in node[1:])]
    if node[0] in ("d", "C"):
        return [node[0], node[1], [_shifted(child, by) for child in node[2]]]
    return node


def _is_below(place_: Sequence[int], roots: Collection[tuple[int, ...]]) -> bool:
    return any(tuple(place_[: len(root)]) == root for root in roots)


def _no_leaf(index: int) -> NoReturn:
    raise SlotError(f"manifest has leaf {index} among the names of parameters or places")
