"""How soon, and how surely, is a slow rank named, and how often one that is not?

Hosts with one Gloo rank each, all on this machine, train with DDP and a checkpoint of every step. `resilient-inject`
makes a drawn rank compute 1.15, 1.3 or 2 times as long (`slow-rank`), until the observation `straggler` names a rank
or 60 steps have passed, and then as long as before again. Before that the run is left alone, and whoever is named in
that time is named falsely, as is another rank than the one that is slow.

Goal: nine of ten named within 30 steps at a factor of 1.3, and none falsely. The default threshold is 1.2, so a rank
that is 1.15 times as slow must not be named.
"""

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import RESILIENT_RUN, host
from report import Summary, parser, table, write_json
from torch.nn.parallel import DistributedDataParallel
from workload import build, emit, train_step

from resilient_run.ckpt.errors import DaemonError, WireError
from resilient_run.daemon.base.ask import ask_daemon
from resilient_run.launcher.etcd_server import EmbeddedEtcd

_LIMIT_S = 600.0
_LOOK_S = 0.1


class Run:
    """One run of several hosts, and what its daemons say of it; use it as a context manager."""

    def __init__(self, hosts: int, batch: int) -> None:
        self.step = 0
        self._hosts = hosts
        self._batch = batch
        self._stack = ExitStack()

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            self._endpoint = stack.enter_context(EmbeddedEtcd()).endpoint
            environments = [stack.enter_context(host(f"host{index}")) for index in range(self._hosts)]
            self._sockets = [Path(env["RESILIENT_RUN_DIR"]) / "resilientd.sock" for env in environments]
            command = [*RESILIENT_RUN, f"--nnodes={self._hosts}", "--nproc-per-node=1", "--rdzv-backend=etcd-v3"]
            command += [f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=slow", "--local-addr=127.0.0.1"]
            command += ["--rr-insecure", "--rr-allow-injection", __file__, "--worker", "--batch", str(self._batch)]
            for env in environments:
                launcher = subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                reader = threading.Thread(target=self._read, args=(launcher,), daemon=True)
                reader.start()
                for end in (reader.join, launcher.wait, launcher.terminate):
                    stack.callback(end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _read(self, launcher: "subprocess.Popen[str]") -> None:
        assert launcher.stdout is not None
        with launcher.stdout as lines:
            for line in lines:
                if line.startswith('{"step"'):
                    self.step = json.loads(line)["step"]

    def slow_ranks(self) -> dict[int, float]:
        """Return the ranks that are named now, and how slow they are."""
        found = {}
        for socket in self._sockets:
            try:
                jobs = ask_daemon(socket, "status", within_s=10)["jobs"]
            except (OSError, WireError, DaemonError):
                continue
            found |= {
                item["rank"]: item["value"]
                for job in jobs
                for item in job.get("observations", ())
                if item["kind"] == "straggler"
            }
        return found

    def wait(self, steps: int, *, quiet: bool = False) -> tuple[int, dict[int, float]]:
        """Train until a rank is named, `quiet` until none is, but at most so many steps; return steps and the ranks.

        Raises:
            TimeoutError: The run makes no steps.
        """
        began, until_s = self.step, time.monotonic() + _LIMIT_S
        while self.step < began + steps:
            if bool(found := self.slow_ranks()) is not quiet:
                return self.step - began, found
            if time.monotonic() > until_s:
                raise TimeoutError(f"step {self.step} is the last one since {_LIMIT_S:.0f} s")
            time.sleep(_LOOK_S)
        return self.step - began, self.slow_ranks()

    def slow_down(self, rank: int, factor: float) -> None:
        """Let a rank compute so many times as long from its next step on."""
        command = [sys.executable, "-P", "-m", "resilient_run.launcher.inject.cli", "fault", "slow-rank"]
        command += ["--rank", str(rank), "-p", f"factor={factor}", "--run-id", "slow"]
        subprocess.run([*command, "--rdzv-endpoint", self._endpoint], check=True, stdout=subprocess.DEVNULL)


def inject(run: Run, rank: int, factor: float, steps: int) -> dict[str, Any]:
    """Slow one rank down and return whether and when it was named, and who else was."""
    run.slow_down(rank, factor)
    taken, found = run.wait(steps)
    run.slow_down(rank, 1.0)
    run.wait(2 * steps, quiet=True)
    run.wait(5)  # so that the next one begins with ranks that are alike
    return {
        "named": rank in found,
        "steps": taken if rank in found else None,
        "seen": found.get(rank),
        "others": sorted(found.keys() - {rank}),
    }


def leave_alone(run: Run, seconds: float) -> dict[str, Any]:
    """Disturb nothing for so long, and return how often a rank was named."""
    until_s, began, alarms = time.monotonic() + seconds, run.step, 0
    while time.monotonic() < until_s:
        _, found = run.wait(50)
        if found:
            alarms += 1
            run.wait(1000, quiet=True)
    return {"seconds": seconds, "steps": run.step - began, "false_alarms": alarms}


def worker(batch: int) -> None:
    """Train without an end."""
    from resilient_run import Checkpointer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(24 << 20)
    parallel = DistributedDataParallel(model)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    step = checkpointer.restore()
    while True:
        train_step(parallel, optimizer, batch=batch)
        step += 1
        checkpointer.step(step)
        if dist.get_rank() == 0:
            emit(json.dumps({"step": step, "monotonic_s": time.monotonic()}))


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--hosts", type=int, default=2)
    options.add_argument("--batch", type=int, default=1024, help="samples of a rank in each step: how long it takes")
    options.add_argument("--factors", type=float, nargs="+", default=[1.15, 1.3, 2.0])
    options.add_argument("--injections", type=int, default=10, help="for each factor")
    options.add_argument("--steps", type=int, default=60, help="after which a slow rank counts as not named")
    options.add_argument("--quiet-minutes", type=float, default=20.0, help="undisturbed, before")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    if args.worker:
        return worker(args.batch)
    chance, found = random.Random(args.seed), {factor: list[dict[str, Any]]() for factor in args.factors}
    names = ("hosts", "batch", "injections", "steps", "quiet_minutes", "seed")
    with Run(args.hosts, args.batch) as run:
        run.wait(20, quiet=True)
        began, began_s = run.step, time.monotonic()
        alone = leave_alone(run, 60 * args.quiet_minutes)
        step_s = (time.monotonic() - began_s) / max(1, run.step - began)
        for _ in range(args.injections):
            for factor, results in found.items():
                results.append(inject(run, chance.randrange(args.hosts), factor, args.steps))
            # It takes long, and what is known stays if it is cut short.
            write_json(
                args.json,
                question="straggler",
                parameters={name: getattr(args, name) for name in names},
                results={
                    "step_s": step_s,
                    "left_alone": alone,
                    "slow": {f"{factor:g}": results for factor, results in found.items()},
                },
            )
    rows = []
    for factor, results in found.items():
        steps = [each["steps"] for each in results if each["named"]]
        rows.append([f"{factor:g}", f"{len(steps)} of {len(results)}", f"{Summary.of(steps):.0f}" if steps else "-"])
        rows[-1] += [str(sum(each <= 30 for each in steps)), str(sum(bool(each["others"]) for each in results))]
    table("Slow ranks", ["factor", "named", "after steps", "within 30 steps", "others named"], rows)
    print(f"\nleft alone for {alone['seconds'] / 60:.0f} minutes, {alone['steps']} steps of {step_s:.2f} s: ", end="")
    print(f"{alone['false_alarms']} false alarms")
    return None


if __name__ == "__main__":
    main()
