"""Megatron: what its model chunks, optimizers, schedule and random states hold, as one object for a Checkpointer."""

from collections.abc import Iterator
from math import prod
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ..errors import StateError
from ..state.flat import FLAT, Range, Ranges, description, divided
from .common import framework, freeze, frozen, options_of

_KEPT: Final = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")
_UNTRIED: Final = ("fp8", "fp4", "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_megatron_fsdp")
_COUNTERS: Final = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)
_PARTS: Final = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups"),
)
"""Where an optimizer has parameters of the model, and in the same places what it makes of each."""
_DENSE: Final = ("pipeline_model_parallel",)
_EXPERTS: Final = ("expert_model_parallel", "pipeline_model_parallel")
"""What gives ranks other parameters, those of experts and all others, as `parallel_state` calls it."""
_DIVIDES: Final = ("tensor_model_parallel", "expert_tensor_parallel")
"""What divides each parameter."""
_COMMON: Final = "data-parallel-rng"
"""The random state that all ranks of tensor parallelism have alike."""


class _Part(NamedTuple):
    """Elements of a parameter, from `first` on in its memory: the part of shape `local` at `offset` of a whole one."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: int


class MegatronState:
    """The training state of Megatron on this rank, to be registered with a `Checkpointer`.

    Example:
        ```
        checkpointer = Checkpointer(megatron=MegatronState(model, optimizer, opt_param_scheduler, args))
        iteration = checkpointer.restore()
        while iteration < args.train_iters:
            train_step(...)
            iteration += 1
            checkpointer.step(iteration)
        ```

    Kept are parameters and buffers of the model chunks, which parameters are frozen, fp32 weights, optimizer states and
    options, the loss scale, the schedule, the states of Megatron's random generators, the microbatch calculator and the
    counters in `args`. Of what a distributed optimizer shards, each rank keeps its own shard: loading gathers the rest,
    so all ranks have to. What it has of which parameters is told, so that other numbers of data- and tensor-parallel
    ranks can go on with it.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any = None, args: Any = None) -> None:
        """Take what `setup_model_and_optimizer()` of Megatron-LM returns.

        Args:
            model: A model chunk, or the list of them.
            optimizer: What `get_megatron_optimizer()` returned.
            scheduler: An `OptimizerParamScheduler`.
            args: A namespace with Megatron-LM's counters: `consumed_train_samples` and the like.

        Raises:
            ImportError: Megatron-core is not installed.
            StateError: It trains in a way that could not be brought back exactly.
        """
        self._random = framework("megatron.core.tensor_parallel.random")
        self._microbatches = framework("megatron.core.num_microbatches_calculator")
        schedule = framework("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
        if not isinstance(scheduler, schedule | None):
            raise StateError(
                f"{type(scheduler).__qualname__} is not Megatron's OptimizerParamScheduler: register it beside the "
                "MegatronState"
            )
        self._chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._scheduler, self._args = scheduler, args
        every = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._covered = [optimizer, *every, self._random._CUDA_RNG_STATE_TRACKER]
        for each in {optimizer, *every}:
            if (kind := type(each).__qualname__) not in _KEPT and (kind, each) != ("ChainedOptimizer", optimizer):
                raise StateError(f"Megatron's {kind} is not supported: use one of {', '.join(_KEPT)}")
        settings = [vars(each).get(of) for each in [*every, *self._chunks] for of in ("config", "ddp_config")]
        for name in _UNTRIED:
            if any(getattr(each, name, None) for each in settings):
                raise StateError(f"Megatron's {name} is not supported: train without it, or without a Checkpointer")
        known = {id(parameter) for chunk in self._chunks for parameter in chunk.parameters()}
        if any(
            not known.issuperset(map(id, _trained(each)))
            or not set(self._chunks).issuperset(getattr(each, "model_chunks", ()))
            for each in every
        ):
            raise StateError(
                "the optimizer trains what is not in model: give all chunks, as get_megatron_optimizer() has them"
            )
        self._optimizers = [each for each in every if not each.is_stub_optimizer]
        # Ranks gather these parameters from each other: what one has of the others' may be of the step before.
        self._gathered = {chunk for each in every for chunk in getattr(each, "model_chunks", ())}
        self._sharded = {
            id(parameter)
            for chunk in self._gathered
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in group.buckets
            for parameter in bucket.params
        }
        self._parallel = framework("megatron.core.parallel_state")
        self._place, self._tensor, self._index = self._find_place()

    def covers(self) -> list[Any]:
        """Return the objects of which this keeps all."""
        return self._covered

    def differs_between_ranks(self) -> list[Any]:
        """Return this object: its shards are those of one rank."""
        return [self]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, its tensors by reference."""
        tracker = self._random._CUDA_RNG_STATE_TRACKER
        inner = [each.optimizer.state_dict() for each in self._optimizers]
        scalers = (getattr(each, "grad_scaler", None) for each in self._optimizers)
        masters, halves = self._masters(), self._halves()
        parameters = self._parameters(masters)
        states = {} if tracker is None else {name: _rng_state(each) for name, each in tracker.states_.items()}
        return {
            "place": self._place,
            "tensor": self._tensor,
            "index": self._index,
            "parameters": parameters,
            "buffers": dict(self._named("named_buffers")),
            "sharded": self._names_of_shards(),
            "frozen": [frozen(chunk) for chunk in self._chunks],
            "masters": masters,
            "halves": halves,
            "states": [
                state["state"].get(number, {})
                for state in inner
                for group in state["param_groups"]
                for number in group["params"]
            ],
            "options": options_of(group for state in inner for group in state["param_groups"]),
            "scaling": [{} if scaler is None else scaler.state_dict() for scaler in scalers],
            "scheduler": _plain(self._scheduler),
            "rng": {name: each for name, each in states.items() if name == _COMMON},
            "streams": {name: each for name, each in states.items() if name != _COMMON},
            "microbatches": _plain(self._microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR),
            "counters": {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)},
            FLAT: self._flats(parameters, masters, halves),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` returned, and gather the shards of all ranks.

        Raises:
            StateError: It is that of another part of the model, or of optimizers that divide it otherwise.
        """
        masters, halves = self._masters(), self._halves()
        had, now = (
            f"{each['place']}, rank {each['tensor'][0]} of {each['tensor'][1]} of tensor parallelism"
            if "tensor" in each
            else "what an earlier version kept"
            for each in (state, {"place": self._place, "tensor": self._tensor})
        )
        if had != now:
            raise StateError(
                f"this rank had {had}, and has {now}, now: give Megatron the parallel sizes that it had, or change "
                "that of tensor parallelism with the number of ranks"
            )
        parameters = self._parameters(masters)
        if (state["sharded"], state[FLAT]) != (self._names_of_shards(), self._flats(parameters, masters, halves)):
            raise StateError(
                "Megatron's optimizer has other parameters or shards than in the checkpoint: give it the model, the "
                "groups and the bucket_size that it had"
            )
        for name, tensor in parameters.items():
            tensor.copy_(state["parameters"][name])
        for name, tensor in self._named("named_buffers"):
            tensor.copy_(state["buffers"][name])
        for chunk, names in zip(self._chunks, state["frozen"], strict=True):
            freeze(chunk, names)
        for tensor, saved in zip([*masters, *halves], [*state["masters"], *state["halves"]], strict=True):
            tensor.copy_(saved)
        groups = [(each.optimizer, group) for each in self._optimizers for group in each.optimizer.param_groups]
        # As they are: the optimizer's own method would cast them.
        for (inner, master), saved in zip(
            [(inner, each) for inner, group in groups for each in group["params"]], state["states"], strict=True
        ):
            if saved:
                inner.state[master] = saved
        for (_, group), options in zip(groups, state["options"], strict=True):
            group.update(options)
        for each, saved in zip(self._optimizers, state["scaling"], strict=True):
            if saved:
                each.grad_scaler.load_state_dict(saved)
        for target, saved in (
            (self._scheduler, state["scheduler"]),
            (self._microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR, state["microbatches"]),
            (self._args, state["counters"]),
        ):
            for name, value in saved.items():
                setattr(target, name, value)
        random = state["rng"] | state["streams"]
        states = self._random._CUDA_RNG_STATE_TRACKER.states_ if random else {}
        for name, saved in random.items():
            if isinstance(states.get(name), torch.Generator):
                states[name].set_state(saved)
            else:
                states[name] = saved
        # Megatron-LM leaves out the gather of the first iteration, as after loading its own checkpoints.
        for chunk in self._chunks:
            if chunk in self._gathered:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def _find_place(self) -> tuple[str, list[int], int]:
        """Return what this rank has of the model, "" if nothing tells it; its tensor-parallel rank and their number;
        and its number among those that have the same.
        """
        parallel = self._parallel
        if not parallel.model_parallel_is_initialized():
            return "", [0, 1], dist.get_rank()
        replicas = [
            set(dist.get_process_group_ranks(group))
            for group in (parallel.get_data_parallel_group(), parallel.get_expert_data_parallel_group())
        ]
        has_experts = any(not getattr(each, "allreduce", True) for _, each in self._named("named_parameters"))
        kinds = (*_DENSE, "context_parallel", *(("expert_tensor_parallel", _EXPERTS[0]) if has_experts else ()))
        place = f"{self._part(*kinds)} in {len(self._chunks)} chunk(s)"
        tensor = [parallel.get_tensor_model_parallel_rank(), parallel.get_tensor_model_parallel_world_size()]
        return place, tensor, sorted(set.intersection(*replicas)).index(dist.get_rank())

    def _part(self, *divided: str) -> str:
        """Return which of how many parts this rank has, of what is divided by these kinds of parallelism."""
        parts = []
        for name in divided:
            rank, size = (getattr(self._parallel, f"get_{name}_{what}")() for what in ("rank", "world_size"))
            parts += [f"{name} rank {rank} of {size}"] if size > 1 else []
        return ", ".join(parts) or "the whole model"

    def _named(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        for number, chunk in enumerate(self._chunks):
            for name, tensor in getattr(chunk, kind)():
                yield f"{number}.{name}", tensor

    def _parameters(self, masters: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that no optimizer shards, or steps itself."""
        others = {*self._sharded, *map(id, masters)}
        return {name: each for name, each in self._named("named_parameters") if id(each) not in others}

    def _names_of_shards(self) -> list[str]:
        return [name for name, each in self._named("named_parameters") if id(each) in self._sharded]

    def _masters(self) -> list[torch.Tensor]:
        """Return what the inner optimizers step."""
        return [each for held in self._optimizers for group in held.optimizer.param_groups for each in group["params"]]

    def _halves(self) -> list[torch.Tensor]:
        """Return the shards of the model's parameters of which the inner optimizers step copies."""
        groups = (group for each in self._optimizers for group in getattr(each, "shard_float16_groups", []))
        return [shard for group in groups for shard in group]

    def _flats(
        self, parameters: dict[str, torch.Tensor], masters: list[torch.Tensor], halves: list[torch.Tensor]
    ) -> str:
        key = [*parameters, *map(id, [*parameters.values(), *masters, *halves])]
        return description(self, key, lambda: self._ranges(parameters, masters, halves))

    def _ranges(
        self, parameters: dict[str, torch.Tensor], masters: list[torch.Tensor], halves: list[torch.Tensor]
    ) -> dict[str, Ranges]:
        """Return what tensors have of whole parameters, by their paths in the state."""
        made: dict[int, tuple[Any, torch.Tensor, int]] = {}
        for each in self._optimizers:
            for number, group in enumerate(each.optimizer.param_groups):
                made |= {id(tensor): (each, tensor, number) for tensor in group["params"]}
            for models, parts in _PARTS:
                several = zip(getattr(each, models, []), getattr(each, parts, []), strict=True)
                for number, pair in enumerate(several):
                    made |= {id(part): (each, model, number) for model, part in zip(*pair, strict=True)}
        paths = {f"parameters.{name}": each for name, each in parameters.items()} if self._place else {}
        for kind, tensors in (("masters", masters), ("halves", halves)):
            paths |= {f"{kind}.{number}": tensor for number, tensor in enumerate(tensors)}
        whole = self._whole()
        found: dict[str, Ranges] = {}
        for path, tensor in paths.items():
            optimizer, model, number = made.get(id(tensor), (None, tensor, -1))
            begin, size = 0, model.numel()
            if hasattr(optimizer, "model_param_gbuf_map"):
                shard = optimizer._get_model_param_range_map(model)["param"]
                begin, size = shard.start, shard.size
            name, pieces = whole[id(model)]
            group = f" of group {number}" if number >= 0 else ""
            is_told = self._place and model.is_contiguous() and tensor.is_contiguous() and tensor.numel() == size
            ranges: list[Range] = []
            for key, shape, offset, local, first in pieces:
                low, high = max(begin, first), min(begin + size, first + prod(local))
                if low < high:
                    ranges += divided(key + group, shape, offset, local, low - first, low - begin, high - low)
            found[path] = ranges if is_told else f"Megatron does not tell what ranks have of {name}{group}"
        return found

    def _whole(self) -> dict[int, tuple[str, list[_Part]]]:
        """Return each parameter's name, and of which whole ones it is what parts, as Megatron's checkpoints have it."""
        mapping = framework("megatron.core.dist_checkpointing.mapping")
        values = framework("megatron.core.dist_checkpointing.dict_utils").nested_values
        told: dict[int, list[Any]] = {}
        for chunk in self._chunks:
            try:
                every = list(values(chunk.sharded_state_dict()))  # type: ignore[operator]
            except Exception:  # noqa: BLE001 - a script's model may have anything of that name
                continue
            for each in every:
                is_made = isinstance(each, mapping.ShardedTensorFactory)
                if is_made or isinstance(each, mapping.ShardedTensor):
                    told[id(each.data)] = list(values([each.build()])) if is_made else [each]
        found: dict[int, tuple[str, list[_Part]]] = {}
        for name, tensor in self._named("named_parameters"):
            kinds = _DENSE if getattr(tensor, "allreduce", True) else _EXPERTS
            parts = [
                _Part(
                    f"{name} as {each.key} ({self._part(*kinds)})",
                    tuple(each.global_shape[each.prepend_axis_num :]),
                    tuple(each.global_offset[each.prepend_axis_num :]),
                    tuple(each.local_shape),
                    each.data.storage_offset() - tensor.storage_offset(),
                )
                for each in told.get(id(tensor), ())
                if each.data.is_contiguous()
                and each.data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            ]
            is_divided = getattr(tensor, "tensor_model_parallel", False) and self._tensor[1] > 1
            if (
                sum(prod(each.local) for each in parts) != tensor.numel()
                or (is_divided and any(each.shape == each.local for each in parts))
                or any(sum(map(int.__ne__, each.shape, each.local)) > 1 for each in parts)
            ):
                shape = tuple(tensor.shape)
                parts = [_Part(f"{name} ({self._part(*_DIVIDES, *kinds)})", shape, (0,) * len(shape), shape, 0)]
            found[id(tensor)] = name, parts
        return found


def _trained(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of models that an optimizer trains, without those that a distributed one shards."""
    halves = [parameter for group in getattr(optimizer, "float16_groups", []) for parameter in group]
    groups = [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups
    return halves + [each for group in groups for each in group["params"] if isinstance(each, torch.nn.Parameter)]


def _rng_state(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _plain(item: Any) -> dict[str, Any]:
    """Return the numbers and texts among the attributes of an object."""
    kinds = (bool, int, float, str, type(None))
    return {} if item is None else {name: value for name, value in vars(item).items() if type(value) in kinds}
