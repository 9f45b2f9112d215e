"""The daemon as a user's service: stopped, started, upgraded and downgraded, it keeps the job."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Host, kill, recovered, wait_until
from gated import STEPS, Gate, assert_undisturbed, jobs_at, train_to

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"),
]

USER = 65534
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
# Python and this repository may lie where only root can read; writing stays forbidden.
MAY_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
NEWER = """
from resilient_run.ckpt.format import slot, wire
slot.MAGIC, wire.VERSION = slot.MAGIC[:-1] + bytes([slot.MAGIC[-1] + 1]), wire.VERSION + 1
from resilient_run.daemon.cli import resilientd
resilientd(prog_name="resilientd")
"""


class Service:
    """What systemd does with the unit: it starts the daemon as its user, waits until that is ready, and stops it."""

    def __init__(self, root: Path, *, uid: int = 0) -> None:
        self.shm_dir = Path("/dev/shm") / f"{root.name}-{os.getpid()}-service"
        # Where its user gets to, as to /run/resilientd.
        self.run_dir = self.shm_dir.with_suffix(".run")
        self.socket_path = self.run_dir / "resilientd.sock"
        self.log_path = root / "service.log"
        self._notify = root / "notify"
        self._process: subprocess.Popen[bytes] | None = None
        self._prefix = () if uid == 0 else (*AS_USER, *MAY_READ)
        self.run_dir.mkdir(mode=0o700)
        os.chown(self.run_dir, uid, uid)

    def start(self, *program: str) -> None:
        """Start the daemon; `program` instead of the one that is installed."""
        directories = ["--run-dir", str(self.run_dir), "--shm-dir", str(self.shm_dir)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, self.log_path.open("ab") as log:
            manager.bind(str(self._notify))
            self._notify.chmod(0o666)
            manager.settimeout(60)
            self._process = subprocess.Popen(
                [*self._prefix, sys.executable, "-P", *(program or ("-m", "resilient_run.daemon")), *directories],
                env={**os.environ, "NOTIFY_SOCKET": str(self._notify)},
                stdout=log,
                stderr=log,
            )
            assert manager.recv(100) == b"READY=1", self.log
        self._notify.unlink()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        assert self._process.wait(60) == 0, self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def slots(self) -> set[tuple[Path, int]]:
        """Return every slot file with its inode."""
        return {(path, path.stat().st_ino) for path in self.shm_dir.glob("*/*.slot")}

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for directory in (self.run_dir, self.shm_dir):
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def service(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(tmp_path, uid=getattr(request, "param", 0))
    yield made
    made.close()


@pytest.mark.parametrize(("service", "uid"), [(USER, USER), (0, 0)], indirect=["service"], ids=["user", "root"])
def test_a_service_keeps_its_job_over_stop_start_and_upgrade(
    cluster: Cluster, service: Service, tmp_path: Path, uid: int
) -> None:
    gate = Gate(tmp_path / "gate")
    service.start()
    host = cluster.host("a")
    if uid != 0:
        host.prefix = (*AS_USER, *MAY_READ)
        os.chown(host.events_path.parent, USER, USER)
    host.launch(
        ["--standalone", "--nproc-per-node", "2"], gate.script, RESILIENT_RUN_DIR=str(service.run_dir), HOME="/tmp"
    )
    wait_until(lambda: jobs_at(service.socket_path) != {}, timeout_s=180, what="the job", host=host)
    train_to(4, gate, [host], service.socket_path)
    slots = service.slots()
    assert len(slots) == 4

    # Training goes on meanwhile, nobody else takes the service's place, and what is committed goes on afterwards.
    service.stop()
    gate.open(gate.step + 2)
    wait_until(lambda: host.reached(gate.step), timeout_s=180, what="two steps", host=host)
    wait_until(
        lambda: "waiting for the service" in host.output, timeout_s=180, what="the launcher to say so", host=host
    )
    assert not service.socket_path.exists()
    assert not (service.run_dir / "resilientd.log").exists()
    service.start()
    train_to(gate.step + 1, gate, [host], service.socket_path)

    # A worker that is killed while the service is away is recovered when it is back.
    service.stop()
    kill(host.pids()[1])
    wait_until(lambda: "waiting for the daemon" in host.output, timeout_s=180, what="the launcher to wait", host=host)
    service.start()
    train_to(gate.step + 1, gate, [host], service.socket_path)
    wait_until(lambda: recovered(host) == 1, timeout_s=180, what="the recovery", host=host)

    # Another version refuses the job, leaves its slots alone, and the old one goes on with them.
    service.stop()
    service.start("-c", NEWER)
    wait_until(lambda: "refuses to go on with the job" in host.output, timeout_s=180, what="a refusal", host=host)
    gate.open(gate.step + 2)
    wait_until(lambda: host.reached(gate.step), timeout_s=180, what="two steps", host=host)
    assert service.slots() == slots
    wait_until(lambda: service.log.count("is of another version") == 4, timeout_s=180, what=lambda: service.log)
    service.stop()
    service.start()
    train_to(gate.step + 1, gate, [host], service.socket_path)
    kill(host.pids()[0])
    gate.open(STEPS)
    assert host.wait(300) == 0, host.output
    assert recovered(host) == 2
    # What a daemon had not heard yet when it was asked, nobody knows.
    assert {event["steps_lost"] for event in host.recoveries()} <= {0, 1, None}
    assert_undisturbed([host])
    assert service.slots() == set()


def test_a_launcher_does_not_take_the_place_of_a_service_that_is_down(
    cluster: Cluster, service: Service, tmp_path: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.open(STEPS)
    service.start()
    service.stop()
    host: Host = cluster.host("a")
    host.launch(["--standalone", "--nproc-per-node", "1"], gate.script, RESILIENT_RUN_DIR=str(service.run_dir))
    assert host.wait(300) == 1
    assert "it is a service: start it" in host.output
    assert not service.socket_path.exists()
