"""The manifest of a slot: which tensors lie where in the payload, and the tree of plain values that holds them.

A manifest is UTF-8 JSON: `{"version", "tensors": [TensorSpec with its offset…], "tree": node}`. The tree,
written and read by `ckpt/state/tree.py`, refers to tensors by index. Parsing trusts nothing: the bytes may come from
another host.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from ..errors import SlotError
from .slot import CHUNK_BYTES

VERSION: Final = 1

ALIGNMENT_BYTES: Final = 64
"""Every tensor begins at a multiple of this in the payload."""

LARGE_BYTES: Final = 4 * CHUNK_BYTES
"""A registered object of at least so many bytes begins where a chunk of the payload does."""

ITEM_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of the torch dtypes that a slot can hold."""

MAX_SPAN: Final = 16
"""A tensor that spans more memory than so many times its own is brought back contiguous."""

Kind = Literal["torch", "numpy", "bytes"]
Node = Any
"""A JSON value of the tree; its grammar is in `ckpt/state/tree.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """How the tensor that is stored here is a shard of a DTensor.

    Attributes:
        shape: Global shape.
        stride: Global strides, in elements.
        mesh_shape: Shape of the device mesh.
        mesh_ranks: Ranks of the mesh in row-major order.
        mesh_dim_names: Names of the mesh dimensions, if it has any.
        placements: One per mesh dimension: `["R"]`, `["S", dim]`, `["SS", dim, split_factor]` or `["P", op]`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    placements: tuple[tuple[str | int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What is stored of one tensor, apart from where.

    Attributes:
        kind: "torch", "numpy" (dtype is the array's `dtype.str`), or "bytes" (a bytes object, dtype "uint8").
        dtype: Name of the dtype.
        shape: Shape of what is stored here: of the local shard if it is a DTensor.
        device: Device type it was captured from, such as "cuda"; "cpu" unless it is a torch tensor.
        shard: Set if the tensor is a DTensor.
        stride: Strides in elements of what was captured, if it was not contiguous: of an array that is dense, and of a
            tensor with gaps up to `MAX_SPAN`.
        within: Set if it shares memory with other tensors: the index of the first of them, and where it begins in the
            memory that they span, in bytes.
        grad: Whether it is a leaf that requires grad.
    """

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    shard: ShardSpec | None = None
    stride: tuple[int, ...] | None = None
    within: tuple[int, int] | None = None
    grad: bool = False

    @property
    def content(self) -> tuple[Any, ...]:
        """What has to be equal for one tensor to take the bytes of the other; not where and how it lies in memory."""
        return self.kind, self.dtype, self.shape, self.shard

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize if self.kind == "numpy" else ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes, contiguous."""
        return self.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        """Describe the tensor for an error message."""
        if self.shard is None:
            return f"{self.dtype} {list(self.shape)}"
        placements = ", ".join("".join(map(str, placement)) for placement in self.shard.placements)
        return f"{self.dtype} {list(self.shard.shape)} sharded ({placements}) over {list(self.shard.mesh_shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where each tensor begins in the payload, and how long the payload is, in bytes."""

    offsets: tuple[int, ...]
    payload_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A parsed manifest; every tensor lies inside the payload. `compared` is what its digests are of, not checked."""

    tree: Node
    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    compared: Any = None


def plan_payload(tensors: Sequence[TensorSpec], parts: Iterable[Collection[int]] = ()) -> Layout:
    """Return the payload layout of `tensors`, in their order.

    Args:
        tensors: What is stored.
        parts: Their indices by registered object, in the order of the first ones. Where chunks cut the tensors of a
            large object depends on nothing that is stored before it.
    """
    before, large = set[int](), set[int]()
    for part in parts:
        own = set(part) - before
        if own and is_large(tensors, part):
            large.add(min(own))
        before |= own
    offsets = []
    end = 0
    for index, spec in enumerate(tensors):
        alignment_bytes = CHUNK_BYTES if index in large else ALIGNMENT_BYTES
        start = -(-end // alignment_bytes) * alignment_bytes
        offsets.append(start)
        end = start + spec.nbytes
    return Layout(offsets=tuple(offsets), payload_bytes=end)


def is_large(tensors: Sequence[TensorSpec], part: Iterable[int]) -> bool:
    """Tell whether the registered object that has these of `tensors` begins where a chunk does."""
    return sum(tensors[index].nbytes for index in part) >= LARGE_BYTES


def encode_tensors(tensors: Sequence[TensorSpec], layout: Layout) -> bytes:
    """Return the JSON array of `tensors`, for `encode`; it changes only when the layout does."""
    rows = []
    for spec, offset in zip(tensors, layout.offsets, strict=True):
        row: dict[str, Any] = {"kind": spec.kind, "dtype": spec.dtype, "shape": spec.shape, "device": spec.device}
        row |= {"offset": offset, "nbytes": spec.nbytes}
        if spec.grad:
            row["grad"] = True
        if spec.shard is not None:
            row["shard"] = {name: getattr(spec.shard, name) for name in ShardSpec.__slots__}
        row |= {name: value for name in ("stride", "within") if (value := getattr(spec, name)) is not None}
        rows.append(row)
    return _dump(rows)


def encode(tensors: bytes, tree: Node) -> bytes:
    """Return the manifest made of `encode_tensors` and the tree."""
    return b'{"version":%d,"tensors":%b,"tree":%b}' % (VERSION, tensors, _dump(tree))


def parse(data: bytes, payload_bytes: int) -> Manifest:
    """Return the manifest in `data`, of a slot whose payload has `payload_bytes`.

    Raises:
        SlotError: It is not a manifest of this version, or a tensor is of an unknown type or outside the
            payload.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SlotError(f"manifest is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise SlotError(f"manifest has version {version!r}, this release reads {VERSION}")
    rows = document.get("tensors")
    if not isinstance(rows, list) or "tree" not in document:
        raise SlotError("manifest has no list of tensors or no tree")
    tensors = []
    offsets = []
    for index, row in enumerate(rows):
        try:
            spec, offset = _parse_row(row, payload_bytes)
        except (KeyError, TypeError, ValueError) as error:
            raise SlotError(f"manifest entry {index} is malformed: {error!r}") from error
        tensors.append(spec)
        offsets.append(offset)
    _check_sharing(tensors)
    compared = document.get("compared")
    return Manifest(tree=document["tree"], tensors=tuple(tensors), offsets=tuple(offsets), compared=compared)


def leaf_paths(node: Node) -> dict[str, int]:
    """Return the leaf index at each dotted path of the tree of a manifest.

    Where keys with dots, or 1 and "1", make two paths one, the later one ends with an apostrophe.
    """
    paths: dict[str, int] = {}

    def walk(node: Node, path: str) -> None:
        if not isinstance(node, list):
            return
        if node[0] == "x":
            while path in paths:
                path += "'"
            paths[path] = node[1]
            return
        if node[0] in ("d", "C"):
            pairs = [(str(key), child) for key, child in zip(node[1], node[2], strict=True)]
        else:
            pairs = [(str(index), child) for index, child in enumerate(node[1:])]
        for key, child in pairs:
            walk(child, f"{path}.{key}" if path else key)

    walk(node, "")
    return paths


def leaf_parts(paths: Mapping[str, int]) -> dict[str, dict[int, str]]:
    """Return the part of `leaf_paths` that each registered object has, by its name: leaf index → path below `objects.`.

    A leaf that several objects have is in each of them.
    """
    parts: dict[str, dict[int, str]] = {}
    for path, index in paths.items():
        if path.startswith("objects."):
            below = path.removeprefix("objects.")
            parts.setdefault(object_name(below), {})[index] = below
    return parts


def object_name(path: str) -> str:
    """Return the name under which the object that has the leaf at `path` was registered."""
    return path.partition(".")[0]


def _parse_row(row: dict[str, Any], payload_bytes: int) -> tuple[TensorSpec, int]:
    kind, dtype, device = row["kind"], _string(row["dtype"]), _string(row["device"])
    if kind not in ("torch", "numpy", "bytes"):
        raise ValueError(f"unknown kind {kind!r}")
    if kind == "numpy":
        check_numpy_dtype(dtype)
    elif dtype not in ITEM_BYTES or (kind == "bytes" and dtype != "uint8"):
        raise ValueError(f"unknown dtype {dtype!r}")
    shard = _parse_shard(row["shard"]) if "shard" in row else None
    spec = TensorSpec(
        kind=kind,
        dtype=dtype,
        shape=_sizes(row["shape"]),
        device=device,
        shard=shard,
        stride=_sizes(row["stride"]) if "stride" in row else None,
        within=_parse_within(row["within"]) if "within" in row else None,
        grad=row.get("grad") is True,
    )
    if (kind == "bytes" and spec.stride) or (kind != "torch" and spec.within):
        raise ValueError(f"strides or shared memory of {spec}")
    lies_well = is_dense if spec.within is not None or kind == "numpy" else lies_apart
    if spec.stride is not None and not lies_well(spec.shape, spec.stride):
        raise ValueError(f"strides {list(spec.stride)} of {spec}")
    offset, nbytes = _size(row["offset"]), _size(row["nbytes"])
    if nbytes != spec.nbytes:
        raise ValueError(f"{nbytes} bytes for {spec}, which takes {spec.nbytes}")
    if math.prod(size or 1 for size in spec.shape) >= 2**59:
        raise ValueError(f"{spec} has sizes beyond any tensor")
    if offset % ALIGNMENT_BYTES or offset + nbytes > payload_bytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a payload of {payload_bytes}")
    return spec, offset


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether a tensor of these strides, in elements, fills a piece of memory without gaps and overlaps."""
    return 0 < _span(shape, stride) == math.prod(shape)


def lies_apart(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether a tensor of these strides has no element twice, and spans not more than `MAX_SPAN` allows."""
    return 0 < _span(shape, stride) <= MAX_SPAN * math.prod(shape)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first one in memory to the last; 0 if there are none, or several in one place."""
    if len(shape) != len(stride) or 0 in shape:
        return 0
    span = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step < span:
            return 0
        span += (size - 1) * step
    return span


def _check_sharing(tensors: Sequence[TensorSpec]) -> None:
    """Check that tensors which share memory span no more of it than they fill."""
    groups: dict[int, list[TensorSpec]] = {}
    for spec in tensors:
        if spec.within is not None:
            groups.setdefault(spec.within[0], []).append(spec)
    for first, members in groups.items():
        filled_bytes = sum(spec.nbytes for spec in members)
        if len({spec.device for spec in members}) != 1:
            raise SlotError(f"manifest entries that share memory with entry {first} are on different devices")
        for spec in members:
            assert spec.within is not None
            offset = spec.within[1]
            if offset % ITEM_BYTES[spec.dtype] or offset + spec.nbytes > filled_bytes:
                raise SlotError(f"manifest entry {first} shares memory with {spec} at byte {offset}, where none is")


def check_numpy_dtype(name: str) -> None:
    """Check that `name` is the `dtype.str` of a plain numpy type.

    Raises:
        ValueError: It is not: it holds Python objects, is structured, or is no dtype at all.
    """
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"unknown numpy dtype {name!r}") from error
    if dtype.str != name or dtype.kind not in "biufcmMSU":
        raise ValueError(f"unsupported numpy dtype {name!r}")


def _parse_shard(row: dict[str, Any]) -> ShardSpec:
    names = row["mesh_dim_names"]
    shard = ShardSpec(
        shape=_sizes(row["shape"]),
        stride=_sizes(row["stride"]),
        mesh_shape=_sizes(row["mesh_shape"]),
        mesh_ranks=_sizes(row["mesh_ranks"]),
        mesh_dim_names=None if names is None else tuple(_string(name) for name in names),
        placements=tuple(_parse_placement(placement) for placement in row["placements"]),
    )
    if len(shard.shape) != len(shard.stride) or len(shard.mesh_ranks) != math.prod(shard.mesh_shape):
        raise ValueError(f"inconsistent {shard}")
    if len(shard.placements) != len(shard.mesh_shape):
        raise ValueError(f"{len(shard.placements)} placements on a mesh of shape {shard.mesh_shape}")
    return shard


def _parse_placement(placement: Any) -> tuple[str | int, ...]:
    match placement:
        case ["R"]:
            return ("R",)
        case ["S", dim]:
            return ("S", _size(dim))
        case ["SS", dim, split_factor]:
            return ("SS", _size(dim), _size(split_factor))
        case ["P", str(operation)]:
            return ("P", operation)
    raise ValueError(f"unknown placement {placement!r}")


def _parse_within(value: Any) -> tuple[int, int]:
    first, offset = _sizes(value)
    return first, offset


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list of sizes")
    return tuple(_size(item) for item in value)


def _dump(value: Any) -> bytes:
    # ASCII escapes keep lone surrogates, which UTF-8 cannot carry.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
