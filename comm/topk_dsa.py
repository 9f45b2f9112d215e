"""TopkDSA, by the name that users import."""

from .baselines.topk_dsa import TopkDSA

__all__ = ["TopkDSA"]
