"""What planners read and write: models, clusters, plans, and the decision tree."""

from .plan import Plan

__all__ = ["Plan"]
