"""How accurate is a model after how many seconds, trained with SparDL and its rivals (SparDL, Figure 6 and Table 3)?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each train a small model of real text
(`tests/byte_model.py`) with plain SGD, whose gradient goes through a scheme as one tensor; k is 1 % of its elements.
Accuracy is the share of held-out bytes that the model tells from the eight before them; the clock stands still while
rank 0 looks. For each seed all schemes train, in an order that moves on by one. "To the common accuracy" is the time
until the accuracy that the worst of a seed ends with. All hosts share the processors of this machine, so that computing
takes a greater part of a step than on hosts of their own.

    sudo python benchmarks/spardl_accuracy.py --json FILE.json --plot FILE.svg
"""

import json
import operator
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curves import Points, plot, seconds_to_common
from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

WORKER = str(Path(__file__).with_name("spardl_accuracy_worker.py"))
SCHEMES = ("spardl", "topk-a", "topk-dsa", "gtopk", "ok-topk", "dense")


def curves(options: Any) -> dict[str, list[Points]]:
    """Return scheme → the points of each seed, in the order of seeds."""
    shared = {
        "contenders": {name: {} if name == "dense" else {"density": options.density} for name in options.schemes},
        **{name: getattr(options, name) for name in ("seeds", "steps", "every", "width", "batch", "learning_rate")},
    }
    found: dict[str, list[Points]] = defaultdict(list)
    with NetLab(options.hosts, rate=options.rate) as lab:
        for line in lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)]):
            trained = json.loads(line)
            found[trained["scheme"]].append(trained["points"])
    return {name: found[name] for name in options.schemes}


def summaries(found: Mapping[str, Sequence[Points]]) -> dict[str, dict[str, Any]]:
    """Return of each scheme its accuracy in the end, its time, and its time to the common accuracy over the first's."""
    to_common_s = seconds_to_common(found, operator.ge)
    reference = next(iter(to_common_s.values()))
    return {
        name: {
            "accuracy": Summary.of(run[-1][1] for run in runs),
            "seconds": Summary.of(run[-1][0] for run in runs),
            "to_common_s": Summary.of(to_common_s[name]),
            "to_common_over_first": Summary.of(
                own / first for own, first in zip(to_common_s[name], reference, strict=True)
            ),
            "points": runs,
        }
        for name, runs in found.items()
    }


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=6, help="gtopk needs a power of two")
    arguments.add_argument("--rate", default="100mbit")
    arguments.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=[name for name in SCHEMES if name != "gtopk"]
    )
    arguments.add_argument("--steps", type=int, default=600)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--width", type=int, default=4096, help="of the hidden layer: a million elements in all")
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--learning-rate", type=float, default=0.2)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    parameters["load_average"] = os.getloadavg()[0]
    found = curves(options)
    results = summaries(found)
    table(
        f"{options.hosts} hosts at {options.rate}, {options.steps} steps",
        ("scheme", "accuracy", "seconds", "to the common accuracy, s", f"over {options.schemes[0]}"),
        [
            (
                name,
                f"{each['accuracy']:.4f}",
                f"{each['seconds']:.1f}",
                f"{each['to_common_s']:.1f}",
                f"{each['to_common_over_first']:.2f}",
            )
            for name, each in results.items()
        ],
    )
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, found, reached="accuracy on held-out text")


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
