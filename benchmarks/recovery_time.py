"""How long does training stand still when a worker is killed?

From the SIGKILL of one of two Gloo ranks, sent from outside right after a step was reported, to the moment when every
rank has completed its first step again. The same model, kill and machine for each contender:

- resilient-run: a `Checkpointer` capture at every step.
- torchrun: `torch.distributed.checkpoint.save` after every step into tmpfs, `load` at the start. Its restarts work
  reliably only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so it gets that.
- peers (`--peer NAME=PYTHON`, see peers/README.md): other systems, each with its own launcher and environment.
- floor: processes forked with torch imported join a process group, build the model, load the state from tmpfs and do
  one step. No launcher can be faster than this with processes that hold no state.

Goal: at most a quarter of torchrun's time, at most one step lost.
"""

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host, job
from recovery_worker import BATCH
from report import Summary, parser, table, write_json
from torch.nn.parallel import DistributedDataParallel
from workload import build, train_step


def recoveries(process: subprocess.Popen[str], *, kills: int, kill_after: int) -> list[dict[str, float]]:
    """Kill rank 1 `kills` times, `kill_after` steps into its life, and return what each recovery took and lost."""
    lives: dict[int, list[list[dict[str, Any]]]] = {0: [], 1: []}  # rank → the lines of each of its processes
    kills_s: list[float] = []
    assert process.stdout is not None
    for line in map(json.loads, filter(lambda text: text.startswith('{"rank"'), process.stdout)):
        own = lives[line["rank"]]
        if not own or own[-1][-1]["pid"] != line["pid"]:
            own.append([])
        own[-1].append(line)
        if line["rank"] == 1 and len(own) > len(kills_s) < kills and len(own[-1]) == kill_after:
            kills_s.append(time.monotonic())
            os.kill(line["pid"], signal.SIGKILL)
    found = []
    for life, kill_s in enumerate(kills_s):
        completed = max(own[life][-1]["step"] for own in lives.values())
        firsts = [own[life + 1][0] for own in lives.values()]
        seconds = max(first["monotonic_s"] for first in firsts) - kill_s
        found.append({"seconds": seconds, "steps_lost": completed - firsts[0]["step"] + 1})
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A launcher, and the module in peers/ that keeps the state."""

    launcher: tuple[str, ...]
    keeper: str


def contenders(peers: dict[str, str]) -> dict[str, Contender]:
    """Return every contender by name; `peers` says which Python has which peer."""
    found = {
        "torchrun": Contender(launcher=TORCHRUN, keeper="dcp"),
        "resilient-run": Contender(launcher=RESILIENT_RUN, keeper="checkpointer"),
    }
    for name, python in peers.items():
        launchers = {
            "lm_resiliency": (python, "-P", "-m", "torch.distributed.run"),
            "nvidia_resiliency_ext": (
                python,
                "-P",
                "-m",
                "nvidia_resiliency_ext.fault_tolerance.launcher",
                "--ignore-missing-fault-tol-cfg",
            ),
            "dlrover": (python, "-P", str(Path(__file__).parent / "peers" / "dlrover_launcher.py")),
        }
        found[name] = Contender(launcher=launchers[name], keeper=name)
    return found


def measure(contender: Contender, *, kills: int, kill_after: int, state_mb: int) -> list[dict[str, float]]:
    """Return the recoveries of one job."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    steps = kills * kill_after + 10
    script = [str(Path(__file__).with_name("recovery_worker.py")), "--keeper", contender.keeper]
    options = ["--steps", str(steps), "--state-mb", str(state_mb), "--directory", str(directory)]
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
    try:
        with host() as env, job([*contender.launcher, *flags, *script, *options], env) as process:
            return recoveries(process, kills=kills, kill_after=kill_after)
    finally:
        shutil.rmtree(directory)


def floor_worker(rank: int, state_mb: int, directory: Path, done: Any) -> None:
    """The least that a new process must do before its first step is complete."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, optimizer = build(state_mb << 20)
    parallel = DistributedDataParallel(model)
    state = torch.load(directory / "state.pt", mmap=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train_step(parallel, optimizer, batch=BATCH)
    done.put(time.monotonic())
    del parallel  # a DDP module that outlives its process group can deadlock in torch's destructors
    dist.destroy_process_group()


def floor(state_mb: int) -> float:
    """Return seconds from starting two forked processes to the end of their first step."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    model, optimizer = build(state_mb << 20)
    train_step(model, optimizer, batch=BATCH)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, directory / "state.pt")
    context = multiprocessing.get_context("forkserver")
    done = context.Queue()
    workers = [context.Process(target=floor_worker, args=(rank, state_mb, directory, done)) for rank in range(2)]
    start_s = time.monotonic()
    for process in workers:
        process.start()
    ends_s = [done.get(timeout=60) for _ in workers]
    for process in workers:
        process.join()
    shutil.rmtree(directory)
    return max(ends_s) - start_s


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=5, help="kills per job")
    options.add_argument("--kill-after", type=int, default=60, help="steps of each life before its kill")
    options.add_argument("--jobs", type=int, default=2, help="jobs of each contender, alternating")
    options.add_argument("--state-mb", type=int, default=64, help="parameters and optimizer state of a rank, MiB")
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="see peers/README.md")
    args = options.parse_args()
    found = contenders(dict(peer.split("=", 1) for peer in args.peer))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ("floor", *found)}
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.checkpoint.state_dict", "resilient_run.ckpt.checkpointer"]
    )
    floor(args.state_mb)  # starts the fork server
    for _ in range(args.jobs):
        samples["floor"] += [{"seconds": floor(args.state_mb)} for _ in range(args.kills)]
        for name, contender in found.items():
            samples[name] += measure(contender, kills=args.kills, kill_after=args.kill_after, state_mb=args.state_mb)

    seconds = {name: Summary.of(recovery["seconds"] for recovery in found) for name, found in samples.items()}
    lost = {
        name: [int(recovery["steps_lost"]) for recovery in found] for name, found in samples.items() if name != "floor"
    }
    rows = [
        [
            name,
            f"{summary:.2f}",
            f"{summary.median / seconds['torchrun'].median:.2f}",
            f"{summary.median / seconds['floor'].median:.1f}",
            f"{statistics.mean(lost[name]):.1f}, at most {max(lost[name])}" if name in lost else "",
        ]
        for name, summary in seconds.items()
    ]
    header = ["contender", "seconds", "of torchrun", "of floor", "steps lost"]
    table("SIGKILL of a worker to the first completed step: median (p10..p90)", header, rows)
    write_json(
        args.json,
        question="recovery_time",
        parameters={"kills": args.kills, "kill_after": args.kill_after, "jobs": args.jobs, "state_mb": args.state_mb},
        results={"seconds": seconds, "steps_lost": lost},
    )


if __name__ == "__main__":
    main()
