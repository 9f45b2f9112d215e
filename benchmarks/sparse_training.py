"""How many steps a second do the examples train with sparse schemes, over DDP's all-reduce?

Hosts of a laboratory network (namespaces, links shaped by tbf), one Gloo rank each. The word-level LSTM has gradients
that are sparse by nature; the GPT's are dense, and its schemes select from them, or send all of them smaller. A step is
the time between two lines of rank 0; the first steps, in which Zen profiles, do not count. Rounds of all schemes follow
each other, so that a slow minute of the machine hits each of them. All hosts share this machine's processors: what
computing costs a scheme weighs more here than where each host has its own.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

WITH_BASELINES = Path(__file__).with_name("with_baselines.py")
EXAMPLES = Path(__file__).parent.parent / "examples"
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "lstm_lm.py": {
        "all-reduce": ("--scheme", "ddp"),
        "zen": ("--scheme", "zen"),
        "zen, sparse tables": ("--scheme", "zen", "--sparse"),
        "all-gather, sparse tables": ("--scheme", "ddp", "--sparse"),
        "sparcml": ("--scheme", "sparcml"),
        "omnireduce": ("--scheme", "omnireduce"),
    },
    "train_gpt.py": {
        "all-reduce": (),
        "spardl": ("--scheme", "spardl"),
        "dgc, zen": ("--scheme", "dgc"),
        "topk-a": ("--scheme", "topk-a"),
        "ok-topk": ("--scheme", "ok-topk"),
        "int8": ("--scheme", "int8"),
        "powersgd": ("--scheme", "powersgd"),
    },
}
UNCOUNTED_STEPS = 5
"""Steps that do not count: memory is allocated, and Zen measures densities and decides."""


def step_seconds(lab: NetLab, example: str, options: tuple[str, ...], *, steps: int) -> list[float]:
    """Return the seconds of each counted step of a training on all hosts of `lab`."""
    command = [
        sys.executable,
        str(WITH_BASELINES),
        str(EXAMPLES / example),
        "--json",
        "--steps",
        str(UNCOUNTED_STEPS + steps),
        *options,
    ]
    times_s = [time.monotonic() for line in lines_of(lab, command) if "loss" in json.loads(line)]
    if len(times_s) != UNCOUNTED_STEPS + steps:
        raise RuntimeError(f"{example} {' '.join(options)}: {len(times_s)} steps of {UNCOUNTED_STEPS + steps}")
    counted = times_s[UNCOUNTED_STEPS - 1 :]
    return [after - before for before, after in pairwise(counted)]


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=4)
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "1000mbit"])
    arguments.add_argument("--examples", nargs="+", choices=RUNS, default=list(RUNS))
    arguments.add_argument("--steps", type=int, default=8, help="counted in each round")
    arguments.add_argument("--rounds", type=int, default=2)
    options = arguments.parse_args()
    results: list[dict[str, Any]] = []
    for rate in options.rates:
        for example in options.examples:
            seconds: dict[str, list[float]] = {scheme: [] for scheme in RUNS[example]}
            for _ in range(options.rounds):
                for scheme, arguments_ in RUNS[example].items():
                    with NetLab(options.hosts, rate=rate) as lab:
                        seconds[scheme] += step_seconds(lab, example, arguments_, steps=options.steps)
            lines = {scheme: Summary.of(each) for scheme, each in seconds.items()}
            base_s = lines["all-reduce"].median
            table(
                f"{example}, {options.hosts} hosts at {rate}",
                ("scheme", "step, s", "speed-up over all-reduce"),
                [(scheme, f"{line:.3f}", f"{base_s / line.median:.2f}") for scheme, line in lines.items()],
            )
            sys.stdout.flush()
            results += [
                {"example": example, "rate": rate, "scheme": scheme, "step_s": line, "speedup": base_s / line.median}
                for scheme, line in lines.items()
            ]
    parameters = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(
        options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results={"steps": results}
    )


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
