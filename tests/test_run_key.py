"""Runs with a run key, on chosen ports; and without one where everybody reaches etcd."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, Host, kill, wait_until
from etcd_process import EtcdProcess, entries, kept_ports
from launchers import run_launcher
from peer_talk import dial

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.trust import secret
from resilient_run.daemon.trust.identity import Identity
from resilient_run.daemon.trust.secret import make_key

pytestmark = pytest.mark.jobs

TRAIN = """
import os
import time
import torch
from resilient_run import Checkpointer

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
checkpointer = Checkpointer(model=model)
start = checkpointer.restore()
rank = os.environ["RANK"]
print(f'{{"rank": {rank}, "pid": {os.getpid()}, "has_key": {int("RESILIENT_KEY" in os.environ)}}}', flush=True)
for step in range(start + 1, 100_000):
    torch.nn.init.constant_(model.bias, step)
    checkpointer.step(step)
    print(f'{{"rank": {rank}, "step": {step}, "loss": 0}}', flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def on_etcd(cluster: Cluster, endpoint: str) -> list[str]:
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={endpoint}"]
    return [
        *arguments,
        f"--rdzv-id={cluster.name}",
        "--rdzv-conf=lease_ttl=2,join_timeout=60",
        "--local-addr=127.0.0.1",
    ]


def everywhere(etcd: EtcdProcess) -> str:
    """Return a name of the endpoint by which it might be another host's."""
    return f"0.0.0.0:{etcd.port}"


def test_an_etcd_that_lets_everybody_in_needs_a_key(cluster: Cluster, script: Path, tcp_etcd: EtcdProcess) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, everywhere(tcp_etcd)), [str(script)])
    assert host.wait() == 2
    told = next(line for line in host.text if "anyone who reaches this etcd" in line)
    for remedy in ("resilientctl keygen", "--rr-key-file", "RESILIENT_ETCD_USER", "cert=", "--rr-insecure"):
        assert remedy in told
    assert "Traceback" not in host.output
    assert not host.lines


@pytest.mark.parametrize("allowed", ["key", "insecure", "one host", "loopback"])
def test_where_nothing_is_open_nothing_is_refused(
    cluster: Cluster, script: Path, tcp_etcd: EtcdProcess, allowed: str, tmp_path: Path
) -> None:
    make_key(tmp_path / "run.key")
    endpoint = tcp_etcd.endpoint if allowed == "loopback" else everywhere(tcp_etcd)
    extra = {
        "key": ["--rr-key-file", str(tmp_path / "run.key")],
        "insecure": ["--rr-insecure"],
        "one host": ["--nnodes=1"],
    }
    host = cluster.host("a")
    host.launch([*on_etcd(cluster, endpoint), "--rdzv-conf=join_timeout=1", *extra.get(allowed, [])], [str(script)])
    if allowed == "one host":
        wait_until(lambda: host.reached(1), timeout_s=60, what="a step", host=host)
    else:
        assert host.wait() == 1
        assert "1 of at least 2 hosts are ready" in host.output


@pytest.mark.parametrize("nnodes", ["1", "1:2"])
def test_who_reads_an_etcd_of_this_host_alone_gets_in_nowhere(
    cluster: Cluster, script: Path, tcp_etcd: EtcdProcess, nnodes: str
) -> None:
    """Every user of the host reaches a loopback port: the secret in that etcd is not the one that daemons believe."""
    host = cluster.host("a")
    arguments = [*on_etcd(cluster, tcp_etcd.endpoint), f"--nnodes={nnodes}", "--rdzv-conf=last_call_timeout=0.1"]
    host.launch(arguments, [str(script)])
    wait_until(lambda: host.committed_step() > 2, timeout_s=120, what="commits", host=host)
    job_key = f"/resilient-run/{cluster.name}/rdzv/job"
    job = entries(tcp_etcd.endpoint, job_key)[job_key].value
    thief = Identity(job["token"], run_id=cluster.name, incarnation=job["incarnation"], host="mallory")
    with pytest.raises(OSError, match=r"(?i)certificate verify failed|unknown ca|closed|reset"):
        dial(("127.0.0.1", port_of(host)), thief).recv(1)
    reached = host.committed_step()
    wait_until(lambda: host.committed_step() > reached + 2, timeout_s=60, what="commits", host=host)


def test_a_key_of_the_host_is_made_once_and_is_its_users_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secret, "own_directory", lambda uid: tmp_path / "own")
    with ThreadPoolExecutor(8) as pool:
        keys = {found.result() for found in [pool.submit(secret.host_key) for _ in range(8)]}
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["host.key"]
    assert (tmp_path / "own" / "host.key").stat().st_mode & 0o077 == 0
    (tmp_path / "own" / "host.key").chmod(0o604)
    with pytest.raises(DaemonError, match=r"no key for the runs of this host: .*not private.*--rr-key-file"):
        secret.host_key()


def test_workers_never_see_the_key(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print('key' if 'RESILIENT_KEY' in os.environ else 'none')\n")
    for arguments in ([], ["--rr-off"]):
        done = run_launcher(["--standalone", *arguments, str(script)], {**os.environ, "RESILIENT_KEY": "k" * 40})
        assert (done.returncode, done.stdout) == (0, "none\n"), done.stderr


def port_of(host: Host) -> int:
    """Return where the daemon of a host listens for peers."""
    pid = host.daemon_pid()
    assert pid is not None
    (port,) = {
        each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == psutil.CONN_LISTEN
    }
    return port


def test_a_run_with_a_key_on_chosen_ports_recovers(
    cluster: Cluster, script: Path, etcd_endpoint: str, tmp_path: Path
) -> None:
    """One host has the key in a file, the other one in its environment, of which workers see nothing."""
    make_key(tmp_path / "run.key")
    key = (tmp_path / "run.key").read_text().strip()
    a, b = cluster.host("a"), cluster.host("b")
    first, last = sorted(kept_ports(2))
    with socket.create_server(("127.0.0.1", first)):
        # The first one is taken by somebody else.
        a.launch(
            [
                *on_etcd(cluster, etcd_endpoint),
                "--rr-key-file",
                str(tmp_path / "run.key"),
                "--rr-port",
                f"{first}-{last}",
            ],
            [str(script)],
        )
        b.launch(on_etcd(cluster, etcd_endpoint), [str(script)], RESILIENT_KEY=key)
        wait_until(lambda: a.committed_step() > 2, timeout_s=120, what=lambda: a.output + b.output, host=a)
    assert first < port_of(a) <= last
    daemon = b.daemon_pid()
    assert daemon is not None
    assert key not in Path(f"/proc/{daemon}/environ").read_text()
    kill(b.pids()[next(iter(b.pids()))])
    wait_until(lambda: b.starts() > 1, timeout_s=60, what="a restart", host=b)
    reached = a.committed_step()
    wait_until(lambda: a.committed_step() > reached + 2, timeout_s=60, what="commits", host=a)
    assert not any(line.get("has_key") for line in [*a.lines, *b.lines])
    for host in (a, b):
        assert key not in host.output
        assert key not in (host.run_dir / "resilientd.log").read_text()


def test_ports_that_are_taken_are_named(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = cluster.host("a")
        host.launch([*on_etcd(cluster, etcd_endpoint), "--nnodes=1", "--rr-port", str(port)], [str(script)])
        assert host.wait() == 1
    assert f"cannot listen for peers on 127.0.0.1: [Errno {98}] {os.strerror(98)}" in host.output
    assert f"give a free port, or a longer range, with --rr-port (now {port})" in host.output
