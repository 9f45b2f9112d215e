"""What groups of gradients cost to compress, communicate and decompress, and the file that says it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import FileError
from .curve import FREE, Curve, read_curve
from .fields import FileFields, read_object

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class GroupCosts:
    """What planners that fuse have to know.

    Attributes:
        forward_s: The forward pass and what else precedes the backward pass, seconds.
        bytes_per_element: Size of an element before compression.
    """

    forward_s: float
    bytes_per_element: float

    @property
    def knows_dense(self) -> bool:
        """Whether it is known what groups without compression cost."""
        return True

    def over(self, sizes_bytes: NDArray[np.float64], compressed: bool) -> NDArray[np.float64]:
        """Return the seconds for encoding, communicating and decoding groups of sizes before compression (3, …)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class System(GroupCosts):
    """The costs of one compressor on one network, each over the bytes of the gradients before compression.

    Attributes:
        compress: Encoding of one group, h; on the device that computes.
        communicate: Communication of one encoded group, g.
        decompress: Decoding of one group after its communication; on the device that computes.
        communicate_dense: Communication of one group that is not compressed; None if nobody knows.
    """

    compress: Curve
    communicate: Curve
    decompress: Curve = FREE
    communicate_dense: Curve | None = None

    @property
    def knows_dense(self) -> bool:
        """Whether it is known what groups without compression cost."""
        return self.communicate_dense is not None

    def over(self, sizes_bytes: NDArray[np.float64], compressed: bool) -> NDArray[np.float64]:
        """Return the costs of groups.

        Raises:
            FileError: Nobody knows what communication without compression costs.
        """
        if compressed:
            return np.stack([curve.over(sizes_bytes) for curve in (self.compress, self.communicate, self.decompress)])
        if self.communicate_dense is None:
            raise FileError("the system file has no communicate_dense: add what groups without compression cost")
        free = np.zeros_like(sizes_bytes)
        return np.stack([free, self.communicate_dense.over(sizes_bytes), free])


def read_system(path: Path) -> System:
    """Return the system of a JSON file, in the form of the attributes of `System`.

    Raises:
        FileError: The file is no such description.
    """
    return system_of(read_object(path))


def system_of(fields: FileFields) -> System:
    """Return the system that an object of such a file describes.

    Raises:
        FileError: It is no such description.
    """
    fields.version(VERSION)
    system = System(
        forward_s=fields.number("forward_s", "the seconds of the forward pass"),
        bytes_per_element=fields.number("bytes_per_element", "the bytes of an element of a gradient", positive=True),
        compress=_curve(fields, "compress"),
        communicate=_curve(fields, "communicate"),
        decompress=_curve(fields, "decompress") if "decompress" in fields else FREE,
        communicate_dense=_curve(fields, "communicate_dense") if "communicate_dense" in fields else None,
    )
    fields.close()
    return system


def _curve(fields: FileFields, key: str) -> Curve:
    return read_curve(fields.object(key, 'what it costs, {"alpha_s", "beta_s_per_byte"} or {"sizes_bytes", "seconds"}'))
