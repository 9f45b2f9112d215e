"""Ok-Topk, by the name that users import."""

from .baselines.ok_topk import Estimate, OkTopk

__all__ = ["Estimate", "OkTopk"]
