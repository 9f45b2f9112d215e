"""How much of the network do replication and restore use, and what does it cost the daemons?

Real daemons on a laboratory network (`netlab`, needs root) whose links have the given rate in both directions; the
benchmark takes the trainers' part. Nothing else runs on the links.

- replicate: two hosts send each other their rank's state at the same time, from the trainer's word that a capture is
  complete to the commit: fetch, verification and etcd included.
- restore: a host is lost with its memory; a new one fetches its rank's state, from the forming of the round to the
  path of a verified slot in the trainer's hands. With several holders it comes from all of them at once, which shows
  where their links are slower than the new host's: there they have a quarter of its rate.

Full TCP segments in Ethernet frames of 1514 bytes carry 95.6 % payload: that is the most a link can give. Goal: 90 %.
"""

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from netlab import NetLab
from report import Summary, parser, table, write_json

from resilient_run.daemon.etcd.client import EtcdConfig

# The daemons' test harness plays launcher, rendezvous and trainers.
sys.path.append(str(Path(__file__).parent.parent / "tests"))
from cluster import wait_until
from hosts import Host, Hosts, Trainer, publish, wait_for_watermark
from lab import EtcdMember

from resilient_run.ckpt.format.slot import Slot

CONTROL = "control"
NAMES = ("a", "b", "c", "d", "z")
SHM_BYTES = 4 << 30


class LabHosts(Hosts):
    """The hosts of one job, each in a namespace of the lab."""

    def __init__(self, lab: NetLab, root: Path, *, run_id: str, config: EtcdConfig) -> None:
        super().__init__(root, run_id=run_id, config=config)
        self.lab = lab

    def __getitem__(self, name: str) -> Host:
        known = name in self.hosts
        host = super().__getitem__(name)
        if not known:
            net = self.lab.host(name)
            host.prefix, host.address, host.run_dir, host.shm_dir = net.prefix, net.address, net.run_dir, net.shm_dir
            host.socket_path = net.run_dir / "resilientd.sock"
        return host


@contextmanager
def job(lab: NetLab, etcd: EtcdMember) -> Iterator[LabHosts]:
    """Yield the hosts of a fresh job; end their daemons and empty their memory afterwards."""
    with tempfile.TemporaryDirectory() as root:
        hosts = LabHosts(
            lab, Path(root), run_id=f"bench-{secrets.token_hex(4)}", config=EtcdConfig(endpoints=(etcd.endpoint,))
        )
        try:
            yield hosts
        finally:
            for name in hosts.hosts:
                hosts[name].drop_clients()
                lab.host(name).lose()
                lab.host(name).heal()


def prepare(trainer: Trainer, step: int, size_bytes: int) -> str:
    """Write a state of `size_bytes` into one of the trainer's slots, and say nothing of it yet."""
    if not trainer.paths:
        trainer.allocate(size_bytes)
    path = trainer.paths[step % 2]
    slot = Slot.open(path, writable=True)
    pair = (trainer.generation, step)
    publish(
        slot,
        run_id=trainer.host.run_id,
        rank=trainer.rank,
        world_size=trainer.world_size,
        pair=pair,
        size_bytes=size_bytes,
    )
    slot.close()
    return path


def capture_all(trainers: Sequence[Trainer], step: int, size_bytes: int) -> float:
    """Let every trainer announce a capture at the same time, and return the seconds until it is committed."""
    paths = [prepare(trainer, step, size_bytes) for trainer in trainers]
    start_s = time.monotonic()
    for trainer, path in zip(trainers, paths, strict=True):
        trainer.notify("complete", path=path, generation=trainer.generation, step=step)
    wait_for_watermark(trainers, (trainers[0].generation, step))
    return time.monotonic() - start_s


def cpu_s(hosts: LabHosts, names: Sequence[str]) -> float:
    """Return the processor time that the daemons of these hosts have used so far."""
    total_s = 0.0
    for name in names:
        process = hosts[name].process
        assert process is not None
        times = psutil.Process(process.pid).cpu_times()
        total_s += times.user + times.system
    return total_s


def replicate(lab: NetLab, etcd: EtcdMember, *, size_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Measure commits between two hosts whose replicas go both ways at once."""
    rates, costs = [], []
    with job(lab, etcd) as hosts:
        trainers = hosts.run(["a", "b"])
        capture_all(trainers, 1, size_bytes)  # allocates the peers' slots
        for step in range(2, repeats + 2):
            before_s = cpu_s(hosts, "ab")
            seconds = capture_all(trainers, step, size_bytes)
            rates.append(8 * size_bytes / seconds / lab.rate_bit_s)
            costs.append((cpu_s(hosts, "ab") - before_s) / (2 * size_bytes / 1e9))
    return {"fraction_of_link": rates, "cpu_s_per_gb": costs}


def restore(lab: NetLab, etcd: EtcdMember, *, size_bytes: int, holders: int, slow: bool) -> float:
    """Return the seconds in which a new host restores the state of one that was lost, from `holders` others.

    Args:
        lab: The laboratory.
        etcd: A member on the control host.
        size_bytes: The rank's state.
        holders: Hosts that keep it.
        slow: Give the holders' links a quarter of the new host's rate.
    """
    names = list(NAMES[: holders + 1])
    with job(lab, etcd) as hosts:
        trainers = hosts.run(names, replicas=holders + 1)
        capture_all(trainers, 1, size_bytes)
        lost, new = names[-1], NAMES[-1]
        hosts[lost].drop_clients()
        lab.host(lost).lose()
        hosts[new].start()
        hosts[new].open(replicas=holders + 1)
        wait_until(lambda: hosts[new].status()["jobs"][0]["generation"] == 1, timeout_s=30, what="the round")
        time.sleep(0.5)  # a standby has known everybody for long
        if slow:
            for name in names[:-1]:
                lab.host(name).slow(f"{lab.rate_bit_s // 4}bit")
        hosts.form_round(2, [*names[:-1], new])
        start_s = time.monotonic()
        trainer = hosts[new].trainer(holders, world_size=len(names), generation=2)
        trainer.attach()
        answer = trainer.request("restore")
        seconds = time.monotonic() - start_s
        assert answer["source"] == "peer", answer
    return seconds


def conduct(args: argparse.Namespace) -> None:
    """Measure in the lab, print, write; runs on the control host."""
    lab = NetLab.attach(args.lab)
    control = lab.host(CONTROL)
    control.slow("10gbit")
    with tempfile.TemporaryDirectory() as root:
        etcd = EtcdMember(control, Path(root), {CONTROL: f"http://{control.address}:2380"})
        etcd.start()
        try:
            wait_until(etcd.answers, timeout_s=60, what="etcd", pause_s=0.1)
            size_bytes = int(lab.rate_bit_s / 8 * args.seconds)
            results: dict[str, dict[str, Summary]] = {
                "replicate": {
                    name: Summary.of(values)
                    for name, values in replicate(lab, etcd, size_bytes=size_bytes, repeats=args.repeats).items()
                }
            }
            for slow in (False, True):
                for holders in args.holders:
                    share = min(1.0, holders / 4) if slow else 1.0
                    found = [
                        restore(lab, etcd, size_bytes=int(share * size_bytes), holders=holders, slow=slow)
                        for _ in range(args.repeats)
                    ]
                    fractions = [8 * int(share * size_bytes) / seconds / lab.rate_bit_s for seconds in found]
                    key = f"restore from {holders}{', their links slow' if slow else ''}"
                    results[key] = {"fraction_of_link": Summary.of(fractions), "seconds": Summary.of(found)}
        finally:
            etcd.kill()
    rows = [
        [
            name,
            f"{100 * summary['fraction_of_link'].median:.1f} %",
            f"{summary['cpu_s_per_gb']:.2f}" if "cpu_s_per_gb" in summary else "",
        ]
        for name, summary in results.items()
    ]
    megabit = lab.rate_bit_s // 10**6
    header = ["", "of the link's rate", "daemons' CPU s per GB"]
    table(f"{size_bytes / 1e6:.0f} MB per rank over links of {megabit} Mbit/s, {args.repeats} times", header, rows)
    write_json(
        args.json,
        question="replication_rate",
        parameters={"rate_bit_s": lab.rate_bit_s, "state_bytes": size_bytes, "repeats": args.repeats},
        results=results,
    )


def main() -> None:
    """Build a lab and measure in it."""
    options = parser(__doc__)
    options.add_argument("--rate", default="400mbit", help="of every link")
    options.add_argument("--seconds", type=float, default=2.0, help="that a rank's state takes on such a link")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--holders", type=int, nargs="+", default=[1, 2, 3], help="restore from so many hosts")
    options.add_argument("--lab", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.lab:
        conduct(args)
        return
    with NetLab([*NAMES, CONTROL], rate=args.rate, shm_bytes=SHM_BYTES) as lab:
        command = [sys.executable, *sys.argv, "--lab", lab.name]
        with lab.host(CONTROL).popen(command) as conductor:
            code = conductor.wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
