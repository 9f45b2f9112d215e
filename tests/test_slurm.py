"""`examples/slurm/train.sbatch` under a real Slurm, each node a laboratory host with a slurmd of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import ENDLESS, EXAMPLE, PACED, wait_until
from lab import EtcdMember
from netlab import NetLab

from resilient_run.daemon.tier.tier import Tier
from resilient_run.launcher.etcd_server import find_etcd

SBATCH = EXAMPLE.parent / "slurm" / "train.sbatch"
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_PROGRAMS = {name: shutil.which(name, path=_PATH) for name in ("munged", "slurmctld", "slurmd")}

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(None in _PROGRAMS.values(), reason="needs Slurm and munge (apt-get install slurm-wlm munge)"),
]

_CONFIG = """
ClusterName=lab
SlurmctldHost=ctl({ctl})
SlurmUser=root
AuthInfo=socket={root}/munge/socket,cred_expire=30
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/{tracking}
MailProg=/bin/true
TaskPlugin=task/none
SelectType=select/linear
SlurmdTimeout=20
KillWait=60
MessageTimeout=60
SchedulerParameters=batch_sched_delay=0,sched_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


# Nearly every cluster tracks processes by control groups, by which all processes of a step end with it.
_FREEZER = Path("/sys/fs/cgroup/freezer")
_MOUNT_FREEZER = (
    f"mount -t tmpfs none {_FREEZER.parent} && mkdir {_FREEZER} && mount -t cgroup -o freezer none {_FREEZER}"
)


def _tracking() -> str:
    """Return how Slurm can track processes here: by control groups, which need version 1 with Slurm 22.05."""
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", _MOUNT_FREEZER], capture_output=True)
    return "linuxproc" if tried.returncode else "cgroup"


class Slurm:
    """A cluster of `names`, in a lab whose host "ctl" has the controller.

    Args:
        build: The `netlab` fixture.
        root: Directory of the test.
        names: The nodes.
    """

    def __init__(self, build: Callable[..., NetLab], root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names
        self.net = build([*names, "ctl"], rate="1gbit")
        self.processes: list[subprocess.Popen[Any]] = []
        for name in ("munge", "state", "bin", "shared", *(f"spool-{name}" for name in names)):
            (root / name).mkdir(mode=0o700)
        (root / "munge" / "key").write_bytes(os.urandom(128))
        (root / "munge" / "key").chmod(0o400)
        self._tracking = _tracking()
        nodes = "\n".join(f"NodeName={name} NodeAddr={self.net.host(name).address} CPUs=1" for name in names)
        self.config = root / "slurm.conf"
        self.config.write_text(
            _CONFIG.format(root=root, ctl=self.net.host("ctl").address, nodes=nodes, tracking=self._tracking)
        )
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._make_programs()

    def start(self) -> None:
        """Start it, and return once its nodes are there."""
        munge = self.root / "munge"
        paths = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in paths.items()]
        # It doubts directories that others may write to, as /tmp is.
        self._start("munged", None, "--foreground", "--force", "--num-threads=2", *options)
        wait_until((munge / "socket").exists, timeout_s=30, what=lambda: self.log("munged"))
        self._start("slurmctld", "ctl", "-D", "-f", str(self.config))
        for name in self.names:
            self.start_node(name)

        def is_up() -> bool:
            assert all(process.poll() is None for process in self.processes), self.log("ctl")
            return self.states() == dict.fromkeys(self.names, "idle")

        wait_until(
            is_up,
            timeout_s=120,
            what=lambda: f"idle nodes, not {self.states()}\n{self.log('ctl')}",
            pause_s=0.2,
        )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", name, "-D", "-N", name, "-f", str(self.config))

    def _make_programs(self) -> None:
        """Put the commands that the script calls on a path, as an installation does."""
        for name, call in {"resilient-run": "-m resilient_run", "resilientctl": f'-c "{_CTL}"'}.items():
            path = self.root / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -P {call} "$@"\n')
            path.chmod(0o755)
        (self.root / "bin" / "etcd").symlink_to(find_etcd()[0])

    def _start(self, program: str, host: str | None, *arguments: str) -> None:
        """Start a program, if on a host of the lab, then with its host name and a /dev/shm of its own."""
        command = [str(_PROGRAMS[program]), *arguments]
        if host is not None:
            freezer = _MOUNT_FREEZER if self._tracking == "cgroup" else "true"
            inside = f'hostname {host} && mount -t tmpfs none /dev/shm && {freezer} && exec "$@"'
            command = [*self.net.host(host).prefix, "unshare", "--mount", "--uts", "sh", "-c", inside, "sh", *command]
        with (self.root / f"{host or program}.log").open("ab") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self.env)
        self.processes.append(process)

    @property
    def env(self) -> dict[str, str]:
        """The environment of Slurm's commands, and of the jobs that they submit."""
        path = f"{self.root / 'bin'}:{_PATH}"
        return {**os.environ, "SLURM_CONF": str(self.config), "PATH": path, "OMP_NUM_THREADS": "1"}

    def run(self, *command: str, **env: str) -> str:
        """Return what a command of Slurm's prints, run where the controller is."""
        words = [*self.net.host("ctl").prefix, *command]
        done = subprocess.run(
            words, env={**self.env, **env}, cwd=self.root, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.log('ctl')}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return node → state."""
        try:
            lines = self.run("sinfo", "--Node", "--noheader", "--format=%N %T").splitlines()
        except AssertionError:
            return {}  # the controller does not answer yet
        return dict(line.split(maxsplit=1) for line in lines)

    def log(self, name: str) -> str:
        """Return the end of a program's log."""
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def close(self) -> None:
        """End what was started; the lab kills what is left on its hosts."""
        for host in self.net.hosts:
            host.kill()
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            for group, _, _ in os.walk(_FREEZER / f"slurm_{name}", topdown=False):
                # A killed process leaves its group a moment later.
                tasks = Path(group, "tasks")
                wait_until(lambda tasks=tasks: not tasks.read_text(), timeout_s=30, what=f"{group} to be empty")
                os.rmdir(group)


_CTL = "import sys; from resilient_run.daemon.ctl.cli import resilientctl; sys.argv[0] = 'resilientctl'; resilientctl()"


class Job:
    """The committed script, submitted; every rank prints JSON lines into one log."""

    def __init__(self, slurm: Slurm, steps: int, **env: str) -> None:
        self.slurm = slurm
        self.output = slurm.root / "shared" / "out.log"
        script = [*PACED, "--steps", str(steps)]
        settings = {"SHARED": str(slurm.root / "shared"), "NPROC": "1", "GLOO_SOCKET_IFNAME": "eth0", **env}
        settings["RESILIENT_RUN_DIR"] = "/dev/shm/run"  # /tmp is the machine's, and one for all nodes
        command = ["sbatch", "--parsable", f"--output={self.output}", "--time=60", str(SBATCH), *script]
        self.id = slurm.run(*command, **settings).strip()

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines so far."""
        found = []
        for line in self.text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                found.append(entry)
        return found

    def steps(self) -> list[tuple[int, int, float]]:
        """Return (rank, step, loss) of every completed step, in the order printed."""
        return [(line["rank"], line["step"], line["loss"]) for line in self.lines() if "loss" in line]

    def starts(self) -> int:
        """Return how many workers have announced themselves so far."""
        return sum("pid" in line for line in self.lines())

    def reached(self, step: int) -> bool:
        """Tell whether `step` or a later one was completed."""
        return any(done >= step for _, done, _ in self.steps())

    def state(self) -> str:
        """Return Slurm's word for how the job is."""
        shown = self.slurm.run("scontrol", "--oneliner", "show", "job", self.id)
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)["JobState"]

    def wait(self, *states: str, timeout_s: float = 300.0) -> None:
        """Wait until the job is in one of `states`."""
        wait_until(lambda: self.state() in states, timeout_s=timeout_s, what=self.describe, pause_s=0.5)

    def describe(self) -> str:
        """Return what there is to know of a job that is not as it should be."""
        return f"job {self.id} is {self.state()}, nodes {self.slurm.states()}\n{self.text[-6000:]}"


@pytest.fixture
def slurm(netlab: Callable[..., NetLab], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    # Control groups are named after nodes, and belong to the machine.
    nodes = getattr(request, "param", 3)
    made = Slurm(netlab, tmp_path, [f"n{number}p{os.getpid()}" for number in range(nodes)])
    try:
        made.start()
        yield made
    finally:
        made.close()


def node_of(slurm: Slurm, pid: int) -> str:
    """Return the node that a process runs on."""
    return next(name for name in slurm.names if pid in slurm.net.host(name).pids())


def assert_one_training(job: Job, steps: int) -> None:
    """Every step was trained, with one loss of each rank however often, and the run ended.

    The last lines of a lost node may be lost with it.
    """
    losses: dict[tuple[int, int], float] = {}
    for rank, step, loss in job.steps():
        assert losses.setdefault((rank, step), loss) == loss, f"rank {rank} step {step}"
    assert {step for _, step in losses} == {*range(1, steps + 1)}
    assert [line for line in job.lines() if "params_sha256" in line], job.describe()


@pytest.fixture
def etcd(slurm: Slurm) -> Iterator[EtcdMember]:
    host = slurm.net.host("ctl")
    member = EtcdMember(host, slurm.root, {host.name: f"http://{host.address}:2380"})
    member.start()
    wait_until(member.answers, timeout_s=60, what="etcd to serve", pause_s=0.1)
    yield member
    member.kill()


def test_job_outlives_a_worker_and_a_node(slurm: Slurm, etcd: EtcdMember) -> None:
    job = Job(slurm, 200, ETCD=etcd.endpoint)
    wait_until(lambda: job.reached(5), timeout_s=120, what=job.describe, pause_s=0.1)
    pids = {line["rank"]: line["pid"] for line in job.lines() if "pid" in line}
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: "all 2 host(s) recovered" in job.text, timeout_s=120, what=job.describe, pause_s=0.1)
    pids = {line["rank"]: line["pid"] for line in job.lines() if "pid" in line}
    # The first node runs the script itself.
    lost = next(name for name in (node_of(slurm, pid) for pid in pids.values()) if name != slurm.names[0])
    slurm.net.host(lost).lose()
    job.wait("COMPLETED", "FAILED", "NODE_FAIL", timeout_s=200)
    assert_one_training(job, 200)
    assert job.text.count("all 2 host(s) recovered") == 2, job.describe()


@pytest.mark.parametrize("slurm", [4], indirect=True)
def test_slurm_provides_a_host_and_takes_one_back(slurm: Slurm, etcd: EtcdMember) -> None:
    """When a host is lost, the root submits the script, and cancels the job of a host that is one too many."""
    first, lost, *others = slurm.names
    shared = slurm.root / "shared"
    launch, key, config = shared / "launch", shared / "key", shared / "config.toml"
    slurm.run("resilientctl", "keygen", str(key))
    config.write_text(f'[root]\nslurm_script = "{launch}"\n')
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoint]
    words += ["--rr-key-file", str(key), "--rr-config", str(config), *ENDLESS]
    launch.write_text(
        f"#!/bin/bash\n#SBATCH --no-requeue\n#SBATCH --output={shared}/%N.log\n"
        f'exec resilient-run --rr-host-id "$SLURMD_NODENAME" --rdzv-id "$RUN_ID" {" ".join(words)}\n'
    )
    launch.chmod(0o600)

    def submit(node: str, name: str) -> None:
        env = {"RUN_ID": "given", "GLOO_SOCKET_IFNAME": "eth0", "RESILIENT_RUN_DIR": "/dev/shm/run"}
        slurm.run("sbatch", f"--job-name={name}", f"--nodelist={node}", str(launch), **env)

    def provided() -> list[str]:
        """Return the nodes of running jobs that have the name which the root gives them."""
        running = slurm.run("squeue", "--noheader", "--states=RUNNING", "--name=resilient-given", "--format=%N")
        return running.split()

    def text(node: str) -> str:
        path = shared / f"{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs() -> str:
        shown = [f"{name}:\n{text(name)[-4000:]}" for name in slurm.names]
        return "\n".join([slurm.run("squeue"), str(slurm.states()), *shown])

    for name in (first, lost):
        submit(name, "mine")
    wait_until(lambda: all('"step": 5,' in text(name) for name in (first, lost)), timeout_s=120, what=logs, pause_s=0.2)
    slurm.net.host(lost).lose()
    wait_until(provided, timeout_s=120, what=logs, pause_s=0.5)
    (newcomer,) = provided()
    assert newcomer in others
    wait_until(lambda: '"loss"' in text(newcomer), timeout_s=120, what=logs, pause_s=0.5)
    (surplus,) = set(others) - {newcomer}
    submit(surplus, "resilient-given")
    wait_until(lambda: "CANCELLED" in text(surplus), timeout_s=120, what=logs, pause_s=0.2)
    assert "it is released" in text(surplus)
    wait_until(lambda: provided() == [newcomer], timeout_s=120, what=logs, pause_s=0.5)
    done = text(newcomer).count('"loss"')
    wait_until(lambda: text(newcomer).count('"loss"') > done, timeout_s=60, what=logs, pause_s=0.2)


def test_job_goes_on_after_its_time_limit(slurm: Slurm) -> None:
    """Its signal comes early here. The job's own etcd ends with it, so the persistent tier is all that is left."""
    job = Job(slurm, 100_000)
    wait_until(lambda: job.reached(10), timeout_s=120, what=job.describe, pause_s=0.1)
    slurm.run("scancel", "--signal=USR1", "--batch", job.id)
    wait_until(lambda: "begins with the persisted step" in job.text, timeout_s=280, what=job.describe, pause_s=0.5)
    wait_until(lambda: job.starts() == 4, timeout_s=120, what=job.describe, pause_s=0.5)
    published = Tier(str(slurm.root / "shared" / "checkpoints"), f"slurm-{job.id}").published()
    (persisted,) = {int(step) for step in re.findall(r"begins with the persisted step (\d+)\n", job.text)}
    assert persisted in {step for _, step in published}, "later ones are of the run that goes on"

    def again() -> list[int]:
        """Return the steps that were trained after the last worker had begun."""
        lines = job.lines()
        begun = max(index for index, line in enumerate(lines) if "pid" in line)
        return [line["step"] for line in lines[begun:] if "step" in line]

    wait_until(again, timeout_s=120, what=job.describe, pause_s=0.5)
    assert again()[0] == persisted + 1
