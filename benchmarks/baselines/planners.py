"""The planners that papers compare with, and the restricted search spaces of the thesis (Section 4.8.6).

`register` makes them known to `resilient-comm plan` in this process.
"""

from collections.abc import Callable
from itertools import pairwise

from resilient_run.comm.cupcake.cupcake import PLANNERS
from resilient_run.comm.cupcake.fusion import FusionProblem
from resilient_run.comm.cupcake.fusion import Strategy as Fusion
from resilient_run.comm.espresso.espresso import ESPRESSO_PLANNERS, Espresso, Planner, or_dense
from resilient_run.comm.espresso.strategy import Strategy
from resilient_run.comm.plan.constraints import (
    compress_once,
    compressed,
    cpu_only,
    dense_in_hosts,
    gpu_only,
    rootless,
    uncompressed,
)
from resilient_run.comm.plan.tree import Comm, Decomp, Option, Role, Routine

from .fusions import best_bucketed, best_evenly_split, hipress, layer_wise

# BytePS leaves smaller tensors alone (BYTEPS_MIN_COMPRESS_BYTES).
BYTEPS_LEAST_BYTES = 65536


def inter_all_gather(option: Option) -> bool:
    """Compressed between hosts, one all-gather there (thesis, Section 4.8.6); with GPUs, HiTopKComm's scheme."""
    whole = tuple(comm for comm in option.comms if comm.compressed and comm.role is Role.WHOLE)
    return dense_in_hosts(option) and rootless(option) and len(whole) == 1 and compress_once(option)


def inter_all_to_all(option: Option) -> bool:
    """Compressed between hosts, all-to-all and all-gather there with the sum in between (thesis, Section 4.8.6)."""
    return dense_in_hosts(option) and rootless(option) and option.compressions == 2


def all_to_all_twice(option: Option) -> bool:
    """Compressed throughout, all-to-all both in the host and between hosts, each followed by the sum (same section)."""
    after = [
        following
        for step, following in pairwise(option.steps)
        if isinstance(step, Comm) and step.routine is Routine.ALL_TO_ALL
    ]
    summed = len(after) == 2 and all(isinstance(following, Decomp) for following in after)
    return summed and option.compressions == 3 and all(comm.compressed for comm in option.comms)


def myopic(job: Espresso) -> Strategy:
    """Return what is quickest for each tensor alone."""
    return job.problem.quickest(range(len(job.options)))


def hipress_tree(job: Espresso) -> Strategy:
    """Return what is quickest for each tensor alone when GPUs may compress what travels between hosts."""
    between_hosts = job.among(compressed, gpu_only, dense_in_hosts)
    return job.problem.quickest([*job.without, *between_hosts])


def hitopkcomm(job: Espresso) -> Strategy:
    """Return all-gathers between hosts of all tensors, compressed on GPUs."""
    return job.problem.quickest(job.among(gpu_only, inter_all_gather))


def byteps(job: Espresso) -> Strategy:
    """Return two-step sums between hosts of all tensors but the smallest, compressed on CPUs."""
    compress = job.problem.quickest(job.among(cpu_only, inter_all_to_all))
    leave = job.problem.quickest(job.among(uncompressed))
    return tuple(
        choices[size_bytes < BYTEPS_LEAST_BYTES]
        for size_bytes, choices in zip(job.sizes_bytes, zip(compress, leave, strict=True), strict=True)
    )


FUSING: dict[str, Callable[[FusionProblem], Fusion]] = {
    "layer-wise": layer_wise,
    "hipress": hipress,
    "bucket-fusion": best_bucketed,
    "evenly-split": best_evenly_split,
}
CHOOSING: dict[str, Planner] = {
    "espresso-myopic": myopic,
    "espresso-inter-allgather": or_dense(inter_all_gather),
    "espresso-inter-alltoall": or_dense(inter_all_to_all),
    "espresso-alltoall-twice": or_dense(all_to_all_twice),
    "espresso-hipress": hipress_tree,
    "espresso-hitopkcomm": hitopkcomm,
    "espresso-byteps": byteps,
}


def register() -> None:
    """Make these planners known, before `comm.cli.plan` is imported."""
    PLANNERS.update(FUSING)
    ESPRESSO_PLANNERS.update(CHOOSING)
