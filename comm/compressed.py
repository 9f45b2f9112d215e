"""A compressor as a scheme, by the name that users import."""

from .compress.compressed import Compressed

__all__ = ["Compressed"]
