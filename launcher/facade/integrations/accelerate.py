"""accelerate: see docs/frameworks/accelerate.md."""

from resilient_run.ckpt.integrations.accelerate import AcceleratorCheckpointer

__all__ = ["AcceleratorCheckpointer"]
