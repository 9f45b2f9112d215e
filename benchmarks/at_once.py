"""May the messages of an all-to-all come at once, or better in turn?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each exchange messages that bring
each of them so many KiB in all: sent at once, and one after the other, by turns. Each link's queue holds `--queue-kib`,
as a port of a switch does, whatever its rate. Ranks find out how much they let come at once (`Transport.learn`); that
is done again and again as well.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lab_job import lines_of
from report import Summary, parser, table, write_json

from resilient_run.launcher.netlab import NetLab, NetLabError

WORKER = str(Path(__file__).with_name("at_once_worker.py"))


def run(ranks: int, rate_mbit_s: int, queue_kib: int, sizes_kib: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of both ways, of each size, and what the ranks find out."""
    queue_s = 8 * (queue_kib << 10) / (rate_mbit_s * 1e6)
    shared = json.dumps({"sizes_kib": sizes_kib, "repeats": repeats})
    with NetLab(ranks, rate=f"{rate_mbit_s}mbit", queue_s=queue_s) as lab:
        found = [json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, shared])]
    learnt, *sizes = ({name: _summary(value) for name, value in line.items()} for line in found)
    return {"ranks": ranks, "rate_mbit_s": rate_mbit_s, **learnt, "all_to_alls": sizes}


def _summary(value: Any) -> Any:
    return Summary.of(value) if isinstance(value, list) else value


def main() -> None:
    """Measure, print and write."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[4, 6], metavar="N", help="hosts")
    made.add_argument("--rate-mbit", type=int, nargs="+", default=[25, 100, 400], metavar="N", help="of each link")
    made.add_argument("--queue-kib", type=int, default=256, metavar="KIB", help="in front of each link")
    made.add_argument("--kib", type=int, nargs="+", default=[64, 128, 192, 256], metavar="KIB", help="for each rank")
    made.add_argument("--repeats", type=int, default=24, metavar="N", help="of each way, by turns")
    options = made.parse_args()
    try:
        found = [
            run(ranks, rate, options.queue_kib, options.kib, options.repeats)
            for ranks in options.ranks
            for rate in options.rate_mbit
        ]
    except NetLabError as error:
        sys.exit(str(error))
    table(
        "milliseconds of an all-to-all",
        ("hosts", "Mbit/s", "KiB", "at once", "in turn", "at once / in turn"),
        [
            (
                str(lab["ranks"]),
                str(lab["rate_mbit_s"]),
                str(line["received_kib"]),
                *(f"{1e3 * line[way].median:.1f} (to {1e3 * line[way].p90:.1f})" for way in ("at_once_s", "in_turn_s")),
                f"{line['at_once_s'].median / line['in_turn_s'].median:.2f}",
            )
            for lab in found
            for line in lab["all_to_alls"]
        ],
    )
    table(
        "what ranks let come at once",
        ("hosts", "Mbit/s", "KiB", "found out in s"),
        [
            (
                str(lab["ranks"]),
                str(lab["rate_mbit_s"]),
                *(
                    f"{value.median / unit:.3g} ({value.p10 / unit:.3g} to {value.p90 / unit:.3g})"
                    for value, unit in ((lab["learnt_bytes"], 1024), (lab["learn_s"], 1))
                ),
            )
            for lab in found
        ],
    )
    parameters = {key: value for key, value in vars(options).items() if key != "json"}
    question = (__doc__ or "").splitlines()[0]
    write_json(options.json, question=question, parameters=parameters, results={"networks": found})


if __name__ == "__main__":
    main()
