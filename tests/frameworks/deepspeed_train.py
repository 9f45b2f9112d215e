"""A DeepSpeed training that ends with digests of all that it made: `deepspeed_train.py CASE [EXIT_STEP]`.

CASE is a JSON object: "stage", "dtype", and what else is set below. Each rank prints a line `digest RANK …`.
Of ZeRO 3, whole parameters and states are gathered: the padding of partitions is memory that nobody has initialised.
"""

import hashlib
import json
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resilient_run import Checkpointer
from resilient_run.integrations.deepspeed import EngineState
from resilient_run.integrations.torch import ResumableLoader

case: dict[str, Any] = json.loads(sys.argv[1])
steps = case.get("steps", 12)
stage, dtype, pipeline = case["stage"], case["dtype"], case.get("pipeline", False)
accumulate = case.get("accumulate", 1)
kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


class Block(nn.Module):
    """Layers of odd sizes, so that partitions have padding, with a buffer, dropout, and a count as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 9))
        self.gate = MoE(9, nn.Linear(9, 9), num_experts=2, ep_size=2, use_residual=False) if case.get("moe") else None
        self.register_buffer("average", torch.zeros(9))
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * inputs.mean(0))
            self.calls += 1
        outputs = inputs + self.body(inputs) + (self.average * (self.calls % 3)).to(inputs.dtype)
        return outputs if self.gate is None else outputs + self.gate(inputs)[0]

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def build() -> Any:
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 9), Block(), Block(), nn.Linear(9, 1)]
    if pipeline:
        model: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    else:
        model = nn.Sequential(*layers)
    if case.get("frozen"):
        model[0].requires_grad_(False)
    optimizer = None if case.get("adam") else getattr(torch.optim, case.get("optimizer", "AdamW"))
    zero: dict[str, Any] = {"stage": stage, **case.get("zero", {})}
    if stage == 3 and "stage3_param_persistence_threshold" not in zero:
        zero["stage3_param_persistence_threshold"] = 0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":  # the first steps overflow, and the scale rises again after two that did not
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 2}
    if optimizer is None:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    groups = [{"params": [each for each in model.parameters() if each.requires_grad], "name": "all"}]
    if case.get("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None if optimizer is None else optimizer(groups, lr=1e-2),
        model_parameters=[each for each in model.parameters() if each.requires_grad] if optimizer is None else None,
        config=config,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1)),
    )
    return engine


def loss_of(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (outputs.float().squeeze(1) - wanted.float()).square().mean()


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        value = [(str(key), digest(each)) for key, each in value.items() if key != "params"]
    elif isinstance(value, list | tuple):
        value = [digest(each) for each in value]
    return hashlib.sha256(repr(value).encode()).hexdigest()


def digests(engine: Any) -> dict[str, str]:
    """Return what there is in the end, by name."""
    named = list(engine.module.named_parameters())
    found: dict[str, Any] = {}
    with deepspeed.zero.GatheredParameters([each for _, each in named], enabled=stage == 3):
        found["parameters"] = digest([each for _, each in named])
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if stage == 0:
        masters = [each for group in inner.param_groups for each in group["params"]]
        found["masters"] = digest(masters)
        found["states"] = digest([inner.state[each] for each in masters])
    elif case.get("moe"):  # the groups of experts have one rank, and are not gathered
        found["masters"] = digest([each for group in inner.param_groups for each in group["params"]])
        found["states"] = digest(list(inner.state.values()))
    else:
        trained = [each for _, each in named if each.requires_grad]
        found["masters"] = digest([safe_get_full_fp32_param(each) for each in trained])
        keys = [key for key, each in next(iter(inner.state.values()), {}).items() if getattr(each, "dim", lambda: 0)()]
        found["states"] = digest([[safe_get_full_optimizer_state(each, key) for key in keys] for each in trained])
        found["steps"] = digest([float(state.get("step", 0)) for state in inner.state.values()])
    found["buffers"] = digest([*(each for _, each in engine.module.named_buffers())])
    found["extra"] = digest([each.calls for each in engine.module.modules() if isinstance(each, Block)])
    found["options"] = digest([{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups])
    found["schedule"] = digest(engine.lr_scheduler.state_dict())
    scale = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    names = ("cur_scale", "cur_iter", "cur_hysteresis", "last_overflow_iter")
    found["scale"] = str([getattr(scale, name, None) for name in names])
    names = ("global_steps", "micro_steps", "global_samples", "skipped_steps")
    found["counters"] = str([getattr(engine, name) for name in names])
    found["random"] = digest(torch.get_rng_state())
    return found


engine = build()
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(52, 8, generator=generator)
data = TensorDataset(inputs.to(kind), inputs.sum(1))
rank, size = (0, 1) if pipeline else (engine.global_rank, engine.world_size)
sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=3)
loader = ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler, drop_last=True))
with Checkpointer(engine=EngineState(engine), loader=loader, epoch=0, losses=[]) as checkpointer:
    done = checkpointer.restore()
    losses = checkpointer.values["losses"]

    def batches() -> Any:
        while True:
            sampler.set_epoch(checkpointer.values["epoch"])
            yield from loader
            checkpointer.values["epoch"] += 1

    stream = batches()
    for n in range(done, steps):
        if n == case.get("freeze"):
            engine.module[1].requires_grad_(False)
        if pipeline:
            losses.append(float(engine.train_batch(stream)))
        else:
            for _ in range(accumulate):
                features, wanted = next(stream)
                loss = loss_of(engine(features), wanted)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        if n % 4 == 3:  # before step(): a kill in here repeats it
            engine.eval()
            with torch.no_grad():
                if pipeline:
                    part = [(inputs[:4].to(kind), inputs[:4].sum(1))] * accumulate
                    losses.append(float(engine.eval_batch(iter(part))))
                else:
                    losses.append(loss_of(engine(inputs[:8].to(kind)), inputs[:8].sum(1)).item())
            engine.train()
        checkpointer.step(n + 1)
    ends = {**digests(engine), "losses": digest(losses)}
os.write(1, f"digest {engine.global_rank} {json.dumps(ends, sort_keys=True)}\n".encode())
torch.distributed.barrier()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
