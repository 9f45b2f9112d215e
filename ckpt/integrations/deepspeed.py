"""DeepSpeed: what an engine trains and counts on this rank, as one object to register with a `Checkpointer`."""

from collections.abc import Iterator
from typing import Any, Final, cast

import torch

from ..errors import StateError
from ..state.flat import FLAT, Range, Ranges, description
from .common import framework, freeze, frozen, options_of

_COUNTS: Final = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "_step_applied",
    "_is_gradient_accumulation_boundary",
)
_SCALING: Final = (
    "cur_scale",
    "cur_iter",
    "cur_hysteresis",
    "last_overflow_iter",
    "overflow",
    "custom_loss_scaler",
    "external_loss_scale",
    "is_gradient_accumulation_boundary",
)
"""Attributes of what has the loss scale: the engine's optimizer and, with most of them, an object of its."""
_REFUSED: Final = (
    ("random_ltd_enabled", "random LTD"),
    ("curriculum_learning_enabled", "curriculum learning"),
    ("super_offload", "SuperOffload"),
    ("is_deepcompile_enabled", "DeepCompile"),
)


_APART: Final = (
    ("has_moe_layers", "MoE"),
    ("pipeline_parallelism", "pipeline parallelism"),
    ("mp_world_size", "model parallelism"),
    ("autotp_size", "AutoTP"),
    ("sequence_parallel_size", "sequence parallelism"),
)
"""What divides ranks otherwise, by the attribute of the engine that tells it: a flag, or in how many parts."""


class EngineState:
    """The state of a `deepspeed.DeepSpeedEngine` on this rank: nothing is gathered, and tensors are not copied.

    These are parameters or their partitions, buffers, fp32 weights, states and options of the inner optimizer, loss
    scale, schedule and counters. Nothing else of the engine has to be registered.

    Example:
        ```
        engine, _, _, _ = deepspeed.initialize(model=model, config=config)
        with Checkpointer(engine=EngineState(engine)) as ckpt:
            for n in range(ckpt.restore(), steps):
                train_one_step()
                ckpt.step(n + 1)
        ```
    """

    def __init__(self, engine: Any) -> None:
        """Show `engine`, which `deepspeed.initialize` returned.

        Raises:
            ImportError: DeepSpeed is not installed.
            StateError: It uses something that could not be brought back exactly.
        """
        kind = framework("deepspeed.runtime.engine").DeepSpeedEngine
        if not isinstance(engine, kind):
            raise StateError(
                f"EngineState({type(engine).__qualname__}): give it the engine that deepspeed.initialize() returns"
            )
        _refuse(engine, kind)
        self._engine = engine
        self._loaded: int | None = None  # micro-batches of which it had no gradients, whatever the script sets then

    def covers(self) -> tuple[Any]:
        """Return what this shows all of (`foreign.py`)."""
        return (self._engine,)

    def differs_between_ranks(self) -> tuple["EngineState"]:
        """Return this: ranks have partitions of their own."""
        return (self,)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it by reference.

        Raises:
            StateError: Gradients of several batches are being accumulated, which no checkpoint has.
        """
        engine = self._engine
        if engine.micro_steps != self._loaded and _accumulates(engine):
            raise StateError(
                f"the engine has accumulated gradients of {engine.micro_steps % engine.gradient_accumulation_steps()} "
                f"of {engine.gradient_accumulation_steps()} micro-batches, which no checkpoint has: call "
                "Checkpointer.step() where engine.step() has updated the weights"
            )
        inner, masters = self._inner, self._masters()
        states = [] if inner is None else [dict(inner.state.get(master, {})) for master in masters]
        if inner is not None and sum(map(bool, states)) < sum(map(bool, inner.state.values())):
            raise StateError(
                f"{type(inner).__qualname__} of the engine has states for something else than the weights that it "
                "trains: it is not supported"
            )
        named = dict(engine.module.named_parameters())
        return {
            "parameters": {name: _part(parameter) for name, parameter in named.items()},
            "buffers": {name: buffer.detach() for name, buffer in engine.module.named_buffers()},
            "frozen": frozen(engine.module),
            "extra": {name: module.get_extra_state() for name, module in self._with_extra()},
            "masters": [master.detach() for master in masters],
            "states": states,
            "options": [] if inner is None else options_of(inner.param_groups),
            "scaling": [
                {name: value for name, value in vars(item).items() if name in _SCALING} for item in self._scaling()
            ],
            "objects": [item.state_dict() for item in self._stateful()],
            "counts": {name: getattr(engine, name) for name in _COUNTS},
            "ranks": torch.distributed.get_world_size(),
            "norm": engine._global_grad_norm,
            "rng": dict(_tracker().get_states()),
            FLAT: self._flats(masters, named),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; it fills the tensors that there are, which others have views of."""
        engine, inner, masters = self._engine, self._inner, self._masters()
        # ZeRO 3 may have small parameters whole, which are no views of the partitions; a forward pass gathers them.
        if whole := getattr(engine.optimizer, "persistent_parameters", ()):
            whole[0].partition(whole)
        for name, parameter in engine.module.named_parameters():
            _part(parameter).copy_(state["parameters"][name])
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        freeze(engine.module, state["frozen"])
        for name, module in self._with_extra():
            module.set_extra_state(state["extra"][name])
        for master, saved in zip(masters, state["masters"], strict=True):
            master.copy_(saved)
        if inner is not None:
            for group, options in zip(inner.param_groups, state["options"], strict=True):
                group.update(options)
            on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
            for master, saved in zip(masters, state["states"], strict=True):
                if saved or master in inner.state:
                    inner.state[master] = _filled(inner.state.get(master, {}), saved, master, on_device)
            _replay(inner, state["states"])
            # After a first step, ZeRO 1 and 2 show parameters their parts of the states.
            if any(state["states"]) and hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
                engine.optimizer._lazy_init_hp_params_optimizer_state()
        for item, saved in zip(self._scaling(), state["scaling"], strict=True):
            vars(item).update(saved)
        for item, saved in zip(self._stateful(), state["objects"], strict=True):
            item.load_state_dict(saved)
        vars(engine).update(state["counts"], _global_grad_norm=state["norm"])
        # Other ranks may accumulate other numbers of micro-batches. It tells only where a step of theirs begins: here.
        if state["ranks"] != torch.distributed.get_world_size():
            engine.micro_steps = 0
        self._loaded = engine.micro_steps
        _tracker().set_states(state["rng"])

    @property
    def _inner(self) -> Any:
        """The optimizer that makes the update, None in an engine that does not train."""
        outer = self._engine.optimizer
        inner = getattr(outer, "optimizer", outer)
        return inner if isinstance(inner, torch.optim.Optimizer) else None

    def _masters(self) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizer updates."""
        # ZeRO 3 shows them to it only while it updates them.
        found = getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", None)
        if found is not None:
            return list(found)
        inner = self._inner
        return [] if inner is None else [each for group in inner.param_groups for each in group["params"]]

    def _flats(self, masters: list[torch.Tensor], named: dict[str, torch.nn.Parameter]) -> str:
        parts = [(name, each, getattr(each, "ds_tensor", None)) for name, each in named.items()]
        key = [*map(id, masters)], [(name, id(whole), id(part)) for name, whole, part in parts]
        return description(self._engine.optimizer or self._engine, key, lambda: self._ranges(masters))

    def _ranges(self, masters: list[torch.Tensor]) -> dict[str, Ranges]:
        """Return what partitions have of parameters, by their paths in the state, or why that cannot be told."""
        engine, outer = self._engine, self._engine.optimizer
        told = ((what, getattr(engine, name, 0)) for name, what in _APART)
        why = next((what for what, held in told if held is True or (held() if callable(held) else held) > 1), None)
        if why or type(outer).__name__.startswith("MiCS"):
            return dict.fromkeys(self._paths(masters), f"{why or 'MiCS'} gives ranks other parameters")
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        found: dict[str, Ranges] = {}
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor"):
                found[f"parameters.{name}"] = [*_partition(name, parameter, 0)]
        groups = getattr(outer, "round_robin_bit16_groups", None) or getattr(outer, "bf16_groups", None) or []
        if hasattr(outer, "fp32_partitioned_groups_flat"):  # ZeRO 3
            groups = outer.fp16_groups
        for number, (path, group) in enumerate(zip(self._paths(masters), groups, strict=True) if groups else ()):
            ranges: list[Range] = []
            at, size = 0, masters[number].numel()
            begins = getattr(outer, "round_robin_bit16_offsets", None)
            for position, parameter in enumerate(group):
                name = names[id(parameter)]
                if hasattr(parameter, "ds_tensor"):
                    ranges += _partition(name, parameter, at)
                    at += parameter.partition_numel()
                    continue
                # Of all that is flat, this rank has `size` elements from `first` on.
                first = size * torch.distributed.get_rank(outer.real_dp_process_group[number])
                begin, count = begins[number][position] if begins else at, parameter.numel()
                low, high = max(begin, first), min(begin + count, first + size)
                if low < high:
                    ranges.append(Range(name, tuple(parameter.shape), low - begin, low - first, high - low))
                at = begin + count
            found[path] = ranges
        if engine.zero_optimization_stage() and not groups:
            found |= dict.fromkeys(self._paths(masters), f"{type(outer).__qualname__} does not tell it")
        return found

    @staticmethod
    def _paths(masters: list[torch.Tensor]) -> list[str]:
        return [f"masters.{number}" for number in range(len(masters))]

    def _with_extra(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for name, module in self._engine.module.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield name, module

    def _scaling(self) -> list[Any]:
        """Return what has the loss scale and its history among its attributes."""
        outer = self._engine.optimizer
        if outer is self._inner:
            return []
        found = [outer, *(getattr(outer, name, None) for name in ("loss_scaler", "loss_scale_config"))]
        return [item for item in found if item is not None]

    def _stateful(self) -> list[Any]:
        """Return the schedule, and the scaler of torch's autocast."""
        engine = self._engine
        scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
        return [item for item in (engine.lr_scheduler, scaler) if item is not None]


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a parameter: of a partitioned one a part."""
    return cast(torch.Tensor, getattr(parameter, "ds_tensor", parameter)).detach()


def _partition(name: str, parameter: Any, at: int) -> Iterator[Range]:
    """Yield what this rank has of a parameter of ZeRO 3, from `at` on."""
    size = parameter.partition_numel()
    begin = size * torch.distributed.get_rank(parameter.ds_process_group)
    if begin < parameter.ds_numel:
        yield Range(name, tuple(parameter.ds_shape), begin, at, min(size, parameter.ds_numel - begin))


def _accumulates(engine: Any) -> bool:
    if engine.pipeline_parallelism:
        return False  # train_batch() is a whole step
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count)
    told = engine._is_gradient_accumulation_boundary
    return bool(engine.micro_steps % engine.gradient_accumulation_steps()) if told is None else not told


def _filled(own: dict[str, Any], saved: dict[str, Any], master: torch.Tensor, on_device: bool) -> dict[str, Any]:
    """Return a parameter's state with the values of `saved`, in the tensors of `own` where those fit."""
    for key, value in saved.items():
        now = own.get(key)
        if isinstance(value, torch.Tensor):
            if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
                value = now.copy_(value)
            elif value.dim() or on_device:
                value = value.to(master.device)
        own[key] = value
    return {key: own[key] for key in saved}


def _replay(inner: Any, states: list[dict[str, Any]]) -> None:
    """Bring DeepSpeed's two Adams for CPUs to where they were.

    They multiply the powers of their betas step by step in C++, where a state begins with `pow()`, which rounds
    otherwise.
    """
    fused = getattr(inner, "_dummy_overflow_buf", None)  # on a GPU, its kernel keeps nothing
    if not hasattr(inner, "ds_opt_adam") and (fused is None or fused.device.type != "cpu"):
        return
    empty = [torch.zeros(1) for _ in range(4)]
    for step in range(1, max((int(state.get("step", 0)) for state in states), default=0) + 1):
        for group in inner.param_groups:
            numbers = (group["lr"], *group["betas"], group["eps"])
            decay, correction = group["weight_decay"], group["bias_correction"]
            if fused is None:
                inner.ds_opt_adam.adam_update(inner.opt_id, step, *numbers, decay, correction, *empty)
            else:
                lists = [[each] for each in empty]
                inner.multi_tensor_adam(1, fused, lists, *numbers, step, inner.adam_w_mode, int(correction), decay)


def _tracker() -> Any:
    """Return what has the random states of DeepSpeed's activation checkpointing under model parallelism."""
    module = framework("deepspeed.runtime.activation_checkpointing.checkpointing")
    return module.get_cuda_rng_tracker()


def _refuse(engine: Any, kind: type) -> None:
    """Refuse what could not be brought back exactly.

    Raises:
        StateError: It names the setting.
    """
    pipeline = framework("deepspeed.runtime.pipe.engine").PipelineEngine
    found = next((what for name, what in _REFUSED if getattr(engine, name)()), None)
    if type(engine) not in (kind, pipeline):
        found = type(engine).__qualname__
    elif engine.zenflow:
        found = "ZenFlow"
    elif "onebit" in type(getattr(engine, "basic_optimizer", None)).__module__:
        found = type(engine.basic_optimizer).__qualname__
    elif hasattr(engine.optimizer, "muon_momentum_buffer_partitioned_groups_flat"):
        found = "save_muon_momentum_buffer_in_memory"
    elif getattr(engine.optimizer, "swap_optimizer", False) or getattr(engine.optimizer, "params_in_nvme_and_cpu", 0):
        found = "offloading to NVMe"
    elif engine.zero_hpz_partition_size() > 1:
        found = "zero_hpz_partition_size"
    if found:
        raise StateError(f"{found} of DeepSpeed is not supported: turn it off, or keep engine.save_checkpoint()")
    if engine.training_dataloader is not None:
        raise StateError(
            "the position in the loader of deepspeed.initialize(training_data=…) is not known: leave that out, and "
            "register a ResumableLoader(DataLoader(…)) of your own"
        )
