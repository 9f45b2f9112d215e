"""transformers: see docs/frameworks/transformers.md."""

from resilient_run.ckpt.integrations.transformers import ResilientMixin, protect

__all__ = ["ResilientMixin", "protect"]
