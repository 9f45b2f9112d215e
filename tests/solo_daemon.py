"""The smallest daemon that a trainer can attach to: one host, one replica, commits at once or when a test says so."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from cluster import wait_until

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot
from resilient_run.ckpt.format.wire import Message, encode, recv_message
from resilient_run.ckpt.link.env import TrainerEnv

RUN_ID = "run"


def is_committed(ckpt: Checkpointer) -> bool:
    """Return whether the newest step is captured and committed, so that the next one is captured, too."""
    assert ckpt._capturer is not None
    return ckpt.wait(30) and ckpt._capturer.wait_decided(30)


class SoloDaemon:
    """Speaks the trainer's part of `docs/internals/protocol.md` on a real unix socket and keeps real slot files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "resilientd.sock"
        self.frozen = False
        self.refuse: dict[str, tuple[str, str]] = {}
        self.plan: tuple[int, int] | None = None
        self.watermark: tuple[int, int] | None = None
        self.next: tuple[int, int] | None = None
        self.replication: Message = {
            "scheme": "unpaced",
            "variance": 0.9,
            "sub_buffer_bytes": 4 << 20,
            "bandwidth_mbit_s": 0.0,
            "copies": 0,
            "every": 1,
            "idle": None,
        }
        self.seen: list[Message] = []
        self.eager: list[str] = []
        self._complete: dict[int, set[tuple[int, int]]] = {}
        self.changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()
        self._threads[0].join()  # accepts: nobody comes any more
        with self.changed:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # the trainer was faster
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._connections, self._threads = [], []

    def environ(self, *, generation: int = 1, rank: int = 0, world_size: int = 1) -> dict[str, str]:
        return {
            "RESILIENT_SOCKET": str(self.path),
            "RESILIENT_RUN_ID": RUN_ID,
            "RESILIENT_GENERATION": str(generation),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        """Let the next Checkpointer attach here."""
        for name, value in self.environ(**options).items():
            monkeypatch.setenv(name, value)

    def restart(self, monkeypatch: pytest.MonkeyPatch, generation: int = 2) -> None:
        """Let the next Checkpointer be one of a new generation that restores the watermark."""
        self.plan = wait_until(lambda: self.watermark, timeout_s=30, what="a commit")
        self.enter(monkeypatch, generation=generation)

    def env(self, **options: int) -> TrainerEnv:
        env = TrainerEnv.from_environ(self.environ(**options))
        assert env is not None
        return env

    def commit(self, generation: int, step: int) -> None:
        with self.changed:
            self.watermark = (generation, step)
            self._say(next_=(generation, step + 1))

    def call_for(self, generation: int, step: int) -> None:
        """Say that the first step from this one on is captured next, and nothing before it."""
        with self.changed:
            self._say(next_=(generation, step))

    def _say(self, *, next_: tuple[int, int]) -> None:
        self.next = next_
        for connection in self._connections:
            agreed = {"watermark": _pair(self.watermark), "next": _pair(next_), "older": []}
            with contextlib.suppress(OSError):  # this trainer is gone
                connection.sendall(encode({"op": "watermark", **agreed}))
        self.changed.notify_all()

    def wait_for(self, op: str, **fields: Any) -> Message:
        """Return the first message seen with this op and these fields, waiting for it."""

        def find() -> Message | None:
            wanted = {"op": op, **fields}
            return next((m for m in self.seen if wanted.items() <= m.items()), None)

        with self.changed:
            assert self.changed.wait_for(lambda: find() is not None, 30), f"no {op} {fields} in {self.seen}"
            found = find()
        assert found is not None
        return found

    def slots(self, rank: int = 0) -> list[Slot]:
        return [Slot.open(path) for path in sorted(self.directory.glob(f"rank{rank}.*.slot"))]

    def _spawn(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self.changed:
                self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        rank, world_size = 0, 1
        with connection:
            try:
                while (message := recv_message(connection)) is not None:
                    if message["op"] == "attach":
                        rank, world_size = message["rank"], message["world_size"]
                    answer = self._handle(rank, message)
                    if "id" in message:
                        connection.sendall(encode({"id": message["id"], **answer}))
                    with self.changed:
                        self.seen.append(message)
                        self.changed.notify_all()
                    if message["op"] == "complete":
                        self._completed(rank, world_size, (message["generation"], message["step"]))
            except OSError:
                return
            finally:
                with self.changed:
                    if connection in self._connections:
                        self._connections.remove(connection)
                    self.changed.notify_all()

    def _completed(self, rank: int, world_size: int, version: tuple[int, int]) -> None:
        with self.changed:
            self._complete.setdefault(rank, set()).add(version)
            everywhere = set.intersection(*(self._complete.get(other, set()) for other in range(world_size)))
            newest = max(everywhere, default=None)
        if newest is not None and newest != self.watermark and not self.frozen:
            self.commit(*newest)

    def _handle(self, rank: int, message: Message) -> Message:
        if message["op"] in self.refuse:
            error, text = self.refuse[message["op"]]
            return {"ok": False, "error": error, "message": text}
        match message["op"]:
            case "attach":
                committed = max((pair for pair in (self.plan, self.watermark) if pair), default=None)
                following = (message["generation"], 1 if committed is None else committed[1] + 1)
                next_ = self.next if self.next and self.next[0] == message["generation"] else following
                answer = {"restore": _pair(self.plan), "watermark": _pair(committed), "next": _pair(next_), "older": []}
                return {"ok": True, **answer, "eager": self.eager, "replication": self.replication}
            case "eager":
                self.eager.append(message["name"])
            case "allocate":
                return {"ok": True, "paths": self._allocate(rank, message)}
            case "restore":
                for slot in self.slots(rank):
                    if slot.state() == "COMPLETE" and (slot.header().generation, slot.header().step) == self.plan:
                        slot.verify()
                        return {"ok": True, "path": str(slot.path), "source": "local"}
                return {"ok": False, "error": "RestoreError", "message": "no copy is left"}
        return {"ok": True}

    def _allocate(self, rank: int, message: Message) -> list[str]:
        paths = []
        sizes = {"capacity_bytes": message["capacity_bytes"], "payload_offset": message["payload_offset"]}
        known = [slot.capacity_bytes for slot in self.slots(rank)]
        if known and max(known) < sizes["capacity_bytes"]:  # as the daemon does where there is room
            sizes = {name: size * 3 // 2 // HEADER_BYTES * HEADER_BYTES for name, size in sizes.items()}
        for index in range(2):
            path = self.directory / f"rank{rank}.{index}.slot"
            if path.exists():
                slot = Slot.open(path)
                if {name: getattr(slot, name) for name in sizes} != sizes:
                    os.unlink(path)
                slot.close()
            if not path.exists():
                Slot.create(path, **sizes).close()
            paths.append(str(path))
        return paths


def _pair(version: tuple[int, int] | None) -> Message | None:
    return None if version is None else {"generation": version[0], "step": version[1]}
