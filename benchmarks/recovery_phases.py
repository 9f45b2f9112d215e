"""Where do the seconds of a recovery go, for each kind of failure?

Three hosts with one Gloo rank each and a standby, every host with a daemon and directories of its own on loopback, one
etcd. After some steps one failure is made from outside:

- worker kill: SIGKILL of a rank (software failure: the same hosts go on from local memory).
- hang: SIGSTOP of a rank, which blocks the others in a collective; found by missing progress after `--hang-s`.
- host loss: SIGKILL of a host's launcher, rank and daemon, and its memory is wiped (hardware failure: the standby takes
  the rank and fetches its state from the peer); found when its lease of `--lease-s` expires.

"total" is measured from outside: from the signal to the moment when every rank has completed its first step again. The
phases are those of the host that was last, as its launcher reports them (`--rr-events`), except that the first begins
with the signal and the last ends with the first step of every rank. So they add up to the total. The table shows the
round with the median total, because medians of phases would not add up. "told" is the total as the run itself tells it;
it does not see the signal, and counts a hang or a lost host from the last step on.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from jobs import RESILIENT_RUN, host
from report import Summary, parser, table, write_json

from resilient_run.launcher.etcd_server import EmbeddedEtcd
from resilient_run.launcher.timeline import PHASES

RANKS = 3
WORKER = str(Path(__file__).with_name("recovery_worker.py"))


class Member:
    """One host: its launcher, and every step that its rank completed, newest last."""

    def __init__(self, command: list[str], env: dict[str, str], events: Path, messages: Path) -> None:
        self.steps: list[dict[str, Any]] = []
        self.events_path = events
        self.shm_dir = Path(env["RESILIENT_SHM_DIR"])
        self._lock = Path(env["RESILIENT_RUN_DIR"]) / "resilientd.lock"
        with messages.open("w") as stderr:
            self.launcher = subprocess.Popen(
                command, env={**env, "RESILIENT_EVENTS": str(events)}, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            self.steps.append(json.loads(line))

    def lose(self) -> None:
        """Take the host away."""
        for pid in (self.launcher.pid, self.steps[-1]["pid"], int(self._lock.read_text())):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.shm_dir)

    def recovery(self) -> dict[str, Any] | None:
        """Return the newest complete recovery that the launcher reported."""
        lines = self.events_path.read_text().splitlines() if self.events_path.exists() else []
        complete = [event for event in map(json.loads, lines) if event.get("complete")]
        return complete[-1] if complete else None

    def close(self) -> None:
        """End what runs here, by pid."""
        self.launcher.terminate()
        try:
            self.launcher.wait(20)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()
        self._reader.join()
        assert self.launcher.stdout is not None
        self.launcher.stdout.close()


@contextmanager
def fleet(*, state_mb: int, lease_s: float, hang_s: float) -> Iterator[list[Member]]:
    """Yield the training hosts and, last, the standby, which came when the others trained."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="resilient-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        etcd = stack.enter_context(EmbeddedEtcd())
        policy = directory / "policy.toml"
        policy.write_text(f"[detect]\nhang_floor_s = {hang_s}\n")
        members: list[Member] = []
        for name in ("a", "b", "c", "standby"):
            env = stack.enter_context(host(name))
            flags = ["--nnodes", str(RANKS), "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
            flags += ["--rdzv-endpoint", etcd.endpoint, "--rdzv-id", directory.name, "--local-addr", "127.0.0.1"]
            flags += ["--rdzv-conf", f"lease_ttl={lease_s}", "--rr-config", str(policy)]
            options = ["--keeper", "checkpointer", "--steps", "1000000", "--state-mb", str(state_mb)]
            command = [*RESILIENT_RUN, *flags, WORKER, *options, "--directory", str(directory)]
            members.append(Member(command, env, directory / f"{name}.jsonl", directory / f"{name}.log"))
            stack.callback(members[-1].close)
            if len(members) == RANKS:
                wait_for(lambda: all(member.steps for member in members), "the first step")
        yield members


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds.

    Raises:
        TimeoutError: It did not within two minutes.
    """
    deadline_s = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within two minutes: {what}")
        time.sleep(0.002)


def recover(kind: str, *, after: int, **options: float) -> dict[str, float]:
    """Return what one recovery of this kind took, by phase, and the steps that it lost."""
    with fleet(**options) as members:
        *training, _ = members
        victim = training[1]
        wait_for(lambda: all(len(member.steps) >= after for member in training), f"{after} steps")
        standby_ready = time.monotonic() + 3  # its launcher registers, its daemon gets warm
        wait_for(lambda: time.monotonic() > standby_ready, "the standby")
        pids = {step["pid"] for member in training for step in member.steps}
        start_s, start_unix_s = time.monotonic(), time.time()
        match kind:
            case "worker kill":
                os.kill(victim.steps[-1]["pid"], signal.SIGKILL)
            case "hang":
                os.kill(victim.steps[-1]["pid"], signal.SIGSTOP)
            case "host loss":
                victim.lose()
        new = members if kind == "host loss" else training
        new = [member for member in new if kind != "host loss" or member is not victim]

        def firsts() -> list[dict[str, Any]]:
            found = [next((step for step in member.steps if step["pid"] not in pids), None) for member in new]
            return [step for step in found if step is not None]

        wait_for(lambda: len(firsts()) == RANKS, "the first step after the recovery")
        # Its own launcher is gone, and the standby had nothing to recover from: the survivors report.
        reporting = [member for member in training if member in new]
        wait_for(lambda: all(member.recovery() for member in reporting), "the reports")
        reports = [report for member in reporting if (report := member.recovery())]
        old = max(step["step"] for member in training for step in member.steps if step["pid"] in pids)
        total_s = max(step["monotonic_s"] for step in firsts()) - start_s
        last = max(reports, key=lambda report: report["unix_s"])
        phases = between(last, start_unix_s, start_unix_s + total_s)
        told_s = max(report["total_s"] for report in reports)
        return {**phases, "total": total_s, "told": told_s, "steps_lost": old - firsts()[0]["step"] + 1}


def between(report: dict[str, Any], start_unix_s: float, end_unix_s: float) -> dict[str, float]:
    """Return the phases of a reported recovery that began and ended at these times, which the host did not see."""
    phases: dict[str, float] = {phase: report[f"{phase}_s"] for phase in PHASES}
    phases["detect"] += report["unix_s"] - report["total_s"] - start_unix_s
    phases["first_step"] += end_unix_s - report["unix_s"]
    return phases


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="recoveries of each kind, alternating")
    options.add_argument("--after", type=int, default=100, help="steps before the failure")
    options.add_argument("--state-mb", type=int, default=64, help="parameters and optimizer state of a rank, MiB")
    options.add_argument("--lease-s", type=float, default=3.0, help="time to live of the launchers' leases, seconds")
    options.add_argument("--hang-s", type=float, default=3.0, help="least time without progress, seconds")
    args = options.parse_args()
    kinds = ("worker kill", "hang", "host loss")
    samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _, kind in itertools.product(range(args.rounds), kinds):
        samples[kind].append(
            recover(kind, after=args.after, state_mb=args.state_mb, lease_s=args.lease_s, hang_s=args.hang_s)
        )
    columns = (*PHASES, "total", "told", "steps_lost")
    summaries = {
        kind: {column: Summary.of(sample[column] for sample in found) for column in columns}
        for kind, found in samples.items()
    }
    medians = {
        kind: sorted(found, key=lambda sample: sample["total"])[(len(found) - 1) // 2]
        for kind, found in samples.items()
    }
    rows = [
        [kind, *(f"{medians[kind][column]:.2f}" for column in (*PHASES, "total")),
         *(f"{summary[column]:.2f}" for column in ("total", "told")),
         f"{max(sample['steps_lost'] for sample in samples[kind]):.0f}"]
        for kind, summary in summaries.items()
    ]  # fmt: skip
    header = ["failure", *PHASES, "total, s", "of all rounds: median (p10..p90)", "told", "steps lost, at most"]
    table("One failure to the first completed step of every rank: the round with the median total", header, rows)
    write_json(
        args.json,
        question="recovery_phases",
        parameters={name: value for name, value in vars(args).items() if name != "json"},
        results={kind: {**summary, "median round": medians[kind]} for kind, summary in summaries.items()},
    )


if __name__ == "__main__":
    main()
