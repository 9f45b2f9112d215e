"""The shipped units under a real systemd: a user's job persists in their home and keeps its slots over restarts."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from booted import HOME, UID, USER, Booted, unavailable
from cluster import wait_until
from gated import SCRIPT, Gate, on_etcd

from resilient_run.launcher.etcd_server import find_etcd

pytestmark = [pytest.mark.jobs, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))]

UNIT = Path(__file__).parent.parent / "systemd" / "resilientd@.service"
USER_UNIT = UNIT.parent / "user" / "resilientd.service"
SERVICE = f"resilientd@{USER}.service"
STEPS = 100
_SKIPPED_S = 3.0
DROP_IN = f"""
[Service]
Environment=PYTHONPATH={os.environ.get("PYTHONPATH", "")}
ExecStart=
ExecStart={sys.executable} -P -m resilient_run.daemon --run-dir {{}}
"""
RUNTIME_DIR = f"/run/user/{UID}"
# What logind, which is not here, starts for a user who has logged in.
MANAGER = f"""
[Service]
Type=notify
User={USER}
Environment=HOME={HOME} XDG_RUNTIME_DIR={RUNTIME_DIR}
ExecStartPre=+install -d -m 700 -o {UID} -g {UID} {RUNTIME_DIR}
ExecStart=/usr/lib/systemd/systemd --user
Delegate=yes
KillMode=mixed
"""
ETCD = f"""
[Service]
User={USER}
ExecStart={shlex.join(find_etcd())} --data-dir {HOME}/etcd
"""
STATUS = """
import json, socket, sys
from resilient_run.ckpt.format import wire
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1] + "/resilientd.sock")
sock.sendall(wire.encode({"id": 1, "op": "status"}))
print(json.dumps(wire.recv_message(sock)))
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[Booted]:
    """A booted machine on which the service of `USER` runs, installed as docs/operations/daemon.md says."""
    shared = Path(tempfile.mkdtemp(prefix="rr-booted-"))
    shared.chmod(0o755)
    units = {UNIT.name: UNIT.read_text(), f"{UNIT.name}.d/override.conf": DROP_IN.format("/run/resilientd/%i")}
    units |= {"etcd.service": ETCD, "manager.service": MANAGER}
    try:
        (shared / "s").mkdir()
        with Booted(shared / "s", units) as booted:
            booted.run("systemctl", "start", "etcd.service", SERVICE)
            yield booted
    finally:
        shutil.rmtree(shared)


@pytest.fixture
def start(machine: Booted) -> Iterator[Callable[..., "Run"]]:
    """Starts runs on the machine; they are gone with the test."""
    with contextlib.ExitStack() as runs:
        yield lambda *arguments, **options: runs.enter_context(contextlib.closing(Run(machine, *arguments, **options)))


class Run:
    """A run of one host and one rank, which `USER` starts and a gate holds."""

    def __init__(self, machine: Booted, name: str, *options: str, run_dir: str = f"/run/resilientd/{USER}") -> None:
        self.machine, self.name, self.run_dir = machine, name, run_dir
        self.gate = Gate(machine.shared / f"{name}.gate")
        self.output_path = machine.shared / f"{name}.output"
        script = [str(SCRIPT), str(self.gate.path), str(STEPS)]
        command = ["env", f"XDG_RUNTIME_DIR={RUNTIME_DIR}"]
        command += [sys.executable, "-P", "-m", "resilient_run", *on_etcd("127.0.0.1:2379", name, nproc=1)]
        with self.output_path.open("w") as output:
            self.process = machine.popen(*command, *options, *script, stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def committed(self) -> int:
        """Return the newest committed step, 0 while there is none or no daemon."""
        with contextlib.suppress(AssertionError):
            status = json.loads(self.machine.run(sys.executable, "-P", "-c", STATUS, self.run_dir, user=True))
            return sum(
                (job.get("watermark") or {"step": 0})["step"] for job in status["jobs"] if job["run_id"] == self.name
            )
        return 0

    def train_to(self, step: int) -> None:
        """Let it train until `step` or a later one is committed."""

        opened_s = time.monotonic()

        def done() -> bool:
            nonlocal opened_s
            committed = self.committed()
            # What was captured while no daemon was there to hear of it is followed by a step that is committed.
            if committed >= self.gate.step or time.monotonic() > opened_s + _SKIPPED_S:
                opened_s = time.monotonic()
                self.gate.open(min(self.gate.step + 1, STEPS - 1))
            return committed >= step

        wait_until(done, timeout_s=120, what=lambda: f"commit of {step}:\n{self.output}", pause_s=0.1)

    def end(self) -> None:
        self.gate.open(STEPS)
        assert self.process.wait(120) == 0, self.output

    def close(self) -> None:
        """Leave nothing behind, however it went."""
        self.process.kill()
        self.process.wait()

    def started_at(self) -> list[int]:
        """Return the step that each start of the worker went on from."""
        lines = [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]
        return [line["started_at"] for line in lines if "started_at" in line]


def test_the_service_may_do_nothing_more_than_it_needs(machine: Booted) -> None:
    pid = machine.property_of(SERVICE, "MainPID")
    status = dict(line.split(":", 1) for line in machine.run("cat", f"/proc/{pid}/status").splitlines())
    expected = {"Uid": f"{UID} " * 4, "CapBnd": "0" * 16, "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    assert {name: status[name].split() for name in expected} == {name: text.split() for name, text in expected.items()}
    mounts = [line.split() for line in machine.run("cat", f"/proc/{pid}/mountinfo").splitlines()]
    options = {fields[4]: set(fields[5].split(",")) for fields in mounts}
    assert {place for place in ("/usr", "/etc", "/proc/sys") if "ro" in options[place]} == {"/usr", "/etc", "/proc/sys"}
    assert "rw" in options["/dev/shm"]


def test_a_run_persists_in_its_users_home(machine: Booted, start: Callable[..., Run]) -> None:
    """The daemon of the service writes there, with that user's rights; what it wrote is what the run id begins with."""
    tier = HOME / "checkpoints" / "tier"
    config = machine.shared / "persist.toml"
    config.write_text(f'[persist]\ntarget = "{tier}"\nevery_steps = 1\nevery_s = 0\n')
    run = start("persisted", "--rr-config", str(config))
    run.train_to(3)

    def published() -> int:
        run.train_to(run.gate.step + 1)
        manifests = machine.run("sh", "-c", f"find {tier} -name manifest.json -user {USER} || true")
        return len(manifests.splitlines())

    wait_until(published, timeout_s=60, what=lambda: f"a published step:\n{run.output}")
    run.end()
    again = start("persisted", "--rr-config", str(config))
    again.end()
    assert again.started_at() != [0]


def test_slots_outlive_the_service(machine: Booted, start: Callable[..., Run]) -> None:
    """Killed or restarted, the daemon that systemd starts next has what was captured, and the run goes on."""
    outlives(start("restarted"), partial(machine.run, "systemctl"), SERVICE)


def test_slots_outlive_the_service_of_a_users_own_systemd(machine: Booted, start: Callable[..., Run]) -> None:
    """The unit that needs no root, under the user's manager, installed as docs/operations/daemon.md says."""
    shipped = machine.shared / USER_UNIT.name
    shutil.copy(USER_UNIT, shipped)
    drop_in = machine.shared / "override.conf"
    drop_in.write_text(DROP_IN.format("%t/resilient-run"))
    home = f"{HOME}/.config/systemd/user"
    systemctl = partial(machine.run, "env", f"XDG_RUNTIME_DIR={RUNTIME_DIR}", "systemctl", "--user", user=True)
    machine.run("systemctl", "stop", SERVICE)
    machine.run("rm", "-r", f"/run/resilientd/{USER}")  # as if the machine had been booted without that service
    try:
        machine.run("install", "-D", "-m", "644", str(shipped), f"{home}/{shipped.name}", user=True)
        machine.run("install", "-D", "-m", "644", str(drop_in), f"{home}/{shipped.name}.d/override.conf", user=True)
        machine.run("systemctl", "start", "manager.service")
        systemctl("enable", "--now", "resilientd")
        outlives(start("own", run_dir=f"{RUNTIME_DIR}/resilient-run"), systemctl, shipped.name)
    finally:
        machine.run("systemctl", "stop", "manager.service")
        machine.run("systemctl", "start", SERVICE)


def outlives(run: Run, systemctl: Callable[..., str], service: str) -> None:
    """Kill and restart the service under the run, which goes on where it was."""
    pid = partial(systemctl, "show", service, "--property=MainPID", "--value")
    run.train_to(3)
    for command in (("kill", "--kill-whom=main", "--signal=KILL", service), ("restart", service)):
        before = pid()
        systemctl(*command)
        wait_until(lambda before=before: pid() not in (before, "0\n"), timeout_s=60, what="a restart")
        run.train_to(run.gate.step + 3)
    run.end()
    assert run.started_at() == [0]
