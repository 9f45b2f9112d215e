"""Is training faster with what `resilient-comm advise` recommends, and by as much as it says?

Hosts of a laboratory network (namespaces, links shaped by tbf), one Gloo rank each. First the command advises the
example; then the example is trained as it is and as advised, in turns. Steps are those between lines of rank 0. Where
nothing is recommended nothing is compared. Goal: nothing that is recommended is slower than DDP's all-reduce.
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

FOLDER = Path(__file__).parent
EXAMPLES = {
    "LSTM": (str(FOLDER.parent / "examples" / "lstm_lm.py"), "--scheme", "ddp"),
    "GPT": (str(FOLDER.parent / "examples" / "train_gpt.py"),),
}
ADVISE = (
    "-P",
    "-c",
    "from resilient_run.comm.cli.main import resilient_comm; resilient_comm()",
    "advise",
    "--json",
    "--seconds",
)
UNCOUNTED_STEPS = 8
"""Steps that do not count: memory is allocated, buckets are made anew, and Zen decides."""


def advised(lab: NetLab, script: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Return what the command says of a script on all hosts of `lab`."""
    command = [sys.executable, *ADVISE, str(seconds), *script, "--steps", "1000000"]
    (answer,) = (line for line in lines_of(lab, command) if line.startswith('{"step_s"'))
    found: dict[str, Any] = json.loads(answer)
    return found


def step_seconds(lab: NetLab, script: tuple[str, ...], line: str, *, steps: int) -> list[float]:
    """Return the seconds of each counted step of a training in which `line` is written behind DDP."""
    command = [sys.executable, "-P", str(FOLDER / "advised_worker.py"), line, *script]
    command += ["--json", "--steps", str(UNCOUNTED_STEPS + steps)]
    times_s = [time.monotonic() for text in lines_of(lab, command) if "loss" in json.loads(text)]
    return [after - before for before, after in pairwise(times_s[UNCOUNTED_STEPS - 1 :])]


def main() -> None:
    """Measure, print and write; exit 1 when a recommendation is slower than all-reduce."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=2)
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "1000mbit", "4000mbit"])
    arguments.add_argument("--seconds", type=float, default=20.0, help="of --seconds")
    arguments.add_argument("--steps", type=int, default=12, help="counted in each round")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    results: list[dict[str, Any]] = []
    for rate in options.rates:
        for name, script in EXAMPLES.items():
            with NetLab(options.hosts, rate=rate) as lab:
                found = advised(lab, script, options.seconds)
            row = {"example": name, "rate": rate, **found}
            print(f"\n{name}, {rate}: {found['advice']}", flush=True)
            if found["recommended"] is not None:
                taken: dict[str, list[float]] = {"as it is": [], "as advised": []}
                for _ in range(options.rounds):
                    for how, line in (("as it is", ""), ("as advised", found["write"])):
                        with NetLab(options.hosts, rate=rate) as lab:
                            taken[how] += step_seconds(lab, script, line, steps=options.steps)
                row["trained_s"] = {how: Summary.of(each) for how, each in taken.items()}
            results.append(row)
    compared = [row for row in results if "trained_s" in row]
    table(
        f"{options.hosts} hosts",
        ("example, rate", "advice", "step as it is, s", "as advised, s", "times as fast"),
        [
            (f"{row['example']}, {row['rate']}", row["recommended"], *_cells(row["trained_s"]))
            if row in compared
            else (f"{row['example']}, {row['rate']}", "nothing pays", "", "", "")
            for row in results
        ],
    )
    parameters = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(
        options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results={"advised": results}
    )
    slower = [row for row in compared if row["trained_s"]["as advised"].median > row["trained_s"]["as it is"].median]
    sys.exit(1 if slower else 0)


def _cells(trained: dict[str, Summary]) -> tuple[str, str, str]:
    before, after = trained["as it is"], trained["as advised"]
    return f"{before:.3f}", f"{after:.3f}", f"{before.median / after.median:.2f}"


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
