"""How much longer does a training step take with a checkpoint of every step?

Two Gloo ranks train with DDP, one thread each, on this machine's cores, which training keeps busy: whatever a
checkpoint computes, in `step()` or behind it, makes steps longer. Rounds without and with a checkpoint of every step
alternate in the same processes. Beside the time of a step: the processor's time for each rank and step, with a share
of the daemon's, and one memcpy of the state into a warm tmpfs mapping, on all ranks at once, which is the least that a
copy costs.

Contenders: resilient-run on one host, `async_save` of `torch.distributed.checkpoint` and `torch.save` into tmpfs.
Goal: a step at most 1.1 times as long as without a checkpoint, and at most three memcpys of the processor's time.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from capture_stall import AsyncSave, Loop, PlainSave, launched
from jobs import SHARED_MEMORY
from memcpy import memcpy_seconds
from report import Summary, parser, table, write_json
from workload import emit, tensors

CONTENDERS = ("resilient-run", "async_save", "torch.save")
STEPS_PER_ROUND = 8
BATCH = 64


class EveryStep:
    """A `Checkpointer` whose captures end behind training."""

    def __init__(self, loop: Loop) -> None:
        from resilient_run import Checkpointer

        self.checkpointer = Checkpointer(model=loop.model, optimizer=loop.registered)
        self.checkpointer.restore()

    def save(self, step: int) -> None:
        self.checkpointer.step(step)

    def finish(self) -> None:
        self.checkpointer.wait()


def _cpu_seconds() -> float:
    """Return the processor's time of this rank, and its share of the daemon's."""
    daemons = [each for each in psutil.process_iter(["cmdline"]) if _is_daemon(each)]
    theirs = sum(sum(daemon.cpu_times()[:2]) for daemon in daemons)
    return time.process_time() + theirs / dist.get_world_size()


def _is_daemon(process: psutil.Process) -> bool:
    run_dir = os.environ["RESILIENT_RUN_DIR"]
    command = process.info["cmdline"] or []
    return run_dir in command and "resilient_run.daemon" in command


def train_round(loop: Loop, saver: Any, first_step: int) -> dict[str, float]:
    """Train one round and return what a step took; a checkpoint that is not complete by its end is waited for."""
    dist.barrier()
    started_s, cpu_s = time.monotonic(), _cpu_seconds()
    for step in range(first_step, first_step + STEPS_PER_ROUND):
        loop.step()
        if saver is not None:
            saver.save(step)
    seconds = (time.monotonic() - started_s) / STEPS_PER_ROUND
    if saver is not None:
        saver.finish()
    return {"seconds": seconds, "cpu_s": (_cpu_seconds() - cpu_s) / STEPS_PER_ROUND}


class _Finished(AsyncSave):
    """`async_save` of every step: each waits for the one before, as its documentation says."""

    _future = None

    def save(self, step: int) -> None:
        if self._future is not None:
            self._future.result()
        super().save(step)


def worker(args: argparse.Namespace) -> None:
    """Train rounds with and without checkpoints in turn, and print everything that was measured as one line."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop = Loop("plain", args.mb << 20, args.tensors)
    saver: Any
    if args.worker == "async_save":
        saver = _Finished(loop.model, loop.optimizer, args.directory)
    elif args.worker == "torch.save":
        saver = PlainSave(loop.model, loop.optimizer, args.directory)
    else:
        saver = EveryStep(loop)
    loop.step()
    state = tensors(loop.model, loop.optimizer)
    memcpy_s = memcpy_seconds(state, args.directory)
    step, rounds = 1, []
    for count in range(1 + args.rounds):
        without = train_round(loop, None, step)
        with_checkpoint = train_round(loop, saver, step)
        step += STEPS_PER_ROUND
        if count:
            rounds.append(
                {
                    "seconds": with_checkpoint["seconds"],
                    "ratio": with_checkpoint["seconds"] / without["seconds"],
                    "cpu_s": with_checkpoint["cpu_s"] - without["cpu_s"],
                }
            )
    found = {"bytes": sum(tensor.nbytes for tensor in state), "memcpy_s": memcpy_s, "rounds": rounds}
    emit(json.dumps(found))
    if isinstance(saver, EveryStep):
        saver.checkpointer.close()
    loop.trained = loop.model  # a DDP module that outlives its process group can deadlock in torch's destructors
    dist.destroy_process_group()
    os._exit(0)


def measure(contender: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each rank of one job measured."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    options = {"worker": contender, "mb": args.mb, "tensors": args.tensors, "rounds": args.rounds}
    script = [__file__, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    try:
        with launched(contender, [*script, "--directory", str(directory)], None) as launchers:
            return [json.loads(line) for launcher in launchers for line in launcher.stdout]
    finally:
        shutil.rmtree(directory)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, default=144, help="state of each rank, MiB")
    options.add_argument("--tensors", type=int, default=291, help="parameters of the model")
    options.add_argument("--rounds", type=int, default=8, help="rounds with a checkpoint of every step, per job")
    options.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        worker(args)
        return
    results = {}
    for contender in CONTENDERS:
        ranks = measure(contender, args)
        values = {
            name: Summary.of(one[name] for rank in ranks for one in rank["rounds"])
            for name in ("seconds", "ratio", "cpu_s")
        }
        memcpy = Summary.of(seconds for rank in ranks for seconds in rank["memcpy_s"])
        of_memcpy = values["cpu_s"].median / memcpy.median
        results[contender] = {**values, "memcpy_s": memcpy, "cpu_of_memcpy": of_memcpy, "bytes": ranks[0]["bytes"]}
    table(
        f"Steps with a checkpoint of each, {args.mb} MiB in {args.tensors} parameters: median (p10..p90)",
        ["contender", "step s", "of a step without", "processor s", "/memcpy", "memcpy s"],
        [
            [
                name,
                f"{found['seconds']:.3f}",
                f"{found['ratio']:.2f}",
                f"{found['cpu_s']:.3f}",
                f"{found['cpu_of_memcpy']:.1f}",
                f"{found['memcpy_s']:.3f}",
            ]
            for name, found in results.items()
        ],
    )
    parameters = {"mb": args.mb, "tensors": args.tensors, "rounds": args.rounds, "batch": BATCH}
    write_json(args.json, question="step_cost", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
