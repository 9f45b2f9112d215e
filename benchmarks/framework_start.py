"""How long from the command, and from a killed worker, to the next step, for scripts that import a framework?

One worker and one host; plain torch, transformers and Lightning. In each job the worker is killed twice (`SIGKILL`): in
its first steps, and later, when its successor has trained for some seconds. The contenders alternate:

- resilient-run: its integration for the framework, which captures every step. With `--rr-preload learn`.
- torchrun: what its users have. A checkpoint of every step into tmpfs, by torch.save, by `Trainer`'s own saving, or by
  `ModelCheckpoint`, and a restart from there.
- peers (`--peer NAME=PYTHON`, see peers/README.md), with the scripts that they support: nvidia-resiliency-ext keeps a
  local checkpoint of every step in tmpfs, and has a callback for Lightning. lm-resiliency keeps the state of a killed
  rank in the memory of another one, so it has nothing for a job of one worker.

Goal: to the first step no later than torchrun; after a kill at most a quarter of torchrun's time.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host, job
from recovery_time import Contender
from recovery_time import contenders as recovered
from report import Summary, parser, table, write_json

FRAMEWORKS = ("plain", "transformers", "lightning")
OURS = "resilient-run"
SUPPORTED = {"nvidia_resiliency_ext": ("plain", "lightning")}
MOMENTS = ("command", "killed early", "killed late")
STEPS = 100_000


def contenders(peers: dict[str, str]) -> dict[str, Contender]:
    """Return every contender by name; `peers` says which Python has which peer."""
    found = {
        "torchrun": Contender(launcher=TORCHRUN, keeper="files"),
        OURS: Contender(launcher=RESILIENT_RUN, keeper="checkpointer"),
    }
    return found | {name: peer for name, peer in recovered(peers).items() if name in peers}


def measure(framework: str, name: str, contender: Contender, *, early_steps: int, late_s: float) -> dict[str, float]:
    """Return the seconds from each moment to the next completed step, in one job."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    script = [str(Path(__file__).with_name("framework_worker.py")), "--framework", framework, "--steps", str(STEPS)]
    options = ["--directory", str(directory), "--keeper", contender.keeper]
    flags = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "2"]
    flags += ["--rr-preload", "learn"] if name == OURS else ["--monitor-interval", "0.1"]
    found: dict[str, float] = {}
    moments = list(MOMENTS)
    try:
        with host() as env:
            since_s = time.monotonic()
            with job([*contender.launcher, *flags, *script, *options], env | {"HF_HUB_OFFLINE": "1"}) as process:
                assert process.stdout is not None
                pid, lived, first_s = 0, 0, 0.0
                for line in map(json.loads, filter(lambda text: text.startswith('{"rank"'), process.stdout)):
                    if line["pid"] != pid:
                        pid, lived, first_s = line["pid"], 0, line["monotonic_s"]
                        found[moments.pop(0)] = first_s - since_s
                        if not moments:
                            (directory / "stop").touch()
                    lived += 1
                    is_over = lived >= early_steps if len(moments) == 2 else line["monotonic_s"] - first_s >= late_s
                    if moments and is_over and lived:
                        since_s = time.monotonic()
                        os.kill(pid, signal.SIGKILL)
                        lived = -STEPS
        return found
    finally:
        shutil.rmtree(directory)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=5, help="jobs of each contender, alternating")
    options.add_argument("--early-steps", type=int, default=3, help="steps of the first life")
    options.add_argument("--late-s", type=float, default=6.0, help="seconds of training of the second life")
    options.add_argument("--framework", action="append", choices=FRAMEWORKS, help="only these")
    options.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"see peers/README.md: {', '.join(SUPPORTED)}",
    )
    args = options.parse_args()
    frameworks = args.framework or FRAMEWORKS
    peers = dict(peer.split("=", 1) for peer in args.peer)
    if others := sorted(peers.keys() - SUPPORTED):
        options.error(f"--peer: {', '.join(others)} is none of {', '.join(SUPPORTED)}")
    found = contenders(peers)
    samples: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(args.jobs):
        for framework in frameworks:
            for name, contender in found.items():
                if framework not in SUPPORTED.get(name, FRAMEWORKS):
                    continue
                took_s = measure(framework, name, contender, early_steps=args.early_steps, late_s=args.late_s)
                for moment, seconds in took_s.items():
                    samples.setdefault((framework, moment, name), []).append(seconds)
    results = {" / ".join(key): Summary.of(values) for key, values in samples.items()}
    rows = []
    for framework in frameworks:
        for moment in MOMENTS:
            own = {name: results.get(f"{framework} / {moment} / {name}") for name in found}
            ours, theirs = own[OURS], own["torchrun"]
            assert ours is not None
            assert theirs is not None
            seconds = ["" if summary is None else f"{summary:.2f}" for summary in own.values()]
            rows.append([f"{framework}, {moment}", *seconds, f"{ours.median / theirs.median:.2f}"])
    header = ["framework, from", *found, "ours of torchrun"]
    table("To the next step, seconds: median (p10..p90)", header, rows)
    parameters = {"jobs": args.jobs, "early_steps": args.early_steps, "late_s": args.late_s}
    write_json(args.json, question="framework_start", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
