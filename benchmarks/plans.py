"""Do plans take the time that was predicted for them, and are they faster than what else there is? (thesis, 4.8, 5.4)

Two hosts of a laboratory network (namespaces, links shaped by tbf) with two Gloo workers each. A model is one of the
papers' with a fraction of its elements; its gradients, their compression and the messages are real, but the arithmetic
of a worker is waited for (`timed_model.py`), and takes as long as a dense all-reduce needs at the slowest of the rates:
balanced there, while at faster rates compression can gain little. Then, as a user would: profile the model's backward
pass and the lab (`resilient-comm profile`), plan (`resilient-comm plan`), train by each plan, and by DDP with torch's
own hooks, in turns. Ratios are between medians of the same run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from lab_job import lines_of
from lab_state import parse_rate
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json
from timed_model import steps_of

WORKER = str(Path(__file__).with_name("plans_worker.py"))
WITH_BASELINES = str(Path(__file__).with_name("with_baselines.py"))
RESILIENT_COMM = str(Path(sys.executable).with_name("resilient-comm"))
SCALES = {"lstm": 8, "vgg16": 48, "gpt2": 32, "bert_base": 32, "resnet50": 2, "resnet101": 16}
PLANNERS = (
    *("dense", "layer-wise", "hipress", "bucket-fusion", "evenly-split", "cupcake"),
    *("espresso-greedy", "espresso-hitopkcomm", "espresso", "espresso-fused"),
)
"""BytePS-Compress is not among them: it compresses on CPUs beside the device, and here the device is the CPU."""
HOSTS, PER_HOST = 2, 2
LARGEST_MIB = 4
DDP_BUCKET_MIB = 25


def tensors_of(model: str) -> list[tuple[str, int, float]]:
    document = json.loads((Path(__file__).parent / "models" / f"{model}.json").read_text())
    return [(each["name"], each["numel"], each["bwd_flop"]) for each in document["tensors"]]


def measure(model: str, rate: str, *, options: Any, directory: Path) -> list[dict[str, Any]]:
    """Return one object for each strategy."""
    tensors, scale = tensors_of(model), SCALES[model]
    ranks = HOSTS * PER_HOST
    size_bytes = 4 * sum(numel // scale for _, numel, _ in tensors)
    computing_s = 2 * (ranks - 1) / ranks * size_bytes * 8 / min(map(parse_rate, options.rates))
    steps = steps_of(tensors, scale=scale, backward_s=computing_s * 2 / 3)
    common = {
        "steps": [asdict(step) for step in steps],
        "forward_s": computing_s / 3,
        "density": options.density,
        "bucket_mib": DDP_BUCKET_MIB / scale,
    }
    model_path, system_path = directory / "model.json", directory / "system.json"
    worker = [sys.executable, "-P", WORKER]
    with NetLab(HOSTS, rate=rate) as lab:
        ports = count(29500)

        def run(command: Sequence[str]) -> list[str]:
            return list(lines_of(lab, command, per_host=PER_HOST, port=next(ports)))

        task = {"task": "profile", "model": model, "model_path": str(model_path), "iterations": 5}
        run([*worker, json.dumps({**common, **task})])
        form = ["--density", str(options.density), "--largest-mib", str(LARGEST_MIB)]
        files = ["--model", str(model_path), "--out", str(system_path)]
        run([RESILIENT_COMM, "profile", *form, "--repeats", str(options.repeats), *files])
        plans = {name: plan(name, model_path, system_path, directory) for name in options.planners}
        task = {
            "task": "train",
            "plans": {name: str(path) for name, (path, _) in plans.items()},
            "rounds": options.rounds,
            "iterations": options.iterations,
        }
        lines = [json.loads(line) for line in run([*worker, json.dumps({**common, **task})])]
    seconds: dict[str, list[float]] = {}
    for line in lines:
        seconds.setdefault(line["strategy"], []).extend(line["seconds"])
    fp32_s = Summary.of(seconds["fp32"]).median
    found = []
    for name, samples in seconds.items():
        summary, planned = Summary.of(samples), plans[name][1] if name in plans else None
        found.append(
            {
                "model": model,
                "rate": rate,
                "strategy": name,
                "computing_s": computing_s,
                "gradient_bytes": size_bytes,
                "iteration_s": summary,
                "throughput_over_fp32": fp32_s / summary.median,
                "predicted_s": None if planned is None else planned["iteration_s"],
                "measured_over_predicted": None if planned is None else summary.median / planned["iteration_s"],
                "groups": None if planned is None else len(planned["groups"]),
                "options": None if planned is None else sorted(set(planned["options"])),
            }
        )
    return [*found, {"model": model, "rate": rate, "system": json.loads(system_path.read_text())}]


def plan(planner: str, model_path: Path, system_path: Path, directory: Path) -> tuple[Path, dict[str, Any]]:
    path = directory / f"{planner}.json"
    files = ["--model", str(model_path), "--system", str(system_path), "--out", str(path)]
    command = [sys.executable, WITH_BASELINES, RESILIENT_COMM, "plan", "--planner", planner, *files]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path, json.loads(path.read_text())


def show(lines: Sequence[dict[str, Any]], *, model: str, rate: str) -> None:
    """Print one table for a cell."""
    table(
        f"{model} at {rate}: {lines[0]['gradient_bytes'] / 1e6:.1f} MB of gradients, "
        f"{lines[0]['computing_s'] * 1e3:.0f} ms of computing",
        ("strategy", "iteration, ms", "throughput over fp32", "predicted, ms", "measured / predicted", "groups"),
        [
            (
                line["strategy"],
                f"{line['iteration_s'].median * 1e3:.1f} "
                f"({line['iteration_s'].p10 * 1e3:.1f}..{line['iteration_s'].p90 * 1e3:.1f})",
                f"{line['throughput_over_fp32']:.3f}",
                "" if line["predicted_s"] is None else f"{line['predicted_s'] * 1e3:.1f}",
                "" if line["predicted_s"] is None else f"{line['measured_over_predicted']:.3f}",
                "" if line["predicted_s"] is None else str(line["groups"]),
            )
            for line in lines
        ],
    )
    sys.stdout.flush()


def plot(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the figure: throughput of each strategy over FP32, by model and rate; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    cells = list(dict.fromkeys((line["model"], line["rate"]) for line in lines))
    strategies = [name for name in dict.fromkeys(line["strategy"] for line in lines) if name != "fp32"]
    figure, axes = plt.subplots(figsize=(2 + 2.5 * len(cells), 4))
    width = 1 / (len(strategies) + 1)
    for place, strategy in enumerate(strategies):
        values = {
            (line["model"], line["rate"]): line["throughput_over_fp32"]
            for line in lines
            if line["strategy"] == strategy
        }
        positions = [index + (place + 0.5) * width - 0.5 for index in range(len(cells))]
        axes.bar(positions, [values.get(cell, 0) for cell in cells], width, label=strategy)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cells)), [f"{model}, {rate}" for model, rate in cells])
    axes.set_ylabel("throughput over FP32")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=SCALES, default=["lstm", "resnet50"])
    arguments.add_argument("--rates", nargs="+", default=["200mbit", "4gbit"])
    arguments.add_argument("--planners", nargs="+", default=list(PLANNERS))
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--rounds", type=int, default=3, help="turns of each strategy")
    arguments.add_argument("--iterations", type=int, default=4, help="of each turn")
    arguments.add_argument("--repeats", type=int, default=5, help="samples of each time of the profile")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    lines: list[dict[str, Any]] = []
    systems: list[dict[str, Any]] = []
    for model in options.models:
        for rate in options.rates:
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as directory:
                *found, system = measure(model, rate, options=options, directory=Path(directory))
            show(found, model=model, rate=rate)
            lines += [{**line, "machine_load": load} for line in found]
            systems.append(system)
            # After each cell, since what was measured until then is worth keeping.
            results = {"measured": lines, "profiles": systems}
            write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
            if options.plot is not None:
                plot(options.plot, lines)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
