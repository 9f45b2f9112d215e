"""What `transports.py` runs on each host: checkpoints alone, or training whose network is idle between all-reduces."""

import argparse
import json
import os
import time

import torch
import workload
from torch import distributed

from resilient_run import Checkpointer

_WARM_UP = 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("alone", "training"))
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--profile-steps", type=int, default=0)
    parser.add_argument("--idle-s", type=float, default=0.0, help="computation before each all-reduce")
    parser.add_argument("--reduce-bytes", type=int, default=0)
    return parser.parse_args()


def alone(checkpointer: Checkpointer, repeats: int) -> list[float]:
    """Return the seconds from each complete capture to its commit, with nothing else on the network."""
    seconds = []
    for step in range(1, _WARM_UP + repeats + 1):
        distributed.barrier()
        checkpointer.step(step)
        checkpointer.wait()
        began_s = time.monotonic()
        while checkpointer.watermark != (1, step):
            time.sleep(0.0005)
        seconds.append(time.monotonic() - began_s)
    return seconds[_WARM_UP:]


def training(checkpointer: Checkpointer, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each iteration; sleeping stands for the computation of an accelerator."""
    gradient = torch.ones(args.reduce_bytes // 4)
    skipped = _WARM_UP + 2 * args.profile_steps + 2
    seconds = []
    for step in range(1, skipped + args.repeats + 1):
        began_s = time.monotonic()
        for _ in range(2):
            time.sleep(args.idle_s)
            distributed.all_reduce(gradient)
        checkpointer.step(step)
        seconds.append(time.monotonic() - began_s)
    return seconds[skipped:]


def main() -> None:
    args = parse_args()
    distributed.init_process_group("gloo")
    model, optimizer = workload.build(args.state_bytes)
    workload.train_step(model, optimizer, batch=1)
    with Checkpointer(model=model, optimizer=optimizer) as checkpointer:
        checkpointer.restore()
        seconds = alone(checkpointer, args.repeats) if args.mode == "alone" else training(checkpointer, args)
        distributed.barrier()
        stats, moved = checkpointer.stats, checkpointer.exchange_stats
        captured_bytes = stats.bytes // max(1, stats.captures)
        workload.emit(
            json.dumps(
                {
                    "rank": int(os.environ["RANK"]),
                    "seconds": seconds,
                    "bytes": captured_bytes,
                    "captures": stats.captures,
                    "skipped": stats.skipped,
                    "sent": moved.sent,
                }
            )
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
