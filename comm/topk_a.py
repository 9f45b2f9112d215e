"""TopkA, by the name that users import."""

from .baselines.topk_a import TopkA

__all__ = ["TopkA"]
