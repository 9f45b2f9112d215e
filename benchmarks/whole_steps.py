"""How long do whole steps take with each scheme and each rival, on 4 to 16 hosts from 100 Mbit/s to 4 Gbit/s?

A step is the forward and the backward pass with all sums of gradients, on the slowest rank. Two kinds of model:

- `dense`: twelve equal matrices, as the blocks of a transformer. Contenders are DDP as it is and with torch's own
  hooks, our schemes, the plans of `cupcake` and `espresso-fused` for files written by hand (top-k), and local steps.
- a name of the Zen chapter's evaluation (thesis, Table 3.1): an embedding and dense layers in the proportion given
  there. The embedding's gradient has the density, skew and overlap of that model with eight GPUs on each host; schemes
  sum it alone. Contenders are DDP, torch's all-gather of sparse tables, Zen, and its rivals with rows and bitmaps.

Computation takes as long as DDP's all-reduce needs at `--balance-mbit`, whatever the network; buckets have the share
of the model that 25 MiB have of the real one. One rank for each host of a laboratory network (namespaces, links shaped
by tbf), in a single job; contenders take turns, one step each.

Two cores emulate all hosts. So arithmetic is waited for (`timed_model.py`), and time is dilated (Gupta et al., NSDI
2006; see `predicted.py`), such that all links together pass `--total-mbit` in truth. Models have as many elements as
DDP's all-reduce sums in `--dense-s` for each host then: with fewer, what a call costs on two cores would count for more
than it does in training. Times are given undilated: a worker has `cores` (in the results) such cores, few at
100 Mbit/s, and at 4 Gbit/s enough to compress as fast as a GPU.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path
from typing import Any

from lab_job import PAYLOAD, lines_of
from netlab import NetLab, NetLabError
from predicted import QUEUE_S, Sample, cores_busy, plan_all, write_files
from report import Summary, parser, table, write_json
from sparse_workload import WIDTH, WORKLOADS
from timed_model import Step

from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.tree import Routine

WORKER = str(Path(__file__).with_name("whole_steps_worker.py"))
DENSE, BASE = "dense", "all-reduce"
PLANNERS = ("cupcake", "espresso-fused")
BLOCKS, LAYERS = 12, 4
DENSE_MILLIONS = 124
"""Elements of the model that is scaled: GPT-2."""
MLP_MILLIONS = {"LSTM": 20, "DeepFM": 68, "NMT": 31, "BERT": 86}
"""Of Table 3.1."""
BUCKET_MIB = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is trained.

    Attributes:
        workload: The embedding's, None without one.
        table_elements: Of the embedding.
        sides: Of square matrices.
        bucket_mib: DDP's.
    """

    workload: str | None
    table_elements: int
    sides: Sequence[int]
    bucket_mib: float

    @classmethod
    def of(cls, name: str, elements: int) -> "Model":
        """Return the model of a name with so many elements."""
        if name == DENSE:
            share, sides, millions = 0.0, [isqrt(elements // BLOCKS)] * BLOCKS, DENSE_MILLIONS
        else:
            embedding = WORKLOADS[name].millions
            millions = MLP_MILLIONS[name] + embedding
            share = embedding / millions
            sides = [isqrt(round(elements * (1 - share)) // LAYERS)] * LAYERS
        return cls(
            workload=None if name == DENSE else name,
            table_elements=round(elements * share) // WIDTH * WIDTH,
            sides=sides,
            bucket_mib=BUCKET_MIB * elements / (millions * 1e6),
        )

    @property
    def elements(self) -> int:
        """Return how many all gradients have."""
        return self.table_elements + sum(side * side for side in self.sides)


def measure(name: str, hosts: int, rate_mbit_s: float, options: Any) -> tuple[dict[str, Any], dict[str, Summary]]:
    """Return what all contenders have in common, and the undilated seconds of a step of each."""
    slower = hosts * rate_mbit_s / options.total_mbit
    adapter_load = load(Routine.ALL_REDUCE, hosts).adapter
    dense_s = hosts * options.dense_s
    model = Model.of(name, int(dense_s * PAYLOAD * 1e6 * rate_mbit_s / slower / 8 / 4 / adapter_load))
    computing_s = dense_s * rate_mbit_s / options.balance_mbit
    sample = Sample(
        seed=DENSE,
        hosts=hosts,
        per_host=1,
        slower=slower,
        rate_mbit_s=rate_mbit_s / slower,
        compressor={"name": "topk", "density": options.density},
        forward_s=computing_s / 3,
        steps=tuple(
            Step(name=f"t{place}", rows=side, columns=side, backward_s=2 / 3 * computing_s * side**2 / model.elements)
            for place, side in enumerate(model.sides)
        ),
        scale=1,
        planners=PLANNERS,
    )
    lab = NetLab(hosts, rate=f"{1000 * sample.rate_mbit_s:.0f}kbit", queue_s=slower * QUEUE_S)
    plans: dict[str, dict[str, Any]] = {}
    seconds = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder, lab:
        shared = {
            "steps": [asdict(step) for step in sample.steps],
            "forward_s": sample.forward_s,
            "workload": model.workload,
            "table_elements": model.table_elements,
            "table_s": 2 / 3 * computing_s * model.table_elements / model.elements,
            "gpus": options.gpus,
            "bucket_mib": model.bucket_mib,
            "compressor": sample.compressor,
            "folder": folder,
            "rounds": options.rounds,
            "every": options.every,
        }
        lines = lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)])
        if model.workload is None:
            write_files(sample, json.loads(next(lines)), Path(folder))
            plans = plan_all(sample, Path(folder))
        names = {path: f"plan of {', '.join(plan['planners'])}" for path, plan in plans.items()}
        busy = None
        for line in map(json.loads, lines):
            busy = busy or cores_busy()  # from the first line on
            seconds[names.get(line["contender"], line["contender"])].append(line["seconds"] / slower)
        now = cores_busy()
    assert busy is not None
    common = {
        "model": name,
        "rate_mbit_s": rate_mbit_s,
        "hosts": hosts,
        "elements": model.elements,
        "slower": slower,
        "cores": slower * (os.cpu_count() or 1) / hosts,
        "busy": (now[0] - busy[0]) / (now[1] - busy[1]),
        "plans": list(plans.values()),
    }
    return common, {contender: Summary.of(each) for contender, each in seconds.items()}


def show(name: str, rate_mbit_s: float, steps: Mapping[int, Mapping[str, Summary]]) -> None:
    """Print a table with a column for each number of hosts."""
    contenders = dict.fromkeys(contender for each in steps.values() for contender in each)

    def cell(each: Mapping[str, Summary], contender: str) -> str:
        if (step := each.get(contender)) is None:
            return ""
        low, high = 1000 * step.p10, 1000 * step.p90
        return f"{each[BASE].median / step.median:.2f} ({low:.0f}..{high:.0f} ms)"

    table(
        f"{name}, {rate_mbit_s:g} Mbit/s: speed-up over all-reduce (step, 10th to 90th percentile)",
        ("contender", *(f"{hosts} hosts" for hosts in steps)),
        [(contender, *(cell(each, contender) for each in steps.values())) for contender in contenders],
    )
    sys.stdout.flush()


def main() -> None:
    """Measure, print and write."""
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=(DENSE, *MLP_MILLIONS), default=[DENSE, "LSTM"])
    made.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16], metavar="N")
    made.add_argument("--rates-mbit", type=float, nargs="+", default=[100, 1000, 4000], metavar="N", help="of links")
    made.add_argument("--dense-s", type=float, default=1.0, metavar="S", help="of DDP's all-reduce for each host")
    made.add_argument("--density", type=float, default=0.01, help="of what sparsifiers send")
    made.add_argument("--gpus", type=int, default=8, metavar="N", help="whose gradients a host's embedding has")
    made.add_argument("--every", type=int, default=5, metavar="N", help="steps of a round of local steps")
    made.add_argument("--balance-mbit", type=float, default=4000, metavar="N", help="see above")
    made.add_argument("--total-mbit", type=float, default=100, metavar="N", help="of all links, in truth")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="in which contenders take turns")
    options = made.parse_args()
    results: list[dict[str, Any]] = []
    parameters = {key: value for key, value in vars(options).items() if key != "json"}
    for name in options.models:
        for rate in options.rates_mbit:
            steps: dict[int, dict[str, Summary]] = {}
            for hosts in options.hosts:
                common, steps[hosts] = measure(name, hosts, rate, options)
                results += [
                    {
                        **common,
                        "contender": contender,
                        "step_s": step,
                        "speedup": steps[hosts][BASE].median / step.median,
                    }
                    for contender, step in steps[hosts].items()
                ]
                print(
                    f"{name}, {rate:g} Mbit/s, {hosts} hosts: cores {common['busy']:.0%} busy",
                    file=sys.stderr,
                    flush=True,
                )
                write_json(
                    options.json,
                    question=(__doc__ or "").splitlines()[0],
                    parameters=parameters,
                    results={"steps": results},
                )
            show(name, rate, steps)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        sys.exit(str(error))
