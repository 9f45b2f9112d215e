"""The run key and etcd's password are with launchers and daemons, and nowhere else that anybody could look."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner
from cluster import Cluster, Host, kill, recovered, wait_until
from etcd_process import EtcdProcess, ask
from gated import STEPS, Gate, on_etcd, train_to

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.tier.tier import Tier, TierError
from resilient_run.launcher.config import options as config_options

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(600)]

KEY = "a-run-key-of-at-least-thirty-two-characters"
PASSWORD = "a-password-that-etcd-asks-for"
SECRETS = (KEY.encode(), PASSWORD.encode())
GIVEN = {"RESILIENT_KEY": KEY, "RESILIENT_ETCD_USER": "trainer", "RESILIENT_ETCD_PASSWORD": PASSWORD}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    process.start()
    process.enable_auth(PASSWORD)
    yield process
    process.kill()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    cluster = Cluster(tmp_path / "cluster")
    made = cluster.host("a")
    made.forked = False  # The test's processes would have the secrets in memory that they hand on.
    yield made
    cluster.close()


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield what a process has in memory of its own."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            where, rights, *_ = line.split()
            begin, end = (int(number, 16) for number in where.split("-"))
            if not rights.startswith("rw-p"):
                continue
            memory.seek(begin)
            try:
                data = memory.read(end - begin)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                continue  # It was given back after the line was read.
            yield data


def shows(data: bytes) -> bool:
    return any(secret in data for secret in SECRETS)


@pytest.mark.parametrize("start", ["--rr-warm-workers", "--rr-no-warm-workers"])
def test_nobody_is_shown_a_secret(host: Host, tmp_path: Path, guarded: EtcdProcess, start: str) -> None:
    """Neither workers, in whose memory it is not even once, nor who reads the process list, logs, files or etcd."""
    gate = Gate(tmp_path / "gate")
    options = [*on_etcd(guarded.endpoint, tmp_path.name, nproc=1), start]
    host.launch(options, gate.script, **GIVEN, LOGLEVEL="DEBUG")
    train_to(2, gate, [host], host.run_dir / "resilientd.sock")
    kill(host.pids()[0])
    wait_until(lambda: host.starts() == 2, timeout_s=120, what="a restart", host=host)
    train_to(5, gate, [host], host.run_dir / "resilientd.sock")
    wait_until(lambda: recovered(host) == 1, timeout_s=60, what="a recovery", host=host)
    assert host.launcher is not None
    daemon = host.daemon_pid()
    started = {process.pid for process in psutil.Process(host.launcher.pid).children(recursive=True)} - {daemon}
    assert set(host.pids().values()) <= started
    for pid in started:
        assert not any(map(shows, memory_of(pid))), psutil.Process(pid).cmdline()
    for pid in (daemon, host.launcher.pid, guarded.pid, *started):
        assert not shows(Path(f"/proc/{pid}/cmdline").read_bytes())
    for pid in (daemon, guarded.pid, *started):
        assert not shows(Path(f"/proc/{pid}/environ").read_bytes())
    gate.open(STEPS)
    files = [path for place in (host.run_dir, host.shm_dir, host.events_path.parent) for path in place.rglob("*")]
    for path in files:
        assert not path.is_file() or not shows(path.read_bytes()), path
    assert not shows(everything(guarded))
    assert host.wait(300) == 0, host.output
    assert not shows(host.output.encode())


def everything(etcd: EtcdProcess) -> bytes:
    """Return all keys and values of runs."""
    config = EtcdConfig(endpoints=(etcd.endpoint,), user="trainer", password=PASSWORD)
    return repr(ask(config, lambda client: client.list("/resilient-run/"))).encode()


def test_without_recovery_workers_see_no_secret_either(tmp_path: Path, guarded: EtcdProcess) -> None:
    """The rendezvous gets in all the same."""
    script = tmp_path / "script.py"
    script.write_text("import os; print(sorted(set(os.environ) & {'RESILIENT_KEY', 'RESILIENT_ETCD_PASSWORD'}))\n")
    command = [sys.executable, "-P", "-m", "resilient_run", *on_etcd(guarded.endpoint, tmp_path.name, nproc=1)]
    command += ["--rr-off", str(script)]
    done = subprocess.run(command, env={**os.environ, **GIVEN}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


URL = "ftp://trainer:the-password-of-a-store@127.0.0.1:1/runs"


def test_a_password_in_a_url_is_refused_where_everybody_can_read_it(tmp_path: Path) -> None:
    """On command lines, which the process list shows; not in the environment."""
    (tmp_path / "dcp").mkdir()
    persist = ["--rr-persist", URL]
    command = click.Command("resilient-run", params=config_options(), callback=lambda **_: None)
    store = ["--run-id", "r", "--target", URL]
    for called, arguments in (
        (command, persist),
        (resilientctl, ["import", str(tmp_path / "dcp"), *store]),
        (resilientctl, ["export", *store, "--from", "persist", "--to", str(tmp_path / "out")]),
    ):
        done = CliRunner().invoke(called, arguments)
        assert done.exit_code == 2, done.output
        assert "can be read in the process list" in done.output
        assert "RESILIENT_PERSIST" in done.output
        assert "the-password-of-a-store" not in done.output
    assert CliRunner().invoke(command, [], env={"RESILIENT_PERSIST": URL}).exit_code == 0
    assert CliRunner().invoke(command, ["--rr-persist", "s3://bucket@zone/a:b"]).exit_code == 0


@pytest.mark.parametrize("password", ["secret", "se@cr:et"])
def test_a_password_in_a_url_is_in_no_message(password: str) -> None:
    with pytest.raises(TierError) as refusal:
        Tier(f"ftp://trainer:{password}@127.0.0.1:1/runs", "run").published()
    assert "127.0.0.1" in str(refusal.value)
    assert password not in str(refusal.value)
    assert "cr:et" not in str(refusal.value)
