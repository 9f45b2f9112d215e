"""Lightning: see docs/frameworks/lightning.md."""

from resilient_run.ckpt.integrations.lightning import ResilientCallback

__all__ = ["ResilientCallback"]
