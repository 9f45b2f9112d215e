"""resilient-run: training that comes back in seconds, usually with at most one step lost.

Names are loaded on first use (PEP 562), so that the import stays cheap and the daemon never pulls in torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_run.ckpt.checkpointer import Checkpointer as Checkpointer
    from resilient_run.ckpt.dcp import MemoryReader as MemoryReader
    from resilient_run.ckpt.dcp import MemoryTier as MemoryTier
    from resilient_run.ckpt.dcp import MemoryWriter as MemoryWriter
    from resilient_run.launcher.loop import loop as loop
    from resilient_run.launcher.persisted import PersistedReader as PersistedReader

__all__ = ["Checkpointer", "MemoryReader", "MemoryTier", "MemoryWriter", "PersistedReader", "__version__", "loop"]
__version__ = version("resilient-run")

_LAZY = {
    "Checkpointer": "resilient_run.ckpt.checkpointer",
    "MemoryReader": "resilient_run.ckpt.dcp",
    "MemoryTier": "resilient_run.ckpt.dcp",
    "MemoryWriter": "resilient_run.ckpt.dcp",
    "PersistedReader": "resilient_run.launcher.persisted",
    "loop": "resilient_run.launcher.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
