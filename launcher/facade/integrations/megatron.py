"""Megatron: see docs/frameworks.md."""

from resilient_run.ckpt.integrations.megatron import MegatronState

__all__ = ["MegatronState"]
