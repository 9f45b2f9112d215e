"""The slot that a rank would have made, out of those of another number of ranks: a manifest and a payload to load.

What it has of tensors that are sharded is where the registered objects have their shards now. All else must be the same
on all ranks; where it is not, each kind of object has a rule (`_Reshaping`), and what has none is refused by name. The
result is loaded as any slot is: exactly, or not at all.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from ..errors import RestoreError, StateError, some
from ..format.manifest import Node, leaf_paths
from ..state.flat import FLAT
from ..state.held import keyed_parameters
from ..state.memory import leaf_of
from ..state.rng import derived_rng
from ..state.state import TrainingState
from ..state.tree import Flattener, entries, plain, unflatten
from ..state.unsaved import parse as parse_unsaved
from .assembly import (
    Assembled,
    Assembly,
    Rule,
    counts_reads,
    flats_of,
    has_key,
    is_leaf,
    is_optimizer,
    items_of,
    without,
)
from .captures import Captures
from .payload import whole

_BUFFERS: Final = "buffers"
_PLACES: Final = "places"
_FLATS: Final = {"masters": "masters", "states": "masters", "halves": "halves"}
"""Keys of an engine's state that have flat tensors, or what belongs to those below another key."""
_OWN: Final = ("place", "tensor", "index", "microbatches", FLAT)
"""Keys of what follows from the number of ranks that there are now."""
_EXPORT: Final = "start as many ranks as before, or export the step (resilientctl export) and load that in a new run id"
_RESHARD: Final = (
    "Give the object a method reshard(states, rank, world_size), which returns what this rank is to load of the states "
    "of all ranks, or start as many ranks as before"
)


def reshape(state: TrainingState, captures: Captures, *, rank: int, world_size: int) -> Assembled:
    """Return what `rank` of `world_size` is to load of `captures`; nothing is loaded yet.

    Raises:
        StateError: Something has no rule, or does not fit; the message names it.
        SlotError: A slot does not hold the state of a Checkpointer.
        RestoreError: Nobody has a verified copy of something.
    """
    reshaping = _Reshaping(state, state.flatten(), captures, rank, world_size)
    tree = reshaping.tree()
    if reshaping.refused:
        raise StateError(
            f"the checkpoint of {len(captures.ranks)} ranks does not fit {world_size}, nothing was loaded: "
            f"{some(reshaping.refused, between='; ')}"
        )
    return reshaping.filled(tree)


_Partition = tuple[int, Any, Node]
"""A rank, a flat tensor that it has (`Flat`), and the node of its state."""


class _Reshaping(Assembly):
    """Makes the tree of a rank."""

    def __init__(
        self, state: TrainingState, current: Flattener, captures: Captures, rank: int, world_size: int
    ) -> None:
        super().__init__(captures, rank)
        self._state = state
        self._world_size = world_size
        self._shards = {
            path.removeprefix("objects."): current.shards[index]
            for path, index in leaf_paths(current.node).items()
            if index in current.shards
        }
        self._objects_now = entries(entries(current.node)["objects"])
        self._flats_now = flats_of(self._objects_now, current.specs())
        self._order = entries(current.node)["order"]
        self._parameters = keyed_parameters(state.modules)
        self._others: list[str] = []  # of which the lowest rank's is taken
        self._rebuilt: set[tuple[str, *tuple[int, ...]]] = set()  # objects, and places in them
        self._engines: tuple[str, ...] = ()  # how the paths of what they have begin
        self._elder: int | None = None  # whose random states this rank takes, if an engine tells it
        self._twins: set[int] = set()  # who had the same part of each parameter

    def tree(self) -> Node:
        saved = self._saved[self._first]
        made: dict[str, Node] = {"objects": self._objects()}
        made["values"] = self._walk("values", self._nodes("values"), Rule(shards=self._shards))
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
            self.told.append(
                f"ranks had {some(self._others)} differently, and all go on with what rank {self._first} had"
            )
        return ["d", list(saved), [made[name] for name in saved]]

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
            elif counts_reads(self._state, name):
                self.refused.append(
                    f"{name} ({type(item).__qualname__}) yields data, and counts what one rank has read: a loader may "
                    f"go on in a ResumableLoader. {_RESHARD}"
                )
                children.append(nodes[min(nodes)])
            elif not all(has_key(node, FLAT) == has_key(self._objects_now.get(name), FLAT) for node in nodes.values()):
                self.refused.append(
                    f"{name} is sharded by FSDP1 or DeepSpeed only in the checkpoint, or only now: shard it as then, "
                    f"or {_EXPORT}"
                )
                children.append(nodes[min(nodes)])
            elif name in self._state.apart and not self._is_told(name):
                self.refused.append(f"{name} differs between ranks on purpose. {_RESHARD}")
                children.append(nodes[min(nodes)])
            elif isinstance(item, torch.nn.Module):
                children.append(self._module(name, nodes))
            elif has_key(nodes[min(nodes)], FLAT):
                children.append(self._engine(name, nodes))
            elif name in self._state.held and all(map(is_optimizer, nodes.values())):
                children.append(self._optimizer(name, nodes))
            else:
                children.append(self._walk(name, nodes, Rule(shards=self._shards)))
        return ["d", names, children]

    def _is_told(self, name: str) -> bool:
        """Tell whether the flat tensors of an object, or those that an optimizer trains, are described."""
        if has_key(self._objects_now.get(name), FLAT):
            return True
        groups = plain(entries(self._order).get(name, ["l"]))
        return bool(groups) and all(key in self._flats_now for group in groups for key in group)

    def _module(self, name: str, nodes: dict[int, Node]) -> Node:
        """Buffers may differ, as those of BatchNorm do; ranks may have different parts of the model."""
        if len({frozenset(entries(node)) for node in nodes.values()}) > 1:
            self._rebuilt.add((name,))
        rule = Rule(
            shards=self._shards,
            flats=self._flats_now,
            is_whole=True,
            may_differ=lambda path: path not in self._parameters,
        )
        made = self._dict(name, {rank: without(node, FLAT.__eq__) for rank, node in nodes.items()}, rule)
        if has_key(self._objects_now.get(name), FLAT):
            made[1].append(FLAT)
            made[2].append(entries(self._objects_now[name])[FLAT])
        return made

    def _optimizer(self, name: str, nodes: dict[int, Node]) -> Node:
        """Each parameter's state is where its name is, in the ranks that have it and in this one."""
        states = {rank: items_of(node) for rank, node in nodes.items()}
        orders = {
            rank: plain(entries(parts["order"]).get(name, ["l"])) if "order" in parts else []
            for rank, parts in self._saved.items()
        }
        before = {rank: _numbers(states[rank]["param_groups"], orders[rank]) for rank in states}
        parameters = [group["params"] for group in self._state.held[name][0].param_groups]
        counts = {len(state["param_groups"]) - 1 for state in states.values()}
        named = plain(entries(self._order)[name])[: len(parameters)]
        now = _keys([len(group) for group in parameters], named)
        if any(found.keys() != before[self._first].keys() for found in before.values()):
            lacking = [key for key in now if not any(key in found for found in before.values())]
        else:
            lacking = [key for key in [*now, *before[self._first]] if (key in now) != (key in before[self._first])]
            lacking += [key for key in now if key not in lacking and now[key][0] != before[self._first][key][0]]
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
            flat = key[0] if key[0] in self._flats_now else None
            # FSDP1 never updates a parameter of which a rank has nothing.
            if found and (flat is None or prod(self._flats_now[flat].shape)):
                rule = Rule(like=tensors[key], flats=self._flats_now, flat=flat)
                kept[number] = self._walk(f"{name}.state.{key[0] if key[0] is not None else number}", found, rule)
        made: dict[Any, Node] = {}
        for key in states[self._first]:
            path, of_ranks = f"{name}.{key}", {rank: state[key] for rank, state in states.items() if key in state}
            if key == "state":
                others = {rank: without(node, lambda key: type(key) is int) for rank, node in of_ranks.items()}
                rest, were = self._walk(path, others, Rule()), [*_by_number(of_ranks[self._first])]
                # In the order that it had: places in the tree are counted.
                numbers = sorted(kept, key=[*were, *kept].index)
                own = [before[self._first].get(now_, (None, None))[1] for now_ in now]
                if rest[1] or [own[number] for number in numbers] != were:
                    self._rebuilt.add((name, len(made)))
                made[key] = ["d", [*numbers, *rest[1]], [*(kept[number] for number in numbers), *rest[2]]]
            elif key == "param_groups":
                sizes = [len(group) for group in parameters]
                ranges = [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]
                made[key] = self._groups(path, of_ranks, ranges, Rule())
            else:
                made[key] = self._walk(path, of_ranks, Rule())
        return ["d", list(made), list(made.values())]

    def _engine(self, name: str, nodes: dict[int, Node]) -> Node:
        """What `EngineState` and `MegatronState` have: ranks may have flat tensors in other groups, with their states.

        Of a model that is divided, a rank goes on with what those had that were in its place.
        """
        self._rebuilt.add((name,))
        self._engines += (f"{name}: ",)
        now = entries(self._objects_now[name])
        of_ranks = {rank: entries(node) for rank, node in nodes.items()}
        placed = {
            rank: parts
            for rank, parts in of_ranks.items()
            if (parts.get("place"), "tensor" in parts) == (now.get("place"), "tensor" in now)
        }
        if not placed:
            self.refused.append(
                f"{name}: no rank had {now['place']}, as this one has now. Change the numbers of data- and "
                "tensor-parallel ranks alone, or start as many ranks as before"
            )
            return nodes[self._first]
        if "place" in now:
            self._twins = {rank for rank, parts in of_ranks.items() if parts.get("tensor") == now["tensor"]}
            # As Megatron's own checkpoints: replicas have random states in common, or each its own.
            elders = [rank for rank, parts in placed.items() if parts["tensor"][1] == now["tensor"][1]]
            is_new, elders = not elders, sorted(elders or placed)
            self._elder = elders[now["index"] % len(elders)]
        alike = {rank: parts for rank, parts in placed.items() if rank in self._twins} or placed
        buffers = f"{name}.buffers." if self._twins or "place" not in now else None
        rule = Rule(flats=self._flats_now, may_differ=lambda path: buffers is not None and path.startswith(buffers))
        made = dict(now)
        for key in (each for each in now if each not in _OWN):
            several = placed if key == "parameters" else alike  # of which ranks may have parts
            found = {rank: parts[key] for rank, parts in several.items() if key in parts}
            if key == "streams" and is_new:
                made[key] = self._given(f"{name}.{key}", self._state.objects[name].state_dict()[key])
                continue
            if key in ("rng", "streams") and self._elder is not None:
                found = {self._elder: of_ranks[self._elder][key]}
            partitions = self._partitions(name, key, now, of_ranks) if key in _FLATS else None
            made[key] = self._walk(f"{name}.{key}", found, rule) if partitions is None else partitions
        return ["d", list(made), list(made.values())]

    def _partitions(
        self, name: str, key: str, now: Mapping[str, Node], of_ranks: Mapping[int, Mapping[str, Node]]
    ) -> Node:
        """Return the list of flat tensors, or of their states, below `key`; None if nothing tells what they have."""
        at = _FLATS[key]
        flats: list[Any] = [self._flats_now.get(f"{name}.{at}.{number}") for number in range(len(now[at]) - 1)]
        held: list[_Partition] = [
            (rank, self._flats[rank].get(f"{name}.{at}.{number}"), node)
            for rank, parts in of_ranks.items()
            for number, node in enumerate(parts[key][1:])
        ]
        if None in flats or None in (flat for _, flat, _ in held):
            return None
        is_told = not any(isinstance(flat.ranges, str) for flat in (*flats, *(flat for _, flat, _ in held)))
        having: dict[str, dict[int, _Partition]] = {}
        for number, each in enumerate(held if is_told else ()):
            for part in each[1].ranges:
                having.setdefault(part.name, {})[number] = each
        make = self._state_of if key == "states" else self._master
        made = []
        for number, flat in enumerate(flats):
            several: dict[int, _Partition] = {}
            for part in flat.ranges if is_told else ():
                several |= having.get(part.name, {})
            made.append(make(f"{name}.{key}.{number}", flat, list(several.values()) or held))
        return ["l", *made]

    def _master(self, path: str, now: Any, held: Sequence[_Partition]) -> Node:
        return self._flat(path, [(rank, flat.index, flat.ranges) for rank, flat, _ in held], now, path)

    def _state_of(self, path: str, now: Any, held: Sequence[_Partition]) -> Node:
        """The state that an optimizer has of the flat tensor `now`."""
        made: dict[Any, Node] = {}
        states = [items_of(state) for *_, state in held]
        for key, node in states[0].items():
            nodes = [state.get(key) for state in states]
            below = f"{path}.{key}"
            if all(map(is_leaf, nodes)):
                several = [(rank, flat, state[key][1]) for (rank, flat, _), state in zip(held, states, strict=True)]
                specs = [self._captures.ranks[rank].manifest.tensors[index] for rank, _, index in several]
                if all(spec.shape == flat.shape for (_, flat, _), spec in zip(several, specs, strict=True)):
                    made[key] = self._flat(
                        below, [(rank, index, flat.ranges) for rank, flat, index in several], now, below
                    )
                    continue
                rank, _, index = several[0]
                alike = all(spec.content == specs[0].content for spec in specs) and not any(
                    self._unlike((rank, index), {other: leaf}) for other, _, leaf in several
                )
                made[key] = ["x", self._added(below, whole(rank, index, specs[0]))]
            else:
                alike, made[key] = all(repr(each) == repr(node) for each in nodes), node
            if not alike:
                self._differs(below, Rule(), {})
        if any(state.keys() != made.keys() for state in states):
            self._differs(path, Rule(), {})
        return ["d", list(made), list(made.values())]

    def _resharded(self, name: str, item: Any, nodes: dict[int, Node]) -> Node:
        self._rebuilt.add((name,))
        try:
            states = {rank: self._value(rank, node) for rank, node in sorted(nodes.items())}
            return self._given(name, item.reshard(states, self._rank, self._world_size))
        except StateError as error:
            self.refused.append(f"{name}: {error}")
        except RestoreError:
            raise
        except Exception as error:  # noqa: BLE001 - a method of the script may raise anything
            self.refused.append(f"{name}: its reshard() failed: {type(error).__name__}: {error}")
        return nodes[min(nodes)]

    def _value(self, rank: int, node: Node) -> Any:
        def leaf(index: int) -> Any:
            spec = self._captures.ranks[rank].manifest.tensors[index]
            data = self._captures.data(rank, *self._extent(rank, index))
            if spec.shard is not None:
                raise StateError("reshard() gets no shards of tensors: let state_dict() leave them out")
            return leaf_of(spec, torch.tensor(bytearray(data), dtype=torch.uint8))

        for index in leaf_paths(node).values():
            self._captures.want(rank, *self._extent(rank, index))
        return unflatten(node, leaf)

    def _rng(self) -> Node:
        """A rank goes on with its own generators; one that there was not derives its own from those of the first."""
        if self._world_size > len(self._saved) and self._saved[self._first]["rng"] is not None:
            derived = "what is derived from those of rank 0" if self._elder is None else "those of their replicas"
            self.told.append(
                f"ranks from {len(self._saved)} on are new, and their random number generators begin with {derived}"
            )
        source = self._rank if self._elder is None else self._elder
        if source in self._saved:
            return self._walk("rng", {source: self._saved[source]["rng"]}, Rule())
        state = self._value(self._first, self._saved[self._first]["rng"])
        return None if state is None else self._given("rng", derived_rng(state, self._rank))

    def _unsaved(self) -> dict[str, dict[str, str]]:
        """Return the digests of what no state has, which ranks must have had alike to be compared with what is now."""
        found = [parse_unsaved(parts["unsaved"]) for parts in self._saved.values() if "unsaved" in parts]
        kept: dict[str, dict[str, str]] = {}
        for kind in dict.fromkeys(kind for each in found for kind in each):
            kept[kind] = {}
            for path in dict.fromkeys(path for each in found for path in each.get(kind, {})):
                digests = {each[kind][path] for each in found if path in each.get(kind, {})}
                if kind == _PLACES and path.startswith(self._engines):
                    continue  # for which tensors there are states: those below the engine's name are all that it has
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
        places = [
            (parts.index("objects"), objects.index(each), *below) for each, *below in self._rebuilt if each in objects
        ]
        rebuilt = {(parts.index("rng"),), *places}
        found = plain(self._saved[self._first][name])
        if name == "shared":
            return [places for places in found if not any(_is_below(place_, rebuilt) for place_ in places)]
        return [[place_, kind] for place_, kind in found if not _is_below(place_, rebuilt)]

    def _distance(self, rank: int) -> tuple[int, ...]:
        return bool(self._twins) and rank not in self._twins, *super()._distance(rank)

    def _is_compared(self, one: int, other: int) -> bool:
        return (one in self._twins) == (other in self._twins)

    def _differs(self, path: str, rule: Rule, others: Mapping[int, Node]) -> None:
        if rule.may_differ is not None and rule.may_differ(path):
            self._others.append(path)
        else:
            self.refused.append(f"ranks have {path} differently. {_RESHARD}")


def _by_number(node: Node) -> dict[int, Node]:
    """Return the states of parameters by number."""
    return {key: child for key, child in items_of(node).items() if type(key) is int}


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
    numbers = [items_of(group)["params"][1:] for group in groups[1:]]
    keys = _keys([len(each) for each in numbers], names)
    in_order = [number for each in numbers for number in each]
    return {key: (group, in_order[number]) for key, (group, number) in keys.items()}


def _is_below(place_: Sequence[int], roots: Collection[tuple[int, ...]]) -> bool:
    return any(tuple(place_[: len(root)]) == root for root in roots)
