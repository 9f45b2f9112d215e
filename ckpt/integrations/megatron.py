"""Megatron: what its model chunks, optimizers, schedule and random states hold, as one object for a Checkpointer."""

from typing import Any, Final

import torch

from ..errors import StateError
from .common import framework, freeze, frozen

_KEPT: Final = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")
_UNTRIED: Final = ("fp8", "fp4", "use_precision_aware_optimizer", "optimizer_cpu_offload", "use_megatron_fsdp")
_COUNTERS: Final = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)


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
    so all ranks have to.
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
        self._optimizer, self._scheduler, self._args = optimizer, scheduler, args
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        for each in {optimizer, *self._optimizers}:
            if (kind := type(each).__qualname__) not in _KEPT and (kind, each) != ("ChainedOptimizer", optimizer):
                raise StateError(f"Megatron's {kind} is not supported: use one of {', '.join(_KEPT)}")
        settings = [
            vars(each).get(of) for each in [*self._optimizers, *self._chunks] for of in ("config", "ddp_config")
        ]
        for name in _UNTRIED:
            if any(getattr(each, name, None) for each in settings):
                raise StateError(f"Megatron's {name} is not supported: train without it, or without a Checkpointer")
        known = {id(parameter) for chunk in self._chunks for parameter in chunk.parameters()}
        if any(
            not known.issuperset(map(id, _trained(each)))
            or not set(self._chunks).issuperset(getattr(each, "model_chunks", ()))
            for each in self._optimizers
        ):
            raise StateError(
                "the optimizer trains what is not in model: give all chunks, as get_megatron_optimizer() has them"
            )
        # Ranks gather these parameters from each other: what one has of the others' may be of the step before.
        self._gathered = {chunk for each in self._optimizers for chunk in getattr(each, "model_chunks", ())}
        self._sharded = {
            id(parameter)
            for chunk in self._gathered
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in group.buckets
            for parameter in bucket.params
        }

    def covers(self) -> list[Any]:
        """Return the objects of which this keeps all."""
        return [self._optimizer, *self._optimizers, self._random._CUDA_RNG_STATE_TRACKER]

    def differs_between_ranks(self) -> list[Any]:
        """Return this object: its shards are those of one rank."""
        return [self]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, its tensors by reference."""
        tracker = self._random._CUDA_RNG_STATE_TRACKER
        return {
            "model": [self._whole(chunk) for chunk in self._chunks],
            "frozen": [frozen(chunk) for chunk in self._chunks],
            "optimizers": [_optimizer_state(each) for each in self._optimizers],
            "scheduler": _plain(self._scheduler),
            "rng": {} if tracker is None else {name: _rng_state(each) for name, each in tracker.states_.items()},
            "microbatches": _plain(self._microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR),
            "counters": {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` returned, and gather the shards of all ranks."""
        for chunk, saved in zip(self._chunks, state["model"], strict=True):
            for name, tensor in self._whole(chunk).items():
                tensor.copy_(saved[name])
        for chunk, names in zip(self._chunks, state.get("frozen", [None] * len(self._chunks)), strict=True):
            freeze(chunk, names)
        for each, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _load_optimizer(each, saved)
        for target, saved in (
            (self._scheduler, state["scheduler"]),
            (self._microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR, state["microbatches"]),
            (self._args, state["counters"]),
        ):
            for name, value in saved.items():
                setattr(target, name, value)
        states = self._random._CUDA_RNG_STATE_TRACKER.states_ if state["rng"] else {}
        for name, saved in state["rng"].items():
            if isinstance(states.get(name), torch.Generator):
                states[name].set_state(saved)
            else:
                states[name] = saved
        # Megatron-LM leaves out the gather of the first iteration, as after loading its own checkpoints.
        for chunk in self._chunks:
            if chunk in self._gathered:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]

    def _whole(self, chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a chunk that no optimizer shards."""
        every = [*chunk.named_parameters(), *chunk.named_buffers()]
        return {name: tensor for name, tensor in every if id(tensor) not in self._sharded}


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    if optimizer.is_stub_optimizer:
        return {}
    scaler = getattr(optimizer, "grad_scaler", None)
    return {
        "weights": _weights(optimizer),
        "inner": optimizer.optimizer.state_dict(),
        "scaler": {} if scaler is None else scaler.state_dict(),
    }


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Fill the weights, and give the inner optimizer the rest as it is: its own method would cast it."""
    if optimizer.is_stub_optimizer:
        return
    for tensor, saved in zip(_weights(optimizer), state["weights"], strict=True):
        tensor.copy_(saved)
    inner, saved = optimizer.optimizer, state["inner"]
    for group, options in zip(inner.param_groups, saved["param_groups"], strict=True):
        for parameter, index in zip(group["params"], options["params"], strict=True):
            if index in saved["state"]:
                inner.state[parameter] = saved["state"][index]
        group.update({name: option for name, option in options.items() if name != "params"})
    if state["scaler"]:
        optimizer.grad_scaler.load_state_dict(state["scaler"])


def _trained(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of models that an optimizer trains, without those that a distributed one shards."""
    halves = [parameter for group in getattr(optimizer, "float16_groups", []) for parameter in group]
    groups = [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups
    return halves + [each for group in groups for each in group["params"] if isinstance(each, torch.nn.Parameter)]


def _weights(optimizer: Any) -> list[torch.Tensor]:
    """Return what the inner optimizer steps, and the shards of model parameters that are copies of it."""
    stepped = [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
    return stepped + [shard for group in getattr(optimizer, "shard_float16_groups", []) for shard in group]


def _rng_state(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _plain(item: Any) -> dict[str, Any]:
    """Return the numbers and texts among the attributes of an object."""
    kinds = (bool, int, float, str, type(None))
    return {} if item is None else {name: value for name, value in vars(item).items() if type(value) in kinds}
