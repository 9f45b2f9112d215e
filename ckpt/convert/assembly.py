"""State put together of the slots of several ranks: what all have alike once, and parts of tensors where they belong.

An `Assembly` walks the manifests of all ranks at once and decides for every leaf of which slots it is made. Who says
what is to be made is a subclass: `reshape.py` what one rank of another number has, `export.py` whole tensors.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import numpy as np
import torch

from ..errors import SlotError, StateError
from ..format.manifest import Manifest, Node, TensorSpec, leaf_paths, plan_payload
from ..format.slot import CHUNK_BYTES
from ..state.flat import FLAT, Range, Ranges
from ..state.flat import parse as parse_flats
from ..state.memory import leaf_of
from ..state.state import TrainingState
from ..state.tree import OPTIONAL_PARTS, Flattener, entries, shard_spec, unflatten
from .captures import BATCH_BYTES, Captures
from .payload import Made, Piece, Region, fill, whole
from .pieces import Box as Side
from .pieces import missing, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """What was put together, as a slot has it.

    Attributes:
        manifest: The manifest.
        payload: The payload, uint8 on the CPU.
        told: What a person should know.
        untouched: Names of objects that have this state already, and shall not load it.
    """

    manifest: Manifest
    payload: torch.Tensor
    told: list[str]
    untouched: frozenset[str] = frozenset()

    def leaf(self, index: int) -> Any:
        """Return leaf `index`, a tensor as a view of the payload."""
        spec, offset = self.manifest.tensors[index], self.manifest.offsets[index]
        found = leaf_of(spec, self.payload[offset : offset + spec.nbytes])
        return found.copy() if isinstance(found, np.ndarray) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """A flat tensor: its leaf, its shape, and what it has, or why that cannot be told."""

    index: int
    shape: tuple[int, ...]
    ranges: Ranges


Held = tuple[int, int, Ranges]
"""A rank, the leaf in which it has a flat tensor, and what that has."""


def flats_of(objects: Mapping[str, Node], tensors: Sequence[TensorSpec]) -> dict[str, Flat]:
    """Return the flat tensors that `objects`, nodes by name, tell of, by path.

    Raises:
        SlotError: What they tell is malformed.
    """
    found: dict[str, Flat] = {}
    for name, node in objects.items():
        if not has_key(node, FLAT):
            continue
        leaves = leaf_paths(node)
        for path, ranges in parse_flats(entries(node)[FLAT]).items():
            index, parts = leaves.get(path, len(tensors)), [] if isinstance(ranges, str) else ranges
            if index >= len(tensors) or any(
                each.at + each.size * each.times > prod(tensors[index].shape) for each in parts
            ):
                raise SlotError(f"manifest tells of a flat tensor {name}.{path} that is not there, or is shorter")
            found[f"{name}.{path}"] = Flat(index=index, shape=tensors[index].shape, ranges=ranges)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What becomes of the leaves of an object.

    Attributes:
        shards: The DTensors that are there now, by path.
        flats: The flat tensors that are there now, by path.
        flat: The path of the flat tensor whose state this is: what had its shape has the same ranges.
        like: The parameter whose state this is: what has its shape lies as it does.
        is_whole: Whether what was sharded may be whole now.
        may_differ: Tells of a path whether the lowest rank's is right for all.
    """

    shards: Mapping[str, Any] | None = None
    flats: Mapping[str, Flat] = field(default_factory=dict)
    flat: str | None = None
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


class Assembly(ABC):
    """Puts a tree together.

    Attributes:
        unites: Whether ranks may have different keys of a dict, of which all are taken.
        is_partial: Whether parts of tensors may be missing.
        made: The leaves of the tree.
        refused: What does not fit, and what to do about it.
        told: What a person should know.
    """

    def __init__(self, captures: Captures, rank: int = 0) -> None:
        """Take the slots of all ranks for `rank`, which decides whose are read where several would do.

        Raises:
            SlotError: A slot does not hold the state of a Checkpointer.
        """
        self.unites = self.is_partial = False
        self.made: list[Made] = []
        self.refused: list[str] = []
        self.told: list[str] = []
        self._captures = captures
        self._rank = rank
        self._saved = {each: entries(captured.manifest.tree) for each, captured in captures.ranks.items()}
        for each, parts in self._saved.items():
            # What is malformed is found now.
            manifest = captures.ranks[each].manifest
            unflatten(manifest.tree, manifest.tensors.__getitem__)
            if parts.keys() - OPTIONAL_PARTS != {"objects", "values", "rng"}:
                raise SlotError(f"the manifest of rank {each} has the parts {list(parts)}, not objects, values and rng")
        self._flats = {
            each: flats_of(entries(parts["objects"]), captures.ranks[each].manifest.tensors)
            for each, parts in self._saved.items()
        }
        self._first = min(self._saved)
        self._known: dict[Hashable, int] = {}
        self._origins: dict[tuple[int, int], int] = {}

    def filled(self, tree: Node) -> Assembled:
        """Return what `tree` and `made` are; it is read now.

        Raises:
            RestoreError: Nobody has a verified copy of something.
        """
        leaves = [replace(each, spec=self._placed(each.spec)) for each in self.made]
        return filled(self._captures, tree, leaves, self.told)

    def _nodes(self, part: str) -> dict[int, Node]:
        return {rank: parts[part] for rank, parts in self._saved.items()}

    def _walk(self, path: str, nodes: Mapping[int, Node], rule: Rule) -> Node:
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
                    self._walk(_below(path, number), {rank: each[1 + number] for rank, each in nodes.items()}, rule)
                    for number in range(len(node) - 1)
                ),
            ]
        if tag in ("d", "C") and (self.unites or all(repr(each[1]) == repr(node[1]) for each in nodes.values())):
            return self._dict(path, nodes, rule)
        others = {rank: each for rank, each in nodes.items() if repr(each) != repr(node)}
        if not others:
            return node
        self._differs(path, rule, others)
        return self._walk(path, {rank: each for rank, each in nodes.items() if rank not in others}, rule)

    def _dict(self, path: str, nodes: Mapping[int, Node], rule: Rule) -> Node:
        """Return one dict with the keys of all."""
        children: dict[str, tuple[Any, dict[int, Node]]] = {}
        for rank, (_, keys, values) in nodes.items():
            for key, child in zip(keys, values, strict=True):
                children.setdefault(repr(key), (key, {}))[1][rank] = child
        keys = [key for key, _ in children.values()]
        return [
            nodes[min(nodes)][0],
            keys,
            [self._walk(_below(path, unflatten(key, str)), held, rule) for key, held in children.values()],
        ]

    @abstractmethod
    def _differs(self, path: str, rule: Rule, others: Mapping[int, Node]) -> None:
        """Hear that `others` have something else at `path` than the first rank, which is taken."""

    def _leaf(self, path: str, indices: Mapping[int, int], rule: Rule) -> Node:
        first = min(indices)
        specs = {rank: self._captures.ranks[rank].manifest.tensors[index] for rank, index in indices.items()}
        spec, shape = specs[first], _shape(specs[first])
        where = path if rule.flat is None else rule.flat
        if (now := rule.flats.get(where)) is not None:
            flats = {rank: flat for rank in indices if (flat := self._flats[rank].get(where)) is not None}
            if all(rank in flats and flats[rank].shape == spec.shape for rank, spec in specs.items()):
                held = [(rank, index, flats[rank].ranges) for rank, index in indices.items()]
                return self._flat(path, held, now, now.index if rule.flat is None else path)
        kinds = {rank: (each.kind, each.dtype, _shape(each), each.shard is None) for rank, each in specs.items()}
        if others := {rank: ["x", indices[rank]] for rank, kind in kinds.items() if kind != kinds[first]}:
            self._differs(path, rule, others)
            indices = {rank: index for rank, index in indices.items() if rank not in others}
        target = rule.target(path, shape)
        if spec.shard is None and (target is None or not shape):
            return self._plain(path, indices, spec, rule)
        try:
            if target is None and not rule.is_whole_here(shape):
                raise StateError(f"{path} is a shard in the checkpoint, and no DTensor of its shape is there now")
            return self._part(path, indices, specs, target)
        except StateError as error:
            self.refused.append(str(error))
            return ["x", self._make(first, indices[first], Made(spec=spec))]

    def _plain(self, path: str, indices: Mapping[int, int], spec: TensorSpec, rule: Rule) -> Node:
        """A leaf of which each rank has all: any one's, if it is the same on all."""
        first = min(indices)
        # A counter of BatchNorm: to compare it would be to read its surroundings from all ranks.
        lowest = rule.may_differ is not None and rule.may_differ(path)
        lowest = lowest and indices[first] not in self._captures.ranks[first].digests
        unlike = [] if lowest else self._unlike((first, indices[first]), indices)
        if unlike:
            self._differs(path, rule, {rank: ["x", indices[rank]] for rank in unlike})
        rank = first if unlike or lowest else min(indices, key=self._distance)
        return ["x", self._make(first, indices[first], replace(whole(rank, indices[rank], spec), spec=spec))]

    def _part(self, path: str, indices: Mapping[int, int], specs: Mapping[int, TensorSpec], target: Any) -> Node:
        """The part of a sharded tensor that this rank has now; all of it if `target` is None.

        Raises:
            StateError: Shards do not belong to one tensor, or do not fit what is there now.
        """
        first = min(indices)
        spec, shape = specs[first], _shape(specs[first])
        mesh = spec.shard.mesh_ranks if spec.shard is not None else tuple(indices)
        parts: dict[tuple[int, ...], Piece] = {}
        # Other ranks of tensor parallelism have meshes of their own with the same parts: they fill no hole of this one.
        for rank in sorted(indices, key=lambda rank: (rank not in mesh, *self._distance(rank))):
            shard, size = specs[rank].shard, specs[rank].shape
            offset: tuple[int, ...] = (0,) * len(shape)
            if shard is not None:
                assert spec.shard is not None
                if replace(shard, mesh_ranks=mesh, stride=spec.shard.stride) != spec.shard:
                    raise StateError(f"{path}: ranks {first} and {rank} hold shards of different kinds of meshes")
                offset, size = place(path, shard, rank, size)
            if 0 in size:
                continue
            piece = Piece(rank=rank, index=indices[rank], offset=offset, size=size)
            known = parts.setdefault(offset, piece) if rank in mesh else parts.get(offset)
            if known is None or known.size != size or self._unlike((known.rank, known.index), {rank: piece.index}):
                raise StateError(f"{path}: rank {rank} and another one hold different values of the same part")
        holes = missing(path, shape, [(piece.offset, piece.size) for piece in parts.values()])
        if holes and not self.is_partial:
            raise StateError(f"{path}: no rank holds {holes} of its {prod(shape)} elements")
        box: Side = ((0,) * len(shape), shape)
        made_spec = replace(spec, shape=shape, shard=None, stride=None, within=None)
        if target is not None:
            if tuple(target.shape) != shape:
                raise StateError(f"{path} is {spec} in the checkpoint, {list(target.shape)} now")
            now, local = shard_spec(target), tuple(target.to_local().shape)
            box = place(path, now, self._rank, local)
            made_spec = replace(made_spec, shape=local, shard=now)
        region = Region(pieces=tuple(parts.values()), offset=tuple(box[0]), size=tuple(box[1]))
        made = Made(spec=made_spec, regions=(region,))
        return ["x", self._make(first, indices[first], made)]

    def _flat(self, path: str, held: Sequence[Held], now: Flat, key: Hashable) -> Node:
        """The flat tensor `now`, of what is in those that are `held`; what has one `key` is one."""
        specs = [self._captures.ranks[rank].manifest.tensors[index] for rank, index, _ in held]
        spec = replace(specs[0], shape=now.shape, stride=None, within=None)
        made = Made(spec=spec)
        try:
            if len({each.dtype for each in specs}) > 1:
                raise StateError(f"ranks have different dtypes of {path}")
            told = [now.ranges, *(ranges for *_, ranges in held)]
            if reason := next((each for each in told if isinstance(each, str)), None):
                raise StateError(f"{path}: {reason}")
            made = replace(made, regions=tuple(self._regions(path, held, now.ranges)))
        except StateError as error:
            self.refused.append(str(error))
        return ["x", self._added(("flat", key), made)]

    def _regions(self, path: str, held: Sequence[Held], ranges: Any) -> Iterator[Region]:
        """Yield what a flat tensor of these `ranges` is made of: parts of parameters in rows of one width.

        Raises:
            StateError: Some of it is nowhere, or in several places and not the same.
        """
        of_name: dict[str, list[tuple[tuple[int, int], Range]]] = {}
        for rank, index, parts in sorted(held, key=lambda each: self._distance(each[0])):
            for part in cast(Sequence[Range], parts):
                of_name.setdefault(part.name, []).append(((rank, index), part))
        alike = set()
        for wanted in ranges:
            name, shape = wanted.name, wanted.shape
            found: dict[tuple[int, ...], tuple[tuple[int, int], Range]] = {}
            for leaf, part in of_name.get(name, ()):
                first, known = found.setdefault((part.begin, *part[4:]), (leaf, part))
                if part.shape != shape:
                    raise StateError(
                        f"{path}: {name} is {list(part.shape)} in the checkpoint, {list(shape)} now: give the model "
                        "the sizes that it had"
                    )
                is_wanted = part.begin < wanted.end and wanted.begin < part.end
                compared = first != leaf and is_wanted and self._is_compared(first[0], leaf[0])
                if compared and (first, leaf) not in alike:
                    alike.add((first, leaf))
                    if known != part or self._unlike(first, dict([leaf])):
                        raise StateError(f"{path}: ranks {first[0]} and {leaf[0]} hold different values of {name}")
            parts = [part for _, part in found.values()]
            width = max(part.every for part in (wanted, *parts)) or prod(shape)
            if any(part.every not in (0, width) for part in (wanted, *parts)):
                raise StateError(f"{path}: ranks have divided {name} in other dimensions")
            # Rows are read whole: of a parameter that is one row, a part is some of its columns.
            dims = slice(int(width == prod(shape)), None)
            pieces = tuple(
                Piece(rank=rank, index=index, offset=box.offset[dims], size=box.size[dims], start=box.at)
                for (rank, index), part in found.values()
                for box in part.boxes(width)
            )
            sides: list[Side] = [(piece.offset, piece.size) for piece in pieces]
            holes = missing(name, (prod(shape) // width, width)[dims], sides)
            if holes and not self.is_partial:
                raise StateError(f"{path}: no rank holds {holes} of the {prod(shape)} elements of {name}")
            for box in wanted.boxes(width):
                yield Region(pieces=pieces, offset=box.offset[dims], size=box.size[dims], at=box.at)

    def _groups(self, path: str, nodes: Mapping[int, Node], trained: Sequence[Sequence[Node]], rule: Rule) -> Node:
        """The parameter groups of an optimizer, with the options that they had and what each has as "params"."""
        groups = []
        for number, parameters in enumerate(trained):
            options = {rank: without(node[1 + number], "params".__eq__) for rank, node in nodes.items()}
            _, keys, values = self._walk(f"{path}.{number}", options, rule)
            groups.append(["d", [*keys, "params"], [*values, ["l", *parameters]]])
        return ["l", *groups]

    def _is_compared(self, one: int, other: int) -> bool:
        """Tell whether what two ranks have of one parameter must be the same."""
        return True

    def _distance(self, rank: int) -> tuple[int, ...]:
        """Order ranks by how near their slots are; those that are elsewhere are shared out."""
        return rank not in self._captures.local, (rank - self._rank) % len(self._saved)

    def _unlike(self, one: tuple[int, int], indices: Mapping[int, int]) -> list[int]:
        """Return the ranks whose leaf has not the bytes of `one`, by their digests where they can be compared."""
        ranks, found = self._captures.ranks, list[int]()
        digest = ranks[one[0]].digests.get(one[1])
        read = []
        for rank, index in indices.items():
            other = ranks[rank].digests.get(index)
            if digest is not None and other is not None and digest[0] == other[0]:
                if digest[1] == other[1]:
                    continue
                if digest[2]:
                    found.append(rank)
                    continue
            if (rank, index) != one:
                read.append(rank)
        (begin, end), at = self._extent(*one), 0
        while read and begin + at < end:
            # Of large leaves some at a time.
            size = min(max(CHUNK_BYTES, BATCH_BYTES // len(read)), end - begin - at)
            starts = {rank: self._extent(rank, indices[rank])[0] + at for rank in read}
            for rank, start in starts.items():
                self._captures.want(rank, start, start + size)
            data = self._captures.data(one[0], begin + at, begin + at + size)
            unlike = [rank for rank, start in starts.items() if self._captures.data(rank, start, start + size) != data]
            found, read, at = found + unlike, [rank for rank in read if rank not in unlike], at + size
        return found

    def _extent(self, rank: int, index: int) -> tuple[int, int]:
        manifest = self._captures.ranks[rank].manifest
        start = manifest.offsets[index]
        return start, start + manifest.tensors[index].nbytes

    def _make(self, rank: int, index: int, made: Made) -> int:
        """Return the number of the leaf that is `made`, the same for what was one tensor and is one now."""
        key = (rank, index, made.spec.shard)
        if key not in self._known:
            self._origins[rank, index] = len(self.made)
            # Numbers in a manifest are of that manifest.
            made = made if rank == self._first else replace(made, spec=replace(made.spec, within=None))
        return self._added(key, made)

    def _added(self, key: Hashable, made: Made) -> int:
        """Return the number of the leaf that is `made`, of what has one `key` the first."""
        if key not in self._known:
            self._known[key] = len(self.made)
            self.made.append(made)
        return self._known[key]

    def _placed(self, spec: TensorSpec) -> TensorSpec:
        """Return `spec` with the number that the first leaf which it shares memory with has now."""
        if spec.within is None:
            return spec
        first = self._origins.get((self._first, spec.within[0]))
        return replace(spec, within=None if first is None else (first, spec.within[1]))

    def _given(self, name: str, value: Any) -> Node:
        """Return the node of a value that is in no slot.

        Raises:
            StateError: It cannot be held, or has a DTensor.
        """
        flat = Flattener({name: value})
        if flat.shards:
            raise StateError("it returned a DTensor: return plain tensors")
        begin = len(self.made)
        for leaf, spec in zip(flat.leaves, flat.specs(), strict=True):
            self.made.append(Made(spec=replace(spec, within=None), given=leaf))
        return _shifted(entries(flat.node)[name], begin)


def filled(captures: Captures, tree: Node, leaves: Sequence[Made], told: list[str]) -> Assembled:
    """Return what `tree` is with these leaves; it is read now.

    Raises:
        RestoreError: Nobody has a verified copy of something.
    """
    specs = tuple(made.spec for made in leaves)
    layout = plan_payload(specs)
    manifest = Manifest(tree=tree, tensors=specs, offsets=layout.offsets)
    return Assembled(manifest=manifest, payload=fill(captures, leaves, layout), told=told)


def read(captures: Captures, leaves: Iterable[Made]) -> Iterator[Any]:
    """Yield what `leaves` are, of which some are read at a time.

    Raises:
        RestoreError: Nobody has a verified copy of something.
    """
    left = deque(leaves)
    while left:
        batch, size_bytes = list[Made](), 0
        while left and size_bytes < BATCH_BYTES:
            batch.append(left.popleft())
            size_bytes += batch[-1].spec.nbytes
        yield from map(filled(captures, None, batch, []).leaf, range(len(batch)))


def opened(captures: Captures, tree: Node, leaves: Sequence[Made]) -> Any:
    """Return what `tree` is with tensors as they are in `leaves`, and the rest read now.

    Raises:
        RestoreError: Nobody has a verified copy of something.
        SlotError: The tree is malformed.
    """
    plain = [index for index, made in enumerate(leaves) if made.spec.kind != "torch"]
    found: list[Any] = [*leaves]
    for index, content in zip(plain, read(captures, [leaves[index] for index in plain]), strict=True):
        found[index] = content
    return unflatten(tree, found.__getitem__)


def counts_reads(state: TrainingState, name: str) -> bool:
    """Tell whether an object yields data, as loaders and samplers do, and so counts what its own rank has read."""
    item = state.objects.get(name)
    is_data = isinstance(item, Iterable) and not isinstance(item, Collection | torch.nn.Module)
    return is_data and name not in state.held  # nor torchtitan's containers of optimizers and schedulers


def has_key(node: Node, key: str) -> bool:
    """Tell whether `node` is that of a dict with `key`."""
    return isinstance(node, list) and node[0] == "d" and key in node[1]


def items_of(node: Node) -> dict[Any, Node]:
    """Return the child nodes of a dict node by key, whatever the keys are."""
    return dict(zip(node[1], node[2], strict=True))


def without(node: Node, is_out: Callable[[Any], bool]) -> Node:
    """Return the node of a dict without the keys that `is_out` tells."""
    pairs = [(key, child) for key, child in zip(node[1], node[2], strict=True) if not is_out(key)]
    return [node[0], [key for key, _ in pairs], [child for _, child in pairs]]


def is_optimizer(node: Node) -> bool:
    """Tell whether `node` is that of a torch optimizer's state."""
    return has_key(node, "state") and has_key(node, "param_groups")


def is_leaf(node: Node) -> bool:
    """Tell whether `node` is that of a leaf."""
    return isinstance(node, list) and node[0] == "x"


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.shape if spec.shard is None else spec.shard.shape


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
