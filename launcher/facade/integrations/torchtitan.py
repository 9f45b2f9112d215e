"""torchtitan: see docs/frameworks/torchtitan.md."""

from resilient_run.ckpt.integrations.torchtitan import every_step

__all__ = ["every_step"]
