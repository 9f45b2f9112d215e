"""The digests of a capture's leaves, by which ranks that must hold the same bytes are compared. Never imports torch.

Each registered object, a *part* of the state, is compared by itself, so what one rank has more of, or what changes its
length, hides nothing in another object. A manifest ends with the digests: `"compared":{name:[n,index…]…}`, of how many
leaves each digest of a part is and the first of those, and `"digests":"…"`, which is read without parsing the rest: for
each of these parts 16 hexadecimal digits that name its structure, and one little-endian XXH3-64 per digest as base64,
with a comma between two parts. Ranks whose structures have the same name hold the same leaves, hashed in the same
pieces, of a DTensor the same shard; only those are compared.
"""

import base64
import binascii
import json
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import SlotError
from .manifest import Layout, Node, ShardSpec, TensorSpec, is_large, leaf_parts, leaf_paths
from .slot import CHUNK_BYTES, chunk_count

MAX_DIGESTS: Final = 4096
"""Of all parts together; a part of too many leaves has one digest for several neighbours, the largest parts first."""

_COMPARED: Final = b',"compared":'
_DIGESTS: Final = b',"digests":"'
_YIELD_S: Final = 20e-6
"""XXH3 keeps the interpreter's lock, and a thread that waits for it needs so long to wake."""
_INTEGERS: Final = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_COUNTER: Final = ".num_batches_tracked"
"""Of BatchNorm, which each rank counts by itself: as long as all have seen as many batches it is the same by chance."""

U64 = npt.NDArray[np.uint64]


def parse(manifest: bytes) -> dict[str, U64]:
    """Return the digests at the end of `manifest` by the name of their structure, 16 hexadecimal digits.

    Raises:
        SlotError: It has none, or they are malformed.
    """
    at = manifest.rfind(_DIGESTS)
    found: dict[str, U64] = {}
    try:
        if at < 0:
            raise ValueError("there are none")
        for part in manifest[at + len(_DIGESTS) : -2].split(b","):
            if part:
                data = base64.b64decode(part[16:], validate=True)
                found[f"{int(part[:16], 16):016x}"] = np.frombuffer(data, dtype="<u8")
        if (count := sum(map(len, found.values()))) > MAX_DIGESTS:
            raise ValueError(f"{count} of them")
    except (ValueError, binascii.Error) as error:
        raise SlotError(f"manifest without digests of its leaves: {error}") from error
    return found


def names(manifest: bytes) -> dict[str, list[str]]:
    """Return what each digest of a manifest is of, in the words of error messages, by the name of the structure.

    Raises:
        SlotError: The manifest is malformed.
    """
    try:
        document = json.loads(manifest)
        parts = leaf_parts(leaf_paths(document["tree"]))
        found = {}
        for (structure, values), (name, (together, *starts)) in zip(
            parse(manifest).items(), document["compared"].items(), strict=True
        ):
            if len(starts) != len(values):
                raise ValueError(f"{len(values)} digests of {len(starts)} leaves")
            more = "" if together == 1 else f" or one of the {together - 1} after it"
            found[structure] = [f"{parts[name][index]}{more}" for index in starts]
        return found
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SlotError(f"manifest without names of its leaves: {error!r}") from error


def combined(values: U64, mask: npt.NDArray[np.bool_]) -> str:
    """Return one digest, 16 hexadecimal digits, of those of `values` that `mask`, which has an entry for each, has."""
    return f"{xxhash.xxh3_64_intdigest(values[mask].tobytes()):016x}"


class Digester:
    """Makes the checksums and the digests of captures of one structure, in one pass over each.

    A leaf's digest is the XXH3-64 of the XXH3-64s of its pieces. Of a large part, which begins where a chunk does, they
    are cut where chunks of the payload end; of a smaller one a leaf is one piece. So a digest is the same whether a
    leaf was copied inside `step()` or behind it, and whatever lies before the part.

    Args:
        specs: What each leaf takes.
        layout: Where it lies in the payload.
        node: The tree that refers to it.
        rank: The rank that captures.
        trained: Names of the registered modules, optimizers and holders of optimizers, of which every tensor is
            compared but for the counters of BatchNorm; of other objects only floating-point tensors are, because the
            rest is positions and random states.
        apart: Names of the objects of which nothing is compared, because ranks differ in them on purpose.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        layout: Layout,
        node: Node,
        *,
        rank: int,
        trained: Collection[str],
        apart: Collection[str] = (),
    ) -> None:
        self._layout = layout
        self._chunks: list[tuple[int, int]] = []
        self._bytes: list[tuple[int, int, int]] = []
        self._count = 0
        self._ends: list[int] = []
        self._parts: list[tuple[int, int]] = []  # structure, and where its digests end
        parts = leaf_parts(leaf_paths(node))
        leaves = {
            name: [index for index in part if _is_compared(part[index], specs[index], trained, apart)]
            for name, part in parts.items()
        }
        leaves = {name: indices for name, indices in list(leaves.items())[:MAX_DIGESTS] if indices}
        compared = {}
        for (name, indices), together in zip(leaves.items(), _together(list(map(len, leaves.values()))), strict=True):
            cut = is_large(specs, parts[name])
            groups = [indices[start : start + together] for start in range(0, len(indices), together)]
            for group in groups:
                for index in group:
                    self._add(index, specs[index], cut)
                self._ends.append(self._count)
            described = [
                _described(parts[name][index], specs[index], layout.offsets[index], cut, rank) for index in indices
            ]
            structure = xxhash.xxh3_64_intdigest(json.dumps([together, described]).encode())
            self._parts.append((structure, len(self._ends)))
            compared[name] = [together, *(group[0] for group in groups)]
        self._bytes.sort(key=lambda piece: piece[2])
        self._head = _COMPARED + json.dumps(compared, separators=(",", ":")).encode() + _DIGESTS
        self.encoded_bytes = len(self._encode(np.zeros(len(self._ends), dtype="<u8")))

    def hashes(self, payload: memoryview) -> "Hashes":
        """Return the hashes of a capture, none of which are made yet."""
        return Hashes(payload, self._bytes, self._count)

    def extend(self, manifest: bytes, hashes: "Hashes") -> tuple[bytes, U64]:
        """Return `manifest` with the digests of a capture, longer by `encoded_bytes`, and the XXH3-64 of each chunk.

        Args:
            manifest: The one of the capture.
            hashes: Of its payload, which is complete; those that are not made yet are made now.
        """
        hashes.upto(pause_s=_YIELD_S)
        pieces, checksums = hashes.pieces, hashes.checksums
        if self._chunks:
            at, chunks = np.array(self._chunks).T
            pieces[at] = checksums[chunks]
        data, starts = memoryview(pieces.tobytes()), [0, *self._ends[:-1]]
        values = [
            xxhash.xxh3_64_intdigest(data[8 * start : 8 * end]) for start, end in zip(starts, self._ends, strict=False)
        ]
        return manifest[:-1] + self._encode(np.array(values, dtype="<u8")) + b"}", checksums

    def _add(self, index: int, spec: TensorSpec, cut: bool) -> None:
        """Add the pieces of a leaf, each with where its hash comes from."""
        start, end = self._layout.offsets[index], self._layout.offsets[index] + spec.nbytes
        while start < end:
            chunk = start // CHUNK_BYTES
            chunk_end = (chunk + 1) * CHUNK_BYTES
            stop = min(end, chunk_end) if cut else end
            if (start, stop) == (chunk * CHUNK_BYTES, min(chunk_end, self._layout.payload_bytes)):
                self._chunks.append((self._count, chunk))
            else:
                self._bytes.append((self._count, start, stop))
            self._count, start = self._count + 1, stop

    def _encode(self, values: U64) -> bytes:
        starts = [0, *(end for _, end in self._parts)]
        parts = [
            b"%016x%b" % (structure, base64.b64encode(values[start:end].tobytes()))
            for start, (structure, end) in zip(starts, self._parts, strict=False)
        ]
        return self._head + b",".join(parts) + b'"'


class Hashes:
    """The XXH3-64 of the chunks of one payload, and of the pieces of its leaves, made while that is being filled.

    Attributes:
        checksums: Of each chunk.
        pieces: Of each piece.
    """

    def __init__(self, payload: memoryview, pieces: Sequence[tuple[int, int, int]], count: int) -> None:
        """Begin with none; `pieces` are the number, start and end of each of `count`, by end, but for whole chunks."""
        self._payload = payload
        self._size = len(payload)
        self.checksums: U64 = np.zeros(chunk_count(len(payload)), dtype="<u8")
        self.pieces: U64 = np.zeros(count, dtype="<u8")
        self._chunk = 0
        self._due = iter(pieces)
        self._next = next(self._due, None)

    @property
    def complete(self) -> bool:
        """Whether all are made."""
        return self._chunk == len(self.checksums)

    def upto(self, end: int | None = None, *, pause_s: float = 0) -> None:
        """Hash what lies in the chunks that end at or before `end`, all before which is there.

        Args:
            end: In bytes of the payload, None for all of it.
            pause_s: Seconds for which other threads get the interpreter's lock after each chunk.
        """
        while not self.complete:
            start, stop = self._chunk * CHUNK_BYTES, min((self._chunk + 1) * CHUNK_BYTES, self._size)
            if end is not None and stop > end:
                return
            self.checksums[self._chunk] = xxhash.xxh3_64_intdigest(self._payload[start:stop])
            self._chunk += 1
            if pause_s:
                time.sleep(pause_s)
            while self._next is not None and self._next[2] <= stop:  # what was just read is in the processor's cache
                number, first, last = self._next
                self.pieces[number] = xxhash.xxh3_64_intdigest(self._payload[first:last])
                self._next = next(self._due, None)


def _together(counts: Sequence[int]) -> list[int]:
    """Return for how many leaves each part, which has so many, has one digest; a small part has one for each."""
    limit = MAX_DIGESTS
    while True:
        together = [-(-count // limit) for count in counts]
        if limit == 1 or sum(-(-count // each) for count, each in zip(counts, together, strict=True)) <= MAX_DIGESTS:
            return together
        limit //= 2


def is_part(path: str, names: Collection[str]) -> bool:
    """Tell whether the leaf at `path` belongs to a registered object of one of these names."""
    return path.startswith(tuple(f"{name}." for name in names))


def _is_compared(path: str, spec: TensorSpec, trained: Collection[str], apart: Collection[str]) -> bool:
    if spec.kind != "torch" or not spec.nbytes or is_part(path, apart):
        return False
    return spec.dtype not in _INTEGERS or (is_part(path, trained) and not path.endswith(_COUNTER))


def _described(path: str, spec: TensorSpec, offset: int, cut: bool, rank: int) -> list[Any]:
    # Where the first piece ends says where all do.
    first_bytes = min(CHUNK_BYTES - offset % CHUNK_BYTES, spec.nbytes) if cut else spec.nbytes
    shard = None if spec.shard is None else _shard(spec.shard, rank)
    return [path, spec.dtype, spec.shape, first_bytes, shard]


def _shard(shard: ShardSpec, rank: int) -> list[Any]:
    """Return what two ranks must have in common to hold the same part of a DTensor.

    Which ranks the mesh has is none of it: replicas may be sharded over meshes of their own.
    """
    place = shard.mesh_ranks.index(rank) if rank in shard.mesh_ranks else 0
    at = [int(index) for index in np.unravel_index(place, shard.mesh_shape)] if shard.mesh_shape else []
    parts = [None if placement[0] == "R" else index for placement, index in zip(shard.placements, at, strict=True)]
    return [shard.shape, shard.mesh_shape, shard.placements, parts]
