"""Do collectives take what planners say they take?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each. Each collective of the decision
tree is timed as `resilient-comm profile` times it, and compared with its rounds (`comm/plan/collective.py`): the bytes
of the busiest adapter, round by round, at the rate of the link, of which at most 95.6 % are payload, plus the latency
of a round, for which an all-reduce of a few bytes is taken (`alpha_s`). Goal: at most 1.2 times that for 4 MiB.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lab_job import PAYLOAD, lines_of
from netlab import NetLab, NetLabError
from report import parser, table, write_json

from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.tree import Routine

WORKER = str(Path(__file__).with_name("collectives_worker.py"))


def predicted_s(routine: Routine, ranks: int, held_bytes: int, *, alpha_s: float, rate_bit_s: int) -> float:
    """Return what the rounds of a collective take."""
    found = load(routine, ranks)
    return found.startups * alpha_s + 8 * found.adapter * held_bytes / (PAYLOAD * rate_bit_s)


def run(ranks: int, rate: str, size_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Return measured and predicted seconds of each collective."""
    with NetLab(ranks, rate=rate) as lab:
        shared = json.dumps({"size_bytes": size_bytes, "repeats": repeats, "compressors": ["fp16"]})
        found = [json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, shared])]
        rate_bit_s = lab.rate_bit_s
    empty = found.pop(0)
    alpha_s = empty["seconds"] / load(Routine.ALL_REDUCE, ranks).startups
    for line in found:
        line |= {"ranks": ranks, "rate": rate, "alpha_s": alpha_s}
        line["predicted_s"] = predicted_s(
            Routine(line["routine"]), ranks, line["held_bytes"], alpha_s=alpha_s, rate_bit_s=rate_bit_s
        )
        line["ratio"] = line["seconds"] / line["predicted_s"]
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[4, 6], metavar="N", help="hosts")
    made.add_argument("--rate", nargs="+", default=["200mbit"], help="of each link")
    made.add_argument("--size-kib", type=int, default=4096, metavar="KIB", help="of the whole tensor")
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="batches of each time")
    options = made.parse_args()
    try:
        found = [
            line
            for rate in options.rate
            for ranks in options.ranks
            for line in run(ranks, rate, options.size_kib << 10, options.repeats)
        ]
    except NetLabError as error:
        sys.exit(str(error))
    for rate in options.rate:
        for ranks in options.ranks:
            here = [line for line in found if (line["ranks"], line["rate"]) == (ranks, rate)]
            table(
                f"{ranks} hosts at {rate}, {options.size_kib} KiB; a round {here[0]['alpha_s'] * 1e3:.2f} ms",
                ("collective", "data", "measured ms", "predicted ms", "ratio"),
                [
                    (
                        line["routine"],
                        line["compressor"] or "dense",
                        f"{line['seconds'] * 1e3:.1f}",
                        f"{line['predicted_s'] * 1e3:.1f}",
                        f"{line['ratio']:.2f}",
                    )
                    for line in here
                ],
            )
    write_json(
        options.json,
        question="Do collectives take what planners say they take?",
        parameters={key: value for key, value in vars(options).items() if key != "json"},
        results={"collectives": found},
    )


if __name__ == "__main__":
    main()
