"""The commands: one daemon per run directory, a clean end, `resilientctl status` and `gc` with and without a daemon."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import wait_until
from hosts import Client, Hosts
from launchers import run_ctl, run_daemon

from resilient_run.daemon.base.settings import Settings, find_settings

pytestmark = pytest.mark.jobs


def ctl(hosts: Hosts, *arguments: str) -> subprocess.CompletedProcess[str]:
    directories = ["--run-dir", str(hosts["a"].run_dir), "--shm-dir", str(hosts["a"].shm_dir)]
    return run_ctl([*directories, *arguments], os.environ)


def daemon(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_daemon(arguments, os.environ)


def test_second_daemon_is_refused(hosts: Hosts) -> None:
    host = hosts["a"]
    host.start()
    assert host.process is not None
    second = daemon("--run-dir", str(host.run_dir), "--shm-dir", str(host.shm_dir))
    assert second.returncode == 1
    assert f"a daemon with pid {host.process.pid} already serves {host.run_dir}" in second.stderr
    assert host.status()["jobs"] == []


def test_access_to_etcd_that_has_another_name(hosts: Hosts) -> None:
    for command in (["doctor"], ["forget", "r"]):
        done = ctl(hosts, *command, "--etcd-endpoint", "etcd", "--etcd-conf", "user=a,passwordfil=/secret")
        assert done.returncode == 2
        assert "--etcd-conf has no passwordfil, only user, passwordfile, cacert, cert, key" in done.stderr


def test_logs_are_json_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = ("--run-dir", str(tmp_path / "run"), "--shm-dir", str(tmp_path / "shm"), "--idle-exit", "0.1")
    monkeypatch.setenv("RESILIENT_LOG_FORMAT", "json")
    done = daemon(*directories)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 0
    assert entries
    assert all(entry.keys() == {"unix_s", "level", "logger", "pid", "message"} for entry in entries)
    monkeypatch.setenv("RESILIENT_LOG_FORMAT", "xml")
    command = [sys.executable, "-P", "-m", "resilient_run", "--standalone", "train.py"]
    launcher = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    for wrong in (daemon(*directories), launcher):
        assert wrong.returncode == 1
        assert wrong.stderr == "Error: RESILIENT_LOG_FORMAT is 'xml': choose text or json\n"


def test_daemon_replaces_what_a_killed_one_left(hosts: Hosts) -> None:
    host = hosts["a"]
    host.start()
    host.kill()
    assert host.socket_path.exists()
    host.start()
    assert host.process is not None
    assert int((host.run_dir / "resilientd.lock").read_text()) == host.process.pid


def test_directories_are_private(hosts: Hosts) -> None:
    host = hosts["a"]
    host.start()
    assert stat.S_IMODE(host.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(host.shm_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(host.socket_path.stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_ends_cleanly_and_keeps_its_slots(hosts: Hosts, number: signal.Signals) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    host = hosts["a"]
    assert host.process is not None
    host.process.send_signal(number)
    assert host.process.wait(30) == 0
    assert "Traceback" not in host.log
    assert not host.socket_path.exists()
    assert (host.run_dir / "resilientd.lock").read_text() == ""
    assert host.slot_paths(0, (1, 1))
    entry = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}ckpt/hosts/a"))
    assert entry is None, "peers would still dial a daemon that has ended"


def test_idle_daemon_ends_but_not_while_it_holds_something(hosts: Hosts) -> None:
    host = hosts["a"]
    # Idle, too, until its job is opened.
    host.start("--idle-exit", "2", "--orphan-ttl", "3")
    host.open()
    assert host.process is not None
    wait_until(lambda: host.status()["jobs"], timeout_s=30, what="the job")
    host.drop_clients()
    assert host.process.wait(30) == 0
    assert "no launcher came back" in host.log
    assert not list(host.shm_dir.glob("*/"))


def test_systemd_hears_that_the_daemon_is_ready(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{tmp_path}")
        systemd.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        hosts["a"].start()
        assert systemd.recv(100) == b"READY=1"
        assert hosts["a"].stop() == 0
        assert systemd.recv(100) == b"STOPPING=1"


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    refused = daemon("--memory-limit", "much")
    assert refused.returncode == 2
    assert "write a positive number and K, M, G or T" in refused.stderr
    too_long = daemon("--run-dir", str(tmp_path / ("x" * 120)), "--shm-dir", str(tmp_path / "shm"))
    assert too_long.returncode == 1
    assert "Traceback" not in too_long.stderr
    assert "too long" in too_long.stderr


def test_status_shows_jobs_slots_and_watermark(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1, 2])
    answer = json.loads(ctl(hosts, "status", "--json").stdout)
    (job,) = answer["jobs"]
    assert job["watermark"] == {"generation": 1, "step": 2}
    assert (job["run_id"], job["own_ranks"], job["launcher_pid"]) == (hosts.run_id, [0], os.getpid())
    assert [(slot["generation"], slot["step"], slot["state"]) for slot in job["slots"]] == [
        (1, 2, "COMPLETE"),
        (1, 1, "COMPLETE"),
    ]
    assert answer["used_bytes"] == job["bytes"] > 0
    text = ctl(hosts, "status").stdout
    assert "committed step 2 (generation 1)" in text
    assert f"etcd: {hosts.config.where}" in text
    assert "rank0.1.slot" in text


def test_status_without_a_daemon_says_so(hosts: Hosts) -> None:
    answer = ctl(hosts, "status")
    assert answer.returncode == 1
    assert "no daemon answers at " in answer.stderr
    assert "RESILIENT_RUN_DIR and RESILIENT_SHM_DIR" in answer.stderr


def test_gc_removes_what_no_launcher_holds_open(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    assert json.loads(ctl(hosts, "gc", "--json").stdout) == {"removed": [], "freed_bytes": 0}
    hosts["a"].drop_clients()
    wait_until(
        lambda: hosts["a"].status()["jobs"][0]["launcher_pid"] is None, timeout_s=30, what="loss of the launcher"
    )
    answer = json.loads(ctl(hosts, "gc", "--json").stdout)
    assert answer["removed"] == [hosts.run_id]
    assert answer["freed_bytes"] > 0
    assert not list(hosts["a"].shm_dir.glob("*/"))


def test_gc_without_a_daemon_spares_jobs_whose_launcher_lives(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    hosts["a"].kill()
    assert "removed nothing" in ctl(hosts, "gc").stdout
    hosts["a"].drop_clients()
    (record,) = hosts["a"].shm_dir.glob("*/job.json")
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    record.write_text(json.dumps({**json.loads(record.read_text()), "launcher_pid": exited.pid}))
    assert f"removed {hosts.run_id}" in ctl(hosts, "gc").stdout
    assert not list(hosts["a"].shm_dir.glob("*/"))


def test_a_stranger_that_has_the_launcher_s_pid_by_now_keeps_no_slots(hosts: Hosts, tmp_path: Path) -> None:
    """A killed daemon has not seen its launcher's end; in the records of older versions the pid has to do."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    hosts["a"].kill()
    hosts["a"].drop_clients()
    (path,) = hosts["a"].shm_dir.glob("*/job.json")
    sleeping = shutil.which("sleep")
    assert sleeping is not None
    # A name of any bytes; the kernel cuts long ones in the middle of a character.
    program = shutil.copy(sleeping, os.fsencode(tmp_path) + b"/r) \xff\xfe")
    with subprocess.Popen([program, "600"]) as stranger:
        try:
            record = {**json.loads(path.read_text()), "launcher_pid": stranger.pid}
            path.write_text(json.dumps({**record, "launcher_ticks": None}))
            assert "removed nothing" in ctl(hosts, "gc").stdout
            path.write_text(json.dumps(record))
            hosts["a"].start("--orphan-ttl", "0")
            wait_until(lambda: "no launcher came back" in hosts["a"].log, timeout_s=30, what=lambda: hosts["a"].log)
        finally:
            stranger.kill()
    assert not path.exists()


def test_trainer_is_only_let_into_an_open_job(hosts: Hosts) -> None:
    hosts["a"].start()
    client = Client(hosts["a"].socket_path)
    for op in ("allocate", "restore", "job_status", "settle", "close_job", "explode"):
        with pytest.raises(Exception, match=r"attach first|open_job first|field '"):
            client.request(op, run_id="x", capacity_bytes=1 << 20, payload_offset=8192, timeout_s=1, discard=True)
    client.close()


def test_settings_come_from_arguments_then_environment_then_defaults(tmp_path: Path) -> None:
    environ = {"RESILIENT_RUN_DIR": "/a", "RESILIENT_SHM_DIR": "/b", "XDG_RUNTIME_DIR": "/x"}
    assert find_settings(environ, run_dir=tmp_path) == Settings(run_dir=tmp_path, shm_dir=Path("/b"))
    assert find_settings(environ) == Settings(run_dir=Path("/a"), shm_dir=Path("/b"))
    assert find_settings({"XDG_RUNTIME_DIR": "/x"}).run_dir == Path("/x/resilient-run")
    assert find_settings({}).run_dir == Path(f"/tmp/resilient-run-{os.getuid()}")
    assert find_settings({}).shm_dir == Path(f"/dev/shm/resilient-run-{os.getuid()}")
