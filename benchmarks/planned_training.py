"""How low is the loss after how many seconds, trained by a plan or by DDP's all-reduce (thesis, Fig. 4.16 and 5.8)?

The example GPT, small, on hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each, as a
user would: `planned_gpt.py` measures its backward pass, `resilient-comm profile` measures compressor and network,
`resilient-comm plan` plans, and `planned_gpt.py` trains by the plan; `train_gpt.py` trains with DDP. The loss is rank
0's, of its training windows, in means of `--every` steps; hardly any window is seen twice. Seconds count from the first
step on. For each seed all train, in an order that moves on by one. "To the common loss" is the time until the loss that
the worst of a seed ends with. All hosts share the processors of this machine, so that computing takes a greater part of
a step than on hosts of their own.

    sudo python benchmarks/planned_training.py --json FILE.json --plot FILE.svg
"""

import json
import operator
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from baselines import planners
from curves import Points, plot, seconds_to_common
from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

EXAMPLES = Path(__file__).parent.parent / "examples"
RESILIENT_COMM = str(Path(sys.executable).with_name("resilient-comm"))
DDP = "all-reduce"
PLANNED = {
    "dgc, tensor by tensor": ("dgc", "layer-wise"),
    "dgc, cupcake": ("dgc", "cupcake"),
    "dgc, espresso-fused": ("dgc", "espresso-fused"),
    "efsignsgd, cupcake": ("efsignsgd", "cupcake"),
}
PROFILED_STEPS = 20


Job = Callable[[Sequence[str]], Iterator[str]]
"""Runs a command as all ranks and yields the lines of rank 0."""


def plans(job: Job, options: Any, folder: Path) -> dict[str, tuple[str, ...]]:
    """Measure, plan, and return contender → the options of `planned_gpt.py`."""
    planners.register()
    from resilient_run.comm.cli.plan import plan as plan_command  # it lists the planners that there are

    model = folder / "model.json"
    profile = ["--steps", str(PROFILED_STEPS), "--profile", str(model)]
    list(job([sys.executable, str(EXAMPLES / "planned_gpt.py"), *size(options), *profile]))
    found: dict[str, tuple[str, ...]] = {}
    systems: dict[str, Path] = {}
    for name, (compressor, planner) in PLANNED.items():
        how = ("--compressor", compressor, "--density", str(options.density))
        if compressor not in systems:
            system = systems[compressor] = folder / f"{compressor}.json"
            measure = [RESILIENT_COMM, "profile", *how, "--model", str(model)]
            list(job([*measure, "--largest-mib", str(options.largest_mib), "--out", str(system)]))
        out = folder / f"{compressor}-{planner}.json"
        files = ["--model", str(model), "--system", str(systems[compressor]), "--out", str(out)]
        plan_command.main(["--planner", planner, *files], standalone_mode=False)
        found[name] = ("--plan", str(out), *how)
    return found


def size(options: Any) -> list[str]:
    """Return the options of the examples that say how large the model is."""
    return ["--layers", str(options.layers), "--width", str(options.width)]


def trained(job: Job, options: Any, how: Sequence[str], seed: int) -> Points:
    """Return the points of one training."""
    script = EXAMPLES / ("planned_gpt.py" if how else "train_gpt.py")
    command = [sys.executable, str(script), *size(options), "--json", "--steps", str(options.steps + 1)]
    began_s, losses = 0.0, list[float]()
    points: list[tuple[float, float]] = []
    for line in map(json.loads, job([*command, "--seed", str(seed), *how])):
        if line.get("step") == 1:
            began_s = time.monotonic()
        elif "loss" in line:
            losses.append(line["loss"])
            if len(losses) % options.every == 0:
                points.append((time.monotonic() - began_s, fmean(losses[-options.every :])))
    return points


def summaries(found: Mapping[str, Sequence[Points]]) -> dict[str, dict[str, Any]]:
    """Return of each contender its loss in the end, its time, and DDP's time to the common loss over its own."""
    to_common_s = seconds_to_common(found, operator.le)
    return {
        name: {
            "loss": Summary.of(run[-1][1] for run in runs),
            "seconds": Summary.of(run[-1][0] for run in runs),
            "to_common_s": Summary.of(to_common_s[name]),
            "speedup_to_common": Summary.of(
                base / own for own, base in zip(to_common_s[name], to_common_s[DDP], strict=True)
            ),
            "points": runs,
        }
        for name, runs in found.items()
    }


def main() -> None:
    """Plan, train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=4)
    arguments.add_argument("--rate", default="50mbit")
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--density", type=float, default=0.01, help="of dgc")
    arguments.add_argument("--largest-mib", type=int, default=2, help="the largest collective that is measured")
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--every", type=int, default=15)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    if options.steps < options.every:
        arguments.error(f"--steps {options.steps}: train for --every {options.every} steps at least")
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    parameters["load_average"] = os.getloadavg()[0]
    runs: dict[str, list[Points]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, NetLab(options.hosts, rate=options.rate) as lab:
        ports = count(29500)

        def job(command: Sequence[str]) -> Iterator[str]:
            return lines_of(lab, command, port=next(ports))

        contenders: dict[str, tuple[str, ...]] = {DDP: (), **plans(job, options, Path(folder))}
        names = list(contenders)
        for turn, seed in enumerate(options.seeds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                runs[name].append(trained(job, options, contenders[name], seed))
                seconds, loss = runs[name][-1][-1]
                print(f"seed {seed}, {name}: loss {loss:.3f} after {seconds:.1f} s", file=sys.stderr, flush=True)
    found = {name: runs[name] for name in contenders}
    results = summaries(found)
    table(
        f"{options.hosts} hosts at {options.rate}, {options.steps} steps",
        ("contender", "loss", "seconds", "to the common loss, s", "times as fast as all-reduce"),
        [
            (
                name,
                f"{each['loss']:.3f}",
                f"{each['seconds']:.1f}",
                f"{each['to_common_s']:.1f}",
                f"{each['speedup_to_common']:.2f}",
            )
            for name, each in results.items()
        ],
    )
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, found, reached="training loss")


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
