"""What does a checkpoint of every step cost under DeepSpeed's ZeRO 3 and Megatron's distributed optimizer?

Two Gloo ranks, one thread each, train a stack of linear layers in bf16; each keeps its shards of weights, fp32 weights
and moments. Contenders, each in jobs of its own: resilient-run; torchrun with the engine's own checkpoint
(`save_checkpoint()`, `dist_checkpointing.save()`) into tmpfs; for ZeRO 3, with `--lm PYTHON` (the interpreter of an
environment that has it, see peers/README.md), torchrun with lm-resiliency's adapter for DeepSpeed, but for recoveries.
That for Megatron needs a newer megatron-core than the one of the extra `engines`.

- Stall: what the training thread waits for a checkpoint, beside a plain memcpy of this rank's state into a warm tmpfs
  mapping, on both ranks at once; ratios are to the median of what the jobs of all contenders but lm-resiliency
  measured. Goal: at most 1 memcpy.
- Step: how much longer a step takes with a checkpoint of each. Rounds with and without alternate in one job.
- Recovery: from the SIGKILL of rank 1 to the moment when every rank has completed its first step again. Goal: at most
  a quarter of torchrun's time with the engine's own checkpoint. Here resilient-run also has `--rr-preload learn`.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host, job
from recovery_time import recoveries
from report import Summary, parser, table, write_json

OURS, PRELOADED, OWN, LM = "resilient-run", "resilient-run --rr-preload learn", "own", "lm-resiliency"
NAMES = {"zero3": "save_checkpoint", "megatron": "dist_checkpointing.save"}


@contextmanager
def running(measured: str, args: argparse.Namespace, contender: str, count: int) -> Iterator[Iterator[str]]:
    """Yield the lines of a job of `engine_worker.py`, as they come."""
    keeper, _, flags = contender.partition(" ")
    launcher = (*(RESILIENT_RUN if keeper == OURS else TORCHRUN), *flags.split())
    if keeper == LM:
        launcher = (args.lm, *launcher[1:])
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    lines = directory / "lines"
    lines.touch()
    script = (str(Path(__file__).with_name("engine_worker.py")), measured, "--engine", args.engine, "--keeper", keeper)
    size = ("--mb", str(args.mb), "--count", str(count), "--directory", str(directory))
    restarts = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "100")
    try:
        with host() as env:
            env |= {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
            with job([*launcher, *restarts, *script, *size], env) as process:
                yield _followed(lines, process)
    finally:
        for child in psutil.Process().children():  # helpers of Megatron's checkpoints outlive its workers
            child.kill()
            child.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _followed(path: Path, process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the whole lines of a file until the process that they are from has ended."""
    with path.open() as file:
        rest = ""
        while True:
            ended = process.poll() is not None
            rest += file.read()
            *lines, rest = rest.split("\n")
            yield from lines
            if ended:
                return
            time.sleep(0.001)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--engine", choices=NAMES, required=True)
    options.add_argument("--mb", type=int, default=128, help="state of each rank, MiB")
    options.add_argument("--rounds", type=int, default=5, help="rounds of each contender, of 4 steps")
    options.add_argument("--kills", type=int, default=5, help="kills of each contender")
    options.add_argument("--kill-after", type=int, default=10, help="steps of each life before its kill")
    options.add_argument("--lm", metavar="PYTHON", help="with lm-resiliency and DeepSpeed, see peers/README.md")
    args = options.parse_args()
    if args.lm and args.engine != "zero3":
        options.error("--lm is for --engine zero3")
    rivals = [OWN, *([LM] if args.lm else [])]
    ranks = {}
    for name in (OURS, *rivals):
        with running("costs", args, name, args.rounds) as lines:
            ranks[name] = [json.loads(line) for line in lines if line.startswith('{"bytes"')]
    memcpy = Summary.of(seconds for found in ranks.values() for rank in found for seconds in rank["memcpy_s"])
    cost: dict[str, dict[str, Any]] = {}
    for name, found in ranks.items():
        rounds = [one for rank in found for one in rank["rounds"]]
        cost[name] = {key: Summary.of(one[key] for one in rounds) for key in ("step_s", "ratio", "stall_s")}
        cost[name]["of_memcpy"] = Summary.of(one["stall_s"] / memcpy.median for one in rounds)
        cost[name]["skipped"] = sum(one["skipped"] for one in rounds)
    seconds, lost = {}, {}
    for name in (OURS, PRELOADED, OWN):
        with running("train", args, name, (args.kills + 1) * args.kill_after) as lines:
            survived = recoveries(lines, kills=args.kills, kill_after=args.kill_after)
        seconds[name] = Summary.of(recovery["seconds"] for recovery in survived)
        lost[name] = [int(recovery["steps_lost"]) for recovery in survived]
    titles = {OWN: NAMES[args.engine]}
    table(
        f"A checkpoint of every step, {args.engine}, {args.mb} MiB on each rank: median (p10..p90)",
        ["contender", "stall s", "/memcpy", "of a step without", "skipped", "step without s"],
        [
            [
                titles.get(name, name),
                f"{values['stall_s']:.3f}",
                f"{values['of_memcpy']:.2f}",
                f"{values['ratio']:.2f}",
                str(values["skipped"]),
                f"{values['step_s']:.3f}",
            ]
            for name, values in cost.items()
        ],
    )
    print(f"memcpy: {memcpy:.4f} s")
    table(
        "SIGKILL of a worker to the first completed step: median (p10..p90)",
        ["contender", "s", "of torchrun's", "steps lost"],
        [
            [
                titles.get(name, name),
                f"{summary:.2f}",
                f"{summary.median / seconds[OWN].median:.2f}",
                f"at most {max(lost[name])}",
            ]
            for name, summary in seconds.items()
        ],
    )
    write_json(
        args.json,
        question="engine_costs",
        parameters={name: getattr(args, name) for name in ("engine", "mb", "rounds", "kills", "kill_after")},
        results={
            "bytes": ranks[OURS][0]["bytes"],
            "memcpy_s": memcpy,
            "costs": cost,
            "seconds": seconds,
            "steps_lost": lost,
        },
    )


if __name__ == "__main__":
    main()
