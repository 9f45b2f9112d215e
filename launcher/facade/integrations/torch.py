"""torch: see docs/frameworks/data.md."""

from resilient_run.ckpt.integrations.position import ResumableLoader

__all__ = ["ResumableLoader"]
