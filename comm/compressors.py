"""Gradient compressors, by the name that users import."""

from .compress.compressors import NAMES, EFSignSGD, Half, OneBit, RandomK, SampledTopK, TopK, named

__all__ = ["NAMES", "EFSignSGD", "Half", "OneBit", "RandomK", "SampledTopK", "TopK", "named"]
