"""The tree codec and the manifest: bit-exact round trips, clear refusals, and no trust in bytes from elsewhere."""

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_run.ckpt.errors import SlotError, StateError
from resilient_run.ckpt.format.manifest import (
    ITEM_BYTES,
    LARGE_BYTES,
    Layout,
    Manifest,
    ShardSpec,
    TensorSpec,
    encode,
    encode_tensors,
    leaf_paths,
    parse,
    plan_payload,
)
from resilient_run.ckpt.format.slot import CHUNK_BYTES
from resilient_run.ckpt.state.tree import Flattener, unflatten

KEYS = st.recursive(
    st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.complex_numbers()
    | st.binary(max_size=3000)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=25,
)
DTYPES = [getattr(torch, name) for name in ITEM_BYTES]
NUMPY_DTYPES = ["<f8", "<f4", "<f2", "|b1", "|u1", "<i8", "<u4", "<c16", "<M8[ns]", "<U7", "|S3", ">i4"]


def _bits(value: Any) -> Any:
    """Return a form of `value` in which == means: same types, same bits, same order."""
    match value:
        case float():
            return "float", struct.pack("<d", value)
        case complex():
            return "complex", struct.pack("<dd", value.real, value.imag)
        case dict():
            return type(value).__name__, [(_bits(key), _bits(item)) for key, item in value.items()]
        case list() | tuple():
            return type(value).__name__, [_bits(item) for item in value]
        case torch.Tensor():
            data = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
            return "tensor", value.dtype, tuple(value.shape), data.tolist() if value.numel() else []
        case np.ndarray() | np.generic():
            return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    return type(value).__name__, value


def _through_json(tree: Any) -> Any:
    flat = Flattener(tree)
    layout = plan_payload(flat.specs())
    manifest = parse(encode(encode_tensors(flat.specs(), layout), flat.node), layout.payload_bytes)
    assert manifest.tensors == flat.specs()
    assert manifest.offsets == layout.offsets
    return unflatten(manifest.tree, flat.leaves.__getitem__)


@given(TREES)
@settings(deadline=None)
def test_plain_data_survives_bit_by_bit(tree: Any) -> None:
    assert _bits(_through_json(tree)) == _bits(tree)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        struct.unpack(">d", bytes.fromhex("7ff8dead00000001"))[0],
        math.inf,
        -0.0,
        5e-324,
        2**63,
        -(2**63) - 1,
        1 << 20_000,
        "\ud800 lone surrogate",
        complex(math.nan, -0.0),
        torch.float8_e5m2,
        torch.device("cuda", 3),
        torch.Size([2, 0, 3]),
        np.float64(1.5),
        np.int8(-3),
        np.str_("text"),
        np.datetime64("2020-01-01"),
        np.array([], dtype="<U3"),
        np.arange(12).reshape(3, 4)[:, ::2],
        Counter({"a": 3}),
        b"x" * 5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_unusual_values_survive(value: Any) -> None:
    assert _bits(_through_json({"v": [value]})) == _bits({"v": [value]})


def test_dict_flavours_become_dicts_in_order() -> None:
    assert _through_json(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert _through_json(defaultdict(list, {3: [1]})) == {3: [1]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_item_sizes_are_those_of_torch(dtype: torch.dtype) -> None:
    assert dtype.itemsize == ITEM_BYTES[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_arrays_survive(name: str) -> None:
    array = np.zeros((2, 3), dtype=name)
    assert _bits(_through_json(array)) == _bits(array)


def test_a_tensor_that_occurs_twice_is_one_leaf_and_one_object() -> None:
    weight = torch.randn(3)
    flat = Flattener({"a": weight, "b": [weight.detach()], "view": weight[:2]})
    assert len(flat.leaves) == 2
    assert leaf_paths(flat.node) == {"a": 0, "b.0": 0, "view": 1}
    tree = unflatten(flat.node, lambda index: flat.leaves[index].clone())
    assert tree["a"] is tree["b"][0]


def test_leaves_with_one_dotted_path_keep_one_each() -> None:
    flat = Flattener({"a.b": torch.zeros(1), "a": {"b": torch.zeros(2)}, 1: torch.zeros(3), "1": torch.zeros(4)})
    assert leaf_paths(flat.node) == {"a.b": 0, "a.b'": 1, "1": 2, "1'": 3}


def test_tensors_that_differ_only_in_how_they_see_the_memory_are_two_leaves() -> None:
    z = torch.randn(2, 2, dtype=torch.complex64)
    assert len(Flattener([z, z.conj(), z.T, z.view(4)]).leaves) == 4


class _Colour(enum.Enum):
    RED = 1


class _Level(enum.IntEnum):
    LOW = 1


class _MyTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (_Colour.RED, "_Colour"),
        (_Level.LOW, "_Level"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (lambda: None, "builtins.function"),
        (np.array([object()]), "|O"),
        (np.zeros(2, dtype=[("a", "i4")]), "|V4"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.zeros(2).as_subclass(_MyTensor), "_MyTensor"),
    ],
    ids=lambda value: str(value)[:20].splitlines()[0],
)
def test_what_is_unsupported_is_named_with_its_path(value: Any, name: str) -> None:
    with pytest.raises(StateError) as caught:
        Flattener({"optimizer": {"state": {3: {"foo": [0, value]}}}})
    assert str(caught.value).startswith("optimizer.state.3.foo.1: ")
    assert name in str(caught.value)
    assert "state_dict()" in str(caught.value)


@pytest.mark.parametrize("view", [torch.Tensor.flatten, lambda tensor: tensor.T[:, 3:]], ids=["whole", "strided"])
def test_a_tensor_whose_memory_was_freed_is_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As frameworks free what they can gather again; behind the end of the storage nothing may be mapped."""
    tensor = view(torch.zeros(512, 512))
    tensor.untyped_storage().resize_(1 << 19)
    with pytest.raises(StateError, match="its storage holds 524288 of the 1048576 bytes"):
        Flattener({"model": {"weight": tensor}})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contains itself"):
        Flattener(loop)


def test_equal_keys_mean_equal_specs() -> None:
    def keys(*shape: int, dtype: torch.dtype = torch.float32) -> list[Any]:
        return Flattener([torch.zeros(shape, dtype=dtype)]).keys

    assert keys(2, 3) == keys(2, 3)
    assert keys(2, 3) != keys(3, 2)
    assert keys(2) != keys(2, dtype=torch.float64)


@given(st.lists(st.tuples(st.sampled_from(list(ITEM_BYTES)), st.lists(st.integers(0, 9), max_size=3)), max_size=8))
def test_payload_layouts_are_aligned_and_disjoint(tensors: list[tuple[str, list[int]]]) -> None:
    specs = [TensorSpec(kind="torch", dtype=dtype, shape=tuple(shape)) for dtype, shape in tensors]
    layout = plan_payload(specs, [range(len(specs))])
    end = 0
    for spec, offset in zip(specs, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + spec.nbytes
    assert layout.payload_bytes == end


def test_large_objects_begin_where_chunks_do() -> None:
    def spec(nbytes: int) -> TensorSpec:
        return TensorSpec(kind="torch", dtype="uint8", shape=(nbytes,))

    specs = [spec(nbytes) for nbytes in (5, 0, LARGE_BYTES - 5, 7, 7, LARGE_BYTES, 1)]
    layout = plan_payload(specs, [[0], [1, 2, 3], [0, 4], [2, 5]])
    at = CHUNK_BYTES + LARGE_BYTES
    later = at + CHUNK_BYTES
    assert layout.offsets == (0, CHUNK_BYTES, CHUNK_BYTES, at, at + 64, later, later + LARGE_BYTES)
    assert layout.payload_bytes == later + LARGE_BYTES + 1


def test_shards_survive() -> None:
    shard = ShardSpec(
        shape=(7, 2),
        stride=(2, 1),
        mesh_shape=(2, 2, 1, 1),
        mesh_ranks=(0, 1, 2, 3),
        mesh_dim_names=("a", "b", "c", "d"),
        placements=(("S", 0), ("R",), ("P", "sum"), ("SS", 1, 2)),
    )
    spec = TensorSpec(kind="torch", dtype="float32", shape=(4, 2), device="cuda", shard=shard)
    layout = plan_payload([spec])
    assert parse(encode(encode_tensors([spec], layout), None), 32) == Manifest(tree=None, tensors=(spec,), offsets=(0,))


GOOD = {"kind": "torch", "dtype": "float32", "shape": [2], "device": "cpu", "offset": 64, "nbytes": 8}
SHARD = {"shape": [2], "stride": [1], "mesh_shape": [1], "mesh_ranks": [0], "mesh_dim_names": None}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "pickle"},
        {"kind": ["torch"]},
        {"dtype": "float31"},
        {"dtype": ["float32"]},
        {"kind": "numpy", "dtype": "|O"},
        {"kind": "numpy", "dtype": "i4,f4"},
        {"kind": "numpy", "dtype": "object"},
        {"kind": "bytes"},
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [2.0]},
        {"shape": [True, 2]},
        {"shape": 2},
        {"shape": [0, 2**62, 2**62], "nbytes": 0},
        {"nbytes": 9},
        {"offset": 1},
        {"offset": -64},
        {"offset": 128},
        {"offset": 2**80},
        {"device": 1},
        {"shard": SHARD | {"placements": []}},
        {"shard": SHARD | {"placements": [["X"]]}},
        {"shard": SHARD | {"placements": [["R"]], "mesh_ranks": [0, 1]}},
        {"shard": None},
    ],
    ids=str,
)
def test_hostile_entries_are_refused(change: dict[str, Any]) -> None:
    def document(row: dict[str, Any]) -> bytes:
        return json.dumps({"version": 1, "tensors": [row], "tree": None}).encode()

    assert parse(document(GOOD), 72).offsets == (64,)
    with pytest.raises(SlotError, match="entry 0"):
        parse(document(GOOD | change), 72)


@given(st.binary(max_size=50) | st.just(b"[" * 100_000) | st.just(b'{"version":2,"tensors":[],"tree":null}'))
def test_arbitrary_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(SlotError):
        parse(data, 1000)


NODES = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=3)
    | st.sampled_from(["l", "t", "d", "C", "x", "i", "f", "z", "b", "s", "dtype", "device", "size", "<f4", "|O", "00"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(NODES)
@settings(deadline=None, max_examples=300)
def test_hostile_trees_are_decoded_or_refused(node: Any) -> None:
    try:
        unflatten(node, [1, 2].__getitem__)
    except SlotError:
        return


def test_layout_is_comparable() -> None:
    assert plan_payload([]) == Layout(offsets=(), payload_bytes=0)
