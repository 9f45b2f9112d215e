"""Does a run start or recover later with a run key and certificates at etcd than with --rr-insecure?

Two hosts on one machine, a rank each, which find each other through an etcd that is up already:

- guarded: a run key from a file; etcd speaks TLS and lets in who shows a certificate.
- insecure: no key, etcd in clear for everybody, `--rr-insecure`.

Daemons prove who they are to each other and encrypt in both cases; what differs is where they have the secret from.

- start: from the two commands to the first step that both ranks have completed.
- worker: from the SIGKILL of a worker to the next step that both have completed; its state is in its host's memory.
- host: a host's launcher, daemon, worker and memory are gone, and its launcher is started again at once: from that to
  the next step that both have completed. The state comes from the other host, encrypted.

The contenders take turns. Goal: no difference beyond the spread.
"""

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import Summary, parser, table, write_json

from resilient_run.daemon.trust.secret import make_key

# The tests' harness plays the hosts.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
from certificates import make_certificates
from cluster import Cluster, Host, kill, wait_until
from etcd_process import EtcdProcess

WORKER = Path(__file__).with_name("recovery_worker.py")
KINDS = ("start", "worker", "host")


def next_steps(hosts: list[Host], act: Callable[[], None]) -> float:
    """Return the seconds from `act` to the first step that every rank has completed in a new process."""
    before = {line["pid"] for host in hosts for line in list(host.lines)}
    begun_s = time.monotonic()
    act()

    def firsts() -> list[float] | None:
        lines = [line for host in hosts for line in list(host.lines) if line["pid"] not in before]
        found = [next((line["monotonic_s"] for line in lines if line["rank"] == rank), None) for rank in (0, 1)]
        return None if None in found else [second for second in found if second is not None]

    return max(wait_until(firsts, timeout_s=180, what=lambda: "".join(host.output for host in hosts))) - begun_s


def measure(root: Path, etcd: EtcdProcess, options: list[str], state_mb: int) -> dict[str, float]:
    """Return what one run takes of each kind."""
    root.mkdir()
    with contextlib.closing(Cluster(root)) as cluster:
        pair = [cluster.host(name) for name in "ab"]
        arguments = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=etcd-v3", "--max-restarts=9", *options]
        arguments += [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={root.name}", "--local-addr=127.0.0.1"]
        script = [str(WORKER), "--keeper=checkpointer", "--steps=1000000", f"--state-mb={state_mb}"]

        def launch(*hosts: Host) -> None:
            for host in hosts:
                host.launch(arguments, [*script, "--directory", str(root)])

        def commit_more() -> None:
            committed = pair[0].committed_step()
            wait_until(lambda: pair[0].committed_step() > committed + 2, timeout_s=120, what="commits", host=pair[0])

        def lose() -> None:
            pair[1].lose()
            pair[1].shm_dir.mkdir(mode=0o700)
            launch(pair[1])

        found = {"start": next_steps(pair, lambda: launch(*pair))}
        commit_more()
        found["worker"] = next_steps(pair, lambda: kill(pair[1].lines[-1]["pid"]))
        commit_more()
        # What `lose` kills is what has announced itself last.
        found["host"] = next_steps(pair, lose)
        wait_until(
            lambda: "peer" in pair[1].recoveries()[-1]["ranks"].values(), timeout_s=30, what="a restore by a peer"
        )
    return found


def main() -> None:
    """Measure both in turns."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--state-mb", type=int, default=64, help="of each rank, MiB")
    args = options.parse_args()
    root = Path(tempfile.mkdtemp(prefix="resilient-bench-"))
    certificates = {name: root / f"{name}.pem" for name in ("ca", "server", "client")}
    keys = {name: root / f"{name}.key" for name in ("server", "client", "run")}
    make_certificates(root)
    make_key(keys["run"])
    asks = (f"--cert-file={certificates['server']}", f"--key-file={keys['server']}", "--client-cert-auth")
    guarded = EtcdProcess(root / "guarded", *asks, f"--trusted-ca-file={certificates['ca']}", scheme="https")
    insecure = EtcdProcess(root / "insecure")
    shows = f"cacert={certificates['ca']},cert={certificates['client']},key={keys['client']}"
    contenders = {
        "guarded": (guarded, [f"--rdzv-conf=lease_ttl=3,{shows}", f"--rr-key-file={keys['run']}"]),
        "insecure": (insecure, ["--rdzv-conf=lease_ttl=3", "--rr-insecure"]),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    try:
        for etcd, _ in contenders.values():
            etcd.start()
        for turn in range(args.repeats):
            for name, (etcd, how) in contenders.items():
                for kind, taken in measure(root / f"{name}{turn}", etcd, how, args.state_mb).items():
                    seconds.setdefault((name, kind), []).append(taken)
    finally:
        for etcd, _ in contenders.values():
            etcd.kill()
        shutil.rmtree(root)
    results = {f"{kind} / {name}": Summary.of(seconds[name, kind]) for kind in KINDS for name in contenders}
    rows = [[kind, *(f"{results[f'{kind} / {name}']:.2f}" for name in contenders)] for kind in KINDS]
    table(f"Seconds, {args.repeats} times: median (p10..p90)", ["", *contenders], rows)
    parameters = {"repeats": args.repeats, "state_mb": args.state_mb}
    write_json(args.json, question="secure_run", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
