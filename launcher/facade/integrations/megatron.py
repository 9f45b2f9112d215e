"""Megatron: see docs/frameworks/megatron.md."""

from resilient_run.ckpt.integrations.megatron import MegatronState

__all__ = ["MegatronState"]
