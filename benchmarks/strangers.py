"""Does what `auto` and `advise` promise come true on other people's models?

Seven trainings of kinds that the examples do not have (`strange_trainings.py`), on hosts of a laboratory network
(namespaces, links shaped by tbf), one Gloo rank each. First `resilient-comm advise` looks at the script as it is. Then,
in one job, `register(model, "auto")` chooses without and with `lossy=True`. At last DDP, both choices, what was
advised, and torch's own hooks for half precision and PowerSGD train the same steps from the beginning, in turns of some
steps each. A step is that of the slowest rank; of a turn the median counts. torch's hooks know no sparse gradients and
are left out there.

Goals: a choice is no slower than DDP beyond the spread of turns; a gain, DDP's step over the new one, is within 15 % of
the one that was promised. Losses are those at the end, and those at the time at which the fastest has ended. What a
trial costs is told apart. Hosts share this machine's processors.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json
from strange_trainings import TRAININGS

FOLDER = Path(__file__).parent
ADVISE = ("-c", "from resilient_run.comm.cli.main import resilient_comm; resilient_comm()", "advise", "--json")
BASE, ADVISED = "DDP", "as advised"
WARM_UP = 5
"""Steps that do not count: buckets are made anew, and torch's PowerSGD begins."""
SMOOTHED = 10
"""Steps over which a loss is averaged."""
GOAL = 0.15


def advised(lab: NetLab, name: str, seconds: int) -> dict[str, Any]:
    """Return what `resilient-comm advise` says of a training."""
    command = [sys.executable, "-P", *ADVISE, "--seconds", str(seconds)]
    command += [str(FOLDER / "strange_trainings.py"), name, "--steps", "1000000"]
    (answer,) = (line for line in lines_of(lab, command) if line.startswith('{"step_s"'))
    found: dict[str, Any] = json.loads(answer)
    chosen = found["recommended"]
    return {
        "trial": ADVISED,
        "chosen": chosen,
        "taken": found["step_s"],
        "left_out": found["left_out"],
        "promised_s": chosen and median(found["step_s"][chosen]),
        "base_s": median(found["step_s"]["all-reduce"]),
        "write": found["write"],
    }


def trained(
    lab: NetLab, name: str, write: str | None, options: Any
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return what was chosen and promised, and of each contender the seconds of turns and the loss of each step.

    `write` is what to write behind DDP, as was advised.
    """
    shared = {
        "write": write,
        "name": name,
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up": WARM_UP,
        "seconds": options.seconds,
    }
    command = [sys.executable, "-P", str(FOLDER / "strangers_worker.py"), json.dumps(shared)]
    trials, contenders = [], dict[str, dict[str, Any]]()
    for line in map(json.loads, lines_of(lab, command, port=29501)):
        if "trial" in line:
            trials.append(line)
            continue
        contender = contenders.setdefault(line["contender"], {"seconds": []})
        if "losses" in line:
            contender["losses"] = line["losses"]
        else:
            contender["seconds"].append(line["seconds"])
    return trials, contenders


def judged(contenders: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return of each contender its step, its gain over DDP, and its losses."""
    steps = {name: Summary.of(each["seconds"]) for name, each in contenders.items()}
    together_s = min(step.median for step in steps.values()) * len(contenders[BASE]["losses"])
    return {
        name: {
            "step_s": step,
            "gain": steps[BASE].median / step.median,
            "is_slower": step.p10 > steps[BASE].p90,
            "loss_at_start": _smooth(contenders[name]["losses"], SMOOTHED),
            "loss_at_end": _smooth(contenders[name]["losses"], len(contenders[name]["losses"])),
            "loss_by_the_clock": _smooth(contenders[name]["losses"], int(together_s / step.median)),
        }
        for name, step in steps.items()
    }


def _smooth(losses: Sequence[float], steps: int) -> float:
    return fmean(losses[max(0, steps - SMOOTHED) : max(1, steps)])


def _milliseconds(step: Summary) -> str:
    return f"{1000 * step.median:.0f} ({1000 * step.p10:.0f}..{1000 * step.p90:.0f})"


def promised(trial: Mapping[str, Any]) -> float:
    """Return the gain that a trial promised; 1 where it leaves gradients to DDP."""
    return float(trial["base_s"] / trial["promised_s"]) if trial["promised_s"] else 1.0


def measure(name: str, rate: str, options: Any) -> dict[str, Any]:
    """Return what was advised, chosen, promised and measured of a training."""
    with NetLab(options.hosts, rate=rate) as lab:
        advice = advised(lab, name, options.seconds)
    with NetLab(options.hosts, rate=rate) as lab:
        trials, contenders = trained(lab, name, advice["write"], options)
    found = judged(contenders)
    if advice["chosen"] is not None:
        trials.append(advice)
    for trial in trials:
        trial["promised_gain"] = promised(trial)
        trial["apart"] = found[trial["trial"]]["gain"] / trial["promised_gain"] - 1
    return {
        "training": name,
        "rate": rate,
        "nothing_advised": advice["chosen"] is None,
        "trials": trials,
        "contenders": found,
    }


def show(rate: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print two tables: whether promises came true, and what contenders took and reached."""
    table(
        f"{rate}: what was chosen, promised and measured (gain over DDP); where nothing is advised there is no row",
        ("training", "by", "chosen", "promised", "measured", "apart", "trial, s (steps)"),
        [
            (
                row["training"],
                trial["trial"],
                trial["chosen"],
                f"{trial['promised_gain']:.2f}",
                f"{row['contenders'][trial['trial']]['gain']:.2f}",
                f"{trial['apart']:+.0%}",
                f"{trial['seconds']:.0f} ({trial['steps']})" if "seconds" in trial else "",
            )
            for row in rows
            for trial in row["trials"]
        ],
    )
    table(
        f"{rate}: steps and losses",
        ("training", "contender", "step, ms", "loss: first steps", "at the end", "by the clock"),
        [
            (
                row["training"],
                name,
                _milliseconds(each["step_s"]),
                *(f"{each[loss]:.3f}" for loss in ("loss_at_start", "loss_at_end", "loss_by_the_clock")),
            )
            for row in rows
            for name, each in row["contenders"].items()
        ],
    )
    sys.stdout.flush()


def main() -> None:
    """Measure, print and write; exit 1 when a choice is slower than DDP."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=2)
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "1000mbit"])
    arguments.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    arguments.add_argument("--seconds", type=int, default=8, help="of auto and advise, for each measurement")
    arguments.add_argument("--steps", type=int, default=15, help="of a turn")
    arguments.add_argument("--rounds", type=int, default=6, help="in which contenders take turns")
    options = arguments.parse_args()
    results: list[dict[str, Any]] = []
    parameters = {name: value for name, value in vars(options).items() if name != "json"}
    for rate in options.rates:
        for name in options.trainings:
            results.append(measure(name, rate, options))
            print(f"{name}, {rate}: done", file=sys.stderr, flush=True)
            write_json(
                options.json,
                question=(__doc__ or "").splitlines()[0],
                parameters=parameters,
                results={"trainings": results},
            )
        show(rate, [row for row in results if row["rate"] == rate])
    judgements = [(row, trial) for row in results for trial in row["trials"]]
    true = sum(abs(trial["apart"]) <= GOAL for _, trial in judgements)
    slower = [
        f"{row['training']}, {row['rate']}, {trial['trial']}"
        for row, trial in judgements
        if row["contenders"][trial["trial"]]["is_slower"]
    ]
    print(f"\n{true} of {len(judgements)} promises came true within {GOAL:.0%}; slower than DDP: {slower or 'none'}")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        sys.exit(str(error))
