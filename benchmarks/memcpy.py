"""The least that a copy of a state costs, which benchmarks compare with.

It imports nothing of a launcher's: resilient-run starts workers cold whose script names what takes effect before torch.
"""

import ctypes
import mmap
import time
from pathlib import Path

import torch
import torch.distributed as dist


def memcpy_seconds(sources: list[torch.Tensor], directory: Path, repetitions: int = 5) -> list[float]:
    """Return seconds to copy all tensors into a mapped tmpfs file whose pages exist, on all ranks at once."""
    copy = ctypes.CDLL(None).memmove
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    path = directory / f"floor{dist.get_rank()}"
    seconds = []
    with path.open("w+b") as file:
        file.truncate(sum(source.nbytes for source in sources))
        with mmap.mmap(file.fileno(), 0) as mapping:
            view = ctypes.c_char.from_buffer(mapping)
            start = ctypes.addressof(view)
            for _ in range(repetitions + 1):
                dist.barrier()
                target, started_s = start, time.monotonic()
                for source in sources:
                    copy(target, source.data_ptr(), source.nbytes)
                    target += source.nbytes
                seconds.append(time.monotonic() - started_s)
            del view
    path.unlink()
    return seconds[1:]  # the first pass allocates the pages
