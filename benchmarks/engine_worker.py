"""What `engine_costs.py` trains: a stack of linear layers in bf16, under an engine that shards its states.

Everything that it and its helper processes write goes to a file in `--directory`: a helper that outlives a killed
worker would keep a pipe open.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memcpy import memcpy_seconds
from torch import nn
from workload import emit

WIDTH = 1024
BATCH = 64
STEPS_PER_ROUND = 4
STATE_BYTES_PER_PARAMETER = 14  # bf16 weight, fp32 weight, two moments


def _stack(mb: int) -> nn.Module:
    torch.manual_seed(0)
    layers = max(1, round(2 * (mb << 20) / (STATE_BYTES_PER_PARAMETER * WIDTH * (WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).bfloat16()


def _loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(BATCH, WIDTH).bfloat16()).float().square().mean()
    return loss


class Zero3:
    """DeepSpeed's ZeRO 3."""

    def __init__(self, mb: int) -> None:
        import deepspeed

        with contextlib.suppress(ImportError):  # lm-resiliency's environment has no resilient-run
            importlib.import_module("resilient_run.integrations.deepspeed")  # early: for `--rr-preload learn`

        deepspeed.init_distributed("gloo", verbose=False)
        model = _stack(mb)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 1 << 30,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def state(self) -> Any:
        from resilient_run.integrations.deepspeed import EngineState

        return EngineState(self.engine)

    def step(self) -> None:
        self.engine.backward(_loss(self.engine))
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="all")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="all")


class Megatron:
    """Megatron's distributed optimizer."""

    def __init__(self, mb: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        # Not by way of `sys.path`: `--rr-preload learn` learns nothing after a change of it.
        example = Path(__file__).parent.parent / "examples" / "with_megatron.py"
        spec = importlib.util.spec_from_file_location("with_megatron", example)
        assert spec is not None
        assert spec.loader is not None
        with_megatron = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(with_megatron)

        dist.init_process_group("gloo")
        with_megatron.on_cpu()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
        half = {"bf16": True, "params_dtype": torch.bfloat16}
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True, **half
        )
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self._model = DistributedDataParallel(config, buffers, _stack(mb))
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=True, **half), [self._model]
        )

    def state(self) -> Any:
        from resilient_run.integrations.megatron import MegatronState

        return MegatronState(self._model, self._optimizer)

    def step(self) -> None:
        self._model.zero_grad_buffer()
        _loss(self._model).backward()
        self._model.finish_grad_sync()
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save(self._sharded(), str(folder))

    def load(self, folder: Path) -> None:
        from megatron.core import dist_checkpointing

        inner = self._optimizer.chained_optimizers[0].optimizer
        for master in (each for group in inner.param_groups for each in group["params"]):
            zeros = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
            inner.state[master] = {"step": torch.tensor(0.0), **zeros}  # without them, Megatron has no place to load
        loaded = dist_checkpointing.load(self._sharded(is_loading=True), str(folder))
        self._model.module.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])

    def _sharded(self, **loading: bool) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        weights = {
            name: ShardedTensor.from_rank_offsets(f"model.{name}", tensor, replica_id=dist.get_rank())
            for name, tensor in self._model.module.named_parameters()
        }
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        return {
            "model": weights,
            "optimizer": self._optimizer.sharded_state_dict(weights, metadata=metadata, **loading),
        }


ENGINES = {"zero3": Zero3, "megatron": Megatron}


class Ours:
    """resilient-run's `Checkpointer`."""

    def __init__(self, engine: Any, directory: Path) -> None:
        from resilient_run import Checkpointer

        self._checkpointer = Checkpointer(engine=engine.state())
        self.done = self._checkpointer.restore()

    @property
    def stall_s(self) -> float:
        return self._checkpointer.stats.stall_s

    @property
    def skipped(self) -> int:
        return self._checkpointer.stats.skipped

    def save(self, step: int) -> None:
        self._checkpointer.step(step)

    def finish(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()


class Own:
    """The engine's own checkpoint, of which the last complete one is kept."""

    skipped = 0

    def __init__(self, engine: Any, directory: Path) -> None:
        self._engine, self._directory, self._latest = engine, directory, directory / "latest"
        self.done = int(self._latest.read_text()) if self._latest.exists() else 0
        self.stall_s = 0.0
        dist.barrier()
        if self.done:
            engine.load(self._folder(self.done))

    def _folder(self, step: int) -> Path:
        return self._directory / f"step{step}"

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder(step), ignore_errors=True)  # of a life that was killed while it saved
        dist.barrier()
        self._engine.save(self._folder(step))
        dist.barrier()
        if dist.get_rank() == 0:
            new = self._directory / "new"
            new.write_text(str(step))
            new.rename(self._latest)
            for folder in self._directory.glob("step*"):
                if folder != self._folder(step):
                    shutil.rmtree(folder)
        self.stall_s += time.monotonic() - started_s

    def finish(self) -> None:
        """It is complete when `save` returns."""

    close = finish


class LmResiliency:
    """lm-resiliency's adapter for DeepSpeed, in the memory of both trainers; its hook is called for steps to keep."""

    skipped = 0

    def __init__(self, engine: Any, directory: Path) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.integrations.deepspeed import enable_resiliency

        config = InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(directory),
            run_id="engine-costs",
            pin_memory=False,
        )
        step = engine.engine.step
        self._handle = enable_resiliency(
            engine.engine, interval=1, enable_detection=False, ckpt_config=config, device=torch.device("cpu")
        )
        engine.engine.step = step
        self.done = max(0, self._handle.step_count)
        self.stall_s = 0.0

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        self._handle._post_step()
        self.stall_s += time.monotonic() - started_s

    def finish(self) -> None:
        """It is complete when `save` returns."""

    close = finish


KEEPERS = {"resilient-run": Ours, "own": Own, "lm-resiliency": LmResiliency}


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree.detach()]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for child in children for leaf in _tensors(child)]


def costs(engine: Any, keeper: str, rounds: int, directory: Path) -> None:
    """Train rounds without and with a checkpoint of every step in turn, and print what was measured as one line."""
    engine.step()
    leaves = []
    if keeper != "lm-resiliency":  # whose environment has no resilient-run
        leaves = [leaf for leaf in _tensors(engine.state().state_dict()) if leaf.numel() > 1]
    memcpy_s = memcpy_seconds(leaves, directory) if leaves else []
    kept = KEEPERS[keeper](engine, directory)
    found: dict[str, Any] = {"bytes": sum(leaf.nbytes for leaf in leaves), "memcpy_s": memcpy_s, "rounds": []}
    step = 0
    for number in range(1 + rounds):
        seconds = {}
        stall_s, skipped = kept.stall_s, kept.skipped
        for saves in (False, True):
            dist.barrier()
            started_s = time.monotonic()
            for _ in range(STEPS_PER_ROUND):
                engine.step()
                step += 1
                if saves:
                    kept.save(step)
            seconds[saves] = (time.monotonic() - started_s) / STEPS_PER_ROUND
        kept.finish()
        if number:
            found["rounds"].append(
                {
                    "step_s": seconds[False],
                    "ratio": seconds[True] / seconds[False],
                    "stall_s": (kept.stall_s - stall_s) / STEPS_PER_ROUND,
                    "skipped": kept.skipped - skipped,
                }
            )
    emit(json.dumps(found))
    kept.close()


def train(engine: Any, keeper: str, steps: int, directory: Path) -> None:
    """Train with a checkpoint of every step, and report each step when it is completed."""
    kept = KEEPERS[keeper](engine, directory)
    for step in range(kept.done + 1, steps + 1):
        engine.step()
        kept.save(step)
        emit(json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), "step": step, "monotonic_s": time.monotonic()}))
    kept.close()


def main() -> None:
    """Run one rank."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("measured", choices=("costs", "train"))
    options.add_argument("--engine", choices=ENGINES, required=True)
    options.add_argument("--keeper", choices=KEEPERS, required=True)
    options.add_argument("--mb", type=int, required=True)
    options.add_argument("--count", type=int, required=True, help="rounds, or steps")
    options.add_argument("--directory", type=Path, required=True)
    args = options.parse_args()
    os.dup2(os.open(args.directory / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    warnings.simplefilter("ignore")
    if args.keeper == "resilient-run":
        from resilient_run import Checkpointer  # noqa: F401 - at the beginning, as scripts have it
    engine = ENGINES[args.engine](args.mb)
    {"costs": costs, "train": train}[args.measured](engine, args.keeper, args.count, args.directory)
    dist.barrier()
    os._exit(0)  # a thread of Gloo can abort Python's own end


if __name__ == "__main__":
    main()
