"""What do checkpoints cost an iteration, by the scheme in which replicas travel (Gemini, Figure 6.16)?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each, transport `daemon`. An
iteration has layers that compute and then all-reduce, or that FSDP2 has sharded (`--parallel fsdp2`, the ZeRO-3 of the
figure), so the network is idle in between (`interleaving_worker.py`). Per round each scheme is one run, in turn; "none"
makes no checkpoints. The first steps of a run (profiling) are not counted. The ratio is between medians of the same
round, so that slow changes of the machine cancel out.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from jobs import RESILIENT_RUN
from lab_job import key_in
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

from resilient_run.launcher.etcd_server import find_etcd

SCHEMES = ("none", "interleaved", "no-pipeline", "naive", "unpaced", "blocking")
WORKER = str(Path(__file__).with_name("interleaving_worker.py"))
SETTLE = 4
"""Steps after profiling that are not counted either: the first checkpoints by the schedule."""


@contextlib.contextmanager
def etcd_on(lab: NetLab, name: str, root: Path) -> Iterator[str]:
    """Yield the endpoint of an etcd on the lab's host `name`."""
    host = lab.host(name)
    endpoint = f"{host.address}:2379"
    urls = [f"--listen-client-urls=http://{endpoint}", f"--advertise-client-urls=http://{endpoint}"]
    with (root / "etcd.log").open("wb") as log:
        process = host.popen([*find_etcd(), f"--data-dir={root / 'etcd'}", *urls], stdout=log, stderr=log)
    try:
        yield endpoint
    finally:
        process.kill()
        process.wait()


def run(lab: NetLab, endpoint: str, root: Path, *, scheme: str, options: Any, round_: int) -> dict[str, Any]:
    """Train with `scheme` and return iteration times, what rank 0 counted, and what the first host's daemon says."""
    steps = 2 * options.profile_steps + SETTLE + options.steps  # each that is profiled is followed by one that is not
    config = root / f"{scheme}.toml"
    config.write_text(f'[replication]\nscheme = "{scheme}"\nprofile_steps = {options.profile_steps}\n')
    arguments = [options.layers, options.compute_ms / 1e3, options.bucket_kib << 10, options.state_mib << 20, steps]
    command = [*RESILIENT_RUN, "--nnodes", str(options.hosts), "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
    command += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"{scheme}-{round_}", "--rr-no-warm-workers"]
    command += ["--rr-key-file", str(key_in(root))]
    command += ["--rr-config", str(config), WORKER, *map(str, arguments), options.parallel]
    messages = [(root / f"{index}.log").open("w+") for index in range(options.hosts)]
    hosts = [lab.host(f"h{index}") for index in range(options.hosts)]
    # One pipe for all: rank 0, which prints, may be on any of them.
    output, shared = os.pipe()
    launchers = [
        host.popen(command, env={"OMP_NUM_THREADS": "1"}, stdout=shared, stderr=log)
        for host, log in zip(hosts, messages, strict=True)
    ]
    os.close(shared)
    lines: list[dict[str, Any]] = []
    replication: dict[str, Any] = {}
    try:
        with open(output) as printed:
            for line in printed:
                if line.startswith("{"):
                    lines.append(json.loads(line))
                    if lines[-1]["step"] == steps - 4:
                        replication = status(hosts[0], f"{scheme}-{round_}")
        codes = [launcher.wait(120) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        for log in messages:
            log.seek(0)
            text = log.read()
            log.close()
    if any(codes) or len(lines) != steps:
        raise RuntimeError(f"{scheme}: exit codes {codes}, {len(lines)} of {steps} steps\n{text[-3000:]}")
    counted = lines[-options.steps :]
    return {
        "seconds": [line["seconds"] for line in counted],
        "captures": counted[-1]["captures"] - lines[-options.steps - 1]["captures"],
        "stall_s": (counted[-1]["stall_s"] - lines[-options.steps - 1]["stall_s"]) / options.steps,
        "replication": replication,
    }


def status(host: Any, run_id: str) -> dict[str, Any]:
    """Return what the daemon of `host` says about replication."""
    resilientctl = shutil.which("resilientctl")
    if resilientctl is None:
        return {}
    process = host.popen([resilientctl, "status", "--json"], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    jobs = json.loads(output)["jobs"] if process.returncode == 0 else []
    return next((job.get("replication", {}) for job in jobs if job["run_id"] == run_id), {})


def plot(path: Path, overhead: dict[str, Summary]) -> None:
    """Write the figure; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    names = [scheme for scheme in overhead if scheme != "none"]
    values = [100 * (overhead[name].median - 1) for name in names]
    spread = [
        [100 * (overhead[name].median - overhead[name].p10) for name in names],
        [100 * (overhead[name].p90 - overhead[name].median) for name in names],
    ]
    axes.bar(names, values, yerr=spread, capsize=4)
    axes.set_ylabel("iteration time over no checkpoints, %")
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, default=4)
    arguments.add_argument("--rate", default="200mbit")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=25, help="counted iterations of a run")
    arguments.add_argument("--profile-steps", type=int, default=8)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--compute-ms", type=float, default=100.0, help="of each layer")
    arguments.add_argument("--bucket-kib", type=int, default=512, help="all-reduced after each layer")
    arguments.add_argument(
        "--state-mib", type=int, default=6, help="a checkpoint of one rank; with FSDP2 without layers"
    )
    arguments.add_argument("--parallel", choices=("all-reduce", "fsdp2"), default="all-reduce")
    arguments.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, help='with "none", the baseline')
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    seconds: dict[str, list[float]] = {scheme: [] for scheme in options.schemes}
    ratios: dict[str, list[float]] = {scheme: [] for scheme in options.schemes}
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="resilient-bench-") as directory, contextlib.ExitStack() as stack:
        root = Path(directory)
        lab = stack.enter_context(NetLab([*(f"h{index}" for index in range(options.hosts)), "etcd"], rate=options.rate))
        endpoint = stack.enter_context(etcd_on(lab, "etcd", root))
        time.sleep(2)
        for round_ in range(options.rounds):
            medians = {}
            for scheme in options.schemes:
                found = run(lab, endpoint, root, scheme=scheme, options=options, round_=round_)
                seconds[scheme] += found.pop("seconds")
                medians[scheme] = median(seconds[scheme][-options.steps :])
                details[scheme] = found
                print(f"round {round_ + 1}, {scheme}: {medians[scheme] * 1e3:.1f} ms, {found}", flush=True)
            for scheme in options.schemes:
                ratios[scheme].append(medians[scheme] / medians["none"])
    summaries = {scheme: Summary.of(values) for scheme, values in seconds.items()}
    overhead = {scheme: Summary.of(values) for scheme, values in ratios.items()}
    table(
        f"Iteration time by scheme, {options.hosts} hosts at {options.rate}",
        ("scheme", "iteration, s", "over none", "captures"),
        [
            (scheme, f"{summaries[scheme]:.3f}", f"{overhead[scheme]:.3f}", str(details[scheme]["captures"]))
            for scheme in options.schemes
        ],
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    results = {
        scheme: {"iteration_s": summaries[scheme], "over_none": overhead[scheme], "last_run": details[scheme]}
        for scheme in options.schemes
    }
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, overhead)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
