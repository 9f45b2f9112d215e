"""SparDL: sparse all-reduce for any number of ranks."""

from .spardl import SparDL

__all__ = ["SparDL"]
