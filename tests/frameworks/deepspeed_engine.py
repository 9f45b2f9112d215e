"""DeepSpeed's engine under resilient-run, in every way that runs on a CPU: prints what a `Checkpointer` says to it.

The first engine is made after a `Checkpointer`. All others have trained before one is made of them, or of parts.
"""

import json
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from resilient_run import Checkpointer
from resilient_run.ckpt.errors import StateError

RANK = int(os.environ["RANK"])


def build(stage: int, kind: str, *, offload: bool = False) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {}),
    }
    if kind == "bf16":
        config["bf16"] = {"enabled": True}
    elif kind == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 20}  # the first steps overflow
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (step + 1)),
    )
    return engine, model, optimizer, schedule


def train(engine: Any, micro_steps: int) -> None:
    for _ in range(micro_steps):
        inputs = torch.randn(4, 8).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()


def tell(made: str, registered: str, error: Exception | None) -> None:
    line = {"rank": RANK, "made": made, "registered": registered, "error": type(error).__name__, "text": str(error)}
    os.write(1, f"{json.dumps(line)}\n".encode())


def attempt(made: str, **objects: Any) -> None:
    error = None
    try:
        Checkpointer(**objects).close()
    except StateError as refusal:
        error = refusal
    tell(made, "+".join(objects), error)


deepspeed.init_distributed("gloo", verbose=False)
early = Checkpointer(numbers=[1])
early.restore()
engine, *_ = build(0, "fp32")
for kind in ("step", "optimizer"):
    try:
        early.step() if kind == "step" else train(engine, 2)
        tell("afterwards", kind, None)
    except StateError as refusal:
        tell("afterwards", kind, refusal)
    early._looked = False  # as if the other had been first
early.close()
for stage in (0, 1, 2, 3):
    for precision in ("fp32", "bf16", "fp16"):
        engine, model, optimizer, schedule = build(stage, precision, offload=stage > 0 and precision == "bf16")
        train(engine, 4)
        made = f"{stage} {precision}"
        attempt(made, model=engine)
        attempt(made, model=engine.module, optimizer=engine.optimizer, schedule=schedule)
        attempt(made, model=model, optimizer=optimizer)
        attempt(made, layer=model[0])
        attempt(made, schedule=schedule)
dist.barrier()
os._exit(0)
