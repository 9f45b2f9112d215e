"""Does a training run that is broken again and again end bit-identical to one that is left alone?

Four hosts and two standbys train examples/train_gpt.py on a laboratory network, with an etcd of three members on hosts
of their own, while `resilient-inject` carries out a seeded campaign of every kind of fault. What a cluster manager
does is done here too: a launcher or an etcd member that died is started again a few seconds later, a lost host with
empty memory. Afterwards every loss of every step on every rank and the parameters are compared with an undisturbed
run. Needs root (network namespaces).

Goal: bit-identical, and at most one step lost by each fault.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from report import parser, table, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cluster import EXAMPLE, TINY, Cluster, Host, wait_until
from lab import EtcdMember, LabCluster, NetHost
from netlab import NetLab, unavailable

SLOW_STEPS = Path(__file__).with_name("slow_steps.py")
WORLD_SIZE = 4
NAMES = ("h0", "h1", "h2", "h3", "h4", "h5")
SHM_BYTES = 96 << 20
RATE = "4gbit"
AWAY_S = 6.0
"""How long a cluster manager takes to bring a launcher back: longer than a lease, so that a standby comes first."""

CONFIG = """
[root]
# Six hosts take every fault there is: none of them is to blame.
quarantine_failures = 10000

[detect]
hang_floor_s = 10.0
hang_min_steps = 3
hang_start_s = 60.0

[persist]
target = "{disk}/persisted"
every_steps = 20
every_s = 0.0

[replication]
transport = "{transport}"
"""


def kinds(etcd_pid_files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what a campaign draws from: every kind, the more frequent faults of real clusters more often."""
    network = {"interface": "eth0"}
    return [
        {"kind": "kill-rank", "weight": 3},
        {"kind": "raise", "weight": 2},
        {"kind": "hang-rank"},
        {"kind": "stop-rank"},
        {"kind": "stop-rank", "parameters": {"duration_s": 2.0}},
        *({"kind": "corrupt-replica", "parameters": {"how": how, "kill": True}} for how in ("bit-flip", "stale")),
        {"kind": "corrupt-replica", "parameters": {"how": "truncation", "kill": True}},
        {"kind": "kill-launcher"},
        {"kind": "kill-daemon", "weight": 2},
        {"kind": "lose-host", "weight": 3},
        {"kind": "delay-heartbeats", "parameters": {"of": "launcher", "duration_s": 8.0}},
        {"kind": "delay-heartbeats", "parameters": {"of": "daemon", "duration_s": 8.0}},
        {"kind": "fill-memory", "parameters": {"duration_s": 4.0}},
        {"kind": "fill-disk", "parameters": {"directory": str(etcd_pid_files[0].parent / "disk"), "duration_s": 4.0}},
        {"kind": "cut-network", "parameters": {**network, "duration_s": 9.0}},
        {"kind": "slow-network", "parameters": {**network, "duration_s": 4.0, "rate_mbit": 20.0}},
        *({"kind": "kill-etcd", "weight": 0.5, "parameters": {"pid_file": str(file)}} for file in etcd_pid_files),
    ]


def quick_kinds(etcd_pid_files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a short campaign's faults: one of each that has an end soon."""
    return [
        {"kind": "kill-rank"},
        {"kind": "raise"},
        {"kind": "corrupt-replica", "parameters": {"kill": True}},
        {"kind": "kill-launcher"},
        {"kind": "kill-daemon"},
        {"kind": "lose-host"},
        {"kind": "slow-network", "parameters": {"interface": "eth0", "duration_s": 1.0, "rate_mbit": 20.0}},
        {"kind": "fill-memory", "parameters": {"duration_s": 1.0}},
        {"kind": "kill-etcd", "parameters": {"pid_file": str(etcd_pid_files[1])}},
    ]


class ClusterManager:
    """Starts launchers and etcd members again that ended before their time, as Kubernetes or Slurm would.

    Args:
        lab: The cluster.
        script: What it trains.
        root: Where the pids of etcd members are written.
    """

    def __init__(self, lab: LabCluster, script: Sequence[str], root: Path) -> None:
        self._lab = lab
        self._script = script
        self._root = root
        self._since_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.finished: set[str] = set()
        """Hosts whose launcher reported success."""
        self.restarts: list[dict[str, Any]] = []

    def start(self) -> None:
        """Launch every host, the standbys last, and watch them from now on."""
        for name in NAMES:
            self._lab.launch([name], self._script, nodes=WORLD_SIZE)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopping.set()
        self._thread.join()

    def pid_file(self, member: EtcdMember) -> Path:
        """Return the file that holds the pid of an etcd member."""
        return self._root / f"{member.net.name}.pid"

    def _run(self) -> None:
        while not self._stopping.wait(0.2):
            for member in self._lab.etcd:
                self._look_at_member(member)
            for name in NAMES:
                self._look_at_host(self._lab.host(name))

    def _look_at_member(self, member: EtcdMember) -> None:
        if member.pid is None:
            if self._is_time(member.net.name):
                member.start()
        else:
            self.pid_file(member).write_text(str(member.pid))

    def _look_at_host(self, host: NetHost) -> None:
        assert host.launcher is not None
        code = host.launcher.poll()
        if code == 0:
            self.finished.add(host.name)
        elif code is not None and not self.finished and self._is_time(host.name):
            tail = "" if code == -9 else "".join(host.text[-12:])
            self.restarts.append({"host": host.name, "exit_code": code, "output": tail})
            self._lab.launch([host.name], self._script, nodes=WORLD_SIZE)

    def _is_time(self, name: str) -> bool:
        """Tell whether what ended has been away for long enough."""
        since_s = self._since_s.setdefault(name, time.monotonic())
        if time.monotonic() < since_s + AWAY_S:
            return False
        del self._since_s[name]
        return True


def undisturbed(root: Path, script: Sequence[str]) -> Host:
    """Return the host that printed everything of a run that was left alone."""
    cluster = Cluster(root)
    host = cluster.host("reference")
    host.launch(["--standalone", "--nproc-per-node", str(WORLD_SIZE)], script)
    if host.wait(1800) != 0:
        raise RuntimeError(host.output)
    cluster.close()
    return host


def disturbed(args: argparse.Namespace, root: Path, script: Sequence[str]) -> tuple[list[NetHost], dict[str, Any]]:
    """Run the campaign on a run of its own; return its hosts and the report."""
    (root / "run.toml").write_text(CONFIG.format(disk=root / "disk", transport=args.transport))
    os.environ |= {"RESILIENT_CONFIG": str(root / "run.toml"), "RESILIENT_ALLOW_INJECTION": "1"}
    disk = root / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "disk", str(disk)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)

        def build(*names: Any, **options: Any) -> NetLab:
            return stack.enter_context(NetLab(*names, shm_bytes=SHM_BYTES, **options))

        lab = LabCluster(build, root, NAMES, etcd_members=3, rate=RATE)
        stack.callback(lab.close)
        manager = ClusterManager(lab, script, root)
        stack.callback(manager.stop)
        manager.start()
        first = lab.host(NAMES[0])
        wait_until(lambda: any(lab.host(name).reached(3) for name in NAMES), timeout_s=180, what="step 3", host=first)
        report = campaign(args, root, lab, [manager.pid_file(member) for member in lab.etcd])
        try:
            wait_until(lambda: len(manager.finished) >= WORLD_SIZE, timeout_s=args.timeout, what="the end", pause_s=0.5)
        except AssertionError as error:
            report["unfinished"] = {name: "".join(lab.host(name).text[-40:]) for name in NAMES}
            print(f"{error}\n{json.dumps(report['unfinished'], indent=1)}", file=sys.stderr)
        manager.stop()
        report["restarts"] = manager.restarts
        if args.keep is not None:
            keep_logs(lab, args.keep)
        return [lab.host(name) for name in NAMES], report


def campaign(args: argparse.Namespace, root: Path, lab: LabCluster, etcd_pid_files: Sequence[Path]) -> dict[str, Any]:
    """Carry out the campaign with the command that users have, and return its report."""
    lines = [
        f"seed = {args.seed}",
        f"faults = {args.faults}",
        f"mtbf_s = {args.mtbf_s}" if args.mtbf_s else f"mtbf_steps = {args.mtbf_steps}",
        f"wait_for_recovery = {json.dumps(not args.mtbf_s)}",
        "every_kind = true",
        "recovery_timeout_s = 240",
    ]
    for kind in (quick_kinds if args.quick else kinds)(etcd_pid_files):
        lines += ["[[kinds]]", *(f"{name} = {_toml(value)}" for name, value in kind.items())]
    file, report = root / "campaign.toml", root / "report.json"
    file.write_text("\n".join(lines))
    command = [sys.executable, "-P", "-m", "resilient_run.launcher.inject.cli", "campaign", str(file)]
    command += ["--run-id", lab.name, "--rdzv-endpoint", lab.endpoint, "--report", str(report)]
    subprocess.run([*lab.etcd[0].net.prefix, *command], check=False)
    found: dict[str, Any] = json.loads(report.read_text())
    for entry in found["faults"]:
        for event in entry.get("recoveries", ()):
            # Said of every event alike, or by `detected`.
            for name in ("event", "run_id", "cause"):
                del event[name]
    return found


def compare(hosts: Sequence[Host], reference: Host) -> dict[str, Any]:
    """Return how the disturbed run differs from the undisturbed one, and how much it trained twice."""
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    seen: dict[tuple[int, int], int] = {}
    wrong = []
    for host in hosts:
        for rank, step, loss in host.steps():
            seen[rank, step] = seen.get((rank, step), 0) + 1
            if expected.get((rank, step)) != loss:
                wrong.append({"host": host.name, "rank": rank, "step": step, "loss": loss})
    hashes = {host.params_sha256() for host in hosts} - {None}
    return {
        "steps": len(expected) // WORLD_SIZE,
        "missing_steps": len(expected.keys() - seen.keys()),
        "wrong_losses": wrong[:20],
        "same_parameters": hashes == {reference.params_sha256()},
        "identical": not wrong and expected.keys() == seen.keys() and hashes == {reference.params_sha256()},
        "repeated_steps": max(sum(n - 1 for (r, _), n in seen.items() if r == rank) for rank in range(WORLD_SIZE)),
    }


def keep_logs(lab: LabCluster, directory: Path, names: Sequence[str] = NAMES) -> None:
    """Copy what every launcher and daemon said to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        host = lab.host(name)
        (directory / f"{name}.launcher.log").write_text(host.output)
        if (log := host.run_dir / "resilientd.log").exists():
            shutil.copy(log, directory / f"{name}.daemon.log")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def main() -> None:
    """Run, compare, print, write; exit 1 when a goal is missed."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--faults", type=int, default=45)
    options.add_argument("--mtbf-steps", type=float, default=6.0)
    options.add_argument("--mtbf-s", type=float, default=0.0, help="in its place, and without waiting for recoveries")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--transport", choices=("daemon", "trainer"), default="daemon", help="of replicas")
    options.add_argument("--pause-s", type=float, default=0.0, help="in each step, as if it computed longer")
    options.add_argument("--quick", action="store_true", help="one fault of each kind that does not last long")
    options.add_argument("--timeout", type=float, default=1800.0, help="seconds for what is left after the campaign")
    options.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the logs of launchers and daemons")
    args = options.parse_args()
    if args.quick:
        args.steps, args.faults, args.mtbf_steps = 140, 9, 2.0
    if (reason := unavailable()) is not None:
        sys.exit(f"chaos needs a laboratory network: {reason}")
    script = [str(EXAMPLE), "--steps", str(args.steps), "--seed", "7", "--json", *TINY]
    slowed = [str(SLOW_STEPS), str(args.pause_s), *script] if args.pause_s else script
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        root = Path(directory)
        started_s = time.monotonic()
        hosts, report = disturbed(args, root, slowed)
        disturbed_s = time.monotonic() - started_s
        reference = undisturbed(root / "undisturbed", script)
    compared = compare(hosts, reference)
    results = {"seconds": round(disturbed_s, 1), "comparison": compared, **report}
    summary = report["summary"]
    rows = [
        ["faults that struck", str(summary["struck"])],
        ["kinds", str(len(summary["by_kind"]))],
        ["new generations", str(summary["new_generations"])],
        ["not recovered", str(summary["not_recovered"])],
        ["most steps lost by one fault", str(summary["max_steps_lost"])],
        ["steps trained more than once", f"{compared['repeated_steps']} of {compared['steps']}"],
        ["bit-identical to the undisturbed run", str(compared["identical"])],
    ]
    table(__doc__.partition("\n")[0], ["", ""], rows)
    names = ("steps", "faults", "mtbf_steps", "mtbf_s", "pause_s", "seed", "transport")
    parameters = {name: getattr(args, name) for name in names}
    write_json(args.json, question=__doc__.partition("\n")[0], parameters=parameters, results=results)
    good = compared["identical"] and not summary["not_recovered"] and summary["max_steps_lost"] <= 1
    sys.exit(0 if good and "unfinished" not in report else 1)


if __name__ == "__main__":
    main()
