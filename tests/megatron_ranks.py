"""A rank of Megatron loads what other numbers of ranks had, and goes on as ranks that are given the same by hand.

`megatron_ranks.py make DIRECTORY NUMBER…`: the ranks of this run train in each of these `WAYS`, and capture.
`megatron_ranks.py load DIRECTORY NUMBER…`: those of this one load that. With `refuse`, none may.
With `--tensor N`, `join` and `divide` do so in N ranks of tensor parallelism, and put parameters together by hand.
"""

import argparse
import copy
import logging
import multiprocessing
import os
import shlex
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from fake_ranks import Holders, capture
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.format.manifest import parse
from resilient_run.ckpt.format.slot import Slot
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.integrations.megatron import MegatronState

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import with_megatron

WAYS = (
    "--dtype fp32",
    "--dtype bf16 --overlap",
    "--dtype fp32 --distributed --overlap",
    "--dtype bf16 --distributed --rampup 12 12 200",
    "--dtype fp16 --distributed --overlap",
    "--dtype bf16 --tensor 2",
    "--dtype bf16 --distributed --tensor 2",
    "--dtype bf16 --distributed --pipeline 2 --chunks 2 --layers 4",
    "--dtype bf16 --distributed --expert 2 --experts 4",
    "--dtype fp32 --expert 2 --experts 4",
    "--dtype fp32",
    "--dtype bf16 --distributed",
    "--dtype fp16 --distributed --overlap",
    "--dtype bf16",
    "--dtype fp32 --distributed --overlap",
)
MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"gated_linear_unit": True, "activation_func": functional.silu, "num_query_groups": 2, "sequence_parallel": True},
)
"""Further settings of the model, for even and for odd numbers of ways that are joined and divided."""
STEPS = 3


def with_sequences(make: Any, kind: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return torch's norm, which Megatron uses beside sequence parallelism only without it, marked as others are."""
    alone = copy.copy(config)
    alone.sequence_parallel = False
    norm = make(kind, alone, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class Trained:
    """What a rank trains, made anew with other weights for each seed."""

    def __init__(self, way: str, seed: int, settings: dict[str, Any] | None = None) -> None:
        with mock.patch("sys.argv", ["", *shlex.split(way), "--global-batch", "24", "--seed", str(seed)]):
            self.args = with_megatron.arguments()
        with_megatron.initialize_megatron(self.args)
        config = with_megatron.TransformerConfig
        further = {**(settings or {})}
        if self.args.tensor == 1:
            further.pop("sequence_parallel", None)
        make = partial(with_sequences, WrappedTorchNorm.__new__)
        with (
            mock.patch.object(with_megatron, "TransformerConfig", partial(config, **further)),
            mock.patch.object(WrappedTorchNorm, "__new__", make),
        ):
            self.model, self.optimizer, self.scheduler = with_megatron.setup_model_and_optimizer(self.args)
        self.state = MegatronState(self.model, self.optimizer, self.scheduler, self.args)
        self.overlapped = self.args.overlap and self.args.distributed

    def train(self, steps: int) -> list[Any]:
        iterator = with_megatron.build_data_iterator(self.args, self.model, self.args.consumed_train_samples)
        if self.overlapped:
            for chunk in self.model:
                chunk.disable_forward_pre_hook(param_sync=False)
        told = []
        for _ in range(steps):
            microbatches.update_num_microbatches(self.args.consumed_train_samples, consistency_check=False)
            step = with_megatron.train_step(self.args, iterator, self.model, self.optimizer, self.scheduler)
            told.append((*step, microbatches.get_num_microbatches()))
            for chunk in self.model if self.overlapped else ():
                chunk.start_param_sync(force_sync=True)
        for chunk in self.model if self.overlapped else ():
            chunk.enable_forward_pre_hook()
        return told

    def end(self) -> None:
        parallel_state.destroy_model_parallel()
        microbatches.destroy_num_microbatches_calculator()

    def stepped(self) -> Any:
        """Yield each optimizer, a parameter of the model, what is stepped for it here, and which part of it that is."""
        for each in self.optimizer.chained_optimizers:
            kind = type(each).__name__
            if kind == "DistributedOptimizer":
                models = (each.model_fp32_groups, each.model_float16_groups)
                parts = (each.shard_fp32_groups, each.shard_fp32_from_float16_groups)
            elif kind == "FP32Optimizer":
                models = parts = ([group["params"] for group in each.optimizer.param_groups],)
            else:
                models = (each.float16_groups, each.fp32_from_fp32_groups)
                parts = (each.fp32_from_float16_groups, each.fp32_from_fp32_groups)
            for several in zip(models, parts, strict=True):
                for model, part in zip(*(chain(*groups) for groups in several), strict=True):
                    begin, end = 0, model.numel()
                    if kind == "DistributedOptimizer":
                        shard = each._get_model_param_range_map(model)["param"]
                        begin, end = shard.start, shard.end
                    yield each, model, part, slice(begin, end)

    def names(self) -> dict[Any, str]:
        return {each: f"{n}.{name}" for n, chunk in enumerate(self.model) for name, each in chunk.named_parameters()}

    def gathered(self) -> dict[str, Any]:
        """Return all of what this rank has of the model, its fp32 weights and moments whole, and the rest as it is."""
        names = self.names()
        found: dict[str, Any] = {f"parameter {name}": each.detach().clone() for each, name in names.items()}
        for number, chunk in enumerate(self.model):
            found |= {f"buffer {number}.{name}": each.clone() for name, each in chunk.named_buffers()}
        held = {model: (each, part, where) for each, model, part, where in self.stepped()}
        for model, name in names.items():
            for key in ("master", "exp_avg", "exp_avg_sq"):
                # As integers, of which adding zero changes no bit.
                whole = torch.zeros(model.numel(), dtype=torch.int32)
                if model in held:
                    each, part, where = held[model]
                    values = part.detach() if key == "master" else each.optimizer.state[part][key]
                    whole[where] = values.view(-1).view(torch.int32)
                if self.args.distributed:
                    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
                    if not getattr(model, "allreduce", True):
                        group = parallel_state.get_expert_data_parallel_group()
                    dist.all_reduce(whole, group=group)
                found[f"{key} {name}"] = whole.view(torch.float32).view(model.shape)
        (step,) = {float(each.optimizer.state[part]["step"]) for each, part, _ in held.values()}
        found["step"] = step
        for number, each in enumerate(self.optimizer.chained_optimizers):
            groups = each.optimizer.param_groups
            found[f"options {number}"] = [{key: group[key] for key in group if key != "params"} for group in groups]
            scaler = getattr(each, "grad_scaler", None)
            found[f"scale {number}"] = scaler.state_dict() if scaler else None
        kinds = (bool, int, float, str)
        found["schedule"] = {key: each for key, each in vars(self.scheduler).items() if isinstance(each, kinds)}
        found["counters"] = self.args.consumed_train_samples, self.args.consumed_valid_samples
        found["random"] = torch.get_rng_state()
        found |= {f"tracker {name}": each for name, each in tensor_parallel.get_cuda_rng_tracker().get_states().items()}
        return found

    def joined(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return what `gathered` did with whole parameters, by what they say of themselves, and all random states."""
        every: list[Any] = [None] * self.args.tensor
        dist.all_gather_object(every, found, group=parallel_state.get_tensor_model_parallel_group())
        whole = {key: value for key, value in found.items() if not key.startswith("tracker ")}
        assert all(torch.equal(each["random"], found["random"]) for each in every)
        for model, name in self.names().items():
            for key in (f"{kind} {name}" for kind in ("parameter", "master", "exp_avg", "exp_avg_sq")):
                if getattr(model, "tensor_model_parallel", False):
                    parts = [each[key].chunk(model.partition_stride, model.partition_dim) for each in every]
                    whole[key] = torch.cat(
                        [part for several in zip(*parts, strict=True) for part in several], model.partition_dim
                    )
                else:
                    assert all(torch.equal(each[key], found[key]) for each in every), key
        return {**whole, "trackers": [{key: each[key] for key in each if key.startswith("tracker ")} for each in every]}

    def part_of(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank is to have of what was joined; new ranks have the random states that they have now."""
        found = {key: value for key, value in whole.items() if key != "trackers"}
        rank, size = parallel_state.get_tensor_model_parallel_rank(), self.args.tensor
        for model, name in self.names().items():
            for key in (f"{kind} {name}" for kind in ("parameter", "master", "exp_avg", "exp_avg_sq")):
                if getattr(model, "tensor_model_parallel", False):
                    parts = whole[key].chunk(model.partition_stride * size, model.partition_dim)
                    found[key] = torch.cat(parts[rank::size], model.partition_dim)
        now = tensor_parallel.get_cuda_rng_tracker().get_states()
        own = {f"tracker {name}": each for name, each in now.items() if name != "data-parallel-rng"}
        trackers = whole["trackers"]
        return {**found, **(trackers[rank] if rank < len(trackers) else {**trackers[0], **own})}

    def for_files(self, *, is_loading: bool) -> dict[str, Any]:
        """Return what Megatron saves in its own files, and loads in other numbers of ranks."""
        (chunk,) = self.model
        model = chunk.module.sharded_state_dict()
        kind = {"distrib_optim_sharding_type": "fully_reshardable"}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=kind)
        return {"model": model, "optimizer": optimizer}

    @torch.no_grad()
    def take(self, given: dict[str, Any]) -> None:
        """Go on with what `gathered` returned."""
        names = self.names()
        for model, name in names.items():
            model.copy_(given[f"parameter {name}"])
        for number, chunk in enumerate(self.model):
            for name, each in chunk.named_buffers():
                each.data = given[f"buffer {number}.{name}"].clone()  # of the dtype that a first forward pass gives it
        for each, model, part, where in self.stepped():
            part.copy_(given[f"master {names[model]}"].view(-1)[where].view(part.shape))
            state = {"step": torch.tensor(given["step"])}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = given[f"{key} {names[model]}"].view(-1)[where].view(part.shape).clone()
            each.optimizer.state[part] = state
        for number, each in enumerate(self.optimizer.chained_optimizers):
            for group, options in zip(each.optimizer.param_groups, given[f"options {number}"], strict=True):
                group.update(options)
            if given[f"scale {number}"] is not None:
                each.grad_scaler.load_state_dict(given[f"scale {number}"])
        vars(self.scheduler).update(given["schedule"])
        self.args.consumed_train_samples, self.args.consumed_valid_samples = given["counters"]
        torch.set_rng_state(given["random"])
        tracker = tensor_parallel.get_cuda_rng_tracker()
        tracker.set_states({name: given[f"tracker {name}"] for name in tracker.get_states()})


def place() -> str:
    """Return what this rank has of the model, as a name of a file."""
    kinds = ("tensor_model", "pipeline_model", "expert_model")
    return "".join(str(getattr(parallel_state, f"get_{kind}_parallel_rank")()) for kind in kinds)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, (key, found[key].dtype, value.dtype)
            assert torch.equal(found[key], value), (key, found[key], value)
        else:
            assert found[key] == value, (key, found[key], value)


def make(directory: Path, number: int) -> None:
    trained = Trained(WAYS[number], 3)
    told = trained.train(STEPS)
    assert any(succeeded for _, _, succeeded, _ in told), told
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered = trained.gathered()
    state = TrainingState({"megatron": trained.state}, rng=True)
    capture(directory / f"{number}.{rank}", state, rank=rank, world_size=ranks).close()
    if trained.state.state_dict()["index"] == 0:
        torch.save(gathered, directory / f"{number}.whole.{place()}")
    trained.end()


def load(directory: Path, number: int) -> None:
    rank, ranks, before = dist.get_rank(), dist.get_world_size(), len(list(directory.glob(f"{number}.[0-9]")))
    trained = Trained(WAYS[number], 5)
    expected = torch.load(directory / f"{number}.whole.{place()}", weights_only=False)
    if number % 2:
        trained.train(1)  # what it is loaded into has states, or has none
    slots = {each: Slot.open(directory / f"{number}.{each}", writable=True) for each in range(before)}
    holders = Holders({"a": slots})
    holders.load(TrainingState({"megatron": trained.state}, rng=True), rank, ranks, before)
    assert_same(trained.gathered(), expected)
    went_on = trained.train(2), trained.gathered()
    trained.end()
    by_hand = Trained(WAYS[number], 7)
    by_hand.take(expected)
    assert_same(by_hand.gathered(), expected)
    told = by_hand.train(2)
    assert went_on[0] == told, (went_on[0], told)
    assert_same(by_hand.gathered(), went_on[1])
    by_hand.end()
    holders.close()


def join(directory: Path, number: int, tensor: int) -> None:
    trained = Trained(f"{WAYS[number]} --tensor {tensor}", 3, MODELS[number % 2])
    told = trained.train(STEPS)
    assert any(succeeded for _, _, succeeded, _ in told), told
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = trained.joined(trained.gathered())
    state = TrainingState({"megatron": trained.state}, rng=True)
    capture(directory / f"{number}.{rank}", state, rank=rank, world_size=ranks).close()
    files = directory / f"{number}.files"
    if rank == 0:
        torch.save(whole, directory / f"{number}.joined")
        files.mkdir()
    dist.barrier()
    dist_checkpointing.save(trained.for_files(is_loading=False), str(files))
    filesystem_async._results_queue = None
    for helper in multiprocessing.active_children():  # which would outlive this process
        helper.terminate()
        helper.join()
    trained.end()


def divide(directory: Path, number: int, tensor: int) -> None:
    rank, ranks, before = dist.get_rank(), dist.get_world_size(), len(list(directory.glob(f"{number}.[0-9]")))
    trained = Trained(f"{WAYS[number]} --tensor {tensor}", 5, MODELS[number % 2])
    trained.train(number % 3)
    expected = trained.part_of(torch.load(directory / f"{number}.joined", weights_only=False))
    slots = {each: Slot.open(directory / f"{number}.{each}", writable=True) for each in range(before)}
    holders = Holders({"a": slots})
    holders.load(TrainingState({"megatron": trained.state}, rng=True), rank, ranks, before)
    assert_same(trained.gathered(), expected)
    went_on = trained.train(2), trained.gathered()
    trained.end()
    by_hand = Trained(f"{WAYS[number]} --tensor {tensor}", 7, MODELS[number % 2])
    by_hand.take(expected)
    assert_same(by_hand.gathered(), expected)
    told = by_hand.train(2)
    assert went_on[0] == told, (went_on[0], told)
    assert_same(by_hand.gathered(), went_on[1])
    by_hand.end()
    holders.close()
    if trained.overlapped:
        return  # of several buckets, Megatron loads the states of other parameters
    by_files = Trained(f"{WAYS[number]} --tensor {tensor}", 9, MODELS[number % 2])
    by_files.train(STEPS)  # Megatron's optimizer needs its states, which the first steps may not make
    loaded = dist_checkpointing.load(by_files.for_files(is_loading=True), str(directory / f"{number}.files"))
    by_files.model[0].module.load_state_dict(loaded["model"])
    put = DistributedOptimizer._set_main_param_and_optimizer_states
    # It knows the Adams of others, which count steps elsewhere than torch's.
    counted = lambda self, model, tensors: put(self, model, {**tensors, "step": torch.zeros(())})  # noqa: E731
    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", counted):
        by_files.optimizer.load_state_dict(loaded["optimizer"])
    tensors = {key for key in expected if key.startswith(("parameter ", "master ", "exp_avg"))}
    found = by_files.gathered()
    assert_same({key: found[key] for key in tensors}, {key: expected[key] for key in tensors})
    by_files.end()


def refuse(directory: Path, number: int) -> None:
    """Nothing is changed where the optimizer's buckets are others, the vocabulary, or what divides the model.

    As many ranks cannot divide it otherwise, and others only with another number of ranks of tensor parallelism.
    """
    rank, ranks, before = dist.get_rank(), dist.get_world_size(), len(list(directory.glob(f"{number}.[0-9]")))
    way = WAYS[number].replace("--overlap", "")
    for kind in ("tensor", "pipeline", "chunks", "expert"):
        way = way.replace(f"--{kind} 2", f"--{kind} 1")
    vocabulary = 96 if ranks != before and way.endswith("--tensor 1") else with_megatron.VOCABULARY
    with mock.patch.object(with_megatron, "VOCABULARY", vocabulary):
        trained = Trained(way, 5)
    trained.train(1)
    was = trained.gathered()
    slots = {each: Slot.open(directory / f"{number}.{each}", writable=True) for each in range(before)}
    state = TrainingState({"megatron": trained.state}, rng=False)
    if vocabulary == 96:
        told = r"is \[64, 32\] in the checkpoint, \[96, 32\] now: give the model the sizes that it had"
    elif ranks != before:
        told = "no rank had the whole model in 1 chunk.s., as this one has now. Change the numbers of data- and tensor-"
    elif "--tensor 2" in WAYS[number]:
        told = (
            "this rank had .*, rank . of 2 of tensor parallelism, and has .*, rank 0 of 1 of tensor parallelism, now: "
        )
    else:
        told = "Megatron's optimizer has other parameters or shards than in the checkpoint"
    if ranks == before:
        header = slots[rank].header()
        whole = torch.frombuffer(slots[rank].buffer, dtype=torch.uint8)
        manifest = parse(slots[rank].manifest(), header.payload_bytes)
        loading = partial(state.load, manifest, whole[header.payload_offset : header.used_bytes])
    else:
        loading = partial(Holders({"a": slots}).load, state, rank, ranks, before)
    with pytest.raises(StateError, match=told):
        loading()
    assert_same(trained.gathered(), was)
    trained.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("act", choices=("make", "load", "refuse", "join", "divide"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--tensor", type=int)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    with_megatron.on_cpu()
    with_megatron.dist.init_process_group = lambda *_: None  # once for all ways
    for number in args.numbers:
        globals()[args.act](args.directory, number, *([] if args.tensor is None else [args.tensor]))
        os.write(1, f"{args.act} {dist.get_rank()} {number}\n".encode())
    dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
