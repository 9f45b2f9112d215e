"""The parts of a peer's daemon that tests play: dialling a real daemon, and listening for one's `Peer`."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster import wait_until
from hosts import Hosts

from resilient_run.ckpt.errors import CheckpointError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.version import FORMATS
from resilient_run.daemon.trust.identity import Identity
from resilient_run.daemon.trust.secure import SecureSocket


def peer_address(hosts: Hosts, name: str) -> tuple[str, int]:
    """Return where the daemon of a host listens, once etcd says it: one that has just opened a job may be late."""
    key = f"{hosts.prefix}ckpt/hosts/{name}"
    entry = wait_until(lambda: hosts.etcd(lambda etcd: etcd.get(key)), timeout_s=30, what=key)
    return entry.value["addr"], entry.value["port"]


def identity_of(hosts: Hosts, host: str = "b", **changes: str) -> Identity:
    """Return a host of the run, or of another one that is nearly the same."""
    known = {"secret": f"secret of {hosts.run_id}", "run_id": hosts.run_id, "incarnation": hosts.incarnation}
    return Identity(**{**known, "host": host, **changes})


def some_identity(host: str) -> Identity:
    """Return a host of a run that no daemon knows."""
    return Identity("secret", run_id="run", incarnation="first", host=host)


def hello(run_id: str, to: str = "", **changes: Any) -> wire.Message:
    """Return the first message of a connection, in clear."""
    return {"op": "hello", "wire": FORMATS["wire"], "run_id": run_id, "to": to, **changes}


def dial(address: tuple[str, int], identity: Identity, *messages: wire.Message, **changes: Any) -> ssl.SSLSocket:
    """Return a blocking connection on which `messages` were said, once its daemon was told who we are.

    Args:
        address: Of the daemon.
        identity: Who we are.
        messages: What is said then.
        changes: In the greeting inside of TLS.
    """
    sock = socket.create_connection(address, timeout=30)
    try:
        greeting = hello(identity.run_id)
        sock.sendall(wire.encode(greeting))
        sock = identity.client.wrap_socket(sock)
        for message in ({**greeting, "host": identity.host, **changes}, *messages):
            sock.sendall(wire.encode(message))
    except BaseException:
        sock.close()
        raise
    return sock


def was_closed(sock: socket.socket) -> bool:
    """Tell whether the peer closes the connection; with a request unread that is a reset, in TLS it may be an alert."""
    try:
        return sock.recv(1) == b""
    except (ConnectionResetError, ssl.SSLError):
        return True


@asynccontextmanager
async def listening(
    identity: Identity, serve: Callable[[SecureSocket], Awaitable[None]]
) -> AsyncIterator[tuple[str, int]]:
    """Let `serve` handle every connection as the daemon of `identity`, and yield where it listens."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def welcome(plain: socket.socket) -> None:
        plain.setblocking(False)
        frame = wire.Frame(4096)
        while frame.feed(await loop.sock_recv(plain, frame.missing)) is None:
            pass
        sock = SecureSocket(plain, identity, server_side=True)
        try:
            await sock.handshake()
            await sock.receive_message(4096)
            await serve(sock)
        except (OSError, CheckpointError):
            pass  # the client is gone
        finally:
            sock.close()

    async def accept() -> None:
        while True:
            plain, _ = await loop.sock_accept(listener)
            tasks.append(asyncio.create_task(welcome(plain)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        tasks.append(asyncio.create_task(accept()))
        try:
            yield listener.getsockname()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
