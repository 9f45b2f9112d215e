"""The digests of a capture's leaves, by which ranks that must hold the same bytes are compared. Never imports torch.

A manifest ends with them: `"compared":[n,index…]`, of how many leaves each digest is and the first of those, and
`"digests":"…"`, which is read without parsing the rest: 16 hexadecimal digits that name the structure, and one
little-endian XXH3-64 per digest as base64. Ranks whose structures have the same name hold the same leaves at the same
offsets, of a DTensor the same shard; only those are compared.
"""

import base64
import binascii
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import SlotError
from .manifest import Layout, Node, ShardSpec, TensorSpec, leaf_paths
from .slot import CHUNK_BYTES

MAX_DIGESTS: Final = 4096
"""A state of more leaves has one digest for several neighbours."""

_COMPARED: Final = b',"compared":'
_DIGESTS: Final = b',"digests":"'
_INTEGERS: Final = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """What a manifest says of its leaves.

    Attributes:
        structure: Name of the structure.
        values: One digest per entry.
    """

    structure: int
    values: U64

    @classmethod
    def parse(cls, manifest: bytes) -> Self:
        """Return the digests at the end of `manifest`.

        Raises:
            SlotError: It has none, or they are malformed.
        """
        at = manifest.rfind(_DIGESTS)
        text = manifest[at + len(_DIGESTS) : -2]
        try:
            if at < 0:
                raise ValueError("there are none")
            structure, data = int(text[:16], 16), base64.b64decode(text[16:], validate=True)
            if len(data) % 8 or len(data) > 8 * MAX_DIGESTS:
                raise ValueError(f"{len(data)} bytes of them")
        except (ValueError, binascii.Error) as error:
            raise SlotError(f"manifest without digests of its leaves: {error}") from error
        return cls(structure=structure, values=np.frombuffer(data, dtype="<u8"))

    def combined(self, mask: npt.NDArray[np.bool_]) -> int:
        """Return one digest of those digests that `mask` has, which has an entry for each."""
        return xxhash.xxh3_64_intdigest(self.values[mask].tobytes())


def names(manifest: bytes) -> list[str]:
    """Return what each digest of a manifest is of, in the words of error messages.

    Raises:
        SlotError: The manifest is malformed.
    """
    try:
        document = json.loads(manifest)
        together, *starts = document["compared"]
        paths = {index: path.removeprefix("objects.") for path, index in leaf_paths(document["tree"]).items()}
        more = "" if together == 1 else f" or one of the {together - 1} after it"
        return [f"{paths[index]}{more}" for index in starts]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise SlotError(f"manifest without names of its leaves: {error!r}") from error


class Digester:
    """Makes the digests of captures of one structure out of what their copy has hashed already.

    A leaf's digest is the XXH3-64 of the XXH3-64s of its pieces, which are cut where chunks of the payload end. So it
    is the same whether a leaf was copied inside `step()` or behind it.

    Args:
        specs: What each leaf takes.
        layout: Where it lies in the payload.
        node: The tree that refers to it.
        pieces: The live leaf and first byte of each fingerprint that captures have, in their order.
        rank: The rank that captures.
        trained: Names of the registered modules, optimizers and holders of optimizers, of which every tensor is
            compared; of other objects only floating-point tensors are, because the rest is positions and random states.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        node: Node,
        pieces: Sequence[tuple[int, int]],
        *,
        rank: int,
        trained: Collection[str],
    ) -> None:
        paths = {index: path for path, index in leaf_paths(node).items()}
        leaves = [index for index in sorted(paths) if _is_compared(paths[index], specs[index], trained)]
        together = max(1, -(-len(leaves) // MAX_DIGESTS))
        groups = [leaves[start : start + together] for start in range(0, len(leaves), together)]
        known = {piece: number for number, piece in enumerate(pieces)}
        self._chunks: list[tuple[int, int]] = []
        self._fingerprints: list[tuple[int, int]] = []
        self._bytes: list[tuple[int, int, int]] = []
        self._ends: list[int] = []
        count = 0
        for group in groups:
            for index in group:
                start, end = layout.offsets[index], layout.offsets[index] + specs[index].nbytes
                while start < end:
                    chunk = start // CHUNK_BYTES
                    stop = min(end, (chunk + 1) * CHUNK_BYTES)
                    whole = (chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, layout.payload_bytes))
                    if (start, stop) == whole:
                        self._chunks.append((count, chunk))
                    elif (number := known.get((index, start))) is not None:
                        self._fingerprints.append((count, number))
                    else:
                        self._bytes.append((count, start, stop))
                    count, start = count + 1, stop
            self._ends.append(count)
        described = [_described(paths[index], specs[index], layout.offsets[index], rank) for index in leaves]
        structure = xxhash.xxh3_64_intdigest(json.dumps([together, described]).encode())
        compared = json.dumps([together, *(group[0] for group in groups)], separators=(",", ":")).encode()
        self._head = b"%b%b%b%016x" % (_COMPARED, compared, _DIGESTS, structure)
        self.encoded_bytes = len(self._encode(np.zeros(len(groups), dtype="<u8")))

    def extend(self, manifest: bytes, payload: memoryview, checksums: U64, fingerprints: Sequence[int]) -> bytes:
        """Return `manifest` with the digests of a verified capture, longer by `encoded_bytes`.

        Args:
            manifest: The one of the capture.
            payload: What was captured.
            checksums: The XXH3-64 of each chunk of it.
            fingerprints: The XXH3-64 of each piece of a live leaf.
        """
        pieces = np.zeros(self._ends[-1] if self._ends else 0, dtype="<u8")
        if self._chunks:
            at, chunks = np.array(self._chunks).T
            pieces[at] = checksums[chunks]
        for place, number in self._fingerprints:
            pieces[place] = fingerprints[number]
        for place, start, stop in self._bytes:
            pieces[place] = xxhash.xxh3_64_intdigest(payload[start:stop])
        data, starts = memoryview(pieces.tobytes()), [0, *self._ends[:-1]]
        values = [
            xxhash.xxh3_64_intdigest(data[8 * start : 8 * end]) for start, end in zip(starts, self._ends, strict=False)
        ]
        return manifest[:-1] + self._encode(np.array(values, dtype="<u8")) + b"}"

    def _encode(self, values: U64) -> bytes:
        return self._head + base64.b64encode(values.tobytes()) + b'"'


def is_part(path: str, names: Collection[str]) -> bool:
    """Tell whether the leaf at `path` belongs to a registered object of one of these names."""
    return path.startswith(tuple(f"{name}." for name in names))


def _is_compared(path: str, spec: TensorSpec, trained: Collection[str]) -> bool:
    if not path.startswith("objects.") or spec.kind != "torch" or not spec.nbytes:
        return False
    return spec.dtype not in _INTEGERS or is_part(path.removeprefix("objects."), trained)


def _described(path: str, spec: TensorSpec, offset: int, rank: int) -> list[Any]:
    shard = None if spec.shard is None else _shard(spec.shard, rank)
    return [path, spec.dtype, spec.shape, offset, shard]


def _shard(shard: ShardSpec, rank: int) -> list[Any]:
    """Return what two ranks must have in common to hold the same part of a DTensor.

    Which ranks the mesh has is none of it: replicas may be sharded over meshes of their own.
    """
    place = shard.mesh_ranks.index(rank) if rank in shard.mesh_ranks else 0
    at = [int(index) for index in np.unravel_index(place, shard.mesh_shape)] if shard.mesh_shape else []
    parts = [None if placement[0] == "R" else index for placement, index in zip(shard.placements, at, strict=True)]
    return [shard.shape, shard.mesh_shape, shard.placements, parts]
