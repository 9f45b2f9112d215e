"""An engine whose accumulation the script changes after its start: `deepspeed_rounds.py DIRECTORY`, on one rank.

For each stage of ZeRO it prints `update STAGE WHEN COUNT SAME`: after how many micro-batches the engine updates next,
where nothing happened and where a new one was restored before or after that change, and whether with the same weights.
"""

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent))
from fake_ranks import capture

from resilient_run.ckpt.format.manifest import parse
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.integrations.deepspeed import EngineState


def build(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def until_updated(engine: Any, seed: int) -> int:
    """Train up to the next update, and return its number of micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    updates, count = engine.global_steps, 0
    while engine.global_steps == updates:
        engine.backward(engine(torch.randn(1, 5, generator=generator)).square().mean())
        engine.step()
        count += 1
    return count


def weights(engine: Any) -> torch.Tensor:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return torch.cat([each.detach().flatten().clone() for each in parameters])


def main(directory: str) -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined] # a minute to compile
    deepspeed.init_distributed(verbose=False)
    for stage in range(4):
        engine = build(stage, 3)
        engine.set_train_batch_size(2)
        until_updated(engine, 1)
        path = Path(directory, str(stage))
        slot = capture(path, TrainingState({"engine": EngineState(engine)}, rng=False), rank=0, world_size=1)
        counts = {"undisturbed": until_updated(engine, 2)}
        expected = weights(engine)
        found = {"undisturbed": expected}
        engine.destroy()
        for when in ("before", "after"):
            engine = build(stage, 5)
            if when == "after":
                engine.set_train_batch_size(2)
            header = slot.header()
            payload = torch.frombuffer(slot.buffer, dtype=torch.uint8)[header.payload_offset : header.used_bytes]
            TrainingState({"engine": EngineState(engine)}, rng=False).load(
                parse(slot.manifest(), header.payload_bytes), payload
            )
            engine.set_train_batch_size(2)
            counts[when], found[when] = until_updated(engine, 2), weights(engine)
            engine.destroy()
        del payload
        slot.close()
        for when, count in counts.items():
            os.write(1, f"update {stage} {when} {count} {torch.equal(found[when], expected)}\n".encode())
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main(*sys.argv[1:])
