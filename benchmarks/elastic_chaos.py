"""Does an elastic run whose hosts come and go ever stop, train a sample twice or not at all, or grow?

Six hosts on a laboratory network train with `--nnodes 2:6 --rr-elastic 1` and 3 replicas, with an etcd of three members
on hosts of their own. Seeded faults strike one after the other, some two at once: workers that are killed, raise, hang
or stand still; killed launchers and daemons; lost, leaving and drained hosts; corrupt replicas, full memory, late
heartbeats; links that are cut, slow or drop packets; killed members of etcd. Hosts that went come back, one or two at a
time. The next fault strikes once two more steps are committed, and some time later.

Every rank logs the samples of each step (elastic_worker.py). At the end the history that the run has kept is replayed
in one process: every sample of every epoch once, and the same parameters at every step, bit for bit. Where at least
MIN hosts are up and within reach, two steps have to be committed within two minutes.

Meanwhile launcher, daemon and host h0, which alone is never ended, and etcd are measured. Needs root (network
namespaces).

Goal: no stop, nothing wrong, and no more memory, files, threads, processes, tmpfs, keys or leases in the last quarter
than in the first.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_audit import EPOCHS, Log, audit
from elastic_growth import ALLOWED, SPARED, Meter, growth
from report import Summary, parser, table, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from chaos import SHM_BYTES, keep_logs
from cluster import wait_until
from lab import EtcdMember, LabCluster
from launchers import run_ctl, start_python
from netlab import NetLab, unavailable

WORKER = Path(__file__).with_name("elastic_worker.py")
REPLICAS, MIN = 3, 2
LIMIT_S = 120.0
RATE = "1gbit"
CONFIG = """
[root]
# Hosts take every fault there is: none of them is to blame.
quarantine_failures = 10000

[detect]
hang_floor_s = 5.0
hang_min_steps = 3
hang_start_s = 60.0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        weight: How often it is drawn.
        strikes: What: "host", "rank", "gone" (hosts that come back) or "etcd".
        takes: Whether the host is out of reach afterwards, for a while or until it is started again.
        forgets: Whether replicas may be lost.
        renews: Whether a run in which the host trains begins a new generation because of it.
        spares: Whether it ends something that is measured on the spared host.
        injected: Kind and parameters of `resilient-inject`, which carries it out.
    """

    weight: float = 1.0
    strikes: str = "host"
    takes: bool = False
    forgets: bool = False
    renews: bool = False
    spares: bool = False
    injected: tuple[str, ...] = ()


KINDS: Mapping[str, Kind] = {
    "worker killed": Kind(weight=3, strikes="rank", renews=True, injected=("kill-rank",)),
    "worker raises": Kind(weight=2, strikes="rank", injected=("raise",)),
    "worker hangs": Kind(weight=0.5, strikes="rank", injected=("hang-rank",)),
    "worker stands still": Kind(weight=0.5, strikes="rank", injected=("stop-rank",)),
    "worker stands still for 2 s": Kind(strikes="rank", injected=("stop-rank", "duration_s=2.0")),
    "worker slow for 4 s": Kind(weight=0.5, strikes="rank", injected=("slow-rank", "factor=3.0", "duration_s=4.0")),
    "replica corrupt": Kind(
        strikes="rank", forgets=True, renews=True, injected=("corrupt-replica", "how=bit-flip", "kill=true")
    ),
    "replica cut off": Kind(
        strikes="rank", forgets=True, renews=True, injected=("corrupt-replica", "how=truncation", "kill=true")
    ),
    "launcher killed": Kind(weight=1.5, takes=True, renews=True, spares=True, injected=("kill-launcher",)),
    "daemon killed": Kind(weight=1.5, spares=True, injected=("kill-daemon",)),
    "launcher stands still for 8 s": Kind(
        weight=0.5, takes=True, injected=("delay-heartbeats", "of=launcher", "duration_s=8.0")
    ),
    "daemon stands still for 8 s": Kind(
        weight=0.5, takes=True, injected=("delay-heartbeats", "of=daemon", "duration_s=8.0")
    ),
    "memory full for 3 s": Kind(injected=("fill-memory", "duration_s=3.0")),
    "host lost": Kind(weight=3, takes=True, forgets=True, renews=True, spares=True),
    "host leaves": Kind(weight=2, takes=True, forgets=True, renews=True, spares=True),
    "host drained": Kind(weight=2, takes=True, renews=True),
    "hosts come": Kind(weight=20, strikes="gone"),
    "link cut": Kind(weight=2, takes=True),
    "link slow": Kind(),
    "link drops packets": Kind(takes=True),
    "member of etcd killed": Kind(weight=1.5, strikes="etcd"),
}


class Chaos:
    """One run and what is done to it.

    Args:
        lab: The cluster.
        log: What its ranks write.
        script: What it trains.
        seed: Of the faults.
    """

    def __init__(self, lab: LabCluster, log: Log, script: list[str], seed: int) -> None:
        self._lab, self._log, self._script = lab, log, script
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._later: list[tuple[float, Callable[[], Any]]] = []
        self._busy: set[str] = set()
        self.names = [host.name for host in lab.net.hosts if not host.name.startswith("etcd")]
        self.up: set[str] = set()
        """Hosts whose launcher runs, and that nothing keeps from working."""
        self.faults: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.ended: list[dict[str, Any]] = []
        """Launchers that ended though nobody ended them."""
        self.stopped: str | None = None

    def come(self, name: str) -> None:
        """Start the launcher of a host, and connect the host."""
        self._lab.net.host(name).heal()
        more = ["--rr-elastic", "1", "--rr-replicas", str(REPLICAS), "--max-restarts", "1000000"]
        more += ["--rdzv-conf", "lease_ttl=3,last_call_timeout=0.5", "--rr-allow-injection"]
        self._lab.launch([name], self._script, *more, nodes=f"{MIN}:{len(self.names)}")
        self.up.add(name)

    def look(self) -> None:
        """Take in what has happened, and do what is due."""
        self._log.read()
        with self._lock:
            due = [what for at_s, what in self._later if at_s <= time.monotonic()]
            self._later = [(at_s, what) for at_s, what in self._later if at_s > time.monotonic()]
        for what in due:
            what()
        for name in sorted(self.up):
            launcher = self._lab.host(name).launcher
            assert launcher is not None
            if (code := launcher.poll()) is not None:
                self.up.discard(name)
                if not self._log.ends:
                    self.ended.append(
                        {"host": name, "exit_code": code, "output": "".join(self._lab.host(name).text[-15:])}
                    )

    def goes_on(self, steps: int, *, after: int = 0) -> bool:
        """Wait for so many more committed steps, in a generation after that one; tell whether they came."""
        step = self._log.committed[1]
        begun_s = time.monotonic()
        while True:
            self.look()
            now = self._log.committed
            if now[1] >= step + steps and now[0] > after:
                return True
            if time.monotonic() > begun_s + LIMIT_S:
                outputs = {name: "".join(self._lab.host(name).text[-25:]) for name in self.names}
                self.stopped = (
                    f"{sorted(self.up)} are up, and nothing more than {now} is committed: {json.dumps(outputs)}"
                )
                return False
            time.sleep(0.02)

    def run(self, *, faults: int, seconds: float, every_s: float) -> None:
        """Let faults strike until there were so many, or for so long."""
        end_s = time.monotonic() + (seconds or float("inf"))
        while len(self.faults) < (faults or 10**9) and time.monotonic() < end_s:
            begun_s = time.monotonic()
            self.look()
            generation = self._log.generation
            entries = self._strike(2 if self._chance.random() < 0.25 else 1)
            renewing = [entry.pop("renews") for entry in entries]
            if not self.goes_on(2, after=generation if any(renewing) else 0):
                return
            for entry in entries:
                entry["seconds"] = round(time.monotonic() - begun_s, 2)
                print(f"of {len(self.faults)} faults: {entry}", file=sys.stderr, flush=True)
            pause_s = min(3.0, self._chance.expovariate(1.0))
            resume_s = begun_s + every_s if every_s else time.monotonic() + pause_s
            while time.monotonic() < resume_s:
                self.look()
                time.sleep(0.02)

    def heal(self) -> None:
        """Undo what is not over yet."""
        wait_until(lambda: (self.look(), not self._later)[1], timeout_s=60, what="the end of faults", pause_s=0.1)

    def _strike(self, count: int) -> list[dict[str, Any]]:
        """Let so many faults strike at once, and return those that did."""
        acts: list[tuple[str, str, Callable[[], str | None]]] = []
        training = set(self._log.hosts.values())
        free, replicas = len(self.up) - MIN, min(REPLICAS, len(self.up)) - 1
        struck: set[str] = set(self._busy)
        while len(acts) < count:
            gone = sorted(set(self.names) - self.up - struck)
            weights = {
                name: kind.weight * (len(gone) / len(self.names) if kind.strikes == "gone" else 1.0)
                for name, kind in KINDS.items()
                if (not kind.takes or free > 0)
                and (not kind.forgets or replicas > 0)
                and (kind.strikes != "etcd" or ("etcd" not in struck))
            }
            name = self._chance.choices(list(weights), weights=list(weights.values()))[0]
            kind = KINDS[name]
            targets = {
                "gone": gone,
                "etcd": ["etcd1", "etcd2"],
                "rank": sorted(training & self.up - struck),
                "host": sorted(self.up - struck - ({SPARED} if kind.spares else set())),
            }[kind.strikes]
            if not targets:
                if not self.up - struck:
                    break
                continue
            target = self._chance.choice(targets)
            also = [each for each in gone if each != target][: self._chance.randrange(2)]
            duration_s = self._chance.choice((2.0, 5.0, 9.0))
            stays = self._chance.random() < 0.5 or target == SPARED
            free, replicas = free - kind.takes, replicas - kind.forgets
            struck |= {"etcd" if kind.strikes == "etcd" else target, *(also if kind.strikes == "gone" else ())}
            acts.append((name, target, self._act(name, kind, target, also, duration_s=duration_s, stays=stays)))
        leader = self._lab.etcd[0].get(f"/resilient-run/{self._lab.name}/root/leader") or {}
        root, up = leader.get("host"), len(self.up)
        with ThreadPoolExecutor() as pool:
            answers = [pool.submit(carry_out) for _, _, carry_out in acts]
            while not all(answer.done() for answer in answers):
                self.look()
                time.sleep(0.02)
        entries = []
        for (name, target, _), answer in zip(acts, answers, strict=True):
            if (refusal := answer.result()) is not None:
                self.refused.append(f"{name} on {target}: {refusal[-200:]}")
                continue
            entry = {"kind": name, "on": target, "up": up, "of": len(self._log.hosts), "root": target == root}
            entry |= {"at_step": self._log.committed[1], "together": len(acts), "seconds": LIMIT_S}
            self.faults.append(entry)
            entries.append(entry)
            entry["renews"] = KINDS[name].renews and target in training
        return entries

    def _act(
        self, name: str, kind: Kind, target: str, also: list[str], *, duration_s: float, stays: bool
    ) -> Callable[[], str | None]:
        """Return the function that carries a fault out, and tells why if it does not strike."""
        if kind.strikes == "etcd":
            member = next(each for each in self._lab.etcd if each.net.name == target)
            return lambda: self._kill(member, duration_s)
        net, host = self._lab.net.host(target), self._lab.host(target)

        def leave() -> None:
            assert host.launcher is not None
            self.up.discard(target)
            host.launcher.terminate()
            host.launcher.wait(60)

        def drain() -> str | None:
            options = ["--run-id", self._lab.name, "--etcd-endpoint", self._lab.endpoint, "--timeout", "60"]
            options += ["--for", "20"]
            done = run_ctl(["drain", target, *options], host.environ(**net.env), net.prefix)
            if done.returncode != 0:
                return done.stderr.strip()
            if not stays:
                leave()
            return None

        def lose() -> None:
            self.up.discard(target)
            host.lose()

        def come() -> None:
            for each in (target, *also):
                self.come(each)

        def cut() -> None:
            self._away(target, duration_s, net.heal)
            net.cut()

        def drop() -> None:
            self._away(target, 4.0, net.heal)
            for _ in range(8):
                net.cut()
                time.sleep(0.15)
                net.heal()
                time.sleep(0.25)

        def slow() -> None:
            net.slow("2mbit")
            self._after(duration_s, net.heal)

        def inject() -> str | None:
            if kind.takes and not kind.renews:
                self._away(target, 8.0)
            elif kind.takes:
                self.up.discard(target)
            refusal = self._inject(kind, target)
            if refusal is not None and kind.takes and kind.renews:
                self.up.add(target)
            return refusal

        own = {
            "host lost": lose,
            "host leaves": leave,
            "host drained": drain,
            "hosts come": come,
            "link cut": cut,
            "link slow": slow,
            "link drops packets": drop,
        }
        return own.get(name, inject)

    def _inject(self, kind: Kind, target: str) -> str | None:
        """Order a fault with the command that users have; return why it was refused."""
        ranks = [rank for rank, host in self._log.hosts.items() if host == target]
        fault, *parameters = kind.injected
        options = ["--rank", str(ranks[0])] if kind.strikes == "rank" and ranks else []
        options += ["--host", target, "--run-id", self._lab.name, "--rdzv-endpoint", self._lab.endpoint]
        options += ["--timeout", "10", *(f"--parameter={each}" for each in parameters)]
        from_ = self._lab.net.host("etcd0")
        command = ["-m", "resilient_run.launcher.inject.cli", "fault", fault, *options]
        process = start_python(command, {**os.environ, **from_.env}, from_.prefix, stdout=-1, stderr=-1, text=True)
        _, error = process.communicate(timeout=60)
        return None if process.returncode == 0 else error.strip()

    def _kill(self, member: EtcdMember, duration_s: float) -> None:
        member.kill()
        self._busy.add("etcd")

        def back() -> None:
            member.start()
            # It has to catch up before another one may be lost.
            self._after(5.0, lambda: self._busy.discard("etcd"))

        self._after(duration_s, back)

    def _away(self, name: str, duration_s: float, end: Callable[[], Any] = lambda: None) -> None:
        """Count a host as out of reach for so long; nothing else strikes it meanwhile."""
        self.up.discard(name)
        self._busy.add(name)

        def back() -> None:
            end()
            self._busy.discard(name)
            self.up.add(name)

        self._after(duration_s, back)

    def _after(self, delay_s: float, what: Callable[[], Any]) -> None:
        with self._lock:
            self._later.append((time.monotonic() + delay_s, what))


def measure(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run it all; return what was found."""
    (root / "run.toml").write_text(CONFIG)
    os.environ["RESILIENT_CONFIG"] = str(root / "run.toml")
    path, gate = root / "log.jsonl", root / "gate"
    path.touch()
    gate.write_text("1000000000")
    names = [f"h{index}" for index in range(args.hosts)]
    with ExitStack() as stack:

        def build(*lab_names: Any, **options: Any) -> NetLab:
            return stack.enter_context(NetLab(*lab_names, shm_bytes=SHM_BYTES, **options))

        lab = LabCluster(build, root, names, etcd_members=3, rate=RATE)
        stack.callback(lab.close)
        lab.lead(lab.etcd[1])
        # What a fork shares with the interpreter that it comes from would be its own as soon as either writes there.
        lab.host(SPARED).forked = False
        log = Log(path)
        stack.callback(log.close)
        chaos = Chaos(lab, log, [str(WORKER), str(path), str(gate), str(args.pause_s)], args.seed)
        meter = Meter(lab, log, args.sample_s)
        stack.callback(meter.stop)
        begun_s = time.monotonic()
        for name in reversed(names):
            chaos.come(name)
        if chaos.goes_on(5):
            meter.start()
            try:
                chaos.run(faults=args.faults, seconds=args.seconds, every_s=args.every_s)
            except (AssertionError, subprocess.TimeoutExpired):
                chaos.stopped = traceback.format_exc()
        seconds = time.monotonic() - begun_s
        meter.stop()
        codes = {}
        if chaos.stopped is None:
            chaos.heal()
            ready = chaos.goes_on(10)
            last = max(log.made) + 50
            gate.with_suffix(".new").write_text(str(last))
            gate.with_suffix(".new").rename(gate)
            try:
                codes = {name: lab.host(name).wait() for name in sorted(chaos.up)} if ready else {}
            except AssertionError as error:
                chaos.stopped = str(error)
            log.read()
        problems = list(audit(log))
        if args.keep is not None:
            keep_logs(lab, args.keep, names)
            (args.keep / "log.jsonl").write_bytes(path.read_bytes())
    return {
        "seconds": round(seconds, 1),
        "faults": chaos.faults,
        "refused": chaos.refused,
        "stopped": chaos.stopped,
        "launchers_ended": chaos.ended,
        "exit_codes": codes,
        "steps": len(log.made),
        "steps_repeated": log.repeated,
        "generations": log.generation,
        "ranks_of_generations": dict(sorted(log.worlds.items())),
        "samples": sum(len(line[name][1]) for made in log.made.values() for line in made.values() for name in EPOCHS),
        "epochs": {name: max(line[name][0] for line in log.made[max(log.made)].values()) for name in EPOCHS},
        "problems": problems[:50],
        "growth": growth(meter.samples) if meter.samples else {},
        "series": {name: [round(sample[name], 2) for sample in meter.samples] for name in (*ALLOWED, "serves")},
        "keys": meter.keys,
        "measurements": len(meter.samples),
        "measured_processes": len({sample["pids"] for sample in meter.samples}),
    }


def main() -> None:
    """Run, print, write; exit 1 when a goal is missed."""
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, default=6)
    options.add_argument("--faults", type=int, default=0, help="how many")
    options.add_argument("--seconds", type=float, default=0.0, help="or how long")
    options.add_argument(
        "--every-s", type=float, default=0.0, help="between faults; else 1 s on average after recovery"
    )
    options.add_argument("--pause-s", type=float, default=0.2, help="how long a step computes")
    options.add_argument("--sample-s", type=float, default=10.0, help="between measurements of what may grow")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the logs")
    args = options.parse_args()
    if not args.faults and not args.seconds:
        options.error("give --faults or --seconds")
    if (reason := unavailable()) is not None:
        sys.exit(f"elastic_chaos needs a laboratory network: {reason}")
    with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as directory:
        results = measure(args, Path(directory))
    recovered: dict[str, list[float]] = {}
    for fault in results["faults"]:
        recovered.setdefault(fault["kind"], []).append(fault["seconds"])
    results["kinds"] = {kind: len(seconds) for kind, seconds in recovered.items()}
    results["recovered_s"] = {kind: Summary.of(seconds) for kind, seconds in recovered.items()}
    results["two_at_once"] = sum(fault["together"] > 1 for fault in results["faults"])
    results["of_the_root"] = sum(fault["root"] for fault in results["faults"])
    results["faults"] = [
        "{kind}: {on}, step {at_step}, up {up}, ranks {of}, {seconds} s".format(**fault) for fault in results["faults"]
    ]
    title = __doc__.partition("\n")[0]
    rows = [[kind, str(seconds.count), f"{seconds:.1f}"] for kind, seconds in results["recovered_s"].items()]
    rows.sort(key=lambda row: -int(row[1]))
    table("Faults", ["kind", "struck", "two steps committed, s"], rows)
    names = ("first", "last", "most")
    rows = [[name, *(str(each[part]) for part in names)] for name, each in results["growth"].items()]
    table("Medians of the first and of the last quarter", ["", *names], rows)
    grown = [name for name, each in results["growth"].items() if each["grew"]]
    rows = [
        ["faults", str(len(results["faults"]))],
        ["two at once", str(results["two_at_once"])],
        ["on the root's host", str(results["of_the_root"])],
        ["seconds", str(results["seconds"])],
        ["generations", str(results["generations"])],
        ["ranks: generations", str(results["ranks_of_generations"])],
        ["steps, of them made again", f"{results['steps']}, {results['steps_repeated']}"],
        ["samples; epochs", f"{results['samples']}; {results['epochs']}"],
        ["stopped", str(results["stopped"] is not None)],
        ["launchers that ended by themselves", str(len(results["launchers_ended"]))],
        ["wrong samples, steps or parameters", str(len(results["problems"]))],
        ["grown", ", ".join(grown) or "nothing"],
    ]
    table(title, ["", ""], rows)
    parameters = {
        name: getattr(args, name) for name in ("hosts", "faults", "seconds", "every_s", "pause_s", "sample_s", "seed")
    }
    write_json(args.json, question=title, parameters=parameters, results=results)
    bad = results["stopped"] or results["problems"] or grown or any(results["exit_codes"].values())
    for line in (results["stopped"], *results["problems"][:10]):
        if line:
            print(line, file=sys.stderr)
    sys.exit(1 if bad or not results["exit_codes"] else 0)


if __name__ == "__main__":
    main()
