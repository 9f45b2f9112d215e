"""One rank of several that share a GPU: schemes and options over NCCL, each beside itself over Gloo on the CPU.

Prints JSON lines: a case, the digest of its sums, how far they are from those on the CPU in shares of the greatest
number there, how often the CPU waited for the GPU in the last step, and what failed.
"""

import hashlib
import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from resilient_run.comm.compress.compressors import NAMES
from resilient_run.comm.compress.compressors import named as compressor_named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import CommError, OpError
from resilient_run.comm.net.fabric import Fabric, make_fabric
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.tree import Option, all_options
from resilient_run.comm.runtime.choice import scheme_of
from resilient_run.comm.runtime.execute import OptionScheme
from resilient_run.comm.schemes import SCHEMES

SHAPE = (400, 250)
STEPS = 3
OF_SCHEMES: dict[str, dict[str, Any]] = {"powersgd": {"rank": 2}, "zen": {"profile_steps": 1}}
SAMPLED = 40


def gradient(rank: int, step: int) -> Tensor:
    """Make numbers of which one in eight is not zero."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHAPE, generator=generator) * (torch.rand(SHAPE, generator=generator) < 1 / 8)


def stepped(scheme: Scheme, key: str, device: torch.device) -> tuple[list[Tensor], int]:
    """Return the sums of all steps, and how often the CPU waited in the last one."""
    sums: list[Tensor] = []
    given = [gradient(dist.get_rank(), step).to(device) for step in range(STEPS)]
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        for step, tensor in enumerate(given):
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn" if step == STEPS - 1 else "default")
            sums.append(scheme.reduce(key, tensor))
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [each.cpu() for each in sums], sum("synchronizing" in str(each.message) for each in waits)


def tell(case: str, work: Callable[[], tuple[list[Tensor], list[Tensor], int]]) -> None:
    found: dict[str, Any] = {"case": case, "rank": dist.get_rank()}
    try:
        sums, expected, waits = work()
        data = b"".join(each.contiguous().numpy().tobytes() for each in sums)
        scale = max(float(each.abs().max()) for each in expected)
        error = max(float((each - other).abs().max()) for each, other in zip(sums, expected, strict=True)) / scale
        found |= {"digest": hashlib.sha256(data).hexdigest(), "error": error, "waits": waits}
    except (CommError, OpError, RuntimeError):
        found["failed"] = traceback.format_exc(limit=-6)
    os.write(1, f"{json.dumps(found)}\n".encode())


def of_scheme(name: str, over_nccl: Transport, over_gloo: Transport) -> None:
    def work() -> tuple[list[Tensor], list[Tensor], int]:
        options = OF_SCHEMES.get(name, {})
        expected, _ = stepped(scheme_of(name, over_gloo, **options), "w", over_gloo.device)
        sums, waits = stepped(scheme_of(name, over_nccl, **options), "w", over_nccl.device)
        return sums, expected, waits

    tell(name, work)


def of_option(option: Option, fabric: Fabric) -> None:
    def work() -> tuple[list[Tensor], list[Tensor], int]:
        memory = ErrorFeedback(compressor_named("topk", density=1))
        sums, waits = stepped(OptionScheme(fabric, memory, {"w": option}), "w", fabric.flat.device)
        expected = [sum(gradient(rank, step) for rank in range(fabric.flat.size)) for step in range(STEPS)]
        return sums, expected, waits

    tell(str(option), work)


def main() -> None:
    torch.set_num_threads(1)
    # NCCL refuses two ranks of a host on one GPU: each says that it is a host of its own.
    os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    device, ranks = torch.device("cuda", 0), range(dist.get_world_size())
    over_gloo = Transport(dist.new_group(backend="gloo"))
    if "schemes" in sys.argv[1:]:
        over_nccl = Transport.among(ranks, device)
        for name in sorted({*SCHEMES, *NAMES}):
            of_scheme(name, over_nccl, over_gloo)
    if "options" in sys.argv[1:]:
        fabric = make_fabric(ranks, ranks_per_host=2, device=device)
        options = list(all_options())
        dense = [option for option in options if not option.compressions]
        compressed = random.Random(len(ranks)).sample([each for each in options if each.compressions], SAMPLED)
        for option in (*dense, *compressed):
            of_option(option, fabric)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
