"""How long an operation takes as a function of the bytes it works on: affine, or measured points."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .fields import FileFields

Sizes = TypeVar("Sizes", float, NDArray[np.float64])


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine:
    """`alpha_s + beta_s_per_byte * x` seconds for x bytes."""

    alpha_s: float
    beta_s_per_byte: float

    def __call__(self, sizes_bytes: Sizes) -> Sizes:
        """Return the seconds that operations on these sizes take."""
        return self.alpha_s + self.beta_s_per_byte * sizes_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Measured points, joined by lines: constant below the first; above the last the last line goes on.

    If that does not rise, as measurements have it by chance, the line from the first to the last goes on, never down.
    """

    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, sizes_bytes: Sizes) -> Sizes:
        """Return the seconds that operations on these sizes take."""
        inside = np.interp(sizes_bytes, self.sizes_bytes, self.seconds)
        seconds: Sizes = inside + self._beyond() * np.maximum(sizes_bytes - self.sizes_bytes[-1], 0.0)
        return seconds

    def _beyond(self) -> float:
        """Return the seconds for each further byte above the last point."""
        before = zip(self.sizes_bytes[:-1], self.seconds[:-1], strict=True)
        slopes = [(self.seconds[-1] - seconds) / (self.sizes_bytes[-1] - size) for size, seconds in before]
        return next((slope for slope in (*slopes[-1:], *slopes[:1]) if slope > 0), 0.0)


Curve = Affine | Table
FREE = Affine(alpha_s=0.0, beta_s_per_byte=0.0)


def read_curve(fields: FileFields) -> Curve:
    """Return the curve of `{"alpha_s", "beta_s_per_byte"}` or `{"sizes_bytes", "seconds"}`.

    Raises:
        FileError: Neither, or wrong values.
    """
    if "sizes_bytes" in fields or "seconds" in fields:
        sizes_bytes = fields.numbers("sizes_bytes", "bytes")
        seconds = fields.numbers("seconds", "seconds")
        if any(after <= before for before, after in pairwise(sizes_bytes)):
            raise fields.wrong("sizes_bytes", "write the sizes in increasing order, each once")
        if len(seconds) != len(sizes_bytes):
            raise fields.wrong("seconds", f"write as many as there are sizes, {len(sizes_bytes)}")
        pairs = pairwise(zip(sizes_bytes, seconds, strict=True))
        slopes = ((after_s - before_s) / (after - before) for (before, before_s), (after, after_s) in pairs)
        if not all(map(math.isfinite, slopes)):
            raise fields.wrong("sizes_bytes", "write sizes that are farther apart")
        fields.close()
        return Table(sizes_bytes=sizes_bytes, seconds=seconds)
    alpha_s = fields.number("alpha_s", "the seconds that even an empty operation takes")
    beta_s_per_byte = fields.number("beta_s_per_byte", "the seconds for each further byte")
    fields.close()
    return Affine(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)
