"""How long does training stand still when a worker is killed?

From the SIGKILL of one of several Gloo ranks (two by default), sent from outside right after a step was reported, to
the moment when every rank has completed its first step again. The same model, kill and machine for each contender:

- resilient-run: a `Checkpointer` capture at every step; also with `--rr-preload learn`, and with the training in
  `resilient_run.loop`, where the others keep their processes.
- torchrun: `torch.distributed.checkpoint.save` after every step into tmpfs, `load` at the start. Its restarts work
  reliably only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so it gets that.
- peers (`--peer NAME=PYTHON`, see peers/README.md): other systems, each with its own launcher and environment.
- floor: two processes forked with the model made copy the state from tmpfs and do one step (`recovery_floor.py`). No
  launcher can be faster than this with processes that hold no state.

Goal: at most a quarter of torchrun's time, at most one step lost.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host, job
from report import Summary, parser, table, write_json


def recoveries(lines: Iterable[str], *, kills: int, kill_after: int, ranks: int = 2) -> list[dict[str, float]]:
    """Kill rank 1 `kills` times, `kill_after` steps into its life, and return what each recovery took and lost.

    Args:
        lines: What the job's workers print, as it comes.
        kills: How often.
        kill_after: Steps of a life.
        ranks: How many there are.
    """
    # rank → the lines of each of its lives: processes, or calls of the training in one.
    lives: dict[int, list[list[dict[str, Any]]]] = {rank: [] for rank in range(ranks)}
    kills_s: list[float] = []
    for line in map(json.loads, filter(lambda text: text.startswith('{"rank"'), lines)):
        own = lives[line["rank"]]
        if not own or _life(own[-1][-1]) != _life(line):
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


def _life(line: dict[str, Any]) -> tuple[int, int]:
    return line["pid"], line.get("life", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A launcher, the module in peers/ that keeps the state, and further options of the worker."""

    launcher: tuple[str, ...]
    keeper: str
    options: tuple[str, ...] = ()


def contenders(peers: dict[str, str]) -> dict[str, Contender]:
    """Return every contender by name; `peers` says which Python has which peer."""
    found = {
        "torchrun": Contender(launcher=TORCHRUN, keeper="dcp"),
        "resilient-run": Contender(launcher=RESILIENT_RUN, keeper="checkpointer"),
        "resilient-run, preload": Contender(launcher=(*RESILIENT_RUN, "--rr-preload=learn"), keeper="checkpointer"),
        "resilient-run, loop": Contender(launcher=RESILIENT_RUN, keeper="checkpointer", options=("--loop",)),
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


def measure(
    contender: Contender, *, kills: int, kill_after: int, ranks: int, state: list[str]
) -> list[dict[str, float]]:
    """Return the recoveries of one job; `state` are the options that say how large the model is."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    steps = kills * kill_after + 10
    script = [str(Path(__file__).with_name("recovery_worker.py")), "--keeper", contender.keeper]
    options = ["--steps", str(steps), *state, "--directory", str(directory), *contender.options]
    flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(kills)]
    try:
        with host() as env, job([*contender.launcher, *flags, *script, *options], env) as process:
            assert process.stdout is not None
            return recoveries(process.stdout, kills=kills, kill_after=kill_after, ranks=ranks)
    finally:
        shutil.rmtree(directory)


@contextmanager
def floor(state: list[str]) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds from the order to fork two processes to the end of their first step."""
    command = [sys.executable, str(Path(__file__).with_name("recovery_floor.py")), *state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        orders, answers = process.stdin, process.stdout

        def once() -> float:
            start_s = time.monotonic()
            orders.write("\n")
            orders.flush()
            return max(float(answers.readline()) for _ in range(2)) - start_s

        yield once


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=5, help="kills per job")
    options.add_argument("--kill-after", type=int, default=60, help="steps of each life before its kill")
    options.add_argument("--jobs", type=int, default=2, help="jobs of each contender, alternating")
    options.add_argument("--ranks", type=int, default=2, help="ranks, one of which is killed")
    options.add_argument("--state-mb", type=int, default=64, help="parameters and optimizer state of a rank, MiB")
    options.add_argument("--tensors", type=int, help="parameters of the model, in place of layers of 12 MiB")
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="see peers/README.md")
    args = options.parse_args()
    state = ["--state-mb", str(args.state_mb), *([] if args.tensors is None else ["--tensors", str(args.tensors)])]
    found = contenders(dict(peer.split("=", 1) for peer in args.peer))
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ("floor", *found)}
    for _ in range(args.jobs):
        with floor(state) as least_s:
            samples["floor"] += [{"seconds": least_s()} for _ in range(args.kills)]
        for name, contender in found.items():
            samples[name] += measure(
                contender, kills=args.kills, kill_after=args.kill_after, ranks=args.ranks, state=state
            )

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
        parameters={
            name: getattr(args, name) for name in ("kills", "kill_after", "jobs", "ranks", "state_mb", "tensors")
        },
        results={"seconds": seconds, "steps_lost": lost},
    )


if __name__ == "__main__":
    main()
