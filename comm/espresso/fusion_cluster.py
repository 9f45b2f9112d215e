"""The fusion planners on a cluster of hosts: what groups cost that all take one option of Espresso's tree."""

from dataclasses import dataclass, replace

import numpy as np

from ..cupcake.cupcake import fusion_plan
from ..cupcake.fusion import Floats, GroupCosts
from ..errors import FileError
from ..plan.cluster import Cluster
from ..plan.model import Model
from ..plan.plan import ALL_REDUCE, COMPRESSED, FLAT, Plan
from ..plan.tree import parse
from .cost import Costs
from .strategy import KINDS

# Only what travels between hosts is compressed (thesis, Section 5.4.1); each GPU of a host has a part of it.
BETWEEN_HOSTS = "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:gpu > all_gather@intra2"


def cluster_plan(model: Model, cluster: Cluster, *, planner: str = "cupcake") -> Plan:
    """Return the plan of a fusion planner, with all groups compressed in the better of two ways.

    Either all GPUs gather from each other, or data is compressed between hosts only.

    Raises:
        FileError: The compressor has no costs for the device that computes.
    """
    options = {COMPRESSED: FLAT}
    if cluster.hosts > 1 and cluster.gpus_per_host > 1:
        options[BETWEEN_HOSTS] = BETWEEN_HOSTS
    plans = [
        fusion_plan(
            model, fusion_costs(cluster, option), planner=planner, compressor=cluster.compressor.name, option=name
        )
        for name, option in options.items()
    ]
    best = min(plans, key=lambda plan: plan.iteration_s)
    return replace(best, bound_s=min(plan.bound_s for plan in plans))


@dataclass(frozen=True, kw_only=True)
class _OptionCosts(GroupCosts):
    """Costs of groups that take an option if they are compressed, and are all-reduced by all GPUs if not.

    Collectives in hosts count as part of the group's communication, also those before it is encoded.
    """

    cluster: Cluster
    option: str

    def over(self, sizes_bytes: Floats, compressed: bool) -> Floats:
        found = Costs(self.cluster, sizes_bytes.ravel()).options([parse(self.option if compressed else ALL_REDUCE)])
        if not found:
            name = self.cluster.compressor.name
            raise FileError(f"compressors.{name}.gpu is missing: these planners compress where gradients are")
        taken = np.zeros((len(KINDS), sizes_bytes.size))
        for step in found[0][1]:
            taken[KINDS.index(step.kind)] += step.seconds
        return taken.reshape(-1, *sizes_bytes.shape)


def fusion_costs(cluster: Cluster, option: str) -> GroupCosts:
    """Return what groups cost that take `option`, `FLAT` or `BETWEEN_HOSTS`, and dense groups, summed by all GPUs."""
    return _OptionCosts(
        forward_s=cluster.forward_s, bytes_per_element=cluster.bytes_per_element, cluster=cluster, option=option
    )
