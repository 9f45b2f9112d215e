"""Train the GPT of train_gpt.py with gradients averaged by a plan: profile, plan, train.

    resilient-run --standalone --nproc-per-node 2 examples/planned_gpt.py --steps 30 --profile model.json
    resilient-run --standalone --nproc-per-node 2 --no-python resilient-comm profile --model model.json --out costs.json
    resilient-comm plan --model model.json --system costs.json --out plan.json
    resilient-run --standalone --nproc-per-node 2 examples/planned_gpt.py --plan plan.json

What compression left out of the gradients is part of the checkpoint, so a killed worker changes nothing here either.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from train_gpt import GPT, Windows, emit, params_sha256, read_corpus, start

from resilient_run import Checkpointer
from resilient_run.comm.compressors import NAMES, named
from resilient_run.comm.plan import Plan
from resilient_run.comm.profiler import BackwardProfiler
from resilient_run.comm.synchronizer import synchronize_by


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--plan", type=Path, help="train by this plan")
    task.add_argument("--profile", type=Path, metavar="FILE", help="measure backward passes and write a model file")
    parser.add_argument("--compressor", choices=NAMES, default="topk", help="what the plan was made for")
    parser.add_argument("--density", type=float, default=0.01, help="of topk, dgc and randomk")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--json", action="store_true", help="print JSON lines, on every rank")
    parser.add_argument("--demo-kill", type=int, metavar="STEP", help="kill the last rank once, after STEP")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.json:
        emit(json.dumps({"rank": rank, "pid": os.getpid()}))
    device = start(rank, world_size)
    torch.manual_seed(args.seed)
    model = GPT(context=args.context, layers=args.layers, width=args.width).to(device)
    own_seed = args.seed * world_size + rank
    loader = Windows(read_corpus(), batch=args.batch, context=args.context, seed=own_seed)
    torch.manual_seed(own_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    profiler = averaging = None
    if args.profile is not None:
        profiler = BackwardProfiler(model, iterations=args.steps)
    else:
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        compressor = named(args.compressor, density=args.density)
        averaging = parts["averaging"] = synchronize_by(
            Plan.read(args.plan), model, compressor, ranks_per_host=per_host
        )
        averaging.attach(optimizer)

    checkpointer = Checkpointer(**parts)
    for step in range(checkpointer.restore() + 1, args.steps + 1):
        inputs, targets = loader.next_batch()
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()  # averages the gradients first
        optimizer.zero_grad()
        if args.json:
            emit(json.dumps({"rank": rank, "step": step, "loss": loss.item()}))
        elif rank == 0:
            emit(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}")
        checkpointer.step(step)
        if step == args.demo_kill and rank == world_size - 1 and os.environ.get("RESILIENT_GENERATION", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    if profiler is not None and rank == 0:
        profiler.write(args.profile, name="gpt")
    if averaging is not None:
        averaging.close()
        digest = params_sha256(model)
        if rank == 0:
            emit(json.dumps({"params_sha256": digest}) if args.json else f"parameters {digest}")
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
