"""The one client of the daemon, against servers that answer late, wrongly or not at all."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import wait_until

from resilient_run.ckpt.errors import DaemonError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.link.client import DaemonClient

Serve = Callable[[socket.socket, int], None]


class Server:
    """Gives each connection and its number, from 0, to `serve`, one after the other."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self.count = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._serve = serve
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.count += 1
            with connection:
                try:
                    self._serve(connection, self.count - 1)
                except (OSError, WireError):
                    continue


Connect = Callable[..., DaemonClient]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Start a server and a client of it."""
    made: list[Any] = []

    def make(serve: Serve, on_trouble: Callable[[Exception], None] = lambda trouble: None) -> DaemonClient:
        client = DaemonClient(
            tmp_path / "sock",
            {"op": "hello"},
            on_welcome=lambda answer: None,
            on_message=lambda message: None,
            on_trouble=on_trouble,
            name="client",
        )
        server = Server(tmp_path / "sock", serve)
        made.extend([client, server])
        client.start()
        return client

    yield make
    for item in made:
        item.close()


def greet(connection: socket.socket) -> None:
    message = wire.recv_message(connection)
    assert message is not None
    assert message["op"] == "hello"
    connection.sendall(wire.encode({"id": 0, "ok": True}))


def answer_all(connection: socket.socket) -> None:
    while (message := wire.recv_message(connection)) is not None:
        if "id" in message:
            connection.sendall(wire.encode({"id": message["id"], "ok": True, "said": message["op"]}))


def test_requests_are_answered_across_connections(connect: Connect) -> None:
    def serve(connection: socket.socket, number: int) -> None:
        greet(connection)
        if number < 2:
            wire.recv_message(connection)  # and leave with the request
        else:
            answer_all(connection)

    client = connect(serve)
    assert client.request("ask", within_s=30.0)["said"] == "ask"
    assert client.was_welcome
    assert client.away_s is None


@pytest.mark.parametrize("value", [float("nan"), "x" * (wire.MAX_FRAME_BYTES + 1)])
@pytest.mark.parametrize("welcome", [True, False])
def test_what_is_no_message_harms_only_who_sends_it(connect: Connect, value: Any, welcome: bool) -> None:
    let = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        let.wait(30)
        greet(connection)
        answer_all(connection)

    client = connect(serve)
    if welcome:
        let.set()
        client.wait_welcome(30.0)
    with pytest.raises((ValueError, WireError)):
        client.request("poison", within_s=5.0, value=value)
    let.set()
    assert client.request("ask", within_s=30.0)["said"] == "ask"


def test_answers_to_nothing_are_passed_over(connect: Connect) -> None:
    def serve(connection: socket.socket, number: int) -> None:
        greet(connection)
        message = wire.recv_message(connection)
        assert message is not None
        for stray in ([1], "1", None, -1, 10**9):
            connection.sendall(wire.encode({"id": stray, "ok": True}))
        connection.sendall(wire.encode({"id": message["id"], "ok": True}))
        answer_all(connection)

    assert connect(serve).request("ask", within_s=30.0)["ok"]


def test_a_first_refusal_is_the_end(connect: Connect) -> None:
    def serve(connection: socket.socket, number: int) -> None:
        wire.recv_message(connection)
        connection.sendall(wire.encode({"id": 0, "ok": False, "error": "DaemonError", "message": "no"}))
        answer_all(connection)

    client = connect(serve)
    with pytest.raises(DaemonError, match=r"^no$"):
        client.wait_welcome(30.0)
    wait_until(lambda: client.connected_s is None, timeout_s=30, what="the end")
    assert not client.is_welcome
    with pytest.raises(DaemonError, match="closed"):
        client.request("ask", within_s=5.0)


def test_a_daemon_that_does_not_read_is_behind_by_hundreds_of_messages_before_it_counts_as_gone(
    connect: Connect,
) -> None:
    read = threading.Event()
    troubles: list[Exception] = []

    def serve(connection: socket.socket, number: int) -> None:
        greet(connection)
        read.wait(30)

    client = connect(serve, troubles.append)
    client.wait_welcome(30.0)
    for step in range(500):
        client.notify("progress", step=step)
    assert client.is_welcome
    for step in range(1 << 14):
        client.notify("progress", step=step)
    assert not client.is_welcome
    read.set()
    wait_until(lambda: troubles, timeout_s=30.0, what="no trouble was told")
    assert str(troubles[0]) == "it has not read its messages for so long that the socket is full"


def test_any_number_of_connections_takes_one_handler_of_forks_that_closes_what_a_child_inherits(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **handlers: registered.append(handlers))
    connections = 5

    def serve(connection: socket.socket, number: int) -> None:
        greet(connection)
        if number == connections - 1:
            answer_all(connection)

    client = connect(serve)
    wait_until(lambda: client.is_welcome and client.request("ask", within_s=5.0), timeout_s=30, what="the last one")
    assert not registered
    connection = client._connection
    assert connection is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if connection.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.request("ask", within_s=30.0)["ok"], "its parent's goes on"
