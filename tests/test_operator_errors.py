"""What an operator got wrong ends the launcher with one message that says what to change, and no traceback."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from certificates import make_certificates
from cluster import Cluster, Host
from etcd_process import EtcdProcess, kept_ports

pytestmark = pytest.mark.jobs


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "train.py").write_text("raise SystemExit('no worker must start')")
    cluster = Cluster(tmp_path)
    yield cluster.host("a")
    cluster.close()


def message_of(host: Host, root: Path, *options: str) -> str:
    """Return what is printed to the end of a launcher with these options, which must be one message."""
    line = ["--nnodes", "2", "--rdzv-backend", "etcd-v3", "--rdzv-id", root.name, *options]
    host.launch(line, [str(root / "train.py")])
    assert host.wait() == 1, host.output
    assert "Traceback" not in host.output, host.output
    assert not host.daemon_pid(), "nothing is left"
    (message,) = (line for line in host.output.splitlines() if line.startswith("Error: "))
    assert host.output.count("etcd at") <= 1, host.output
    return message


def test_nothing_listens_there(host: Host, tmp_path: Path) -> None:
    (port,) = kept_ports(1)
    message = message_of(host, tmp_path, "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert f"cannot reach etcd at 127.0.0.1:{port} without TLS" in message
    assert "--rdzv-endpoint" in message


def test_something_else_listens_there(host: Host, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert f"cannot reach etcd at {endpoint}" in message_of(host, tmp_path, "--rdzv-endpoint", endpoint)


def test_another_service_of_grpc_listens_there(host: Host, tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert f"what answers at {endpoint} is not etcd 3" in message_of(host, tmp_path, "--rdzv-endpoint", endpoint)
    finally:
        server.stop(None)


def test_there_is_no_such_host(host: Host, tmp_path: Path) -> None:
    message = message_of(host, tmp_path, "--rdzv-endpoint", "no-such-etcd.invalid:2379")
    assert "cannot reach etcd at no-such-etcd.invalid:2379" in message


def test_no_endpoint(host: Host, tmp_path: Path) -> None:
    assert "no etcd endpoint given; use --rdzv-endpoint=host[:port]" in message_of(host, tmp_path)


def test_members_of_etcd_without_its_backend(host: Host, tmp_path: Path) -> None:
    host.launch(["--nnodes", "2", "--rdzv-endpoint", "etcd-0:2379,etcd-1:2379"], [str(tmp_path / "train.py")])
    assert host.wait() == 2
    assert "Traceback" not in host.output, host.output
    assert "need --rdzv-backend=etcd-v3" in host.output


def test_a_setting_that_does_not_exist_is_named(host: Host, tmp_path: Path) -> None:
    conf = "lease_tll=30,join_timeout=9,timeout=9,cert=/client.pem"
    assert "cert= and key=" in message_of(host, tmp_path, "--rdzv-endpoint", "etcd", "--rdzv-conf", conf)
    assert "--rdzv-conf: etcd-v3 ignores lease_tll; it knows join_timeout, " in host.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rdzv-endpoint", "http://etcd:2379"], "is neither host[:port] nor unix:/path"),
        (["--rdzv-endpoint", "etcd", "--rdzv-conf", "join_timeout=soon"], "join_timeout=soon in --rdzv-conf is not"),
        (["--rdzv-endpoint", "etcd", "--rdzv-conf", "password=x"], "passwordfile="),
        (["--rdzv-endpoint", "etcd", "--rdzv-conf", "cacert=/nonexistent/ca.pem"], "cannot read the TLS file"),
    ],
)
def test_options_that_cannot_be_used(host: Host, tmp_path: Path, options: list[str], words: str) -> None:
    assert words in message_of(host, tmp_path, *options)


@pytest.mark.parametrize(("authority", "words"), [("other.pem", "with TLS"), ("", "without TLS")])
def test_certificates_that_do_not_fit(host: Host, tmp_path: Path, authority: str, words: str) -> None:
    make_certificates(tmp_path)
    flags = (f"--cert-file={tmp_path / 'server.pem'}", f"--key-file={tmp_path / 'server.key'}")
    etcd = EtcdProcess(tmp_path / "etcd", *flags, scheme="https")
    etcd.start()
    try:
        options = ["--rdzv-conf", f"cacert={tmp_path / authority}"] if authority else []
        message = message_of(host, tmp_path, "--rdzv-endpoint", etcd.endpoint, *options)
        assert f"cannot reach etcd at {etcd.endpoint} {words}" in message
    finally:
        etcd.kill()


def test_credentials_that_are_refused(host: Host, tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    try:
        etcd.enable_auth("secret")
        message = message_of(host, tmp_path, "--rdzv-endpoint", etcd.endpoint)
        assert f"etcd refused access at {etcd.endpoint} without a user" in message
    finally:
        etcd.kill()
