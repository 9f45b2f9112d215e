"""How much may be on its way to a rank at once?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each go through an all-gather, an
all-to-all and a reduce-scatter, again and again, without waiting for each other in between. Each brings a rank what its
link passes in so many milliseconds. In turns, ranks let as much come at once as a link passes in 2 to 32 ms and cut
longer messages into parts of half of that, or they send *whole* messages, of which no two may bring more than 256 KiB
together. The time is divided by that of the link, of whose rate at most 95.6 % are payload. Each link's queue holds
256 KiB, as a port of a switch does, whatever its rate. Ranks find out how much they let come at once
(`Transport.learn`); that is done again and again as well.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lab_job import PAYLOAD, lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

WORKER = str(Path(__file__).with_name("at_once_worker.py"))
AT_ONCE_MS = (2, 4, 8, 16, 32)
QUEUE_KIB = 256


def run(ranks: int, rate_mbit_s: int, lengths_ms: list[int], repeats: int) -> dict[str, Any]:
    """Return the seconds of each way, for each length, and what the ranks find out."""
    byte_s = 8 / (PAYLOAD * rate_mbit_s * 1e6)
    queue_s = 8 * (QUEUE_KIB << 10) / (rate_mbit_s * 1e6)
    shared = json.dumps(
        {"byte_s": byte_s, "lengths_ms": lengths_ms, "at_once_ms": AT_ONCE_MS, "repeats": repeats},
    )
    with NetLab(ranks, rate=f"{rate_mbit_s}mbit", queue_s=queue_s) as lab:
        learnt, *lines = (json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, shared]))
    return {
        "ranks": ranks,
        "rate_mbit_s": rate_mbit_s,
        "learn_s": Summary.of(learnt["learn_s"]),
        "learnt_ms": Summary.of([1e3 * byte_s * learnt_bytes for learnt_bytes in learnt["learnt_bytes"]]),
        "times": [{**line, "over_link": _summaries(line["over_link"])} for line in lines],
    }


def _summaries(ways: dict[str, list[float]]) -> dict[str, Summary]:
    return {way: Summary.of(taken) for way, taken in ways.items()}


def main() -> None:
    """Measure, print and write."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[4, 6], metavar="N", help="hosts")
    made.add_argument("--rate-mbit", type=int, nargs="+", default=[25, 100, 400], metavar="N", help="of each link")
    made.add_argument("--ms", type=int, nargs="+", default=[20, 200], metavar="MS", help="what collectives bring")
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="of each way, by turns")
    options = made.parse_args()
    try:
        found = [run(ranks, rate, options.ms, options.repeats) for ranks in options.ranks for rate in options.rate_mbit]
    except NetLabError as error:
        sys.exit(str(error))
    table(
        "all-gather, all-to-all and reduce-scatter, time over that of the link",
        ("hosts", "Mbit/s", "ms", *(f"{each} ms" for each in AT_ONCE_MS), "whole", "learnt, ms"),
        [
            (
                str(lab["ranks"]),
                str(lab["rate_mbit_s"]),
                str(line["length_ms"]),
                *(f"{way:.2f}" for way in line["over_link"].values()),
                f"{lab['learnt_ms']:.1f}",
            )
            for lab in found
            for line in lab["times"]
        ],
    )
    parameters = {key: value for key, value in vars(options).items() if key != "json"}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results={"labs": found})


if __name__ == "__main__":
    main()
