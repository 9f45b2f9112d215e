"""Do collectives wait for a slow network as often as planners say?

Hosts with one Gloo rank each, between which a packet takes `--delay-ms` one way (`delayed_hosts.py`), so long that
nothing else counts. Each collective of the decision tree is timed with a few bytes, as `resilient-comm profile` times
it, and given in delays. Planners say how many messages wait for each other (`comm/plan/collective.py`), and one more
where sizes differ from rank to rank (`dgc`) and are announced. Over Gloo a rank asks for what it waits for, so a
start-up is about a round trip, two delays. Collectives follow each other, and may overlap where one has a root.
"""

import json
import sys
from pathlib import Path
from typing import Any

from delayed_hosts import DelayedHosts
from lab_job import lines_of
from report import parser, table, write_json

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.plan.collective import is_short, load
from resilient_run.comm.plan.tree import Routine

WORKER = str(Path(__file__).with_name("collectives_worker.py"))
COMPRESSORS = ("fp16", "dgc")


def run(ranks: int, delay_s: float, size_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Return for each collective the delays that it takes, and how many messages wait for each other."""
    shared = json.dumps({"size_bytes": size_bytes, "repeats": repeats, "compressors": COMPRESSORS})
    with DelayedHosts(ranks, delay_s=delay_s) as network:
        found = [json.loads(line) for line in lines_of(network, [sys.executable, "-P", WORKER, shared])][1:]
    for line in found:
        routine, compressor = Routine(line["routine"]), line["compressor"]
        short = is_short(routine, ranks, line["held_bytes"])
        announced = compressor is not None and (routine is Routine.BROADCAST or not named(compressor).fixed_size)
        waits = load(routine, ranks, short=short).startups
        line |= {"ranks": ranks, "delays": line["seconds"] / delay_s, "planned": waits + announced}
    return found


def main() -> None:
    """Measure, print and write."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 6], metavar="N", help="hosts")
    made.add_argument("--delay-ms", type=float, default=20.0, metavar="MS", help="of each packet, one way")
    made.add_argument("--size-bytes", type=int, default=4096, metavar="N", help="of the whole tensor")
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="batches of each time")
    options = made.parse_args()
    found = []
    for ranks in options.ranks:
        here = run(ranks, options.delay_ms / 1e3, options.size_bytes, options.repeats)
        table(
            f"{ranks} hosts, {options.delay_ms:g} ms one way",
            ("collective", "data", "delays", "planned start-ups", "delays of a start-up"),
            [
                (
                    line["routine"],
                    line["compressor"] or "dense",
                    f"{line['delays']:.1f}",
                    str(line["planned"]),
                    f"{line['delays'] / line['planned']:.1f}",
                )
                for line in here
            ],
        )
        found += here
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={key: value for key, value in vars(options).items() if key != "json"},
        results={"collectives": found},
    )


if __name__ == "__main__":
    main()
