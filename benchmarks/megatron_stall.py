"""What does a checkpoint of every step cost training with Megatron's distributed optimizer?

Two Gloo ranks of data parallelism train a stack of linear layers in bf16; each keeps its shards of weights, fp32
weights and moments. In each round every contender makes one checkpoint, right after an optimizer step:

- resilient-run: what the training thread waits in `step()`, and before the next optimizer step.
- dist_checkpointing.save: Megatron's own `save()` of the sharded states of model and optimizer, into tmpfs.

The limit, measured in the same processes, is a plain memcpy of this rank's state into a warm tmpfs mapping, on both
ranks at once. Goal: stall at most 1 memcpy.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_stall import memcpy_seconds
from jobs import RESILIENT_RUN, SHARED_MEMORY, host, job
from report import Summary, parser, table, write_json
from torch import nn
from workload import emit

WIDTH = 1024
WARM_UP_ROUNDS = 2
STATE_BYTES_PER_PARAMETER = 14  # bf16 weight, fp32 weight, two moments


def train(args: argparse.Namespace) -> None:
    """Measure in one rank, and print it as one line."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from with_megatron import on_cpu

    from resilient_run import Checkpointer
    from resilient_run.integrations.megatron import MegatronState

    dist.init_process_group("gloo")
    on_cpu()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    torch.manual_seed(0)
    layers = max(1, round(2 * (args.mb << 20) / (STATE_BYTES_PER_PARAMETER * WIDTH * (WIDTH + 1))))
    half = {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True, **half
    )
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    stack = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).bfloat16()
    model = DistributedDataParallel(config, buffers, stack)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=True, **half), [model]
    )
    state = MegatronState(model, optimizer)
    checkpointer = Checkpointer(megatron=state)
    checkpointer.restore()

    def step() -> None:
        model.zero_grad_buffer()
        model(torch.randn(8, WIDTH).bfloat16()).float().square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()

    def sharded() -> dict[str, Any]:
        names = {
            f"{name}": ShardedTensor.from_rank_offsets(f"model.{name}", tensor, replica_id=dist.get_rank())
            for name, tensor in model.module.named_parameters()
        }
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        return {"model": names, "optimizer": optimizer.sharded_state_dict(names, metadata=metadata)}

    step()
    leaves = [leaf for leaf in _tensors(state.state_dict()) if leaf.numel() > 1]
    memcpy_s = memcpy_seconds(leaves, args.directory)
    found: dict[str, list[float]] = {"resilient-run": [], "dist_checkpointing.save": []}
    for number in range(1, WARM_UP_ROUNDS + args.rounds + 1):
        step()
        dist.barrier()
        before_s = checkpointer.stats.stall_s
        checkpointer.step(number)
        step()  # before its update a copy under way has ended
        ours_s = checkpointer.stats.stall_s - before_s
        checkpointer.wait()
        while (checkpointer.watermark or (0, 0))[1] < number:
            time.sleep(0.001)
        folder = args.directory / f"round{number}"
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        started_s = time.monotonic()
        dist_checkpointing.save(sharded(), str(folder))
        theirs_s = time.monotonic() - started_s
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        if number > WARM_UP_ROUNDS:
            found["resilient-run"].append(ours_s)
            found["dist_checkpointing.save"].append(theirs_s)
    emit(json.dumps({"bytes": sum(leaf.nbytes for leaf in leaves), "memcpy_s": memcpy_s, "stall_s": found}))
    checkpointer.close()
    dist.barrier()
    os._exit(0)  # a thread of Gloo can abort Python's own end


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree.detach()]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [leaf for child in children for leaf in _tensors(child)]


def main() -> None:
    """Run one job and print the table."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, default=128, help="state of each rank")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        train(args)
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    script = [__file__, "--worker", "--mb", str(args.mb), "--rounds", str(args.rounds), "--directory", str(directory)]
    try:
        with host() as env, job([*RESILIENT_RUN, "--standalone", "--nproc-per-node", "2", *script], env) as launcher:
            assert launcher.stdout is not None
            ranks = [json.loads(line) for line in launcher.stdout if line.startswith("{")]
    finally:
        shutil.rmtree(directory)
    memcpy = Summary.of(seconds for rank in ranks for seconds in rank["memcpy_s"])
    stalls = {
        name: Summary.of(seconds for rank in ranks for seconds in rank["stall_s"][name])
        for name in ("resilient-run", "dist_checkpointing.save")
    }
    rows = [[name, f"{stall:.3f}", f"{stall.median / memcpy.median:.2f}"] for name, stall in stalls.items()]
    table("stall of a checkpoint", ["", "s", "of a memcpy"], [*rows, ["memcpy", f"{memcpy:.3f}", "1"]])
    write_json(
        args.json,
        question=(__doc__ or "").partition("\n")[0],
        parameters={"mb": args.mb, "rounds": args.rounds, "ranks": 2},
        results={
            "bytes": ranks[0]["bytes"],
            "memcpy_s": memcpy,
            "stall_s": stalls,
            "of_memcpy": {name: stall.median / memcpy.median for name, stall in stalls.items()},
        },
    )


if __name__ == "__main__":
    main()
