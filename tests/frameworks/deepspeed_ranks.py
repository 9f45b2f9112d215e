"""A rank of DeepSpeed's engines that loads what another number of ranks had, and leaves its own for the next number.

`deepspeed_ranks.py DIRECTORY BEFORE`: what BEFORE ranks left is compared, bit for bit, with what DeepSpeed gathers. 0
ranks left nothing.
"""

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

sys.path.append(str(Path(__file__).parent.parent))
from fake_ranks import Holders, capture

from resilient_run.ckpt.format.slot import Slot
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.integrations.deepspeed import EngineState

CASES: dict[str, dict[str, Any]] = {
    "0-bf16": {"stage": 0},
    "1-fp32": {"stage": 1},
    "1-bf16": {"stage": 1},
    "2-fp32": {"stage": 2},
    "2-bf16": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "3-fp32": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 60},
    "3-bf16": {"stage": 3, "stage3_param_persistence_threshold": 10},
}
"""The second fp32 case of ZeRO 3 has other groups of weights with each number of ranks."""


class Average(nn.Module):
    """Has a buffer in which ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * inputs.mean(0))
        return inputs * self.weight + 1


def build(case: str, seed: int) -> Any:
    torch.manual_seed(seed)
    # Odd sizes, a single element, and layers that are smaller than the number of ranks.
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3), Average(), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": trained[:1], "lr": 0.01}, {"params": trained[1:]}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": CASES[case],
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": "bf16" in case},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.02),
        config=config,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1)),
    )
    return engine


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.randn(4, 7).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()


def whole(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed gathers."""
    named = list(engine.module.named_parameters())
    partitioned = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters([each for _, each in named], enabled=partitioned):
        found = {name: each.detach().clone() for name, each in named}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed does it when the first group has been updated, and the others have no states yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    if engine.zero_optimization_stage():
        for name, each in named:
            if each.requires_grad:
                found[f"{name} master"] = safe_get_full_fp32_param(each)
                for key in ("exp_avg", "exp_avg_sq"):
                    found[f"{name} {key}"] = safe_get_full_optimizer_state(each, key)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = {float(state["step"]) for state in inner.state.values()}
    rates = [group["lr"] for group in inner.param_groups]
    return {**found, "steps": steps, "rates": rates, "schedule": engine.lr_scheduler.state_dict()["last_epoch"]}


def main(directory: str, before: str) -> None:
    deepspeed.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        engine = build(case, 3)
        state = TrainingState({"engine": EngineState(engine)}, rng=False)
        if int(before):
            train(engine, 2)
            files = [Path(directory, f"{case}.{before}.{each}") for each in range(int(before))]
            slots = {each: Slot.open(file, writable=True) for each, file in enumerate(files)}
            holders = Holders({"a": slots})
            holders.load(state, rank, ranks, int(before))
            holders.close()
            found, expected = whole(engine), torch.load(Path(directory, f"{case}.{before}"))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
                assert same, (case, key, found[key], value)
            os.write(1, f"same {rank} {case}\n".encode())
        torch.manual_seed(rank)
        train(engine, 3)
        capture(Path(directory, f"{case}.{ranks}.{rank}"), state, rank=rank, world_size=ranks).close()
        gathered = whole(engine)
        if rank == 0:
            torch.save(gathered, Path(directory, f"{case}.{ranks}"))
        engine.destroy()
        dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main(*sys.argv[1:])
