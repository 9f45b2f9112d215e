"""`resilientctl doctor` finds what is planted, each by its name and with its remedy, and nothing on a healthy host."""

import asyncio
import contextlib
import email.utils
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificates
from cluster import wait_until
from etcd_process import EtcdProcess, kept_ports
from hosts import Hosts
from launchers import run_ctl
from patient import Patient, patient_of

from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.version import FORMATS
from resilient_run.daemon.base.settings import Settings
from resilient_run.daemon.doctor import etcd as doctor_etcd
from resilient_run.daemon.doctor import run
from resilient_run.daemon.doctor.examine import Check, Finding, examine, ok
from resilient_run.daemon.doctor.plan import RunPlan
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.etcd.rpc import grpc

pytestmark = pytest.mark.jobs

ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None,
    reason="needs root, setpriv and unshare",
)
MOUNTED = ("unshare", "--mount", "sh", "-c")
NAMED = ("unshare", "--mount", "--uts", "--net", "sh", "-c")
USER = 65534


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    made = Patient(tmp_path)
    yield made
    shutil.rmtree(made.shm_dir, ignore_errors=True)


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


# Before a run.


def test_a_healthy_host_has_no_failure_and_is_left_as_it_was(patient: Patient, etcd_endpoint: str) -> None:
    report = patient.doctor(
        "--etcd-endpoint", etcd_endpoint, "--state-gb", "0.001", "--nproc", "2", "--port", "29600-29699"
    )
    assert report.code == 0, report.findings
    names = {found["check"] for found in report.findings}
    expected = "versions shm-size shm-free memory memlock open-files processes run-dir shm-dir gpus host-name interface"
    expected += " address port clock etcd-reachable etcd-access etcd-latency etcd-version daemon"
    assert names >= set(expected.split())
    report.says("etcd-reachable", "ok", found=etcd_endpoint)
    report.says("daemon", "ok", found="none runs")
    assert not patient.run_dir.exists()
    assert not patient.shm_dir.exists()


def test_a_person_gets_a_line_for_each(patient: Patient) -> None:
    patient.run_dir.mkdir(mode=0o755)
    directories = ["--run-dir", str(patient.run_dir), "--shm-dir", str(patient.shm_dir)]
    done = run_ctl([*directories, "doctor", "--etcd-endpoint", "127.0.0.1:1"], os.environ)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert [line for line in lines if line.startswith("FAIL  etcd-reachable ")] == [
        "FAIL  etcd-reachable  nothing listens at 127.0.0.1:1; remedy: start etcd there, or correct host and port in "
        "--rdzv-endpoint (here --etcd-endpoint)"
    ]
    assert any(line.startswith("warn  run-dir ") and line.endswith(f"chmod 700 {patient.run_dir}") for line in lines)
    assert any(line.startswith("ok    gpus ") for line in lines)
    assert lines[-1].startswith(f"{len(lines) - 1} findings: 1 failed, ")


@ROOT
def test_shared_memory_of_a_container(patient: Patient) -> None:
    mount = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    report = patient.doctor(prefix=[*MOUNTED, mount, "-"])
    report.says("shm-size", "warn", found="has 64.00 MiB, too few for slots", remedy="docker run --shm-size=")


@ROOT
def test_shared_memory_that_is_too_small_for_the_state(patient: Patient) -> None:
    mount = 'mount -t tmpfs -o size=1700m none /dev/shm && exec "$@"'
    report = patient.doctor("--state-gb", "0.1", "--nproc", "4", "--peer", "127.0.0.1", prefix=[*MOUNTED, mount, "-"])
    report.says("shm-size", "warn", found="2 slots * 2 replicas * 4 ranks", remedy="mount -o remount,size=3G /dev/shm")
    alone = patient.doctor("--state-gb", "0.1", "--nproc", "3", prefix=[*MOUNTED, mount, "-"])
    alone.says("shm-size", "ok", found="1.66 GiB")


@ROOT
def test_shared_memory_that_others_have_filled(patient: Patient) -> None:
    fill = 'mount -t tmpfs -o size=100m none /dev/shm && head -c 98M /dev/zero > /dev/shm/theirs && exec "$@"'
    report = patient.doctor(prefix=[*MOUNTED, fill, "-"])
    report.says("shm-free", "fail", found="only 2.00 MiB of 100.00 MiB", remedy="resilientctl gc")


def test_slots_on_a_disk(patient: Patient, tmp_path: Path) -> None:
    patient.shm_dir = tmp_path / "slots"
    report = patient.doctor()
    report.says("shm-size", "warn", found="not in memory", remedy="RESILIENT_SHM_DIR")


def test_more_state_than_memory(patient: Patient) -> None:
    report = patient.doctor("--state-gb", "100000", "--persist", "--keep", "4")
    report.says(
        "memory", "fail", found="(5 slots * 1 replicas * 1 ranks and 1 copies to persist", remedy="--rr-replicas"
    )


@ROOT
def test_memory_that_may_not_be_locked(patient: Patient) -> None:
    report = patient.doctor(prefix=["setpriv", "--bounding-set=-ipc_lock", "prlimit", f"--memlock={8 << 20}"])
    report.says("memlock", "warn", found="may lock only 8.00 MiB", remedy="ulimit -l unlimited")
    enough = patient.doctor(
        *("--state-gb", "0.001"), prefix=["setpriv", "--bounding-set=-ipc_lock", "prlimit", f"--memlock={8 << 20}"]
    )
    enough.says("memlock", "ok", found="slots take 2.05 MiB")


def test_few_files(patient: Patient) -> None:
    report = patient.doctor(prefix=["prlimit", "--nofile=300"])
    report.says("open-files", "fail", found="may open 300 files", remedy="LimitNOFILE=")


@ROOT
def test_few_processes(patient: Patient) -> None:
    others = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    # Python may lie where only root can read.
    others += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    report = patient.doctor("--nproc", "64", prefix=["prlimit", "--nproc=400", *others])
    report.says("processes", "fail", found="of 400; a run with 64 ranks", remedy="raise ulimit -u")


@ROOT
def test_run_directory_of_somebody_else(patient: Patient) -> None:
    patient.run_dir.mkdir(mode=0o700)
    os.chown(patient.run_dir, USER, USER)
    report = patient.doctor()
    report.says("run-dir", "fail", found=f"it belongs to uid {USER}", remedy="RESILIENT_RUN_DIR")


def test_run_directory_that_others_may_enter(patient: Patient) -> None:
    patient.run_dir.mkdir(mode=0o755)
    report = patient.doctor()
    report.says("run-dir", "warn", found="drwxr-xr-x", remedy=f"chmod 700 {patient.run_dir}")
    assert patient.run_dir.stat().st_mode & 0o777 == 0o755, "it changes nothing"


# The network.


def test_a_port_that_is_taken(patient: Patient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        report = patient.doctor("--port", str(port), "--etcd-endpoint", "127.0.0.1:1")
    report.says("port", "fail", found=f"other processes use port {port}", remedy="--rr-port")


def test_a_peer_that_is_down(patient: Patient) -> None:
    (port,) = kept_ports(1)
    report = patient.doctor("--peer", f"127.0.0.1:{port}", "--peer", "127.0.0.1")
    report.says("peer", "fail", found=f"127.0.0.1 refuses port {port}", remedy="correct the port")
    report.says("peer", "ok", found="127.0.0.1 is reached")


@ROOT
def test_a_peer_without_a_route_and_one_without_a_name(patient: Patient) -> None:
    prefix = [*NAMED, 'exec "$@"', "-"]
    report = patient.doctor("--peer", "192.0.2.1", "--peer", "no-such-host", prefix=prefix)
    report.says("peer", "fail", found="192.0.2.1, port 29600: Network is unreachable", remedy="firewall")
    report.says("peer", "fail", found="no-such-host does not resolve", remedy="/etc/hosts")


def test_an_interface_that_is_not_there(patient: Patient) -> None:
    report = patient.doctor(GLOO_SOCKET_IFNAME="nope0", NCCL_SOCKET_IFNAME="^docker")
    report.says("interface", "fail", found="GLOO_SOCKET_IFNAME=nope0: there is no nope0", remedy="lo")
    report.says("interface", "ok", found="NCCL_SOCKET_IFNAME=^docker")


@ROOT
def test_an_interface_that_is_down(patient: Patient) -> None:
    report = patient.doctor(prefix=[*NAMED, 'exec "$@"', "-"], NCCL_SOCKET_IFNAME="=lo")
    report.says("interface", "fail", found="lo is down", remedy="one that is up")


@ROOT
def test_a_host_that_does_not_know_its_own_name(patient: Patient) -> None:
    report = patient.doctor(prefix=[*NAMED, 'hostname planted && exec "$@"', "-"])
    report.says("host-name", "warn", found="planted does not resolve", remedy="planted' to /etc/hosts")


@ROOT
def test_a_host_whose_name_is_its_loopback(patient: Patient, tmp_path: Path) -> None:
    """As Debian's installer leaves it, and etcd by a name of this host: the launcher would tell others its loopback."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost etcd-host\n127.0.1.1 planted\n")
    script = f'mount --bind {tmp_path}/hosts /etc/hosts && hostname planted && ip link set lo up && exec "$@"'
    report = patient.doctor("--etcd-endpoint", "etcd-host:1", prefix=[*NAMED, script, "-"])
    report.says("host-name", "warn", found="planted is 127.0.1.1", remedy="instead of that line in /etc/hosts")
    report.says("address", "fail", found="would tell the others 127.0.0.1", remedy="--local-addr")
    report.says("etcd-reachable", "fail", found="nothing listens at etcd-host:1", remedy="start etcd")
    assert not patient.doctor(
        "--etcd-endpoint", "etcd-host:1", prefix=[*NAMED, script, "-"], GLOO_SOCKET_IFNAME="lo"
    ).of("host-name")[0]["remedy"]


# etcd.


def test_a_wrong_port(patient: Patient) -> None:
    (port,) = kept_ports(1)
    report = patient.doctor("--etcd-endpoint", f"127.0.0.1:{port}")
    report.says("etcd-reachable", "fail", found=f"nothing listens at 127.0.0.1:{port}", remedy="--etcd-endpoint")
    assert not report.of("etcd-latency")


@ROOT
def test_a_wrong_host(patient: Patient) -> None:
    report = patient.doctor("--etcd-endpoint", "no-such-etcd:2379", prefix=[*NAMED, 'exec "$@"', "-"])
    report.says("etcd-reachable", "fail", found="no-such-etcd:2379 does not resolve", remedy="correct the host")


def test_something_that_is_not_etcd(patient: Patient) -> None:
    with silent_server() as endpoint:
        report = patient.doctor("--etcd-endpoint", endpoint)
    report.says("etcd-reachable", "fail", found="does not answer as etcd does", remedy="something else listens there")


def test_a_grpc_server_that_is_not_etcd(patient: Patient) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            report = patient.doctor("--etcd-endpoint", endpoint)
        finally:
            server.stop(None).wait()
    report.says("etcd-reachable", "fail", found="is not etcd 3", remedy="something else listens there")


def test_a_member_that_is_away(patient: Patient, tcp_etcd: EtcdProcess) -> None:
    report = patient.doctor("--etcd-endpoint", f"{tcp_etcd.endpoint},127.0.0.1:1")
    report.says("etcd-reachable", "warn", found="1 of 2 members are away: nothing listens", remedy="start etcd there")
    assert report.of("etcd-latency")


def test_tls_that_does_not_fit(patient: Patient, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    flags = (f"--cert-file={tmp_path / 'server.pem'}", f"--key-file={tmp_path / 'server.key'}")
    etcd = EtcdProcess(tmp_path / "etcd", *flags, scheme="https")
    etcd.start()
    try:
        plain = patient.doctor("--etcd-endpoint", etcd.endpoint)
        plain.says("etcd-reachable", "fail", found=f"{etcd.endpoint} speaks TLS", remedy="cacert=")
        other = patient.doctor("--etcd-endpoint", etcd.endpoint, "--etcd-conf", f"cacert={tmp_path / 'other.pem'}")
        other.says("etcd-reachable", "fail", found="certificate", remedy="the cacert= of this etcd")
        missing = patient.doctor("--etcd-endpoint", etcd.endpoint, "--etcd-conf", f"cacert={tmp_path / 'none.pem'}")
        missing.says("etcd-reachable", "fail", found="cannot read the TLS file", remedy="--rdzv-conf")
        right = patient.doctor("--etcd-endpoint", etcd.endpoint, "--etcd-conf", f"cacert={tmp_path / 'ca.pem'}")
        right.says("etcd-reachable", "ok", found="with TLS")
    finally:
        etcd.kill()


def test_certificates_that_are_refused(patient: Patient, tmp_path: Path) -> None:
    """That of etcd has expired, and etcd asks for one that it trusts."""
    make_certificates(tmp_path)
    ca, key = f"cacert={tmp_path / 'ca.pem'}", f"key={tmp_path / 'client.key'}"
    refused = [
        ("expired", ca, "certificate has expired", "renew the certificate of this etcd"),
        ("server", ca, "refuses a host without cert= and key=", "a CA that it trusts"),
        ("server", f"{ca},cert={tmp_path / 'server.pem'},{key}", f"{key} does not belong to cert=", "one certificate"),
    ]
    for certificate, conf, found, remedy in refused:
        files = (f"--cert-file={tmp_path / certificate}.pem", f"--key-file={tmp_path / 'server.key'}")
        asks = ("--client-cert-auth", f"--trusted-ca-file={tmp_path / 'ca.pem'}")
        etcd = EtcdProcess(tmp_path / "etcd", *files, *asks, scheme="https")
        etcd.start()
        try:
            report = patient.doctor("--etcd-endpoint", etcd.endpoint, "--etcd-conf", conf)
        finally:
            etcd.kill()
        report.says("etcd-reachable", "fail", found=found, remedy=remedy)


def test_an_etcd_that_lets_nobody_in_without_a_password(patient: Patient, tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    try:
        etcd.enable_auth("secret")
        report = patient.doctor("--etcd-endpoint", etcd.endpoint)
        report.says("etcd-access", "fail", found="etcd refused access", remedy="RESILIENT_ETCD_USER")
        user = {"RESILIENT_ETCD_USER": "trainer", "RESILIENT_ETCD_PASSWORD": "secret"}
        patient.doctor("--etcd-endpoint", etcd.endpoint, **user).says("etcd-access", "ok", found="only this host")
    finally:
        etcd.kill()


@ROOT
def test_an_etcd_that_lets_everybody_in(patient: Patient, tcp_etcd: EtcdProcess, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost etcd-host\n")
    prefix = [*MOUNTED, f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"', "-"]
    endpoint = f"etcd-host:{tcp_etcd.port}"
    report = patient.doctor("--etcd-endpoint", endpoint, prefix=prefix)
    report.says("etcd-access", "fail", found="anyone who reaches it can read and forge", remedy="resilientctl keygen")
    keyed = patient.doctor("--etcd-endpoint", endpoint, prefix=prefix, RESILIENT_KEY="k" * 64)
    keyed.says("etcd-access", "ok", found="the run key protects the run's state")


def test_an_etcd_that_may_forget(patient: Patient, tcp_etcd: EtcdProcess) -> None:
    version = json.loads(tcp_etcd.ctl("endpoint", "status", "--write-out=json"))[0]["Status"]["version"]
    if tuple(map(int, version.split("."))) >= (3, 5, 3):
        pytest.skip(f"this etcd is {version}")
    report = patient.doctor("--etcd-endpoint", tcp_etcd.endpoint)
    report.says("etcd-version", "fail", found=f"etcd {version}", remedy="upgrade it to 3.5.3 or later")


def test_an_etcd_that_is_full_or_will_be(patient: Patient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = EtcdProcess(tmp_path / "etcd", "--quota-backend-bytes=2000000")
    etcd.start()
    try:
        patient.doctor("--etcd-endpoint", etcd.endpoint).says("etcd-space", "ok", found="0 MiB")
        etcd.fill()
        full = patient.doctor("--etcd-endpoint", etcd.endpoint)
        full.says("etcd-space", "fail", found="has no space left", remedy="--auto-compaction-retention=5m")
        monkeypatch.setattr(doctor_etcd, "_LONG", 3)

        def found() -> Finding:
            return doctor_etcd._space(asyncio.run(doctor_etcd._ask_all(EtcdConfig(endpoints=(etcd.endpoint,)))))

        etcd.ctl("alarm", "disarm")
        assert (found().level, found().remedy) == ("warn", "start etcd with --auto-compaction-retention=5m")
        etcd.make_space()
        assert found().level == "ok"
    finally:
        etcd.kill()


class _HourAhead(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate(time.time() + 3600, usegmt=True)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_clock_that_is_wrong(patient: Patient) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _HourAhead) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            report = patient.doctor("--etcd-endpoint", f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()
    report.says("clock", "fail", found="s behind etcd's", remedy="timedatectl set-ntp true")


# The daemon and its runs.


def test_a_daemon_that_was_killed(hosts: Hosts, tmp_path: Path) -> None:
    hosts["a"].start()
    hosts["a"].kill()
    report = patient_of(hosts["a"], tmp_path).doctor()
    report.says("daemon", "warn", found="was left by a killed daemon", remedy="the next launcher starts one")


def test_a_daemon_that_stands_still(hosts: Hosts, tmp_path: Path) -> None:
    hosts["a"].start()
    assert hosts["a"].process is not None
    hosts["a"].process.send_signal(signal.SIGSTOP)
    try:
        report = patient_of(hosts["a"], tmp_path).doctor()
    finally:
        hosts["a"].process.send_signal(signal.SIGCONT)
    report.says("daemon", "fail", found="does not answer within", remedy="kill -CONT")


NEWER = """
from resilient_run.ckpt.format import wire
wire.VERSION += 1
from resilient_run.daemon.cli import resilientd
resilientd(prog_name="resilientd")
"""


def test_a_daemon_of_another_version(patient: Patient) -> None:
    patient.run_dir.mkdir(mode=0o700)
    directories = ["--run-dir", str(patient.run_dir), "--shm-dir", str(patient.shm_dir)]
    process = subprocess.Popen([sys.executable, "-P", "-c", NEWER, *directories], stderr=subprocess.DEVNULL)
    try:
        place = patient.shm_dir / "resilientd.sock"

        def listening() -> bool:
            with socket.socket(socket.AF_UNIX) as probe:
                return probe.connect_ex(str(place)) == 0

        wait_until(listening, timeout_s=30, what="the daemon")
        report = patient.doctor()
    finally:
        process.kill()
        process.wait()
    found = f"is of another resilient-run (wire {wire.VERSION + 1}, not {wire.VERSION})"
    report.says("daemon", "fail", found=found, remedy=f"kill {process.pid}")


def test_a_daemon_of_another_version_with_the_same_formats(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.shm_dir.mkdir(mode=0o700, exist_ok=True)
    settings = Settings(run_dir=patient.run_dir, shm_dir=patient.shm_dir)
    Path(settings.address()).touch()
    answer = {"pid": 7, "formats": FORMATS, "jobs": [{"run_id": "r", "host": "a", "launcher_pid": 8}]}
    monkeypatch.setattr(run, "ask_daemon", lambda *_, **__: answer)
    (check,) = run.run_checks(RunPlan(settings=settings, environ={}))
    *_, last = check.look()
    assert last.found == "the daemon tells no 'own_ranks' of run r: it is of another resilient-run"
    assert "kill 7, between runs" in last.remedy


def test_a_healthy_run_and_one_whose_commits_stand_still(hosts: Hosts, tmp_path: Path) -> None:
    trainers = hosts.run(["a", "b"])
    hosts.commit(trainers, [1, 2])
    patient = patient_of(hosts["a"], tmp_path)
    healthy = patient.doctor()
    healthy.says("daemon", "ok", found="1 run(s), of this version")
    healthy.says("commits", "ok", found="step 2 is committed")
    healthy.says("replicas", "ok", found="2 of step 2, on a, b")
    healthy.says("etcd-lease", "ok", found="confirmed")
    healthy.says("captures", "ok", found="every step is captured")
    assert healthy.code == 0, healthy.findings
    for step in range(3, 9):
        trainers[0].notify("progress", step=step)
    report = patient.doctor()
    report.says("commits", "fail", found="step 2 is committed, 6 more are at risk", remedy="resilientctl status")
    told = {"step": 8, "steps_at_risk": 6, "reason": "the network is slow"}
    trainers[0].notify("protection", **told)
    patient.doctor().says("commits", "fail", found="at risk: the network is slow", remedy="on every host")
    unknown = patient.doctor("--run-id", "another")
    unknown.says("run", "fail", found=f"knows no run 'another' (it knows {hosts.run_id})", remedy="on a host of that")


def test_captures_that_are_skipped(hosts: Hosts, tmp_path: Path) -> None:
    (trainer,) = hosts.run(["a"])
    hosts.commit([trainer], [1])
    stop = threading.Event()

    def miss() -> None:
        step = 2
        while not stop.wait(0.2):
            trainer.notify("missed", next=step, step=step, late=True)
            step += 1

    thread = threading.Thread(target=miss)
    thread.start()
    try:
        report = patient_of(hosts["a"], tmp_path).doctor()
    finally:
        stop.set()
        thread.join()
    report.says("captures", "warn", found="were skipped in 2 s", remedy="steps are shorter than commits")
    report.says("replicas", "warn", found="on a alone", remedy="--rr-persist")


def test_a_persistent_tier_that_cannot_be_written(hosts: Hosts, tmp_path: Path) -> None:
    """Without it, what this only host has committed is lost with the host."""
    target = tmp_path / "tier"
    target.write_text("in the way")
    hosts.policy = {"persist": {"target": str(target), "every_steps": 1, "every_s": 0}}
    (trainer,) = hosts.run(["a"])
    hosts.commit([trainer], [1])
    job = lambda: hosts["a"].status()["jobs"][0]["persist"]  # noqa: E731
    wait_until(lambda: job()["error"], timeout_s=30, what="a failed attempt")
    report = patient_of(hosts["a"], tmp_path).doctor()
    report.says("persistent-tier", "fail", found=f"{target}: the last attempt failed: ", remedy="writable")
    target.unlink()
    wait_until(lambda: job()["written"] and not job()["error"], timeout_s=60, what="a written step")
    report = patient_of(hosts["a"], tmp_path).doctor()
    report.says("persistent-tier", "ok", found="this host wrote step 1")
    hosts["a"].drop_clients()
    wait_until(
        lambda: hosts["a"].status()["jobs"][0]["launcher_pid"] is None, timeout_s=30, what="loss of the launcher"
    )
    report = patient_of(hosts["a"], tmp_path).doctor()
    report.says("persistent-tier", "ok", found="this host wrote step 1")


def test_a_run_whose_etcd_is_gone(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    made = Hosts(tmp_path, run_id=tmp_path.name, config=EtcdConfig(endpoints=(etcd.endpoint,)))
    try:
        (trainer,) = made.run(["a"])
        made.commit([trainer], [1])
        etcd.kill()
        host = made["a"]
        wait_until(lambda: host.status()["jobs"][0]["etcd_silent_s"] > 5, timeout_s=60, what="silence of etcd")
        report = patient_of(host, tmp_path).doctor()
        report.says("etcd-lease", "fail", found="has been silent", remedy=f"--etcd-endpoint {etcd.endpoint}")
        made["a"].drop_clients()
        wait_until(lambda: host.status()["jobs"][0]["launcher_pid"] is None, timeout_s=30, what="loss of the launcher")
        patient_of(host, tmp_path).doctor().says("run", "warn", found="has no launcher", remedy="resilientctl gc")
    finally:
        etcd.start()
        made.close()
        etcd.kill()


# Whatever hangs.


def test_what_hangs_or_fails_costs_no_other_check() -> None:
    endless = threading.Event()

    def hang() -> Iterator[Finding]:
        endless.wait()
        yield ok("late", "never")

    def broken() -> Iterator[Finding]:
        raise KeyError("x")

    checks = [
        Check(name="late", look=hang, within_s=0.1, when_late="look there"),
        Check(name="broken", look=broken, when_late=""),
        Check(name="fine", look=lambda: [ok("fine", "it is")], when_late=""),
    ]
    late, failed, fine = examine(checks)
    endless.set()
    assert (late.level, late.found, late.remedy) == ("fail", "no answer within 0.1 s", "look there")
    assert (failed.level, failed.found) == ("fail", "could not be looked at: KeyError: 'x'")
    assert fine == ok("fine", "it is")


def test_everything_hangs_at_once(hosts: Hosts, tmp_path: Path) -> None:
    hosts["a"].start()
    assert hosts["a"].process is not None
    hosts["a"].process.send_signal(signal.SIGSTOP)
    try:
        with silent_server() as endpoint, silent_server() as other:
            report = patient_of(hosts["a"], tmp_path).doctor("--etcd-endpoint", f"{endpoint},{other}")
    finally:
        hosts["a"].process.send_signal(signal.SIGCONT)
    report.says("daemon", "fail", found="does not answer within")
    assert len(report.of("etcd-reachable")) == 2
    report.says("memory", "ok", found="available")
