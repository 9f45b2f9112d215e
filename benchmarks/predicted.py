"""Do plans for files that were written by hand take the time that was predicted for them?

Random models (3 to 12 gradients, sizes over two decades, backward times that do not follow the sizes) on random
clusters: 2 to 8 ranks on 2 to 6 hosts of a laboratory network (namespaces, links shaped by tbf). Their files say what a
person would write: of the links between hosts the rate, of which at most 95.6 % are payload; what a start-up takes, by
4 bytes: an all-reduce for the library's, an all-gather for the run-time's own, and one of messages of the compressor;
what a compressor takes at two sizes, all workers at once. No other collective is measured, and none of a size that is
planned. `cupcake`, `espresso`, `espresso-fused` and some of the other planners plan; plans that are the same are run
once, and DDP as it is after them. Goal: within 10 %, and none of those three slower than DDP. With `--models`, those of
the thesis (benchmarks/models) in place of random ones, with all their tensors, but a sixteenth of their elements: on 4
hosts with 2 ranks or, if they are large, on 2 with 2. `--shape` and `--scale` say otherwise. Computation takes as long
as the network without compression.

Two cores emulate all workers. So the arithmetic of a worker is waited for (`timed_model.py`), and sizes are such that
the network dominates: it sums a model in 0.3 to 0.6 s without compression, gradients are large, and all ranks together
have links of at most `--most-mbit` (above 100 Mbit/s each). What they compress, copy and send is still more than these
cores can do beside each other. So time is dilated, as in the emulation of networks that are faster than the machine
(Gupta et al., "To infinity and beyond: time-warped network emulation", NSDI 2006): links pass a part of their rate,
their queues hold as many bytes as before, and models compute as many times as long. So it is a cluster of slower links
whose cores are as many times as fast. The more workers, the slower, so that each has as many cores as
`--cores-per-worker` says. `busy` is the part of the cores' time that they and the rest of the machine took, and
`sent_again` counts TCP segments that were sent twice. Compression is by the device that computes; options on CPUs are
left out, because these cores are both.
"""

import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from baselines import planners
from lab_job import PAYLOAD, lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json
from timed_model import Step

from resilient_run.comm.cupcake.cupcake import PLANNERS
from resilient_run.comm.espresso.espresso import ESPRESSO_PLANNERS
from resilient_run.comm.measure.probe import PROBED_COMPRESSED
from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.model import read_model
from resilient_run.comm.plan.tree import Routine

WORKER = str(Path(__file__).with_name("predicted_worker.py"))
FUSING = (*PLANNERS, *planners.FUSING)
RECOMMENDED = ("cupcake", "espresso", "espresso-fused")
ON_CPUS = ("espresso-cpu", "espresso-byteps")
OTHERS = tuple(
    name for name in (*FUSING, *ESPRESSO_PLANNERS, *planners.CHOOSING) if name not in (*RECOMMENDED, *ON_CPUS)
)
MOST_RANKS = 8
RATES_MBIT_S = (100, 1000)
NETWORK_S, COMPUTING_S = (0.3, 0.6), (0.1, 0.4)
QUEUE_S = 0.02
MODELS = Path(__file__).parent / "models"
SCALE = 16
DDP, BUCKET_MIB = "ddp", 25
LARGE = 60_000_000
"""Elements of a model that gets four workers."""

FREE_CORES = 0.25


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model and a cluster.

    Attributes:
        seed: What they were drawn with, or the name of the model.
        slower: How many times as long everything takes but what cores do.
        scale: How many times as many elements the model has in truth, and DDP's buckets.
    """

    seed: int | str
    hosts: int
    per_host: int
    slower: float
    rate_mbit_s: float
    compressor: dict[str, Any]
    forward_s: float
    steps: tuple[Step, ...]
    scale: int
    planners: tuple[str, ...]

    @property
    def byte_s(self) -> float:
        """Seconds of a byte between hosts."""
        return 8 / (PAYLOAD * self.rate_mbit_s * 1e6)


def dilation(ranks: int, cores_per_worker: float) -> float:
    """Return how many times as slow a cluster must be for each worker to have so many of these cores."""
    return max(1.0, cores_per_worker * ranks / (os.cpu_count() or 1))


def drawn(seed: int, others: int, most_mbit_s: float, cores_per_worker: float) -> Sample:
    """Return the sample of a seed, with so many planners beside those that are recommended."""
    draw = random.Random(seed)
    hosts = draw.randint(2, 6)
    per_host = draw.randint(1, MOST_RANKS // hosts)
    slower = dilation(hosts * per_host, cores_per_worker)
    least, most = RATES_MBIT_S
    most = max(least, min(most, most_mbit_s / (hosts * per_host)))
    rate_mbit_s = round(least * (most / least) ** draw.random() / slower)
    network_s, computing_s = slower * draw.uniform(*NETWORK_S), slower * draw.uniform(*COMPUTING_S)
    whole = network_s * rate_mbit_s * 1e6 * PAYLOAD / 8 / load(Routine.ALL_REDUCE, hosts, per_host).adapter / 4
    shares = [10 ** draw.uniform(0, 2) for _ in range(draw.randint(3, 12))]
    times = [draw.expovariate(1) for _ in shares]
    return Sample(
        seed=seed,
        hosts=hosts,
        per_host=per_host,
        slower=slower,
        rate_mbit_s=rate_mbit_s,
        compressor=draw.choice(({"name": "topk", "density": round(10 ** draw.uniform(-2, -1), 4)}, {"name": "fp16"})),
        forward_s=computing_s / 3,
        steps=tuple(
            Step(
                name=f"t{index}",
                rows=1,
                columns=max(1, round(whole * share / sum(shares))),
                backward_s=computing_s * 2 / 3 * taken / sum(times),
            )
            for index, (share, taken) in enumerate(zip(shares, times, strict=True))
        ),
        scale=1,
        planners=(*RECOMMENDED, *draw.sample(OTHERS, others)),
    )


def of_model(
    name: str, most_mbit_s: float, cores_per_worker: float, *, shape: Sequence[int] | None, scale: int
) -> Sample:
    """Return a model of the thesis with so many times fewer elements, on hosts with so many ranks each."""
    tensors = [tensor for tensor in read_model(MODELS / f"{name}.json", flops_per_s=1).tensors if tensor.numel]
    numel, operations = sum(tensor.numel for tensor in tensors), sum(tensor.backward_s for tensor in tensors)
    hosts, per_host = shape or ((4, 2) if numel < LARGE else (2, 2))
    slower = dilation(hosts * per_host, cores_per_worker)
    rate_mbit_s = round(most_mbit_s / hosts / slower)
    adapter_bytes = 4 * numel / scale * load(Routine.ALL_REDUCE, hosts, per_host).adapter
    computing_s = 8 * adapter_bytes / (PAYLOAD * rate_mbit_s * 1e6)
    return Sample(
        seed=name,
        hosts=hosts,
        per_host=per_host,
        slower=slower,
        rate_mbit_s=rate_mbit_s,
        compressor={"name": "dgc", "density": 0.01},
        forward_s=computing_s / 3,
        steps=tuple(
            Step(
                name=tensor.name.replace(".", "_"),
                rows=1,
                columns=max(1, tensor.numel // scale),
                backward_s=computing_s * 2 / 3 * tensor.backward_s / operations,
            )
            for tensor in tensors
        ),
        scale=scale,
        planners=RECOMMENDED,
    )


def write_files(sample: Sample, known: dict[str, Any], folder: Path) -> None:
    """Write the model and cluster files."""

    def line(points: list[float]) -> dict[str, float]:
        (first, last), (first_s, last_s) = known["sizes_bytes"], points
        slope = max(0.0, last_s - first_s) / (last - first)
        return {"alpha_s": max(0.0, first_s - slope * first), "beta_s_per_byte": slope}

    def link(name: str, byte_s: float) -> dict[str, Any]:
        own, library, coded = (
            {"alpha_s": known.get(f"{name}_{whose}alpha_s", 0.0), "beta_s_per_byte": byte_s}
            for whose in ("", "library_", "coded_")
        )
        return {**own, "routines": {"all_reduce": library}, "compressed": dict.fromkeys(PROBED_COMPRESSED, coded)}

    tensors = [{"name": s.name, "numel": s.rows * s.columns, "backward_s": s.backward_s} for s in sample.steps]
    common = {"forward_s": sample.forward_s, "bytes_per_element": 4}
    coder = {name: line(known[name]) for name in ("compress", "decompress", "accumulate")}
    cluster = {
        **common,
        "hosts": sample.hosts,
        "gpus_per_host": sample.per_host,
        "intra": link("intra", known.get("intra_byte_s", 0.0)),
        "inter": link("inter", sample.byte_s),
        "compressors": {sample.compressor["name"]: {"ratio": known["ratio"], "gpu": coder}},
    }
    (folder / "model.json").write_text(json.dumps({"tensors": tensors}))
    (folder / "cluster.json").write_text(json.dumps(cluster))


def plan_all(sample: Sample, folder: Path) -> dict[str, dict[str, Any]]:
    """Return planners, prediction and options by the file of each different plan, and let the workers begin."""
    planners.register()
    from resilient_run.comm.cli.plan import plan as plan_command  # it lists the planners that there are

    found: dict[str, dict[str, Any]] = {}
    by_content: dict[str, str] = {}
    for planner in sample.planners:
        path = folder / f"{planner}.json"
        files = ["--model", str(folder / "model.json"), "--out", str(path)]
        files += ["--system", str(folder / "cluster.json")]
        with redirect_stdout(StringIO()):
            plan_command.main(["--planner", planner, *files], standalone_mode=False)
        document = json.loads(path.read_text())
        content = json.dumps([document["groups"], document["options"]])
        name = by_content.setdefault(content, f"plan-{len(by_content):02}.json")
        path.rename(folder / name)
        entry = found.setdefault(
            name,
            {
                "planners": [],
                "predicted_s": document["iteration_s"],
                "groups": len(document["groups"]),
                "options": sorted(set(document["options"])),
            },
        )
        entry["planners"].append(planner)
    (folder / "planned").touch()
    return found


def cores_busy() -> tuple[int, int]:
    """Return the ticks in which cores were busy, and all of them."""
    user, nice, system, idle, waiting, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + waiting


def measure(sample: Sample, *, warm_up: int, iterations: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the files know of this machine, and a line for each different plan."""
    lab = NetLab(sample.hosts, rate=f"{sample.rate_mbit_s}mbit", queue_s=sample.slower * QUEUE_S)
    with tempfile.TemporaryDirectory() as name, lab:
        folder = Path(name)
        shared = {
            "steps": [asdict(step) for step in sample.steps],
            "forward_s": sample.forward_s,
            "compressor": sample.compressor,
            "folder": name,
            "warm_up": warm_up,
            "iterations": iterations,
            "ddp": DDP,
            "bucket_mib": BUCKET_MIB / sample.scale,
        }
        lines = lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)], per_host=sample.per_host)
        known = json.loads(next(lines))
        write_files(sample, known, folder)
        planned = plan_all(sample, folder)
        found, busy = [], cores_busy()
        for line in map(json.loads, lines):
            now = cores_busy()
            summary, made = Summary.of(line["seconds"]), planned.get(line["plan"])
            found.append(
                {
                    "seed": sample.seed,
                    **(made or {"planners": [DDP]}),
                    "iteration_s": summary,
                    "measured_over_predicted": made and summary.median / made["predicted_s"],
                    "sent_again": line["sent_again"],
                    "busy": (now[0] - busy[0]) / (now[1] - busy[1]),
                }
            )
            busy = now
    for line in found:
        line["over_ddp"] = line["iteration_s"].median / found[-1]["iteration_s"].median
    return known, found


def show(lines: list[dict[str, Any]]) -> None:
    """Print the distribution, by planner and over different plans."""

    def row(name: str, ratios: list[float]) -> tuple[str, ...]:
        close = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
        spread = f"{Summary.of(ratios):.3f}"
        return name, str(len(ratios)), spread, f"{min(ratios):.3f}", f"{max(ratios):.3f}", f"{close / len(ratios):.0%}"

    ddp = {line["seed"]: line["iteration_s"] for line in lines if DDP in line["planners"]}
    lines = [line for line in lines if DDP not in line["planners"]]
    names = dict.fromkeys(planner for line in lines for planner in line["planners"])
    of_planners = {name: [line for line in lines if name in line["planners"]] for name in names}
    rows = [row(name, [line["measured_over_predicted"] for line in found]) for name, found in of_planners.items()]
    kinds = {
        "different plans": lines,
        f"cores below {FREE_CORES:.0%} busy": [line for line in lines if line["busy"] < FREE_CORES],
        "cores busier": [line for line in lines if line["busy"] >= FREE_CORES],
    }
    rows += [row(name, [line["measured_over_predicted"] for line in kind]) for name, kind in kinds.items() if kind]
    table(
        "measured / predicted",
        ("planner", "runs", "median (p10..p90)", "least", "most", "within 10 %"),
        rows,
    )
    table(
        "measured / DDP",
        ("planner", "runs", "median (p10..p90)", "least", "most", "slower beyond the spread"),
        [
            (
                *row(name, [line["over_ddp"] for line in found])[:-1],
                str(sum(line["iteration_s"].p10 > ddp[line["seed"]].p90 for line in found)),
            )
            for name, found in of_planners.items()
        ],
    )


def main() -> None:
    """Draw, plan, run, print and write."""
    made = parser(__doc__)
    made.add_argument("--seed", type=int, nargs="+", default=[1], metavar="N", help="of samples that others follow")
    made.add_argument("--count", type=int, default=50, metavar="N", help="samples from each seed on")
    made.add_argument("--minutes", type=float, default=150.0, metavar="M", help="begin no further sample after this")
    made.add_argument("--others", type=int, default=3, metavar="N", help="planners of each sample that are drawn")
    made.add_argument("--most-mbit", type=float, default=800, metavar="N", help="Mbit/s, of the links of all ranks")
    made.add_argument("--cores-per-worker", type=float, default=3, metavar="N", help="that a worker has, see above")
    made.add_argument("--models", nargs="+", default=[], metavar="NAME", help="in place of what is drawn")
    made.add_argument("--shape", type=int, nargs=2, metavar=("HOSTS", "RANKS"), help="on each, for `--models`")
    made.add_argument("--scale", type=int, default=SCALE, metavar="N", help="times fewer elements of `--models`")
    made.add_argument("--warm-up", type=int, default=1, metavar="N", help="iterations before those that count")
    made.add_argument("--iterations", type=int, default=5, metavar="N", help="of each plan")
    options = made.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    lines: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for seed in options.models or [first + index for first in options.seed for index in range(options.count)]:
        if time.monotonic() > end_s:
            break
        if options.models:
            sample = of_model(
                seed, options.most_mbit, options.cores_per_worker, shape=options.shape, scale=options.scale
            )
        else:
            sample = drawn(seed, options.others, options.most_mbit, options.cores_per_worker)
        known, found = measure(sample, warm_up=options.warm_up, iterations=options.iterations)
        samples.append({**asdict(sample), "known": known})
        lines += found
        for line in found:
            print(
                f"{seed:>4} {line['measured_over_predicted'] or math.nan:.3f} of what was predicted, "
                f"{line['over_ddp']:.3f} of DDP's  "
                f"{line['iteration_s']:.3f} s, {line['busy']:.0%} busy, {line['sent_again']} sent again  "
                f"{', '.join(line['planners'])}: {' | '.join(line.get('options', []))}",
                file=sys.stderr,
                flush=True,
            )
        # After each sample, since what was measured until then is worth keeping.
        parameters = {key: value for key, value in vars(options).items() if key != "json"}
        results = {"samples": samples, "runs": lines}
        write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    show(lines)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        sys.exit(str(error))
