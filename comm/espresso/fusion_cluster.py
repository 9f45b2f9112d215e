"""The fusion planners on a cluster of hosts: what groups cost that all take one option of Espresso's tree."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..cupcake.cupcake import fusion_plan
from ..errors import FileError
from ..plan.cluster import Cluster
from ..plan.curve import Affine, Curve, Table
from ..plan.model import Model
from ..plan.plan import ALL_REDUCE, COMPRESSED, FLAT, Plan
from ..plan.system import System
from ..plan.tree import Comm, Device, parse
from .cost import Costs

# Only what travels between hosts is compressed (thesis, Section 5.4.1); each GPU of a host has a part of it.
BETWEEN_HOSTS = "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:gpu > all_gather@intra2"


def cluster_plan(model: Model, cluster: Cluster, *, planner: str = "cupcake") -> Plan:
    """Return the plan of a fusion planner, with all groups compressed in the better of two ways.

    Either all GPUs gather from each other, or data is compressed between hosts only.

    Raises:
        FileError: The compressor has no costs for the device that computes.
        ValueError: The planner does not know costs of this form.
    """
    options = {COMPRESSED: FLAT}
    if cluster.hosts > 1 and cluster.gpus_per_host > 1:
        options[BETWEEN_HOSTS] = BETWEEN_HOSTS
    plans = [
        fusion_plan(
            model, fusion_system(cluster, option), planner=planner, compressor=cluster.compressor.name, option=name
        )
        for name, option in options.items()
    ]
    best = min(plans, key=lambda plan: plan.iteration_s)
    return replace(best, bound_s=min(plan.bound_s for plan in plans))


def fusion_system(cluster: Cluster, option: str) -> System:
    """Return what groups cost that take `option`, `FLAT` or `BETWEEN_HOSTS`, and dense groups, summed by all GPUs.

    Collectives in hosts count as part of the group's communication, also those before it is encoded.

    Raises:
        FileError: The compressor has no costs for the device that computes.
    """
    coder = cluster.compressor.coders.get(Device.GPU)
    if coder is None:
        raise FileError(
            f"compressors.{cluster.compressor.name}.gpu is missing: these planners compress where gradients are"
        )
    if option == FLAT:
        part, messages = 1.0, cluster.hosts * cluster.gpus_per_host
    else:
        part, messages = 1.0 / cluster.gpus_per_host, cluster.hosts
    return System(
        forward_s=cluster.forward_s,
        bytes_per_element=cluster.bytes_per_element,
        compress=_sum((coder.compress, 1), part=part),
        communicate=_communication(cluster, option),
        decompress=_sum((coder.decompress, 1), (coder.accumulate, messages - 1), part=part),
        communicate_dense=_communication(cluster, ALL_REDUCE),
    )


def _communication(cluster: Cluster, option: str) -> Curve:
    """Return the time of all collectives of an option; affine, or points where any of their costs is."""
    path = parse(option)
    knots = {knot for comm in path.comms for knot in _knots(cluster, comm)}
    # Joined by lines like its terms, and the last line shows how all of them go on.
    sizes_bytes = sorted({1.0, *knots, 2 * max(knots, default=0.0) + 1e9})
    ((_, steps),) = Costs(cluster, sizes_bytes).options([path])
    collectives = set(map(str, path.comms))
    seconds = sum((step.seconds for step in steps if step.label in collectives), np.zeros(len(sizes_bytes))).tolist()
    if knots:
        return Table(sizes_bytes=tuple(sizes_bytes), seconds=tuple(seconds))
    slope = (seconds[1] - seconds[0]) / (sizes_bytes[1] - 1.0)
    return Affine(alpha_s=max(0.0, seconds[0] - slope), beta_s_per_byte=slope)


def _knots(cluster: Cluster, comm: Comm) -> Iterator[float]:
    """Yield the bytes of a group for which a collective of it may move as many as there are in a measured point."""
    for link in filter(None, (cluster.intra, cluster.inter, cluster.flat)):
        cost = link.of(comm.routine, compressed=comm.compressed)
        if isinstance(cost, Table):
            # All of the group, a GPU's part of it, or either compressed: nobody holds anything else.
            for held in (1.0, 1.0 / cluster.gpus_per_host, cluster.compressor.ratio):
                yield from (size_bytes / held for size_bytes in cost.sizes_bytes if size_bytes / held > 1)


def _sum(*parts: tuple[Curve, int], part: float) -> Curve:
    """Return the sum of curves, each so many times, over the bytes of the whole of which they work on a part."""
    curves = [curve for curve, times in parts if times]
    knots = {0.0, *(size for curve in curves if isinstance(curve, Table) for size in curve.sizes_bytes)}
    # Joined by lines like its terms, and the last line shows how all of them go on.
    if all(isinstance(curve, Affine) for curve in curves):
        alpha_s, beyond_s = (sum(times * curve(size) for curve, times in parts) for size in (0.0, 1e9))
        return Affine(alpha_s=alpha_s, beta_s_per_byte=(beyond_s - alpha_s) / 1e9 * part)
    sizes = np.array([*sorted(knots), max(knots) * 2 + 1e9])
    seconds = sum((times * curve.over(sizes) for curve, times in parts), np.zeros_like(sizes))
    return Table(sizes_bytes=tuple((sizes / part).tolist()), seconds=tuple(seconds.tolist()))
