"""Measures and limits: how long schemes take, what they must move, and how sparse gradients are."""

from .timing import RecordingTransport, measure

__all__ = ["RecordingTransport", "measure"]
