"""What may grow in a long run is measured on one host whose launcher and daemon are never ended, and in etcd."""

import statistics
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from elastic_audit import Log

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from lab import LabCluster

from resilient_run.daemon.run import keys

SPARED = "h0"
"""The host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """How much more there may be in the last quarter than in the first: a share, and as much again in any case."""

    share: float = 0.1
    more: float


MIB = float(1 << 20)
ALLOWED: Mapping[str, Allowance] = {
    "launcher, own memory, MiB": Allowance(more=8),
    "launcher, descriptors": Allowance(more=8),
    "launcher, threads": Allowance(more=4),
    "daemon, own memory, MiB": Allowance(more=8),
    "daemon, descriptors": Allowance(more=8),
    "daemon, threads": Allowance(more=4),
    "h0, tmpfs, MiB": Allowance(more=1),
    "h0, processes": Allowance(more=2),
    "etcd, keys": Allowance(more=10),
    "etcd, leases": Allowance(more=4),
}
"""What is measured that may not grow. etcd's own memory and file follow its rules for compaction, not ours."""


class Meter(threading.Thread):
    """Measures what may grow, every so often, until it is stopped."""

    def __init__(self, lab: LabCluster, log: Log, every_s: float) -> None:
        super().__init__(daemon=True)
        self._lab, self._log, self._every_s = lab, log, every_s
        self._stopping = threading.Event()
        self.samples: list[dict[str, float]] = []
        self.keys: dict[str, int] = {}
        """How many there were in each folder of etcd, at last."""

    def run(self) -> None:
        """Measure."""
        while not self._stopping.wait(self._every_s):
            # A daemon that is being started again has no pid for a moment.
            with suppress(psutil.NoSuchProcess, AssertionError, ValueError):
                self.samples.append(self._sample())

    def stop(self) -> None:
        """Measure no more."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def _sample(self) -> dict[str, float]:
        host = self._lab.host(SPARED)
        daemon_pid, etcd_pid = host.daemon_pid(), self._lab.etcd[0].pid
        assert host.launcher is not None
        assert daemon_pid is not None
        found: dict[str, float] = {"pids": host.launcher.pid + daemon_pid, "serves": self._log.hosts.get(0) == SPARED}
        for name, pid in (("launcher", host.launcher.pid), ("daemon", daemon_pid)):
            process = psutil.Process(pid)
            found[f"{name}, own memory, MiB"] = process.memory_full_info().uss / MIB
            found[f"{name}, descriptors"] = process.num_fds()
            found[f"{name}, threads"] = process.num_threads()
        status = host.net.status()
        found["h0, tmpfs, MiB"] = status.shm_used_bytes / MIB
        found["h0, processes"] = status.processes
        etcd, prefix = self._lab.etcd[0], keys.prefix(self._lab.name)
        folders = Counter(keys.split(key.removeprefix(prefix))[0] for key in etcd.all_keys())
        # A run's orders and their outcomes stay until its end.
        self.keys = {name: count for name, count in folders.items() if not name.startswith(keys.INJECTION)}
        found["etcd, keys"], found["etcd, leases"] = sum(self.keys.values()), etcd.leases()
        found["etcd, file in use, MiB"] = etcd.status()["dbSizeInUse"] / MIB
        found["etcd, memory, MiB"] = psutil.Process(etcd_pid).memory_info().rss / MIB
        return found


def growth(samples: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the medians of the first and of the last quarter of each series, and whether it has grown too much.

    The launcher of rank 0 serves the store of a generation, with a socket for each launcher and worker: such samples
    are left out, if there are others.
    """
    samples = [sample for sample in samples if not sample["serves"]] or samples
    quarter = max(1, len(samples) // 4)
    found = {}
    for name in (name for name in samples[0] if name not in ("pids", "serves")):
        first, last = (
            statistics.median(sample[name] for sample in part) for part in (samples[:quarter], samples[-quarter:])
        )
        allowed = ALLOWED.get(name)
        most = None if allowed is None else first * (1 + allowed.share) + allowed.more
        found[name] = {
            "first": round(first, 2),
            "last": round(last, 2),
            "most": None if most is None else round(most, 2),
            "grew": most is not None and last > most,
        }
    return found
