"""A checkpoint directory of `torch.distributed.checkpoint`, read once to be imported into the persistent tier.

DCP keeps its metadata and everything that is no tensor as pickles, and pickles run code. They are read here only, in
the command of the person who imports the directory, as `dcp.load` would; what is written is plain data, so neither
daemons nor trainers ever unpickle it.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..errors import StateError
from ..format.manifest import encode, encode_tensors, plan_payload
from ..state.memory import content_of
from ..state.tree import Flattener
from .export import STEP
from .import_loader import SOURCE, STRICT
from .pieces import missing

_BATCH_BYTES: Final = 256 << 20


class DcpSource:
    """One DCP checkpoint, as a slot's manifest and payload without shards; its plain values tell of the import.

    Attributes:
        manifest: The manifest.
        left_out: What cannot be held, by name with the reason; no state that a Checkpointer can capture has such.
        step: What `resilientctl export` recorded, None when something else wrote the directory.
    """

    def __init__(self, directory: Path, *, strict: bool) -> None:
        """Check that `directory` is complete, and read all of it that is no tensor.

        `strict`: a run that registers something that is not there must refuse it.

        Raises:
            StateError: It is no DCP checkpoint, files are missing or cut short, or a tensor cannot be held.
        """
        self._directory = directory
        self._reader = _Reader(directory)
        metadata = self._metadata()
        self._check_files(metadata)
        described = metadata.state_dict_metadata
        self.left_out: dict[str, str] = {}
        # Of these only shapes and dtypes are looked at: one element each, so that they take no memory.
        tensors = {
            name: torch.empty((1,) * len(item.size), dtype=item.properties.dtype, device="cpu").expand(item.size)
            for name, item in described.items()
            if isinstance(item, TensorStorageMetadata)
        }
        self._check_whole(metadata)
        objects = self._load({name: None for name in described if name not in tensors})
        self.step = objects.pop(STEP, None)
        for name, value in list(objects.items()):
            try:
                Flattener(value)
            except StateError as error:
                self.left_out[name] = str(error)
                del objects[name]
        mappings = {name: (name,) for name in described} | (metadata.planner_data or {})
        names = {id(tensor): name for name, tensor in tensors.items()}
        state = unflatten_state_dict({**tensors, **objects}, mappings)
        about = {SOURCE: str(directory.absolute()), STRICT: strict}
        flat = Flattener({"objects": state, "values": about, "rng": None})
        specs = flat.specs()
        self._layout = plan_payload(specs)
        self._leaves = [(names.get(id(leaf)), leaf, spec) for leaf, spec in zip(flat.leaves, specs, strict=True)]
        self.manifest = encode(encode_tensors(specs, self._layout), flat.node)

    def payload(self) -> Iterator[memoryview]:
        """Yield the payload from its first byte; the largest tensor, or 256 MiB, are in memory at a time.

        Raises:
            StateError: A file is damaged.
        """
        loaded: dict[str, Any] = {}
        end = 0
        for index, (name, leaf, spec) in enumerate(self._leaves):
            offset = self._layout.offsets[index]
            if offset > end:
                yield memoryview(bytes(offset - end))
            end = offset + spec.nbytes
            if name is not None:
                if name not in loaded:
                    loaded = self._load(self._batch(index))
                leaf = loaded.pop(name)
            if spec.nbytes:
                yield content_of(leaf).numpy().data

    def _batch(self, index: int) -> dict[str, Any]:
        """Return empty tensors for the next ones from leaf `index` on, as many as are read together."""
        batch: dict[str, Any] = {}
        size_bytes = 0
        for name, leaf, spec in self._leaves[index:]:
            if batch and size_bytes + spec.nbytes > _BATCH_BYTES:
                break
            if name is not None and isinstance(leaf, torch.Tensor):
                batch[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                size_bytes += spec.nbytes
        return batch

    def _metadata(self) -> Metadata:
        if not (self._directory / ".metadata").is_file():
            raise StateError(
                f"{self._directory} is not a DCP checkpoint: it has no file .metadata, which is written last"
            )
        try:
            return self._reader.read_metadata()
        except Exception as error:  # the boundary to a pickle, which may raise anything
            raise StateError(f"{self._directory}/.metadata cannot be read: {type(error).__name__}: {error}") from error

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        try:
            with warnings.catch_warnings():
                # It warns that this is a single process; that is meant.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(state, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            # DCP wraps what happened, and pickles may raise anything.
            cause, _ = next(iter(error.failures.values()))
            some = ", ".join(list(state)[:3])
            raise StateError(f"{self._directory}: cannot load {some}, …: {type(cause).__name__}: {cause}") from cause
        return state

    def _check_files(self, metadata: Metadata) -> None:
        ends: dict[str, int] = {}
        for item in (metadata.storage_data or {}).values():
            ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
        for name, needed_bytes in sorted(ends.items()):
            path = self._directory / name
            if not path.is_file():
                raise StateError(f"{path} is missing")
            if path.stat().st_size < needed_bytes:
                raise StateError(f"{path} is cut short: {path.stat().st_size} bytes, {needed_bytes} are needed")

    def _check_whole(self, metadata: Metadata) -> None:
        """Check what DCP does not: that the chunks that are there fill every tensor."""
        for name, item in metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                where = f"{self._directory}: {name}"
                holes = missing(where, item.size, [(chunk.offsets, chunk.sizes) for chunk in item.chunks])
                if holes:
                    raise StateError(f"{where}: no file has {holes} of its {item.size.numel()} elements")


class _Reader(FileSystemReader):
    """Reads the metadata once for all loads."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata(*args, **kwargs)
        return self._known
