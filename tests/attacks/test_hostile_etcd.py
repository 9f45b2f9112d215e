"""An etcd that seems to guard a run's secret, and does not, or nobody can tell: the run does not count on it."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from etcd_process import EtcdProcess

from resilient_run.daemon.etcd.client import Etcd, EtcdAuthError, EtcdConfig
from resilient_run.daemon.etcd.stranger import lets_strangers_in


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    make_certificates(directory)
    return directory


@contextlib.contextmanager
def tls_etcd(pki: Path, directory: Path, *flags: str) -> Iterator[EtcdProcess]:
    own = (f"--cert-file={pki / 'server.pem'}", f"--key-file={pki / 'server.key'}")
    process = EtcdProcess(directory, *own, *flags, scheme="https")
    process.start()
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def guarded(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One that wants a certificate."""
    flags = ("--client-cert-auth", f"--trusted-ca-file={pki / 'ca.pem'}")
    with tls_etcd(pki, tmp_path_factory.mktemp("guarded"), *flags) as process:
        yield process


@pytest.fixture(scope="module")
def unguarded(pki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One that wants none."""
    with tls_etcd(pki, tmp_path_factory.mktemp("unguarded")) as process:
        yield process


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the endpoint of whoever does `serve` with each connection."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                held.append(sock)
                with contextlib.suppress(OSError):
                    serve(sock)

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for sock in held:
                sock.close()


def config(pki: Path, *endpoints: str, **changes: str) -> EtcdConfig:
    files = {"cacert": str(pki / "ca.pem"), "cert": str(pki / "client.pem"), "key": str(pki / "client.key")}
    return EtcdConfig(endpoints=endpoints, **{**files, **changes})


def hangs_up(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.close()


def says_nothing(_: socket.socket) -> None:
    pass


@pytest.mark.parametrize("serve", [hangs_up, says_nothing])
def test_silence_is_no_refusal(
    pki: Path, serve: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody in the middle keeps the question from an etcd that lets everybody in."""
    monkeypatch.setattr("resilient_run.daemon.etcd.stranger._STRANGER_S", 0.5)
    with server(serve) as endpoint:
        assert lets_strangers_in(config(pki, endpoint))


def test_a_no_of_another_authority_is_none(pki: Path) -> None:
    """He speaks TLS himself and says no as an etcd does that wants a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "rogue.pem", pki / "rogue.key")
    context.load_verify_locations(pki / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    def serve(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as secure:
            secure.recv(1)

    with server(serve) as endpoint:
        assert lets_strangers_in(config(pki, endpoint))
        assert not lets_strangers_in(config(pki, endpoint, cacert=str(pki / "other.pem"))), "it can be believed, too"


def test_one_endpoint_that_lets_everybody_in_is_enough(
    pki: Path, guarded: EtcdProcess, unguarded: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resilient_run.daemon.etcd.stranger._STRANGER_S", 3.0)
    assert not lets_strangers_in(config(pki, guarded.endpoint))
    assert lets_strangers_in(config(pki, guarded.endpoint, unguarded.endpoint))
    assert lets_strangers_in(config(pki, unguarded.endpoint, guarded.endpoint))
    # One that is down, or hangs, is no reason to refuse a run: the others say what etcd asks for.
    with server(says_nothing) as silent:
        assert not lets_strangers_in(config(pki, "127.0.0.1:1", silent, guarded.endpoint))
        assert lets_strangers_in(config(pki, "127.0.0.1:1", silent))


@pytest.mark.parametrize("certificate", [True, False])
def test_a_password_beside_a_certificate_guards_nothing_either(
    pki: Path, unguarded: EtcdProcess, certificate: bool
) -> None:
    """etcd asks for neither: who has shown both was believed to be guarded by the password."""
    shown = config(pki, unguarded.endpoint, user="trainer", password="secret")
    if not certificate:
        shown = EtcdConfig(endpoints=shown.endpoints, user="trainer", password="secret", cacert=shown.cacert)
    with pytest.raises(EtcdAuthError, match=r"requires no password.*etcdctl auth enable"):
        asyncio.run(Etcd.connect(shown))
