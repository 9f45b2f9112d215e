"""Run keys, and certificates that only holders of one secret accept of each other."""

import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import NameOID

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.trust.identity import Identity, host_of
from resilient_run.daemon.trust.secret import checked_key, derive, find_key, key_proof, make_key

KEY = "0123456789abcdef" * 2


def identity(host: str, **changes: str) -> Identity:
    return Identity(**{"secret": KEY, "run_id": "run", "incarnation": "first", "host": host, **changes})


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            for sock in (client, accepted):
                sock.settimeout(30)
            yield client, accepted


def meet(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[str, str]:
    """Return the host that the client sees, and the one that the server sees; the error of either, if there is one."""
    seen: dict[str, str | BaseException] = {}

    def greet(name: str, context: ssl.SSLContext, sock: socket.socket) -> None:
        try:
            with context.wrap_socket(sock, server_side=name == "server") as secure:
                secure.sendall(b"x")
                secure.recv(1)
                seen[name] = host_of(secure)
        except (OSError, DaemonError) as error:
            seen[name] = error

    with pair() as (ours, theirs):
        thread = threading.Thread(target=greet, args=("server", server, theirs))
        thread.start()
        greet("client", client, ours)
        thread.join()
    if errors := [error for name in ("client", "server") if isinstance(error := seen[name], BaseException)]:
        # Whoever writes when the other one has refused it may only see that the connection is gone.
        raise min(errors, key=lambda error: isinstance(error, ConnectionError))
    return str(seen["client"]), str(seen["server"])


@pytest.mark.parametrize("host", ["a", "node-1.cluster#2", "[::1]:80", "ä/b%", "x" * 200])
def test_hosts_of_a_run_know_each_other_by_name(host: str) -> None:
    assert meet(identity("b").client, identity(host).server) == (host, "b")


@pytest.mark.parametrize("changes", [{"secret": KEY[::-1]}, {"run_id": "other"}, {"incarnation": "second"}])
def test_another_secret_run_or_life_is_another_authority(changes: dict[str, str]) -> None:
    with pytest.raises(ssl.SSLError):
        meet(identity("b", **changes).client, identity("a").server)
    # Each side refuses for itself.
    lenient = identity("b", **changes).client
    lenient.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        meet(lenient, identity("a").server)
    lenient = identity("a", **changes).server
    lenient.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(identity("b").client, lenient)


def test_nobody_gets_in_without_a_certificate_or_with_an_older_tls() -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        meet(anonymous, identity("a").server)
    old = identity("b").client
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        meet(old, identity("a").server)


def test_clocks_of_hosts_may_be_wrong() -> None:
    """Certificates are valid at the beginning of time, where clocks without a battery start, and ever after."""
    with pair() as (client, accepted):
        thread = threading.Thread(target=lambda: identity("a").server.wrap_socket(accepted, server_side=True).close())
        thread.start()
        with identity("b").client.wrap_socket(client) as secure:
            certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
        thread.join()
    assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (1970, 9999)
    assert certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "resilient-run authority"


def test_nothing_that_is_published_helps_with_something_else() -> None:
    proofs = {key_proof(KEY, "run"), key_proof(KEY, "other"), key_proof(KEY[::-1], "run")}
    assert len(proofs) == 3
    assert key_proof(KEY, "run") == key_proof(KEY, "run")
    # "a", "bc" is another thing than "ab", "c".
    assert derive(KEY, "p", "a", "bc", size_bytes=32) != derive(KEY, "p", "ab", "c", size_bytes=32)


def test_a_key_that_was_made_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "key"
    done = CliRunner().invoke(resilientctl, ["keygen", str(path)])
    assert (done.exit_code, done.output) == (0, "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = find_key(path, {})
    assert key is not None
    assert len(key) == 64
    again = CliRunner().invoke(resilientctl, ["keygen", str(path)])
    assert again.exit_code == 1
    assert f"cannot write a run key to {path}: File exists" in again.output
    assert find_key(path, {}) == key
    assert find_key(None, {"RESILIENT_KEY": f" {KEY}\n"}) == KEY
    assert find_key(None, {}) is None


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path.write_text("x" * 31), r"has 31 characters, fewer than 32: .*resilientctl keygen"),
        (lambda path: path.write_text(f"{KEY}\n{KEY}"), "is not one line"),
        (lambda path: path.write_bytes(b"\xff" * 40), "is not text"),
        (lambda path: path.write_text("x" * 4097), "longer than 4096 bytes"),
        (lambda path: (path.write_text(KEY), path.chmod(0o640)), r"not private .*-rw-r-----.*chmod 600"),
        (lambda path: (path.write_text(KEY), path.chmod(0o602)), "not private"),
        (lambda path: os.mkfifo(path, 0o600), "not private"),
        (lambda path: path.mkdir(mode=0o700), "Is a directory"),
        (lambda path: None, "No such file"),
    ],
)
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, prepare: object, message: str) -> None:
    path = tmp_path / "key"
    assert callable(prepare)
    before = os.umask(0o077)
    try:
        prepare(path)
    finally:
        os.umask(before)
    with pytest.raises(DaemonError, match=message) as refusal:
        find_key(path, {})
    assert KEY not in str(refusal.value)


def test_a_link_to_a_key_is_followed_but_never_written_to(tmp_path: Path) -> None:
    """Orchestrators mount secrets as links."""
    make_key(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    assert find_key(tmp_path / "link", {}) == find_key(tmp_path / "key", {})
    with pytest.raises(FileExistsError):
        make_key(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(DaemonError, match="uid 65534"):
        find_key(tmp_path / "key", {})


def test_two_keys_are_one_too_many(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    with pytest.raises(DaemonError, match="given twice") as refusal:
        find_key(tmp_path / "key", {"RESILIENT_KEY": KEY})
    assert KEY not in str(refusal.value)


def test_no_message_shows_a_key() -> None:
    with pytest.raises(DaemonError) as refusal:
        checked_key("short and secret", "open_job")
    assert "short and secret" not in str(refusal.value)
