"""How many completed steps does a killed worker cost, where steps are longer and where they are shorter than commits?

Real jobs of two ranks whose workers are killed (SIGKILL) at random moments, a fresh moment after each recovery:

- `short`: one host, steps of about 3 ms.
- `wide`: one host, a model of 2048 x 2048 with momentum (32 MiB for each rank).
- `hosts`: the same model on two hosts, so that each capture travels to the other one before it is committed.

Goal: at most one step where commits are faster than steps; else about twice the steps that pass during a commit.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from jobs import RESILIENT_RUN, host, job
from report import Summary, parser, table, write_json

from resilient_run import Checkpointer
from resilient_run.launcher.etcd_server import EmbeddedEtcd

_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One job: on so many hosts, a model so wide, and steps that last at least so long."""

    hosts: int
    width: int
    least_step_s: float


SCENARIOS = {
    "short": Scenario(hosts=1, width=32, least_step_s=0.003),
    "long": Scenario(hosts=1, width=32, least_step_s=0.1),
    "wide": Scenario(hosts=1, width=2048, least_step_s=0.0),
    "hosts": Scenario(hosts=2, width=2048, least_step_s=0.0),
}


def say(message: dict[str, Any]) -> None:
    """Print a line at once: two ranks share the pipe."""
    os.write(1, (json.dumps(message) + "\n").encode())


def train(scenario: Scenario, stop: Path) -> None:
    """Train until `stop` exists, on every rank; say once that this process trains, and at the end how it went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(scenario.width, scenario.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    first = step = checkpointer.restore()
    began_s, over = time.monotonic(), torch.zeros(1)
    watermark, commits = checkpointer.watermark, [0]
    while not over:
        step_s = time.monotonic()
        model(torch.randn(16, scenario.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        over = torch.tensor([float(stop.exists())])
        dist.all_reduce(over)
        time.sleep(max(0.0, step_s + scenario.least_step_s - time.monotonic()))
        step += 1
        checkpointer.step(step)
        if checkpointer.watermark != watermark:
            watermark = checkpointer.watermark
            commits.append(step - (watermark or (0, 0))[1])
        if step == first + 1:
            say({"rank": dist.get_rank(), "pid": os.getpid()})
    step_s = (time.monotonic() - began_s) / (step - first)
    stats = checkpointer.stats
    last = {"step_s": step_s, "captured": stats.captures / (step - first), "commit_steps": statistics.median(commits)}
    say(last)
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)


def kill_at_random(processes: Sequence[subprocess.Popen[str]], stop: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill a worker `kills` times, then let the job end; return what its last generation says of itself."""
    lines: Queue[dict[str, Any]] = Queue()
    moments = random.Random(seed)

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(json.loads(line))

    readers = [Thread(target=read, args=(process,), daemon=True) for process in processes]
    for reader in readers:
        reader.start()
    for _ in range(kills):
        pids = [lines.get(timeout=_PATIENCE_S)["pid"] for _ in range(2)]
        time.sleep(moments.uniform(0.3, 1.5))
        os.kill(moments.choice(pids), 9)
    for _ in range(2):
        lines.get(timeout=_PATIENCE_S)
    time.sleep(1.5)
    stop.touch()
    for reader in readers:
        reader.join(_PATIENCE_S)
    return lines.get(timeout=_PATIENCE_S)


def measure(name: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Return what the kills of one scenario cost."""
    scenario = SCENARIOS[name]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steps-lost-")))
        stop, arguments = directory / "stop", ["--max-restarts=1000"]
        if scenario.hosts == 1:
            arguments += ["--standalone", "--nproc-per-node=2"]
        else:
            endpoint = stack.enter_context(EmbeddedEtcd()).endpoint
            arguments += ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={endpoint}"]
            arguments += ["--rdzv-id=steps-lost"]
        worker = [__file__, "--worker", name, "--stop", str(stop)]
        processes = []
        for number in range(scenario.hosts):
            env = stack.enter_context(host(f"host-{number}"))
            env["RESILIENT_EVENTS"] = str(directory / f"events-{number}")
            env["RESILIENT_CONFIG"] = str(directory / "config.toml")
            (directory / "config.toml").write_text("[root]\nstalled_recoveries = 1000\ncrash_loop_failures = 1000\n")
            processes.append(stack.enter_context(job([*RESILIENT_RUN, *arguments, *worker], env)))
        last = kill_at_random(processes, stop, kills=kills, seed=seed)
        events = [json.loads(line) for line in (directory / "events-0").read_text().splitlines()]
    lost = [event["steps_lost"] for event in events if event["event"] == "recovery" and event["complete"]]
    return {"lost": lost, "summary": Summary.of(lost), "worst": max(lost), **last}


def main() -> None:
    """Measure the scenarios that are asked for."""
    options = parser(__doc__)
    options.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one (all)")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--worker", choices=SCENARIOS, help=argparse.SUPPRESS)
    options.add_argument("--stop", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        train(SCENARIOS[args.worker], args.stop)
    results = {name: measure(name, kills=args.kills, seed=args.seed) for name in args.scenario or SCENARIOS}
    rows = [
        [
            name,
            f"{1e3 * found['step_s']:.1f}",
            f"{100 * found['captured']:.0f}",
            f"{found['commit_steps']:.0f}",
            f"{found['summary']:.1f}",
            str(found["worst"]),
            " ".join(map(str, found["lost"])),
        ]
        for name, found in results.items()
    ]
    header = ["scenario", "step (ms)", "captured (%)", "steps per commit", "lost per kill", "worst", "all"]
    table(f"{args.kills} kills each", header, rows)
    write_json(
        args.json,
        question="how many completed steps does a killed worker cost?",
        parameters={"kills": args.kills, "seed": args.seed, "scenarios": {k: asdict(v) for k, v in SCENARIOS.items()}},
        results=results,
    )


if __name__ == "__main__":
    sys.exit(main())
