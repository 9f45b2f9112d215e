"""Who is no host of a run gets nothing from its daemons, changes nothing, and cannot stop it.

The attacker reaches the daemons' ports, may sit on the wire between two of them, and in some of these attacks writes
the run's keys in etcd. The run has a run key where that matters: without one, who reads etcd has the secret.
"""

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import wait_until
from flood import Flood
from hosts import Hosts, Trainer, payload, wait_for_watermark
from peer_talk import dial, hello, identity_of, peer_address, was_closed

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format import wire
from resilient_run.daemon.trust.identity import Identity

pytestmark = pytest.mark.jobs

KEY = "a run key of at least thirty-two characters"
MIB = 1 << 20
ASK = {"id": 7, "op": "have", "rank": 0, "generation": 1, "step": 1}


def run_with_key(hosts: Hosts, key: str = KEY, *, generation: int = 1) -> list[Trainer]:
    """Let the launchers of a and b open the job with a run key, and their trainers attach in a new generation."""
    hosts.create_job()
    for name in "ab":
        if hosts[name].process is None:
            hosts[name].start()
        hosts[name].drop_clients()
        hosts[name].open(run_key=key)
    return hosts.run("ab", generation=generation)


@pytest.fixture
def trainers(hosts: Hosts) -> list[Trainer]:
    """Two hosts with one committed step."""
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    return trainers


def tells_nothing(sock: socket.socket) -> bool:
    """Tell whether the daemon ends the connection without an answer to anything."""
    return was_closed(sock)


def attempt(make: Callable[[], socket.socket]) -> None:
    """Connect as an attacker does, and see that nothing comes of it."""
    try:
        sock = make()
    except (ssl.SSLError, ConnectionError):
        return
    with sock:
        assert tells_nothing(sock)


def goes_on(hosts: Hosts, trainers: list[Trainer], step: int) -> None:
    """See that training commits, and that the daemons met nothing unexpected."""
    hosts.commit(trainers, [step])
    for name in hosts.hosts:
        assert "Traceback" not in hosts[name].log, hosts[name].log


@pytest.mark.parametrize("changes", [{"secret": "guessed"}, {"run_id": "other"}, {"incarnation": "an earlier life"}])
def test_another_secret_opens_nothing(hosts: Hosts, trainers: list[Trainer], changes: dict[str, str]) -> None:
    address, identity = peer_address(hosts, "a"), identity_of(hosts, **changes)
    # He knows the run's name, trusts anybody, and goes on as if he were in.
    lenient = identity_of(hosts, **changes)
    lenient.run_id = hosts.run_id
    lenient.client.verify_mode = ssl.CERT_NONE
    attempt(lambda: dial(address, identity, ASK))
    attempt(lambda: dial(address, lenient, ASK))
    goes_on(hosts, trainers, 2)


def test_names_alone_make_no_certificate(hosts: Hosts, trainers: list[Trainer]) -> None:
    """An authority of the attacker's own, with all names as the run's, and the secret in etcd: he lacks the run key."""
    trainers = run_with_key(hosts, generation=2)
    known = identity_of(hosts)
    known.client.verify_mode = ssl.CERT_NONE
    attempt(lambda: dial(peer_address(hosts, "a"), known, ASK))
    with dial(peer_address(hosts, "a"), identity_of(hosts, secret=KEY), ASK) as sock:
        assert wire.recv_message(sock) is not None, "the key opens, and etcd's secret does not"
    goes_on(hosts, trainers, 3)


def test_who_speaks_no_tls_hears_nothing(hosts: Hosts, trainers: list[Trainer]) -> None:
    address = peer_address(hosts, "a")
    plain = {"op": "hello", "run_id": hosts.run_id, "token": f"secret of {hosts.run_id}", "host": "b", "to": "a"}
    firsts: list[list[dict[str, Any]]] = [
        [plain, ASK],  # as daemons spoke before
        [hello(hosts.run_id), ASK],
        [{**hello(hosts.run_id), "host": "b"}, {**hello(hosts.run_id), "host": "b"}, ASK],
        [hello(hosts.run_id, wire="1"), ASK],
        [hello(hosts.run_id, wire="99"), ASK],
        [ASK],
    ]
    for messages in firsts:
        with socket.create_connection(address, timeout=30) as sock:
            sock.sendall(b"".join(map(wire.encode, messages)))
            received = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(4096):
                    received += data
        # At most a TLS alert (type 21): no handshake message, no answer.
        assert received[:1] in (b"", b"\x15")
        assert len(received) < 16
    log = hosts["a"].log
    assert f"it speaks version 1 of the wire format, this daemon {wire.VERSION}: install the same resilient-run" in log
    assert "it speaks version 99 of the wire format" in log
    goes_on(hosts, trainers, 2)


def test_an_older_tls_is_refused(hosts: Hosts, trainers: list[Trainer]) -> None:
    old = identity_of(hosts)
    old.client.minimum_version = old.client.maximum_version = ssl.TLSVersion.TLSv1_2
    attempt(lambda: dial(peer_address(hosts, "a"), old, ASK))
    goes_on(hosts, trainers, 2)


def test_host_b_cannot_be_host_a(hosts: Hosts, trainers: list[Trainer]) -> None:
    """The certificate says who it is, and what is said in TLS must be what was said before it."""
    address, identity = peer_address(hosts, "a"), identity_of(hosts, "b")
    for changes in ({"host": "a"}, {"host": None}, {"to": "b"}, {"run_id": "other"}, {"wire": "1"}, {"more": 1}):
        with dial(address, identity, ASK, **changes) as sock:
            assert tells_nothing(sock)
    assert "it has the certificate of host b, and says hello as 'a'" in hosts["a"].log
    goes_on(hosts, trainers, 2)


def test_a_long_first_message_is_not_read(hosts: Hosts, trainers: list[Trainer]) -> None:
    process = hosts["a"].process
    assert process is not None
    before_bytes = psutil.Process(process.pid).memory_info().rss
    for size in (4097, MIB, 2**32 - 1):
        with socket.create_connection(peer_address(hosts, "a"), timeout=30) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(struct.pack(">I", size) + b'{"op":"' + b"x" * min(size, 4 * MIB))
            assert tells_nothing(sock)
    assert psutil.Process(process.pid).memory_info().rss - before_bytes < 16 * MIB
    goes_on(hosts, trainers, 2)


@pytest.mark.parametrize("field", ["run_id", "wire"])
def test_a_stranger_writes_little_into_the_log(hosts: Hosts, trainers: list[Trainer], field: str) -> None:
    long = "x" * 3500
    with socket.create_connection(peer_address(hosts, "a"), timeout=30) as sock:
        sock.sendall(wire.encode({**hello(hosts.run_id), field: long}))
        assert tells_nothing(sock)
    wait_until(lambda: long[:50] in hosts["a"].log, timeout_s=30, what="a line of the log")
    assert long[:200] not in hosts["a"].log
    goes_on(hosts, trainers, 2)


def test_handshakes_that_never_end_keep_nobody_out(hosts: Hosts, trainers: list[Trainer]) -> None:
    """Hundreds that name the run and stop in the middle of TLS; who is in stays, and who belongs here gets in."""
    address = peer_address(hosts, "a")
    known = dial(address, identity_of(hosts), ASK)
    assert wire.recv_message(known) is not None
    process = hosts["a"].process
    assert process is not None
    before_bytes = psutil.Process(process.pid).memory_info().rss
    named = wire.encode(hello(hosts.run_id))
    begun = named + client_hello(identity_of(hosts, secret="guessed"))
    announced = named + struct.pack(">BHH", 22, 0x0301, 1 << 14) + b"\x01" + (100_000).to_bytes(3, "big") + bytes(9000)
    with contextlib.ExitStack() as stack:
        for data in (named, begun, begun[:-20], announced):
            stack.enter_context(Flood(socket.AF_INET, address, count=300, data=data))
        with dial(address, identity_of(hosts, "c"), ASK) as newcomer:
            assert wire.recv_message(newcomer) is not None
        known.sendall(wire.encode(ASK))
        assert wire.recv_message(known) is not None
        hosts.commit(trainers, [2])
        assert psutil.Process(process.pid).memory_info().rss - before_bytes < 96 * MIB
    known.close()
    goes_on(hosts, trainers, 3)


def client_hello(identity: Identity) -> bytes:
    """Return how a client begins with TLS."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        identity.client.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


class Wire:
    """What goes over a connection between two daemons, in the attacker's hands.

    Attributes:
        seen: Everything that passed, for each connection what the client said and what the server answered.
        flip_from: Of what servers say, the first bit after so many bytes is flipped on every connection.
    """

    def __init__(self, target: tuple[str, int], *, flip_from: int | None = None) -> None:
        self.seen: list[tuple[bytearray, bytearray]] = []
        self.flip_from = flip_from
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks = [self._listener]
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._socks += [client, server]
                said, answered = bytearray(), bytearray()
                self.seen.append((said, answered))
                self._spawn(self._forward, client, server, said, None)
                self._spawn(self._forward, server, client, answered, self.flip_from)

    def _forward(self, source: socket.socket, sink: socket.socket, seen: bytearray, flip_at: int | None) -> None:
        with contextlib.suppress(OSError):  # one end is gone
            while data := bytearray(source.recv(1 << 16)):
                if flip_at is not None and len(seen) <= flip_at < len(seen) + len(data):
                    data[flip_at - len(seen)] ^= 1
                seen += data
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()


@contextlib.contextmanager
def in_the_middle(hosts: Hosts, name: str, **options: Any) -> Iterator[Wire]:
    """Lead to the daemon of a host through the attacker's hands: he writes another address into etcd."""
    direct = peer_address(hosts, name)
    wire_ = Wire(direct, **options)
    try:
        point(hosts, name, wire_.address)
        wait_until(lambda: not connected(hosts, direct), timeout_s=30, what="the end of what leads past the attacker")
        yield wire_
    finally:
        wire_.close()


def connected(hosts: Hosts, address: tuple[str, int]) -> bool:
    """Tell whether a daemon is connected to `address`."""
    processes = [psutil.Process(host.process.pid) for host in hosts.hosts.values() if host.process is not None]
    return any(found.raddr == address for process in processes for found in process.net_connections("tcp"))


def point(hosts: Hosts, name: str, address: tuple[str, int]) -> None:
    """Write into etcd that a host's daemon is at `address`."""
    key = f"{hosts.prefix}ckpt/hosts/{name}"

    async def change(etcd: Any) -> None:
        entry = await etcd.get(key)
        await etcd.put(key, {**entry.value, "addr": address[0], "port": address[1]})

    hosts.etcd(change)


def test_who_listens_on_the_wire_reads_nothing(hosts: Hosts, trainers: list[Trainer]) -> None:
    with in_the_middle(hosts, "a") as seen:
        hosts.commit(trainers, [2, 3])
        wait_until(lambda: sum(len(answers) for _, answers in seen.seen) > MIB, timeout_s=30, what="a replica")
        everything = b"".join(bytes(part) for pair in seen.seen for part in pair)
    for step in (2, 3):
        state = payload(hosts.run_id, 0, (1, step))
        for at in range(0, len(state) - 32, 4096):
            assert state[at : at + 32] not in everything
    assert f"secret of {hosts.run_id}".encode() not in everything
    assert b'"host"' not in everything, "hosts say who they are in TLS only"
    assert b'"offset"' not in everything
    assert b'"op":"hello"' in everything, "what is in clear"


@pytest.mark.parametrize("flip_from", [10, 400, 5000, 200_000])
def test_who_changes_a_bit_on_the_wire_is_found_out(hosts: Hosts, trainers: list[Trainer], flip_from: int) -> None:
    """In the handshake or in a replica: nothing is held of it, and what is, is what was captured."""
    with in_the_middle(hosts, "a", flip_from=flip_from):
        for trainer in trainers:
            trainer.capture(2)
        told = "ended the handshake" if flip_from < 1000 else "BAD_RECORD_MAC"
        wait_until(
            lambda: told.lower() in hosts["b"].log.lower(), timeout_s=30, what=lambda: f"{told}\n{hosts['b'].log}"
        )
        assert (1, 2) not in hosts["b"].held().get(0, set())
    # The attacker is gone; the daemon's own address is written again by nobody else.
    point(hosts, "a", own_address(hosts, "a"))
    wait_for_watermark(trainers, (1, 2))
    for path in hosts["b"].slot_paths(0, (1, 2)):
        assert payload(hosts.run_id, 0, (1, 2)) in path.read_bytes()


def own_address(hosts: Hosts, name: str) -> tuple[str, int]:
    """Return where the daemon of a host really listens."""
    process = hosts[name].process
    assert process is not None
    connections = psutil.Process(process.pid).net_connections("tcp")
    (found,) = {found.laddr for found in connections if found.status == psutil.CONN_LISTEN}
    return found.ip, found.port


def test_what_was_recorded_cannot_be_said_again(hosts: Hosts, trainers: list[Trainer]) -> None:
    with in_the_middle(hosts, "a") as seen:
        hosts.commit(trainers, [2])
        recorded = [bytes(said) for said, _ in seen.seen]
    assert recorded
    for said in recorded:
        with socket.create_connection(own_address(hosts, "a"), timeout=30) as sock:
            received = bytearray()
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
                while data := sock.recv(1 << 16):
                    received += data
        # The daemon's own part of a handshake, with keys of its own, and an alert: no more.
        assert len(received) < 4096
    point(hosts, "a", own_address(hosts, "a"))
    goes_on(hosts, trainers, 3)


def test_who_writes_etcd_cannot_be_a_host(hosts: Hosts) -> None:
    """He points a host's key at himself, knows all that etcd has, and has no run key."""
    trainers = run_with_key(hosts)
    hosts.commit(trainers, [1])
    own = own_address(hosts, "a")
    heard: list[bytes] = []
    forger = identity_of(hosts, "a")  # from the secret in etcd
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    sock, _ = listener.accept()
                    sock.settimeout(10)
                    with contextlib.suppress(OSError), sock:
                        first = wire.recv_message(sock)
                        heard.append(json.dumps(first).encode())
                        forger.server.verify_mode = ssl.CERT_NONE
                        with forger.server.wrap_socket(sock, server_side=True) as secure:
                            heard.append(secure.recv(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        point(hosts, "a", listener.getsockname())
        wait_until(lambda: not connected(hosts, own), timeout_s=30, what="the end of what leads past the attacker")
        for trainer in trainers:
            trainer.capture(2)
        wait_until(lambda: len(heard) > 1, timeout_s=30, what="a daemon that calls the attacker")
        wait_until(lambda: "belongs to another run" in hosts["b"].log, timeout_s=30, what=lambda: hosts["b"].log)
        assert (1, 2) not in hosts["b"].held().get(0, set()), "nothing was delivered"
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    # What he heard is what etcd says anyway.
    assert {part for part in heard if part} == {json.dumps(hello(hosts.run_id, "a")).encode()}
    point(hosts, "a", own)
    wait_for_watermark(trainers, (1, 2))


def test_a_key_is_in_no_file_and_no_log(hosts: Hosts) -> None:
    """Neither beside the slots, nor in a log, on a command line, in an environment, or in what `status` says."""
    trainers = run_with_key(hosts)
    hosts.commit(trainers, [1])
    for name in "ab":
        host = hosts[name]
        assert host.process is not None
        process = psutil.Process(host.process.pid)
        texts = [host.log.encode(), json.dumps(host.status()).encode(), " ".join(process.cmdline()).encode()]
        texts += [path.read_bytes() for path in host.shm_dir.rglob("*") if path.is_file()]
        texts += [Path(f"/proc/{host.process.pid}/environ").read_bytes()]
        assert not any(KEY.encode() in text for text in texts)
    entries = hosts.etcd(lambda etcd: etcd.list(hosts.prefix))
    assert KEY not in json.dumps([entry.value for entry in entries.values()])


def test_another_key_is_another_job(hosts: Hosts) -> None:
    """A launcher that comes back with another key: the old one opens nothing any more."""
    hosts.commit(run_with_key(hosts), [1])
    run_with_key(hosts, KEY[::-1], generation=2)
    with dial(peer_address(hosts, "a"), identity_of(hosts, secret=KEY[::-1]), ASK) as sock:
        assert wire.recv_message(sock) is not None
    attempt(lambda: dial(peer_address(hosts, "a"), identity_of(hosts, secret=KEY), ASK))


def test_a_short_key_is_refused_by_the_daemon_too(hosts: Hosts) -> None:
    hosts.create_job()
    hosts["a"].start()
    for key in ("too short", 5):
        with pytest.raises(DaemonError) as refusal:
            hosts["a"].open(run_key=key)
        assert "too short" not in str(refusal.value)
    assert "too short" not in hosts["a"].log
