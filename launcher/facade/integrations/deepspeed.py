"""DeepSpeed: see docs/frameworks.md."""

from resilient_run.ckpt.integrations.deepspeed import EngineState

__all__ = ["EngineState"]
