"""What `register` takes by name, so that no list of a test leaves out a scheme or a compressor that is new."""

from collections.abc import Iterable

from resilient_run.comm.compress.compressors import NAMES
from resilient_run.comm.schemes import SCHEMES

LOSSY = frozenset({"dgc", "fp8", "int8", "powersgd", "spardl", "topk-a"})
"""Schemes of which one sum leaves something out. All others are held to be lossless."""

LOSSLESS = tuple(sorted(SCHEMES.keys() - LOSSY))


def others(named: Iterable[str]) -> list[str]:
    """Return all names that are not the beginning of one of these: of "topk+sparse", "topk" is."""
    return sorted({*SCHEMES, *NAMES} - {each.partition("+")[0].partition(",")[0] for each in named})
