"""What a rank remembers of its gradients, by the name that users import."""

from .compress.feedback import ErrorFeedback, Memory, MomentumCorrection

__all__ = ["ErrorFeedback", "Memory", "MomentumCorrection"]
