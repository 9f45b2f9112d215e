"""A loop of FSDP1, ZeRO or Megatron whose number of ranks may change: `elastic_flat.py KIND GATE FILES [STEP]`.

After each step, FILES.step has what the library itself gathers. No step begins before GATE says at least its number.
With STEP there is no `Checkpointer`: the library takes over what FILES.STEP has, and the rest of the run follows.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent.parent))
from elastic_trainer import say

from resilient_run import Checkpointer

STEPS = 8


def net() -> nn.Module:
    """Return what three ranks cannot divide, and two can: DeepSpeed sets no other parameters of ZeRO 3."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


class Fsdp1:
    def __init__(self, kind: str) -> None:
        import flat_ranks  # mends what torch gathers on a CPU
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        assert flat_ranks
        self.kind = FullyShardedDataParallel
        # Of one rank it is that of NO_SHARD, of which torch warns.
        strategy = ShardingStrategy.FULL_SHARD
        where: dict[str, Any] = {"device_id": torch.device("cpu"), "sharding_strategy": strategy}
        where["use_orig_params"] = kind == "fsdp1-orig"
        inner = net()
        inner[2] = self.kind(inner[2], **where)
        self.model = self.kind(inner, **where)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.registered = {"model": self.model, "optimizer": self.optimizer}

    def step(self, inputs: torch.Tensor) -> None:
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gathered(self) -> dict[str, Any]:
        return {
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "optimizer": self.kind.full_optim_state_dict(self.model, self.optimizer, rank0_only=False),
        }

    def take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        flat = self.kind.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"])
        self.optimizer.load_state_dict(flat)


class Zero:
    def __init__(self, kind: str) -> None:
        import deepspeed

        from resilient_run.integrations.deepspeed import EngineState

        # Its operator is for ranks of one host. A rank that is killed while it compiles that leaves a lock, for which
        # all that come later wait.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        self.stage = int(kind.removeprefix("zero"))
        deepspeed.init_distributed(verbose=False)
        model = net()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage}
            | ({"stage3_param_persistence_threshold": 0} if kind == "zero3" else {}),
            "steps_per_print": 1 << 30,
            "bf16": {"enabled": True},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.registered = {"engine": EngineState(self.engine)}

    def step(self, inputs: torch.Tensor) -> None:
        self.engine.backward(self.engine(inputs.bfloat16()).float().square().mean())
        self.engine.step()

    def gathered(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        inner = self.engine.optimizer.optimizer
        found: dict[str, Any] = {"steps": {float(state["step"]) for state in inner.state.values()}}
        for name, each in self.engine.module.named_parameters():
            found[f"{name} master"] = safe_get_full_fp32_param(each)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(each, key)
        return found

    def take(self, state: dict[str, Any]) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        # A step of zeros makes the states.
        self.step(torch.zeros(4, 5))
        for name, each in self.engine.module.named_parameters():
            safe_set_full_fp32_param(each, state[f"{name} master"])
            with zero.GatheredParameters([each], modifier_rank=0, enabled=self.stage == 3), torch.no_grad():
                each.copy_(state[f"{name} master"])
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(each, state[f"{name} {key}"], key)
        (steps,) = state["steps"]
        for of_parameter in self.engine.optimizer.optimizer.state.values():
            of_parameter["step"].fill_(steps)


class Megatron:
    def __init__(self, kind: str) -> None:
        import megatron_ranks

        megatron_ranks.with_megatron.on_cpu()
        self.trained = megatron_ranks.Trained("--dtype bf16 --distributed --overlap", 3)
        self.registered = {"megatron": self.trained.state}
        self.gathered, self.take = self.trained.gathered, self.trained.take

    def step(self, inputs: torch.Tensor) -> None:
        """Take a step with Megatron's own data, which follow from the samples that all ranks have consumed."""
        self.trained.train(1)


KINDS: dict[str, Any] = {"fsdp1": Fsdp1, "zero": Zero, "megatron": Megatron}


def main(kind: str, gate: str, files: str, begin: str = "") -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    say(pid=os.getpid(), world=ranks)
    warnings.simplefilter("ignore", FutureWarning)
    if kind.startswith("fsdp1"):
        dist.init_process_group("gloo")
    trained = next(made for name, made in KINDS.items() if kind.startswith(name))(kind)
    checkpointer = None if begin else Checkpointer(**trained.registered)
    step = int(begin) if checkpointer is None else checkpointer.restore()
    if begin:
        trained.take(torch.load(f"{files}.{begin}"))
    while step < STEPS:
        step += 1
        while int(Path(gate).read_text()) < step:
            time.sleep(0.01)
        trained.step(torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)))
        gathered = trained.gathered()
        if rank == 0:
            torch.save(gathered, f"{files}.new")
            os.replace(f"{files}.new", f"{files}.{step}")
        if checkpointer is not None:
            checkpointer.step(step)
            while (checkpointer.watermark or (0, 0))[1] < step:
                time.sleep(0.001)
        say(step=step, of=ranks)
    if checkpointer is not None:
        checkpointer.close()
    dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main(*sys.argv[1:])
