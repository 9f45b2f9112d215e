"""How many hosts can commit every step through one etcd?

Every simulated host has a real `ReportTree` with real connections to the hosts above and below it, TLS and all, and
its own place in the tree of the round; only its slots are an object that says which step it holds. The root is a real
`Coordinator`, too, with its watches, its mirror and its transactions in a real etcd, in a process of its own. What the
others do with etcd does not depend on steps, and is not simulated: their leases and their mirrors of the round.

"all at once" is the worst case: when a step is committed everywhere, all hosts hold the next one at the same moment.
All hosts share the cores of this machine, which no cluster would do, so that this takes as long as their CPU time says.
"last one alone" is what a cluster would see: all hosts but the last leaf hold the step and have said so; then that one
does, and its report goes up alone. "root knows" ends when the root's host knows that the step is committed, "all know"
when the last host does.

Goal: 4 writes per commit at most, whatever the number of hosts; the CPU time of a host per step constant; 250 ms with
4,096 hosts.
"""

import asyncio
import contextlib
import http.client
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from report import Summary, parser, table, write_json

from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.supervise import Supervisor
from resilient_run.daemon.comparison.digests import HostDigests
from resilient_run.daemon.coordination import Coordinator
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.peers.fetch import connect
from resilient_run.daemon.peers.peers import PeerServer
from resilient_run.daemon.peers.tree import ReportTree
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.leased import LeasedKeys
from resilient_run.daemon.run.records import Agreement
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView
from resilient_run.daemon.trust.identity import Identity
from resilient_run.daemon.trust.secure import SecureSocket
from resilient_run.launcher.etcd_server import EmbeddedEtcd

RUN_ID = "etcd-scale"
REPLICAS = 2
STARTED_AT_ONCE = 32
ADDRESS = "127.0.0.1"
PROCESSES = 2
"""That share the hosts below the root."""


@dataclass(kw_only=True)
class HeldSteps:
    """What a host holds, in place of its slots."""

    ranks: tuple[int, ...] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()
    adopted: bool = True
    keep: int = 1

    async def adopt(self) -> None: ...

    def held(self) -> dict[int, frozenset[tuple[int, int]]]:
        return dict.fromkeys(self.ranks, self.pairs)

    def find(self, rank: int, pair: tuple[int, int]) -> None:
        """No slot, so no digests."""


class SimulatedHost:
    """A daemon's part in reports of steps, without its daemon.

    Args:
        index: Its group rank.
        addresses: Where daemons listen, by host.
    """

    def __init__(self, index: int, addresses: Mapping[str, tuple[str, int]]) -> None:
        self.view = JobView(host=host_name(index), replicas=REPLICAS)
        self.slots = HeldSteps()
        self.identity = Identity("secret", run_id=RUN_ID, incarnation="x", host=self.view.host)
        self._addresses = addresses
        self.tree = ReportTree(
            view=self.view,
            slots=self.slots,  # type: ignore[arg-type]
            claims=HostDigests(self.view, self.slots, self._no_peer).claims,  # type: ignore[arg-type]
            dial=self._dial,
        )

    async def reports(self, host: str, sock: SecureSocket) -> None:
        await self.tree.serve(host, sock)

    def begin(self, round_: Round) -> None:
        self.view.round = round_
        self.slots.ranks = self.view.kept_ranks

    def hold(self, step: int) -> None:
        """Hold `step` and the one before, as two slots do."""
        self.slots.pairs = frozenset({(1, step - 1), (1, step)})
        self.view.notify()

    async def knows(self, step: int) -> float:
        """Return when this host knows that `step` is committed."""
        await self.view.wait_for(lambda: self.tree.said is not None and self.tree.said.watermark == (1, step))
        return time.monotonic()

    async def _no_peer(self, host: str) -> None: ...

    async def _dial(self, host: str) -> SecureSocket:
        return await connect(host, self._addresses[host], self.identity)


class Process:
    """The hosts that share a process, and its server, which knows them apart by whom a connection asks for.

    Attributes:
        refused: Hosts to which nobody can connect.
    """

    def __init__(self, indices: range) -> None:
        self.addresses: dict[str, tuple[str, int]] = {}
        found = [SimulatedHost(index, self.addresses) for index in indices]
        self.hosts = {host.view.host: host for host in found}
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = PeerServer(bind_addr=None, find_job=self._find, spawn=self._spawn)  # type: ignore[arg-type]
        self.refused: set[str] = set()

    async def listen(self, pipe: multiprocessing.connection.Connection) -> None:
        """Let all processes know where each of them listens."""
        pipe.send((list(self.hosts), (await self.server.listen(ADDRESS))[1]))
        for names, port in await asyncio.to_thread(pipe.recv):
            self.addresses |= dict.fromkeys(names, (ADDRESS, port))

    def _find(self, run_id: str, host: str) -> SimulatedHost | None:
        return None if host in self.refused else self.hosts.get(host)

    def _spawn(self, work: Any, *arguments: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work(*arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def lead(process: Process, config: EtcdConfig, group: asyncio.TaskGroup) -> None:
    """Let the only host of a process be elected, and commit."""
    (host,) = process.hosts.values()

    async def on_round(round_: Round) -> None:
        host.begin(round_)

    async def on_agreement(agreement: Agreement) -> None: ...

    async def no_peer(name: str) -> None: ...

    coordinator = Coordinator(
        run_id=RUN_ID,
        policy=Policy(),
        digests=HostDigests(host.view, host.slots, no_peer),  # type: ignore[arg-type]
        observe=lambda found: None,
        leased=LeasedKeys(host.view),
        persister=None,
        config=config,
        address=process.addresses[host.view.host],
        view=host.view,
        slots=host.slots,  # type: ignore[arg-type]
        tree=host.tree,
        on_agreement=on_agreement,
        on_round=on_round,
        supervisor=Supervisor(host.view.host),
        companions={},
    )
    group.create_task(coordinator.run())
    await host.view.wait_for(lambda: host.tree.said is not None)


async def follow(process: Process, hosts: int, election: int, group: asyncio.TaskGroup) -> None:
    """Let all hosts of a process take their places in the tree, those that are nearer to the root first."""
    round_, waiting = Round.parse(round_value(hosts), revision=1), list(process.hosts.values())
    while waiting:
        starting, waiting = waiting[:STARTED_AT_ONCE], waiting[STARTED_AT_ONCE:]
        for host in starting:
            host.begin(round_)
            host.view.leader, host.view.leader_revision = host_name(0), election
            group.create_task(host.tree.run())
        for host in starting:
            await host.view.wait_for(lambda host=host: host.tree.said is not None)  # type: ignore[misc]


async def serve(indices: range, hosts: int, endpoint: str, pipe: multiprocessing.connection.Connection) -> None:
    """Be the hosts `indices`, and do what `pipe` says."""
    process = Process(indices)

    async def receive() -> Any:
        return await asyncio.to_thread(pipe.recv)

    async with asyncio.TaskGroup() as group:
        await process.listen(pipe)
        if 0 in indices:
            await lead(process, config_of(endpoint), group)
        else:
            await follow(process, hosts, await receive(), group)
        pipe.send(next(iter(process.hosts.values())).view.leader_revision)
        while True:
            step, alone = await receive()
            before_s = time.process_time()
            if alone:
                for name in process.hosts.keys() - {host_name(hosts - 1)}:
                    process.hosts[name].hold(step)
                pipe.send(None)
                await receive()
            for host in process.hosts.values():
                host.hold(step)
            known_s = await asyncio.gather(*(host.knows(step) for host in process.hosts.values()))
            pipe.send((min(known_s), max(known_s), time.process_time() - before_s))


def run(indices: range, hosts: int, endpoint: str, pipe: multiprocessing.connection.Connection) -> None:
    asyncio.run(serve(indices, hosts, endpoint, pipe))


def host_name(index: int) -> str:
    return f"host{index}"


def round_value(hosts: int) -> dict[str, Any]:
    members = [{"host": host_name(i), "session": "s", "nproc": 1, "role": "", "label": ""} for i in range(hosts)]
    return {"generation": 1, "members": members, "restore": None}


def config_of(endpoint: str) -> EtcdConfig:
    """Return how to reach the etcd of this benchmark."""
    return EtcdConfig(endpoints=(endpoint,))


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
    """Write what launchers and daemons would have written: the job, its first round, and who is there."""
    etcd = await Etcd.connect(config_of(endpoint), prefix=keys.prefix(RUN_ID))
    await etcd.put(keys.JOB, {"incarnation": "x", "min_nodes": hosts, "max_nodes": hosts, "token": "t"})
    member = {"session": "s", "nproc": 1, "role": "", "label": "", "addr": ADDRESS, "pid": 1, "ready": 0}
    for index in range(hosts):
        await etcd.put(keys.MEMBERS(host_name(index)), member)
    for index in range(1, hosts):
        await etcd.put(keys.HOSTS(host_name(index)), {"addr": ADDRESS, "port": 1, "every": 1, "sign": ""})
    await etcd.put(keys.ROUND, round_value(hosts))
    await etcd.close()


def measure(hosts: int, *, steps: int) -> dict[str, list[float]]:
    """Return one value for each step of every quantity."""
    context = multiprocessing.get_context("spawn")
    samples: dict[str, list[float]] = {name: [] for name in COLUMNS}
    with EmbeddedEtcd() as etcd:
        asyncio.run(plant(etcd.endpoint, hosts))
        pipes, processes = [], []
        parts = [range(1), *(range(1 + part, hosts, PROCESSES) for part in range(min(PROCESSES, hosts - 1)))]
        for indices in parts:
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(indices, hosts, etcd.endpoint, theirs), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        listening = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(listening)
        election = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(election)
        for pipe in pipes[1:]:
            pipe.recv()
        cpu_s = 0.0
        for step in range(1, 2 * steps + 1):
            alone = step > steps
            before = etcd_counters(etcd.endpoint)
            start_s = time.monotonic()
            for pipe in pipes:
                pipe.send((step, alone))
            if alone:
                for pipe in pipes:
                    pipe.recv()
                time.sleep(QUIET_S)
                start_s = time.monotonic()
                for pipe in pipes:
                    pipe.send("now")
            root, *others = (pipe.recv() for pipe in pipes)
            after = etcd_counters(etcd.endpoint)
            how = "last one alone" if alone else "all at once"
            samples[f"{how}: root knows, ms"].append(1e3 * (root[0] - start_s))
            samples[f"{how}: all know, ms"].append(1e3 * (max(last_s for _, last_s, _ in others) - start_s))
            samples["puts per step"].append(after["puts"] - before["puts"])
            samples["events per step"].append(after["events"] - before["events"])
            samples["watches"].append(after["watches"])
            if not alone:
                cpu_s += after["cpu_s"] - before["cpu_s"]
                samples["root CPU, ms per step"].append(1e3 * root[2])
                samples["host CPU, ms per step"].append(1e3 * sum(cpu for *_, cpu in others) / (hosts - 1))
        # It counts in hundredths of a second, too coarse for one step.
        samples["etcd CPU, ms per step"].append(1e3 * cpu_s / steps)
        for process in processes:
            process.kill()
            process.join()
    return samples


QUIET_S = 2.0
"""By then all that the others hold has been said."""
COLUMNS = (
    "all at once: root knows, ms",
    "all at once: all know, ms",
    "last one alone: root knows, ms",
    "last one alone: all know, ms",
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
    options.add_argument("--hosts", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    options.add_argument("--steps", type=int, default=10, help="steps that are committed each way, one after the other")
    args = options.parse_args()
    # Where others use the cores too, times say little; CPU times and counts still do.
    parameters = {"hosts": args.hosts, "steps": args.steps, "load_before": os.getloadavg()[0]}
    results: dict[int, dict[str, Any]] = {}
    for hosts in args.hosts:
        samples = measure(hosts, steps=args.steps)
        results[hosts] = {name: Summary.of(values) for name, values in samples.items()}
    rows = [
        [str(hosts), *(f"{summary[name]:.1f}" for name in COLUMNS[:4])]
        + [f"{summary[name].median:.2f}" for name in COLUMNS[4:]]
        for hosts, summary in results.items()
    ]
    table("A step until it is committed: median (p10..p90)", ["hosts", *COLUMNS], rows)
    write_json(args.json, question="etcd_scale", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
