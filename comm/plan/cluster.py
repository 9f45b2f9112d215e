"""What Espresso knows of a training job: hosts and links, and what a compressor does to size and time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .curve import Curve, Table, read_curve
from .fields import FileFields, read_object
from .tree import Device, Routine

VERSION = 1
MOST_GPUS = 100_000
"""Their messages take seconds to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """A network between the participants of a collective.

    Attributes:
        cost: Seconds of one round with another participant, and of each byte that one adapter sends or receives; or,
            measured, of the collective, over the bytes that one GPU holds before it; between hosts, all GPUs of a host.
        routines: The same, measured, for collectives that differ from it.
        compressed: The same for collectives of compressed data; as those of dense data where it says nothing.
    """

    cost: Curve
    routines: Mapping[Routine, Curve] = field(default_factory=dict)
    compressed: Mapping[Routine, Curve] = field(default_factory=dict)

    def of(self, routine: Routine, *, compressed: bool = False) -> Curve:
        """Return the cost of a collective."""
        dense = self.routines.get(routine, self.cost)
        return self.compressed.get(routine, dense) if compressed else dense

    @property
    def measured(self) -> bool:
        """Whether any of its costs is measured points."""
        return any(isinstance(cost, Table) for cost in (self.cost, *self.routines.values(), *self.compressed.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Coder:
    """What a compressor takes on one device, over the bytes of the dense tensor.

    Attributes:
        compress: Compression.
        decompress: Decompression of one message.
        accumulate: Decompression of each further message of the same elements onto the sum.
    """

    compress: Curve
    decompress: Curve
    accumulate: Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorCost:
    """A compression algorithm on this cluster.

    Attributes:
        name: What it is called.
        ratio: Compressed bytes for each dense byte.
        coders: The devices that can run it. On CPUs all workers of a host do at the same time.
        batched: One call handles all pieces of a tensor that go different ways, and all messages that are summed; else
            each takes a call, as in the run-time here.
    """

    name: str
    ratio: float
    coders: Mapping[Device, Coder]
    batched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A training job's hardware and its compressor.

    Attributes:
        hosts: n; each has one adapter, which its GPUs share.
        gpus_per_host: k.
        intra: The links in a host, of each GPU.
        inter: The links between hosts, of each adapter.
        compressor: What compresses gradients.
        forward_s: The forward pass and what else precedes the backward pass, seconds.
        bytes_per_element: Size of an element before compression.
        flat: What collectives of all GPUs were measured to cost; without it this is derived from both links.
    """

    hosts: int
    gpus_per_host: int
    intra: LinkCost
    inter: LinkCost
    compressor: CompressorCost
    forward_s: float = 0.0
    bytes_per_element: float = 4.0
    flat: LinkCost | None = None


def read_cluster(path: Path, compressor: str | None = None) -> Cluster:
    """Return the cluster of a JSON file, whose form docs/comm/planning.md gives.

    Args:
        path: The file.
        compressor: Which of the compressors in it; not needed when there is one.

    Raises:
        FileError: The file is no such description, or has no such compressor.
    """
    return cluster_of(read_object(path), compressor)


def cluster_of(fields: FileFields, compressor: str | None = None) -> Cluster:
    """Return the cluster that an object of such a file describes; arguments and errors as of `read_cluster`."""
    fields.version(VERSION)
    coders = fields.object("compressors", "the compressors by name")
    names = coders.keys()
    if compressor is None and len(names) == 1:
        (compressor,) = names
    if compressor is None:
        raise fields.wrong(
            "compressors", f"name one with --compressor: {', '.join(names)}" if names else "describe one"
        )
    if compressor not in names:
        raise fields.wrong("compressors", f"there is no {compressor!r} in it; choose one of {', '.join(names)}")
    what = f"what {compressor} costs"
    cluster = Cluster(
        hosts=fields.integer("hosts", "the number of hosts", minimum=1),
        gpus_per_host=fields.integer("gpus_per_host", "the number of GPUs of a host", minimum=1),
        intra=_link(fields.object("intra", "the links in a host")),
        inter=_link(fields.object("inter", "the links between hosts")),
        compressor=_compressor(compressor, coders.object(compressor, what)),
        forward_s=fields.number("forward_s", "the seconds of the forward pass"),
        bytes_per_element=fields.number("bytes_per_element", "the bytes of an element of a gradient", positive=True),
        flat=_link(fields.object("flat", "the network as all GPUs together see it")) if "flat" in fields else None,
    )
    fields.close()
    if cluster.hosts * cluster.gpus_per_host > MOST_GPUS:
        raise fields.wrong("hosts", f"describe no more than {MOST_GPUS} GPUs in all")
    measured = cluster.intra.measured or cluster.inter.measured
    if measured and cluster.flat is None and min(cluster.hosts, cluster.gpus_per_host) > 1:
        raise fields.wrong("flat", "where links are measured points, say what collectives of all GPUs cost as well")
    return cluster


def _link(fields: FileFields) -> LinkCost:
    routines, compressed = (_routines(fields, key) for key in ("routines", "compressed"))
    return LinkCost(cost=read_curve(fields), routines=routines, compressed=compressed)


def _routines(fields: FileFields, key: str) -> dict[Routine, Curve]:
    if key not in fields:
        return {}
    measured, found = fields.object(key, "the collectives that differ, by name"), {}
    for name in sorted(measured.keys()):
        if name not in set(Routine):
            raise fields.wrong(key, f"no collective {name!r}; there are {', '.join(Routine)}")
        found[Routine(name)] = read_curve(measured.object(name, "what it costs"))
    return found


def _compressor(name: str, fields: FileFields) -> CompressorCost:
    coders = {device: _coder(fields.object(device, "what it costs there")) for device in Device if device in fields}
    if not coders:
        raise fields.wrong(Device.GPU, "say what it costs on at least one device")
    ratio = fields.number("ratio", "the compressed bytes for each dense byte", positive=True)
    batched = "batched" in fields and fields.flag("batched", "whether one call handles all pieces of a tensor")
    fields.close()
    return CompressorCost(name=name, ratio=ratio, coders=coders, batched=batched)


def _coder(fields: FileFields) -> Coder:
    def curve(key: str) -> Curve:
        return read_curve(fields.object(key, "seconds over dense bytes"))

    decompress = curve("decompress")
    coder = Coder(
        compress=curve("compress"),
        decompress=decompress,
        accumulate=curve("accumulate") if "accumulate" in fields else decompress,
    )
    fields.close()
    return coder
