"""nvidia-resiliency-ext in Lightning: its callback saves every step, its checkpoint plug-in keeps and loads that."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import (
    HierarchicalCheckpointIO,
    LocalCheckpointCallback,
)

from .nvidia_resiliency_ext import CpuStateDict


class LocalCheckpointIO(HierarchicalCheckpointIO):
    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> CpuStateDict:
        return CpuStateDict(checkpoint)

    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint: CpuStateDict, **_: Any) -> dict[str, Any]:
        return tensor_aware_checkpoint.state_dict


def make(directory: Path) -> tuple[Callback, LocalCheckpointIO, Path | None]:
    """Return the callback, the plug-in, and the `ckpt_path` of `Trainer.fit`."""
    manager = LocalCheckpointManager(directory)
    plugin = LocalCheckpointIO(TorchCheckpointIO(), manager, lambda path: -1)
    # The plug-in asks its manager for what is newest, and looks at no path.
    return LocalCheckpointCallback(every_n_train_steps=1), plugin, directory if manager.find_latest() >= 0 else None
