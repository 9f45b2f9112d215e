"""gTopk, by the name that users import."""

from .baselines.gtopk import GTopk

__all__ = ["GTopk"]
