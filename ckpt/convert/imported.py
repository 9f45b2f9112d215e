"""Reading an import from storage: any box of any tensor, each byte of it verified before it is used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch.distributed import get_rank

from ..errors import CheckpointError, RestoreError, SlotError
from ..format.import_manifest import CHECKSUMS, DATA, INDEX, MANIFEST, MAX_MANIFEST_BYTES, ImportManifest
from ..format.manifest import TensorSpec, parse
from ..format.slot import CHUNK_BYTES
from ..state.tree import entries, shard_spec, unflatten
from .pieces import place

_BLOCK_BYTES: Final = 8 * CHUNK_BYTES
"""What is read at once; small tensors beside each other share one."""


class StoredTensor:
    """A torch tensor of an import, not read yet."""

    def __init__(self, spec: TensorSpec, offset: int, data: "_Data") -> None:
        self._spec = spec
        self._offset = offset
        self._data = data

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        dtype: torch.dtype = getattr(torch, self._spec.dtype)
        return dtype

    def read(self, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the box of `sizes` at `offsets`, or the whole tensor, in new memory of the CPU.

        Raises:
            SlotError: A byte of it does not match its checksum.
            RestoreError: The storage does not answer.
        """
        shape = self.shape
        offsets, sizes = offsets or (0,) * len(shape), shape if sizes is None else sizes
        if not shape or not prod(sizes):
            start, rows = 0, torch.Size(sizes)
        else:
            # Rows of the first dimension lie behind each other; of the others only a part may be wanted.
            start, rows = offsets[0] * (self._spec.nbytes // shape[0]), torch.Size((sizes[0], *shape[1:]))
        tensor = torch.empty(rows, dtype=self.dtype, device="cpu")
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            self._data.read_into(raw.numpy().data, self._offset + start)
        for dim in range(1, len(shape)):
            tensor = tensor.narrow(dim, offsets[dim], sizes[dim]) if tensor.numel() else tensor
        return tensor

    def read_into(self, target: Any) -> None:
        """Replace what `target`, a tensor of this shape or this rank's shard of one, holds.

        Raises:
            SlotError: A byte of it does not match its checksum.
            RestoreError: The storage does not answer.
        """
        with torch.no_grad():
            if not hasattr(target, "to_local"):
                target.copy_(self.read())
            # A rank that is not in the mesh has no elements, and no place.
            elif (local := target.to_local()).numel():
                local.copy_(self.read(*place("a tensor", shard_spec(target), get_rank(), local.shape)))


class Imported:
    """One import, with its manifest read and verified.

    Attributes:
        manifest: What publishes it.
        state: The nested state, as the checkpoint that was imported had it; `StoredTensor` in place of tensors.
    """

    def __init__(self, url: str, *, run_id: str, step: int) -> None:
        """Open the import of `step` for `run_id` in the directory or fsspec URL `url`.

        Raises:
            SlotError: It is damaged.
            RestoreError: It is not there, or the storage does not answer.
        """
        files = _Files(url)
        try:
            self.manifest = ImportManifest.load(
                files.read(MANIFEST, 0, MAX_MANIFEST_BYTES, short=True), run_id=run_id, step=step
            )
            for name, size in self.manifest.file_bytes.items():
                if files.size(name) != size:
                    raise SlotError(f"{name} has {files.size(name)} bytes, not {size}")
            index = files.verified(INDEX, self.manifest.index_bytes, self.manifest.index_checksum)
            table = files.verified(CHECKSUMS, self.manifest.table_bytes, self.manifest.table_checksum)
            found = parse(index, self.manifest.data_bytes)
            if any(spec.shard is not None for spec in found.tensors):
                raise SlotError(f"{INDEX} has a shard")
            data = _Data(files, self.manifest.data_bytes, np.frombuffer(table, dtype="<u8"))
            tree = entries(found.tree)["objects"]
            state = unflatten(tree, lambda index: data.leaf(found.tensors[index], found.offsets[index]))
        except KeyError as error:
            raise SlotError(f"the import in {files.shown}: {INDEX} has no objects") from error
        except SlotError as error:
            raise SlotError(f"the import in {files.shown}: {error}") from error
        if not isinstance(state, dict):
            raise SlotError(f"the import in {files.shown} is a {type(state).__name__}, not a dict")
        self.state: dict[Any, Any] = state


class _Files:
    """The files of an import."""

    def __init__(self, url: str) -> None:
        import fsspec.core

        self.shown = url.rpartition("@")[2]
        with self._storage("open it"):
            self._fs, self._root = fsspec.core.url_to_fs(url)

    def size(self, name: str) -> int:
        with self._storage(f"find {name}"):
            return int(self._fs.size(f"{self._root}/{name}"))

    def read(self, name: str, start: int, end: int, *, short: bool = False) -> bytes:
        """Return the bytes from `start` to `end`; fewer only if `short`."""
        if start == end:
            return b""
        with self._storage(f"read {name}"):
            data = bytes(self._fs.cat_file(f"{self._root}/{name}", start=start, end=end))
        if len(data) != end - start and not short:
            raise SlotError(f"{name} ends {end - start - len(data)} bytes before byte {end}")
        return data

    def verified(self, name: str, size: int, checksum: int) -> bytes:
        content = self.read(name, 0, size)
        if xxhash.xxh3_64_intdigest(content) != checksum:
            raise SlotError(f"{name} does not match its checksum")
        return content

    @contextmanager
    def _storage(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise RestoreError(
                f"{self.shown} is gone, and with it what this run begins with: cannot {doing}; import it again"
            ) from error
        except Exception as error:  # the boundary to libraries that raise classes of their own
            raise RestoreError(f"{self.shown}: cannot {doing}: {type(error).__name__}: {error}") from error


class _Data:
    """The payload, read in verified blocks, of which the last one is kept."""

    def __init__(self, files: _Files, size_bytes: int, checksums: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self._files = files
        self._size_bytes = size_bytes
        self._checksums = checksums
        self._block: tuple[int, bytes] = (-1, b"")

    def leaf(self, spec: TensorSpec, offset: int) -> Any:
        """Return the leaf at `offset`; a torch tensor is read later."""
        if spec.kind == "torch":
            return StoredTensor(spec, offset, self)
        content = bytearray(spec.nbytes)
        self.read_into(memoryview(content), offset)
        if spec.kind == "bytes":
            return bytes(content)
        return np.ndarray(spec.shape, dtype=np.dtype(spec.dtype), buffer=content)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the payload from byte `start` on."""
        done = 0
        while done < len(target):
            index, offset = divmod(start + done, _BLOCK_BYTES)
            part = memoryview(self._verified(index))[offset : offset + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def _verified(self, index: int) -> bytes:
        if self._block[0] != index:
            start = index * _BLOCK_BYTES
            data = self._files.read(DATA, start, min(start + _BLOCK_BYTES, self._size_bytes))
            for at in range(0, len(data), CHUNK_BYTES):
                chunk = (start + at) // CHUNK_BYTES
                if xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) != int(self._checksums[chunk]):
                    raise SlotError(f"chunk {chunk} of {DATA} in {self._files.shown} does not match its checksum")
            self._block = (index, data)
        return self._block[1]
