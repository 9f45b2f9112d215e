"""The daemon as a systemd service: notify socket, watchdog, the unit's promises, and being found by `resilient-run`."""

import asyncio
import configparser
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import stop
from hosts import Host

from resilient_run.daemon.base.settings import find_settings
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.notify import ServiceManager

pytestmark = pytest.mark.jobs

UNIT = Path(__file__).parent.parent / "systemd" / "resilientd@.service"
USER_UNIT = UNIT.parent / "user" / "resilientd.service"
MOST_EXPOSURE = 3.0
WATCHDOG_USEC = "400000"
SILENCE_S = 1.5


class NotifySocket:
    """The service manager's end, as a real datagram socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + address[1:] if address.startswith("@") else address)

    def receive(self, timeout_s: float = 30.0) -> str:
        self._sock.settimeout(timeout_s)
        return self._sock.recv(4096).decode()

    def until(self, state: str) -> None:
        """Read until `state` arrives."""
        while self.receive() != state:
            pass

    def is_silent(self) -> bool:
        """Tell whether nothing comes for several watchdog intervals, after what was on its way."""
        self._sock.setblocking(False)
        try:
            while self._sock.recv(4096):
                pass
        except BlockingIOError:
            pass
        try:
            self.receive(SILENCE_S)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[NotifySocket]:
    made = NotifySocket(str(tmp_path / "notify"))
    yield made
    made.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host("a", tmp_path, run_id="unused", config=EtcdConfig(endpoints=("127.0.0.1:1",)))
    yield made
    made.close()


def test_a_daemon_says_that_it_is_ready_alive_and_stopping(
    host: Host, manager: NotifySocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    host.start()
    assert host.process is not None
    first = [manager.receive() for _ in range(5)]
    assert first.count("READY=1") == 1
    assert first.count("WATCHDOG=1") == 4
    stop(host.process.pid)
    assert manager.is_silent()
    host.process.send_signal(signal.SIGCONT)
    assert manager.receive() == "WATCHDOG=1"
    host.process.send_signal(signal.SIGTERM)
    manager.until("STOPPING=1")
    assert host.process.wait(30) == 0
    assert manager.is_silent()


def test_without_a_watchdog_none_is_fed(host: Host, manager: NotifySocket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    host.start()
    assert manager.receive() == "READY=1"
    assert host.stop() == 0
    assert manager.receive() == "STOPPING=1"
    assert manager.is_silent()


def test_a_manager_that_does_not_listen_stops_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(host.run_dir / "nobody"))
    monkeypatch.setenv("WATCHDOG_USEC", WATCHDOG_USEC)
    host.start()
    assert host.status()["jobs"] == []
    assert "cannot send READY=1" in host.log
    assert host.stop() == 0


def test_a_stuck_event_loop_gives_no_sign_of_life(manager: NotifySocket) -> None:
    service = ServiceManager({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": WATCHDOG_USEC})
    stuck, seen = threading.Event(), threading.Event()

    async def daemon() -> None:
        watching = asyncio.create_task(service.watch())
        await asyncio.to_thread(manager.until, "WATCHDOG=1")
        stuck.set()
        seen.wait(30)  # The event loop hangs here.
        await asyncio.to_thread(manager.until, "WATCHDOG=1")
        watching.cancel()

    silent: list[bool] = []

    def observe() -> None:
        stuck.wait(30)
        silent.append(manager.is_silent())
        seen.set()

    observer = threading.Thread(target=observe)
    observer.start()
    asyncio.run(daemon())
    observer.join()
    service.close()
    assert silent == [True]


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_ours_only_when_it_says_so(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert ServiceManager(environ).watchdog_s == watchdog_s


def test_abstract_addresses_are_understood() -> None:
    manager = NotifySocket(f"@resilientd-test-{os.getpid()}")
    try:
        with contextlib.closing(ServiceManager({"NOTIFY_SOCKET": manager.address})) as service:
            service.ready()
        assert manager.receive() == "READY=1"
    finally:
        manager.close()


def read_unit(path: Path = UNIT) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(path.read_text())
    return unit


def test_the_unit_keeps_slots_over_a_restart() -> None:
    service = read_unit()["Service"]
    assert (service["Type"], service["Restart"], service["LimitMEMLOCK"]) == ("notify", "always", "infinity")
    assert int(service["WatchdogSec"]) > 0
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("resilientd/%i", "yes")
    assert service["ExecStart"].endswith(" --run-dir /run/resilientd/%i")
    assert read_unit(UNIT.parent / "user" / "resilientd.service")["Service"]["LimitMEMLOCK"] == "infinity"
    # A private or read-only /dev/shm, or one that is cleared, would cost the slots.
    assert not {"PrivateIPC", "PrivateDevices", "RemoveIPC"} & set(service)
    assert service["ProtectSystem"] == "full"


def test_the_unit_runs_as_its_user_who_may_do_nothing_more() -> None:
    service = read_unit()["Service"]
    assert (service["User"], service["CapabilityBoundingSet"], service["NoNewPrivileges"]) == ("%i", "", "yes")
    assert service["RuntimeDirectoryMode"] == "0700"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_exposes_little(tmp_path: Path) -> None:
    unit = tmp_path / "resilientd@daemon.service"
    unit.write_text(UNIT.read_text())
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= MOST_EXPOSURE, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_a_users_manager_takes_the_unit_without_root(tmp_path: Path) -> None:
    unit = tmp_path / "resilientd.service"
    unit.write_text(USER_UNIT.read_text().replace("%h/.local/bin/resilientd", sys.executable))
    command = ["systemd-analyze", "--user", "verify", str(unit)]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_resilient_run_looks_where_the_unit_without_root_serves(tmp_path: Path) -> None:
    found = find_settings({"XDG_RUNTIME_DIR": str(tmp_path)})
    arguments = read_unit(USER_UNIT)["Service"]["ExecStart"].replace("%t", str(tmp_path)).split()
    assert arguments[1:] == ["--run-dir", str(found.run_dir)]


def _can_have_its_own_run() -> bool:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /run"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_have_its_own_run(), reason="needs the right to mount a tmpfs in a mount namespace")
def test_resilient_run_finds_the_daemon_of_the_service(tmp_path: Path) -> None:
    """In a mount namespace with a /run of its own the daemon runs as the unit starts it; nobody says where it is."""
    shm_dir = Path("/dev/shm") / f"rr-test-{os.getpid()}-{tmp_path.name}"
    run_dir = f"/run/resilientd/{pwd.getpwuid(os.geteuid()).pw_name}"
    script = tmp_path / "script.py"
    script.write_text("import os; print('socket', os.environ['RESILIENT_SOCKET'])\n")
    code = "from resilient_run.daemon.ctl.cli import resilientctl; resilientctl(prog_name='resilientctl')"
    inside = f"""
    mount -t tmpfs none /run
    {sys.executable} -P -m resilient_run.daemon --run-dir {run_dir} --shm-dir {shm_dir} &
    daemon=$!
    trap 'kill $daemon; wait $daemon' EXIT
    while ! test -S {run_dir}/resilientd.sock; do test -d /proc/$daemon || exit 3; sleep 0.05; done
    echo status $({sys.executable} -P -c "{code}" status --json)
    {sys.executable} -P -m resilient_run --standalone --nproc-per-node 1 {script}
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENT_")}
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside], env=env, capture_output=True, text=True, timeout=120
        )
    finally:
        shutil.rmtree(shm_dir, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines["socket"] == f"{run_dir}/resilientd.sock"
    assert json.loads(lines["status"])["jobs"] == []
