"""How many hosts can commit every step through one etcd?

Every simulated host is a real `Coordinator`, the daemon's part that talks to etcd: its own connection, lease, watches
and reports; only its slots are an object that says which step it holds. When a step is committed everywhere, all hosts
hold the next one at the same moment, which is the worst case: N reports, one commit, N notifications.

The root runs in a process of its own, so that its time is that of a real root; all others share one process and thus
one core, which no cluster would do. So "commit" (all hold a step → the root knows that it is committed) grows for
several reasons, which the columns of CPU time tell apart: etcd's own per step, the root's, and one other host's.
"""

import asyncio
import contextlib
import http.client
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from report import Summary, parser, table, write_json

from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.supervise import Supervisor
from resilient_run.daemon.comparison.digests import HostDigests
from resilient_run.daemon.coordination import Coordinator
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.leased import LeasedKeys
from resilient_run.daemon.run.records import Agreement
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView
from resilient_run.launcher.etcd_server import EmbeddedEtcd

RUN_ID = "etcd-scale"
REPLICAS = 2
STARTED_AT_ONCE = 16


@dataclass(kw_only=True)
class HeldSteps:
    """What a host holds, in place of its slots."""

    ranks: tuple[int, ...]
    pairs: frozenset[tuple[int, int]] = frozenset()
    adopted: bool = True

    async def adopt(self) -> None: ...

    def held(self) -> dict[int, frozenset[tuple[int, int]]]:
        return dict.fromkeys(self.ranks, self.pairs)

    def find(self, rank: int, pair: tuple[int, int]) -> None:
        """No slot, so no digests."""

    @property
    def record(self) -> "HeldSteps":
        return self

    @property
    def uid(self) -> int:
        return 0


class SimulatedHost:
    """One daemon's coordination without its daemon."""

    def __init__(self, index: int, config: EtcdConfig) -> None:
        self.view = JobView(host=f"host{index}", replicas=REPLICAS)
        self.slots = HeldSteps(ranks=())
        self.seen_s = 0.0
        self.coordinator = Coordinator(
            run_id=RUN_ID,
            policy=Policy(),
            digests=HostDigests(self.view, self.slots, self._no_peer),  # type: ignore[arg-type]
            observe=lambda found: None,
            leased=LeasedKeys(keys.prefix(RUN_ID), self.view),
            persister=None,
            config=config,
            address=("127.0.0.1", 1 + index),
            view=self.view,
            slots=self.slots,  # type: ignore[arg-type]
            on_agreement=self._on_agreement,
            on_round=self._on_round,
            supervisor=Supervisor(f"host{index}"),
            companions={},
        )

    async def _no_peer(self, host: str) -> None: ...

    async def _on_agreement(self, agreement: Agreement) -> None: ...

    async def _on_round(self, round_: Round) -> None:
        self.view.round = round_
        self.slots.ranks = self.view.kept_ranks
        self.view.notify()

    def hold(self, step: int) -> None:
        """Hold `step` and the one before, as two slots do."""
        self.slots.pairs = frozenset({(1, step - 1), (1, step)})
        self.view.notify()

    async def commits(self, step: int) -> None:
        """Wait until this host knows that `step` is committed."""
        await self.view.wait_for(lambda: self.view.watermark == (1, step))
        self.seen_s = time.monotonic()


def config_of(endpoint: str) -> EtcdConfig:
    """Return how to reach the etcd of this benchmark."""
    return EtcdConfig.from_dict(
        {"endpoints": [endpoint], "user": None, "password": None, "cacert": None, "cert": None, "key": None}
    )


async def serve(
    indices: range, endpoint: str, steps: int, pipe: multiprocessing.connection.Connection
) -> list[dict[str, float]]:
    """Be the hosts `indices`; tell `pipe` when ready, hold each step that it names, and answer when it is committed."""
    config = config_of(endpoint)
    hosts = [SimulatedHost(index, config) for index in indices]
    receive = lambda: asyncio.to_thread(pipe.recv)  # noqa: E731
    async with asyncio.TaskGroup() as group:
        tasks = []
        # All at once would be too much for one process: each host hears of every other one.
        for start in range(0, len(hosts), STARTED_AT_ONCE):
            starting = hosts[start : start + STARTED_AT_ONCE]
            tasks += [group.create_task(host.coordinator.run()) for host in starting]
            for host in starting:
                await host.view.wait_for(lambda host=host: host.view.round is not None and host.view.leader is not None)
        pipe.send("ready")
        found = []
        for _ in range(steps):
            step = await receive()
            cpu_s = time.process_time()
            for host in hosts:
                host.hold(step)
            await asyncio.gather(*(host.commits(step) for host in hosts))
            seen_s = sorted(host.seen_s for host in hosts)
            sample = {"first_s": seen_s[0], "last_s": seen_s[-1], "cpu_s": time.process_time() - cpu_s}
            found.append(sample)
            pipe.send(sample)
        for task in tasks:
            task.cancel()
    return found


def run(indices: range, endpoint: str, steps: int, pipe: multiprocessing.connection.Connection) -> None:
    asyncio.run(serve(indices, endpoint, steps, pipe))


def etcd_counters(endpoint: str) -> dict[str, float]:
    """Return etcd's own counters."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(endpoint.removeprefix("unix:"))
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        lines = [line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    return {
        "cpu_s": values["process_cpu_seconds_total"],
        "puts": values["etcd_mvcc_put_total"],
        "events": values["etcd_debugging_mvcc_events_total"],
        "watches": values["etcd_debugging_mvcc_watcher_total"],
    }


async def plant(endpoint: str, hosts: int) -> None:
    """Write what launchers would have written: the job and its first round."""
    etcd = await Etcd.connect(config_of(endpoint))
    prefix = f"/resilient-run/{RUN_ID}/"
    await etcd.put(f"{prefix}rdzv/job", {"incarnation": "x", "min_nodes": hosts, "max_nodes": hosts, "token": "t"})
    member = {"session": "s", "nproc": 1, "role": "", "label": "", "addr": "127.0.0.1", "pid": 1, "ready": 0}
    for index in range(hosts):
        await etcd.put(f"{prefix}rdzv/members/host{index}", member)
    members = [{"host": f"host{i}", "session": "s", "nproc": 1, "role": "", "label": ""} for i in range(hosts)]
    await etcd.put(f"{prefix}rdzv/round", {"generation": 1, "members": members, "restore": None})
    await etcd.close()


def measure(hosts: int, *, steps: int) -> dict[str, list[float]]:
    """Return one value for each step of every quantity."""
    context = multiprocessing.get_context("spawn")
    samples: dict[str, list[float]] = {name: [] for name in COLUMNS}
    with EmbeddedEtcd() as etcd:
        asyncio.run(plant(etcd.endpoint, hosts))
        pipes, processes = [], []
        # The root is started, and so elected, first.
        for indices in (range(1), range(1, hosts)):
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(indices, etcd.endpoint, steps, theirs), daemon=True)
            process.start()
            assert ours.recv() == "ready"
            pipes.append(ours)
            processes.append(process)
        began = etcd_counters(etcd.endpoint)
        for step in range(1, steps + 1):
            before = etcd_counters(etcd.endpoint)
            start_s = time.monotonic()
            for pipe in reversed(pipes):
                pipe.send(step)
            root, others = (pipe.recv() for pipe in pipes)
            after = etcd_counters(etcd.endpoint)
            samples["commit, ms"].append(1e3 * (root["first_s"] - start_s))
            samples["last host knows, ms"].append(1e3 * (max(root["last_s"], others["last_s"]) - start_s))
            samples["puts per step"].append(after["puts"] - before["puts"])
            samples["events per step"].append(after["events"] - before["events"])
            samples["root CPU, ms per step"].append(1e3 * root["cpu_s"])
            samples["host CPU, ms per step"].append(1e3 * others["cpu_s"] / (hosts - 1))
            samples["watches"].append(after["watches"])
        # It counts in hundredths of a second, too coarse for one step.
        samples["etcd CPU, ms per step"].append(1e3 * (after["cpu_s"] - began["cpu_s"]) / steps)
        for process in processes:
            process.join()
    return samples


COLUMNS = (
    "commit, ms",
    "last host knows, ms",
    "puts per step",
    "events per step",
    "etcd CPU, ms per step",
    "root CPU, ms per step",
    "host CPU, ms per step",
    "watches",
)


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, nargs="+", default=[16, 64, 256])
    options.add_argument("--steps", type=int, default=40, help="steps that are committed, one after the other")
    args = options.parse_args()
    # Where others use the cores too, times say little; CPU times and counts still do.
    parameters = {"hosts": args.hosts, "steps": args.steps, "load_before": os.getloadavg()[0]}
    results: dict[int, dict[str, Any]] = {}
    for hosts in args.hosts:
        samples = measure(hosts, steps=args.steps)
        results[hosts] = {name: Summary.of(values) for name, values in samples.items()}
    rows = [
        [str(hosts), *(f"{summary[name]:.1f}" for name in COLUMNS[:2])]
        + [f"{summary[name].median:.2f}" for name in COLUMNS[2:]]
        for hosts, summary in results.items()
    ]
    table("All hosts hold a step until it is committed: median (p10..p90)", ["hosts", *COLUMNS], rows)
    for small, large in zip(args.hosts, args.hosts[1:], strict=False):
        growth = {name: results[large][name].median / max(1e-9, results[small][name].median) for name in COLUMNS}
        told = ", ".join(f"{name.split(',')[0]} x{factor:.1f}" for name, factor in growth.items())
        print(f"{small} to {large} hosts (x{large / small:.0f}): {told}")
    worst = results[args.hosts[-1]]
    rate = 1e3 / worst["etcd CPU, ms per step"].median
    print(f"etcd alone could commit about {rate:.0f} steps/s for {args.hosts[-1]} hosts on one core")
    write_json(args.json, question="etcd_scale", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
