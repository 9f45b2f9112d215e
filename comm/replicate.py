"""Puts a scheme under FSDP2's hybrid sharding, in place of the all-reduce between replicas.

With a mesh of (replicate, shard), `fully_shard` reduce-scatters the gradients of each parameter group among the ranks
that share a replica and all-reduces each rank's shard with the ranks that hold the same shard of other replicas. Hosts
usually hold a replica each, so the all-reduce is what crosses the slow network.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from .compress.feedback import Memory
from .errors import CommError
from .net.alike import check_alike
from .net.fabric import Fabric
from .net.scheme import Scheme, split_as
from .net.transport import Transport
from .plan.plan import Plan
from .plan.tree import Comm, Phase
from .runtime.bucket import LEAST_ELEMENTS, BucketSum
from .runtime.choice import Choice, agreed_scheme
from .runtime.execute import OptionScheme, options_of
from .synchronizer import check_fits

log = logging.getLogger(__name__)


class ReplicateHook(BucketSum):
    """Sums the gradient shards of one FSDP2 model over its replicas.

    A name is that of a parameter, its gradient the shard that this rank has, padded at the end of its first dimension
    as FSDP2 pads it; with tensor parallelism it is the shard of this rank's part. The state is this rank's own.
    Whatever FSDP2 does besides stays its own: the reduce-scatter, divisors, mixed precision, the shards kept while
    gradients accumulate (`set_requires_gradient_sync`, `set_requires_all_reduce`), and hooks after the all-reduce.

    Args:
        groups: Parameter groups of the model, each with the parameters that it sums, by name.
        scheme: Sums large gradients over the replicas.
        least_elements: From how many elements on a shard's gradient is large.
    """

    def __init__(
        self,
        groups: Sequence[tuple[FSDPParamGroup, dict[str, FSDPParam]]],
        *,
        scheme: Scheme,
        least_elements: int = LEAST_ELEMENTS,
    ) -> None:
        super().__init__(scheme=scheme, world=scheme.transport, least_elements=least_elements)
        self._native: list[tuple[HSDPMeshInfo, dist.ProcessGroup]] = []
        for group, parameters in groups:
            # A copy, because parameter groups share it, and each has gradients of its own names.
            mesh_info = copy(_hybrid(group))
            native = mesh_info.replicate_process_group
            mesh_info.replicate_process_group = _Replicas(native, self, parameters)
            group.mesh_info = mesh_info
            self._native.append((mesh_info, native))

    def close(self) -> None:
        """Let FSDP2 all-reduce again; not during a backward pass."""
        for mesh_info, native in self._native:
            mesh_info.replicate_process_group = native


class _Replicas(dist.ProcessGroup):
    """Stands in for the process group of the replicas where a parameter group of FSDP2 all-reduces.

    It equals that group, so that torch finds it in its tables, where it looks when an error passes.
    """

    def __init__(self, native: dist.ProcessGroup, bucket_sum: BucketSum, parameters: dict[str, FSDPParam]) -> None:
        super().__init__(native.rank(), native.size())  # type: ignore[call-arg]
        self._native = native
        self._bucket_sum = bucket_sum
        self._parameters = parameters
        self._warned = False

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._native

    def __hash__(self) -> int:
        return hash(self._native)

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        """Sum or average one reduce-scattered buffer in place; the caller's stream waits for it."""
        (buffer,) = tensors
        self._bucket_sum.sum_bucket(buffer, self._gradients(buffer))
        # Divided after the sum, as the library does it; FSDP2 asks for averages only where that cannot overflow.
        if opts.reduceOp == dist.ReduceOp.AVG:  # type: ignore[comparison-overlap]
            buffer.div_(self.size())

    def _gradients(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Return the gradients that `buffer` is made of; none if it cannot be told which."""
        shapes = {n: p.padded_sharded_param_size for n, p in self._parameters.items() if p.sharded_param.requires_grad}
        if sum(shape.numel() for shape in shapes.values()) != buffer.numel():
            if not self._warned:
                log.warning(
                    "gradients of the parameter group of %s are all-reduced in steps in which some of its parameters "
                    "have none; call set_reduce_scatter_unused_params(True), of torch 2.13 or later, to have zeros for "
                    "them",
                    next(iter(self._parameters)),
                )
            self._warned = True
            return []
        return list(zip(shapes, split_as(buffer, shapes.values()), strict=True))


def register_replicated(
    model: nn.Module,
    scheme: Choice = "zen",
    *,
    least_elements: int = LEAST_ELEMENTS,
    **options: Any,
) -> ReplicateHook:
    """Let `scheme` sum the gradients of `model` between replicas from now on; all ranks of the replicas call this.

    The scheme runs when FSDP2's all-reduce would, over the process group that it would use, and the backward pass waits
    for it (on CUDA: until it is enqueued on FSDP2's all-reduce stream, or where a scheme waits for sizes).

    Args:
        model: After `fully_shard` with a mesh of (replicate, shard), before a backward pass; parameters that other
            ranks of the same place hold are equal.
        scheme: A name of `resilient_run.comm.schemes` or of a compressor, which then has error feedback, or what makes
            a scheme for these ranks: `planned(…)`, or `lambda ranks: Compressed(ranks, MomentumCorrection(…))`.
        least_elements: Shards of gradients with fewer elements are all-reduced together.
        options: Of the scheme, if it is a name.

    Returns:
        The hook; give it to the `Checkpointer` as one of its objects.

    Raises:
        CommError: There is no such scheme, options are given without a name, or the model is not of FSDP2, has no
            replicas, different replicas for different parameters, or a hook already; or the replicas
            are given different schemes or options.
    """
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    groups = []
    for group in _parameter_groups(model):
        infos = [parameter._module_info for parameter in group.fsdp_params]
        keys = [names[info.module] + info.param_name for info in infos]
        parameters = dict(zip(keys, group.fsdp_params, strict=True))
        _check(group, parameters)
        groups.append((group, parameters))
    if not groups:
        raise CommError(
            f"no parameter of this {type(model).__name__} is sharded by FSDP2; call fully_shard with a mesh of "
            f"(replicate, shard) first, or use resilient_run.comm.hook.register under DDP"
        )
    ranks = Transport.over(_replicas(groups), groups[0][0].device)
    check_alike(ranks, scheme=scheme, **options, least_elements=least_elements)
    made = agreed_scheme(scheme, ranks, ranks, options)
    return ReplicateHook(groups, scheme=made, least_elements=least_elements)


def planned(plan: Plan, model: nn.Module, memory: Memory) -> Callable[[Transport], Scheme]:
    """Return what makes the scheme that treats each gradient as `plan` says; which go together is up to FSDP2.

    Args:
        plan: Of `resilient-comm plan`, for a cluster whose hosts are replicas with one GPU each.
        model: What `register_replicated` gets.
        memory: Compresses, and remembers what it left out.

    Raises:
        CommError: The plan is not one for `model`, or has options that do not exist or have steps within hosts.
    """
    check_fits(plan, model)
    options = options_of({name: group.option for group in plan.groups for name in group.tensors})
    for name, option in options.items():
        if any(isinstance(step, Comm) and step.phase is not Phase.FLAT for step in option.steps):
            raise CommError(
                f"{name} is to be summed by {option}, but FSDP2 itself sums within hosts; plan with --planner espresso "
                "--constraint flat"
            )
    return lambda ranks: OptionScheme(Fabric(flat=ranks, intra=ranks, inter=ranks), memory, options)


def _parameter_groups(model: nn.Module) -> Iterator[FSDPParamGroup]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # torch 2.11: one at most
                yield state._fsdp_param_group


def _check(group: FSDPParamGroup, parameters: dict[str, FSDPParam]) -> None:
    first = next(iter(parameters))
    if not isinstance(group.mesh_info, HSDPMeshInfo):
        raise CommError(
            f"{first} has no replicas: its mesh is {group.mesh_info.mesh}; give fully_shard a mesh of two dimensions, "
            f"(replicate, shard)"
        )
    if isinstance(group.mesh_info.replicate_process_group, _Replicas):
        raise CommError(f"{first} has a scheme between replicas already; close() that hook first")


def _replicas(groups: Sequence[tuple[FSDPParamGroup, dict[str, FSDPParam]]]) -> dist.ProcessGroup:
    """Return the process group of the replicas, which must be the same ranks for all parameter groups."""
    found = [_hybrid(group).replicate_process_group for group, _ in groups]
    ranks = [dist.get_process_group_ranks(each) for each in found]
    for (_, parameters), others in zip(groups, ranks, strict=True):
        if others != ranks[0]:
            raise CommError(
                f"{next(iter(groups[0][1]))} has replicas on ranks {ranks[0]}, {next(iter(parameters))} on {others}; "
                f"give fully_shard one mesh for all parameters"
            )
    return found[0]


def _hybrid(group: FSDPParamGroup) -> HSDPMeshInfo:
    assert isinstance(group.mesh_info, HSDPMeshInfo), "checked by `_check`"
    return group.mesh_info
