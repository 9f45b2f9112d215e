"""The tree codec: nested state ↔ JSON nodes and a list of leaves that hold bytes. Nothing is pickled.

A node is a JSON scalar (None, bool, finite float, 64-bit int, str), or an array that begins with a tag:

- `["l", node…]`, `["t", node…]`, `["d", [key node…], [value node…]]`, `["C", …]`: list, tuple, dict, Counter
- `["x", index]`: the leaf with that index (tensor, numpy array, or long bytes)
- `["i", hex]`, `["f", hex]`, `["z", real, imaginary]`, `["b", base64]`: other int, float, complex, short bytes
- `["s", dtype, hex]`, `["dtype", name]`, `["device", name]`, `["size", n…]`: numpy scalar and torch's types
"""

import base64
import binascii
import ctypes
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NoReturn

import numpy as np
import torch

from ..errors import SlotError, StateError
from ..format.manifest import ITEM_BYTES, Node, ShardSpec, TensorSpec, check_numpy_dtype, is_dense, lies_apart

_ORDERED: Final = "OrderedDict"
_FACTORIES: Final = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}
_ROOTS: Final = 2
"""The length of the place of a registered object's state."""

OPTIONAL_PARTS: Final = frozenset({"order", "outside", "unsaved", "shared", "kinds"})
"""Parts of the tree of a manifest beside the state; older versions did not write them."""

LONG_BYTES: Final = 1024
"""Bytes objects longer than this are leaves, shorter ones are part of the manifest."""

Leaf = torch.Tensor | np.ndarray | bytes

Extent = tuple[int, int]
"""The addresses where memory begins and ends."""

Place = list[int]
"""The way from the root of a tree to a node: the positions of children."""

_MAX_WORK: Final = 100_000
_byte_bounds: Final = getattr(np.lib, "array_utils", np).byte_bounds

PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_DTYPES: Final = frozenset(getattr(torch, name) for name in ITEM_BYTES)
_REMEDY: Final = (
    "give objects with state_dict() and load_state_dict(), or plain Python data, tensors and numpy arrays, also in "
    "what state_dict() returns: a deque as list(deque), a generator of random numbers by its get_state(), getstate() "
    "or bit_generator.state; in place of a DataLoader resilient_run.integrations.torch.ResumableLoader(loader)"
)


class _UnsupportedError(Exception):
    """A value that has no place in a tree; `path` collects the keys to it, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


class Flattener:
    """Splits one tree into a node and its leaves; a tensor or an array that occurs several times is one leaf.

    Attributes:
        node: The tree.
        shared: The places (`Place`) of each list or dict that occurs several times, for `link`.
        kinds: The places of dicts that are an `OrderedDict` or a `defaultdict` of a builtin type, with `_kind`.
        leaves: What `["x", index]` refers to; of a DTensor the local shard.
        keys: One hashable key per leaf: two flattened trees with equal keys have equal `specs`.
        shards: The DTensor of each leaf that is a shard of one, by index.
        sharing: Leaves that are not the same but share bytes, each with where it begins in the memory that they span,
            in bytes. Sets that a checkpoint can lay out again in the same way are in `specs`.
        repeating: Leaves of which several elements are one in memory, as `expand` makes them.
        arrays: Leaves that are numpy arrays.
    """

    def __init__(self, tree: Any) -> None:
        """Flatten `tree`.

        Raises:
            StateError: It contains something unsupported; the message has its path, its type and the remedy.
        """
        self.leaves: list[Leaf] = []
        self.keys: list[tuple[Any, ...]] = []
        self._first: dict[Hashable, int] = {}  # by address; of leaves that have none, by identity
        self._others: dict[Hashable, list[int]] = {}  # further leaves at such an address
        self._tensors: list[int] = []  # those that have memory, with where it begins and ends
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.shards: dict[int, Any] = {}
        self.repeating: list[int] = []
        self.arrays: list[int] = []
        self.shared: list[list[Place]] = []
        self.kinds: list[tuple[Place, str]] = []
        self._place: Place = []
        self._containers: dict[int, tuple[Node, list[Place]]] = {}
        # Imported by whoever makes DTensors; importing it here would cost every trainer half a second.
        self._dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        try:
            with torch.no_grad():  # `to_local` would record it
                self.node: Node = self._encode(tree)
        except _UnsupportedError as error:
            path = ".".join(reversed(error.path)) or "state"
            raise StateError(f"{path}: {error}; {_REMEDY}") from None
        except RecursionError:
            raise StateError(f"state is nested too deeply or contains itself; {_REMEDY}") from None
        self.sharing = self._overlaps()
        self._within: dict[int, tuple[int, int]] = {}
        for overlap in self.sharing:
            if all(self._can_share(index, offset) for index, offset in overlap.items()):
                for index, offset in overlap.items():
                    self._within[index] = min(overlap), offset
                    self.keys[index] = (*self.keys[index], min(overlap), offset)

    def add(self, key: str, value: Any) -> None:
        """Put `value`, which has no leaves, into the tree, which is a dict."""
        _, keys, children = self.node
        self._containers = {}  # ids of what may be gone
        keys.append(key)
        children.append(self._encode(value))

    def can_share(self, overlap: dict[int, int]) -> bool:
        """Tell whether a checkpoint can lay out the leaves of this item of `sharing` as they lie now."""
        return all(index in self._within for index in overlap)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return what each leaf takes."""
        return tuple(self._spec(index, leaf) for index, leaf in enumerate(self.leaves))

    def _encode(self, value: Any) -> Node:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            return self._tensor(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else ["i", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["f", struct.pack(">d", value).hex()]
        if kind is dict or kind is list or kind is OrderedDict or kind is defaultdict or kind is Counter:
            return self._container(value)
        if kind is tuple:
            return ["t", *self._children(range(len(value)), value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._rare(value)

    def _container(self, value: Any) -> Node:
        known = self._containers.get(id(value))
        if known is not None:
            node, places = known
            places.append(self._place.copy())
            if len(places) == 2:
                self.shared.append(places)
            return node
        place = self._place.copy()
        if type(value) is list:
            node = ["l", *self._children(range(len(value)), value)]
        else:
            tag = "C" if type(value) is Counter else "d"
            keys = [key if type(key) is str else self._encode(key) for key in value]
            node = [tag, keys, self._children(value, value.values())]
            kind = _kind(value)
            if kind is not None and len(place) >= _ROOTS:
                self.kinds.append((place, kind))
        self._containers[id(value)] = node, [place]
        return node

    def _children(self, keys: Iterable[Any], items: Iterable[Any]) -> list[Node]:
        nodes: list[Node] = []
        place = self._place
        place.append(0)
        try:
            for item in items:
                if type(item) in PLAIN_TENSORS:
                    nodes.append(self._tensor(item))
                else:
                    place[-1] = len(nodes)
                    nodes.append(self._encode(item))
        except _UnsupportedError as error:
            error.path.append(str(list(keys)[len(nodes)]))
            raise
        place.pop()
        return nodes

    def _tensor(self, tensor: torch.Tensor) -> Node:
        shard, shard_key = None, None
        if self._dtensor and isinstance(tensor, self._dtensor):
            shard, tensor = tensor, tensor.to_local()
            shard_key = (shard.shape, shard.stride(), shard.placements, shard.device_mesh)
        dtype, address = tensor.dtype, None
        if type(tensor) in PLAIN_TENSORS and dtype in _DTYPES:
            try:
                address, shape = tensor.data_ptr(), tensor.shape
            except RuntimeError:
                address = None  # it has no memory that a shape and strides describe
        if address is None or (not address and tensor.is_meta):
            raise _UnsupportedError(_why_unsupported(tensor))
        nbytes = tensor.nbytes
        stride = None if tensor.is_contiguous() else tensor.stride()
        key = (dtype, shape, tensor.device, stride, tensor.is_conj(), tensor.is_neg())
        # Empty tensors have no memory by which to tell them apart.
        place = address if nbytes else (id(tensor),)
        index = self._first.setdefault(place, len(self.leaves))
        if index < len(self.leaves):
            others = self._others.setdefault(place, [])
            for known in (index, *others):
                # Hashing how each shard is laid out would take as long as all the rest.
                if self.keys[known][0] == key and self.keys[known][2] == shard_key:
                    return ["x", known]
            index = len(self.leaves)
            others.append(index)
        self.leaves.append(tensor)
        self.keys.append((key, tensor.requires_grad, shard_key))
        if nbytes:
            if stride is not None:
                size = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
                nbytes = size * dtype.itemsize
                if any(count > 1 and not step for count, step in zip(shape, stride, strict=True)):
                    self.repeating.append(index)
            storage = tensor.untyped_storage()
            held_bytes, end_bytes = storage.nbytes(), address + nbytes - storage.data_ptr()
            if end_bytes > held_bytes:  # as `untyped_storage().resize_(0)` leaves it
                reason = f"its storage holds {held_bytes} of the {end_bytes} bytes up to its end"
                raise _UnsupportedError(f"its memory was freed: {reason}")
            self._tensors.append(index)
            self._begins.append(address)
            self._ends.append(address + nbytes)
        if shard is not None:
            self.shards[index] = shard
        return ["x", index]

    def _overlaps(self) -> list[dict[int, int]]:
        """Return the sets of tensors that share bytes, each tensor with its distance from the first byte of its set."""
        begins = np.array(self._begins, dtype=np.uint64)
        order = begins.argsort()
        ends = np.maximum.accumulate(np.array(self._ends, dtype=np.uint64)[order])
        if not (ends[:-1] > begins[order][1:]).any():
            return []
        return overlaps(dict(zip(self._tensors, zip(self._begins, self._ends, strict=True), strict=True)))

    def _rare(self, value: Any) -> Node:
        match value:
            case np.generic():
                self._check_numpy(value.dtype)
                return ["s", value.dtype.str, value.tobytes().hex()]
            case complex() if type(value) is complex:
                return ["z", self._encode(value.real), self._encode(value.imag)]
            case bytes() if type(value) is bytes:
                if len(value) <= LONG_BYTES:
                    return ["b", base64.b64encode(value).decode()]
                return self._host_leaf(value, ("bytes", len(value)))
            case np.ndarray() if type(value) is np.ndarray:
                return self._array(value)
            case torch.dtype():
                return ["dtype", str(value).removeprefix("torch.")]
            case torch.device():
                return ["device", str(value)]
            case torch.Size():
                return ["size", *value]
        raise _UnsupportedError(f"values of type {_name(value)} are not supported")

    def _array(self, array: np.ndarray[Any, Any]) -> Node:
        self._check_numpy(array.dtype)
        index = self._first.setdefault((id(array),), len(self.leaves))
        if index == len(self.leaves):
            self.arrays.append(index)
            self._host_leaf(array, ("numpy", array.dtype, array.shape, array.strides))
        return ["x", index]

    def _host_leaf(self, value: Leaf, key: tuple[Any, ...]) -> Node:
        self.leaves.append(value)
        self.keys.append(key)
        return ["x", len(self.leaves) - 1]

    @staticmethod
    def _check_numpy(dtype: np.dtype[Any]) -> None:
        try:
            check_numpy_dtype(dtype.str)
        except ValueError as error:
            raise _UnsupportedError(str(error)) from None

    def _spec(self, index: int, leaf: Leaf) -> TensorSpec:
        if isinstance(leaf, bytes):
            return TensorSpec(kind="bytes", dtype="uint8", shape=(len(leaf),))
        if isinstance(leaf, np.ndarray):
            stride = tuple(step // max(1, leaf.itemsize) for step in leaf.strides)
            laid_out = not leaf.flags.c_contiguous and is_dense(leaf.shape, stride)
            return TensorSpec(kind="numpy", dtype=leaf.dtype.str, shape=leaf.shape, stride=stride if laid_out else None)
        shard = self.shards.get(index)
        laid_out = not leaf.is_contiguous() and lies_apart(leaf.shape, leaf.stride())
        return TensorSpec(
            kind="torch",
            dtype=str(leaf.dtype).removeprefix("torch."),
            shape=tuple(leaf.shape),
            device=leaf.device.type,
            shard=None if shard is None else shard_spec(shard),
            stride=leaf.stride() if laid_out else None,
            within=self._within.get(index),
            grad=leaf.requires_grad and leaf.is_leaf,
        )

    def _can_share(self, index: int, offset: int) -> bool:
        leaf = self.leaves[index]
        assert isinstance(leaf, torch.Tensor)
        plain = not leaf.is_conj() and not leaf.is_neg()
        return plain and is_dense(leaf.shape, leaf.stride()) and offset % leaf.element_size() == 0


def is_strided(tensor: torch.Tensor) -> bool:
    """Tell whether `tensor` is one of torch's own classes whose memory its shape and strides describe."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_plain and (type(tensor) in PLAIN_TENSORS or _is_named(type(tensor)))


def _is_named(kind: type[torch.Tensor]) -> bool:
    """Tell whether `kind` is another class for parameters, with torch's own operations."""
    plain = torch.nn.Parameter
    methods = ("__torch_function__", "__torch_dispatch__")
    return issubclass(kind, plain) and all(getattr(kind, name) is getattr(plain, name) for name in methods)


def extent(leaf: Leaf) -> Extent:
    """Return the addresses where the memory of a tensor or an array begins and ends; equal ones if it has none."""
    if isinstance(leaf, np.ndarray):
        return _byte_bounds(leaf) if leaf.nbytes else (0, 0)
    assert isinstance(leaf, torch.Tensor)
    if not leaf.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.data_ptr(), leaf.data_ptr() + elements * leaf.element_size()


def share(one: Leaf, other: Leaf) -> bool:
    """Tell whether two tensors or arrays have a byte in common; those that cannot be told apart have."""
    try:
        return bool(np.shares_memory(_array(one), _array(other), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, RuntimeError):
        return True


def _array(leaf: Leaf) -> Any:
    """Return an array that lies where `leaf` does; its elements are never read."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    begin, end = extent(leaf)
    size = leaf.element_size()
    there = memoryview((ctypes.c_char * (end - begin)).from_address(begin))
    return np.ndarray(tuple(leaf.shape), np.dtype((np.void, size)), there, strides=[size * n for n in leaf.stride()])


def overlaps(extents: dict[int, Extent]) -> list[dict[int, int]]:
    """Return the sets of leaves that share bytes, each leaf with its distance from the first byte of its set."""
    found: list[dict[int, int]] = []
    members: dict[int, int] = {}
    begin = end = -1
    for index, (start, stop) in sorted(extents.items(), key=lambda item: item[1]):
        if start >= end:
            found.append(members)
            members, begin = {}, start
        members[index] = start - begin
        end = max(end, stop)
    return [overlap for overlap in [*found, members] if len(overlap) > 1]


def shard_spec(dtensor: Any) -> ShardSpec:
    """Return how `dtensor` is laid over its mesh."""
    mesh = dtensor.device_mesh
    return ShardSpec(
        shape=tuple(dtensor.shape),
        stride=tuple(dtensor.stride()),
        mesh_shape=tuple(mesh.mesh.shape),
        mesh_ranks=tuple(mesh.mesh.flatten().tolist()),
        mesh_dim_names=None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        placements=tuple(_placement(placement) for placement in dtensor.placements),
    )


def _placement(placement: Any) -> tuple[str | int, ...]:
    split_factor = getattr(placement, "split_factor", None)
    if split_factor is not None:
        return ("SS", placement.dim, split_factor)
    if placement.is_shard():
        return ("S", placement.dim)
    return ("R",) if placement.is_replicate() else ("P", placement.reduce_op)


def _children_of(node: Node) -> tuple[list[Node], int]:
    """Return the list that has the children of `node`, and where in it they begin."""
    if isinstance(node, list) and node:
        if node[0] in ("d", "C"):
            return node[2], 0
        if node[0] in ("l", "t"):
            return node, 1
    return [], 0


def link(root: Node, shared: Any) -> None:
    """Make one node of those that were one list or dict, for `unflatten`, when `Flattener.shared` was `shared`.

    Raises:
        SlotError: There are no equal nodes in these places.
    """
    try:
        for first, *others in shared:
            node = _at(root, first)
            for *parent, position in others:
                children, begin = _children_of(_at(root, parent))
                if position < 0 or children[begin + position] != node:
                    raise ValueError(f"other content at {parent} {position}")
                children[begin + position] = node
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise SlotError(f"manifest tree is malformed: shared places {str(shared)[:80]}: {error!r}") from error


def kinds_at(root: Node, kinds: Any) -> dict[int, str]:
    """Return the kinds of dicts by the id of their node, when `Flattener.kinds` was `kinds`.

    Raises:
        SlotError: There are no dicts in these places.
    """
    try:
        found = {id(node): kind for place, kind in kinds if (node := _at(root, place))[0] == "d"}
    except (TypeError, ValueError, LookupError) as error:
        raise SlotError(f"manifest tree is malformed: kinds {str(kinds)[:80]}: {error!r}") from error
    known = {_ORDERED, *_FACTORIES}
    if len(found) != len(kinds) or not all(isinstance(kind, str) and kind in known for kind in found.values()):
        raise SlotError(f"manifest tree is malformed: kinds {str(kinds)[:80]}")
    return found


def _kind(value: Any) -> str | None:
    """Return what a dict is besides: ordered, or with a builtin type for keys that it lacks; None for another one."""
    if type(value) is OrderedDict:
        return _ORDERED
    factory = value.default_factory if type(value) is defaultdict else None
    return None if factory is None else next((name for name, known in _FACTORIES.items() if known is factory), None)


def _at(root: Node, place: Place) -> Node:
    for position in place:
        children, first = _children_of(root)
        root = children[first:][position]
    return root


def unflatten(
    node: Node,
    leaf: Callable[[int], Any],
    containers: dict[int, Any] | None = None,
    kinds: dict[int, str] | None = None,
) -> Any:
    """Return the tree of `node`; `leaf` makes the value of each leaf index, once.

    Args:
        node: What `Flattener` made, or was read from a manifest.
        leaf: Called with a leaf's index.
        containers: The lists and dicts made of the same manifest so far, by the id of their node: a node that occurs
            again is the same object.
        kinds: What `kinds_at` returned.

    Raises:
        SlotError: The node is not one that `Flattener` writes.
    """
    try:
        return _Decoder(leaf, {} if containers is None else containers, kinds or {}).decode(node)
    except (TypeError, ValueError, IndexError, RecursionError, RuntimeError, binascii.Error) as error:
        raise SlotError(f"manifest tree is malformed: {error!r}") from error


def plain(node: Node) -> Any:
    """Return the tree of a node in which there are no leaves; SlotError if there are."""

    def refuse(index: int) -> NoReturn:
        raise SlotError(f"manifest has leaf {index} where there can be none")

    return unflatten(node, refuse)


class _Decoder:
    """Makes values of nodes, one of each node."""

    def __init__(self, leaf: Callable[[int], Any], containers: dict[int, Any], kinds: dict[int, str]) -> None:
        self._make_leaf = leaf
        self._leaves: dict[int, Any] = {}
        self._containers = containers
        self._kinds = kinds

    def decode(self, node: Node) -> Any:
        if not isinstance(node, list):
            if isinstance(node, dict):
                _malformed(node)
            return node
        match node:
            case ["x", int(index)] if type(index) is int and index >= 0:
                if index not in self._leaves:
                    self._leaves[index] = self._make_leaf(index)
                return self._leaves[index]
            case ["t", *items]:
                return tuple(map(self.decode, items))
            case ["l" | "d" | "C", *_]:
                if id(node) not in self._containers:
                    self._containers[id(node)] = self._container(node)
                return self._containers[id(node)]
            case ["i", str(digits)]:
                return int(digits, 16)
            case ["f", str(digits)]:
                return struct.unpack(">d", bytes.fromhex(digits))[0] if len(digits) == 16 else _malformed(node)
            case ["z", real, imaginary]:
                return complex(self.decode(real), self.decode(imaginary))
            case ["b", str(text)]:
                return base64.b64decode(text, validate=True)
            case ["s", str(name), str(digits)]:
                check_numpy_dtype(name)
                return np.ndarray((), dtype=np.dtype(name), buffer=bytearray(bytes.fromhex(digits)))[()]
            case ["dtype", str(name)] if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            case ["device", str(name)]:
                return torch.device(name)
            case ["size", *sizes]:
                return torch.Size(sizes)
        return _malformed(node)

    def _container(self, node: Node) -> Any:
        match node:
            case ["l", *items]:
                return list(map(self.decode, items))
            case ["d" | "C" as tag, list(keys), list(values)]:
                pairs = zip(keys, values, strict=True)
                mapping = {self.decode(key): self.decode(value) for key, value in pairs}
                kind = self._kinds.get(id(node))
                if kind == _ORDERED:
                    return OrderedDict(mapping)
                if kind is not None:
                    return defaultdict(_FACTORIES[kind], mapping)
                return Counter(mapping) if tag == "C" else mapping
        return _malformed(node)


def entries(node: Node) -> dict[str, Node]:
    """Return the child nodes of a dict node by key.

    Raises:
        SlotError: It is not the node of a dict with string keys.
    """
    match node:
        case ["d", list(keys), list(children)] if len(keys) == len(children):
            if all(isinstance(key, str) for key in keys):
                return dict(zip(keys, children, strict=True))
    raise SlotError(f"manifest tree is malformed: no dict of names in {str(node)[:80]}")


def _malformed(node: Node) -> NoReturn:
    raise ValueError(f"unknown node {str(node)[:80]}")


def _why_unsupported(tensor: torch.Tensor) -> str:
    if type(tensor) not in PLAIN_TENSORS:
        if torch.nn.parameter.is_lazy(tensor):
            return "it has no data before the module's first forward pass: do one first"
        return f"tensors of type {_name(tensor)} are not supported"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"{'nested' if tensor.is_nested else tensor.layout} tensors are not supported"
    if tensor.dtype not in _DTYPES:
        return f"tensors of {tensor.dtype} are not supported"
    return "tensors on the meta device hold no data"


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of `tensor` as bytes of the CPU, contiguous; of its memory where that is possible."""
    plain = raw(tensor.detach()).cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return flags as the bytes that they are, which torch's copies make 0 or 1; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def same(left: Any, right: Any) -> bool:
    """Tell whether two leaves are bit-identical; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        one, other = (raw(each).contiguous().flatten().view(torch.uint8) for each in (left, right))
        return torch.equal(one, other)
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return bool(left is right or left == right)
