"""The launcher's side of the daemon's unix socket: find or start `resilientd`, keep one job open, hear its events."""

import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_run.ckpt import wire
from resilient_run.ckpt.errors import BY_NAME, DaemonError, WireError

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 30.0
_RETRY_S = 0.05
_RESPAWN_S = 1.0
_IDLE_EXIT_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """What a launcher tells the daemon about its job, in the fields of `open_job` (docs/protocol.md)."""

    run_id: str
    host: str
    replicas: int
    nproc: int
    etcd: dict[str, Any]
    addr: str
    memory_limit_bytes: int | None
    policy: dict[str, Any]

    def message(self) -> wire.Message:
        """Return the fields of the `open_job` request."""
        return {name: getattr(self, name) for name in self.__slots__}


class DaemonLink:
    """One job's life line to the host daemon; reopened by itself, with a new daemon when the old one died.

    Args:
        run_dir: Directory of `resilientd.sock`.
        shm_dir: tmpfs directory that a daemon started here keeps its slots in.
        job: Sent with `open_job` at every (re)connection.
        on_event: Called from the reader thread with each `event` notification of the daemon.
    """

    def __init__(
        self, *, run_dir: Path, shm_dir: Path, job: JobRequest, on_event: Callable[[wire.Message], None]
    ) -> None:
        self._run_dir = run_dir
        self._shm_dir = shm_dir
        self._job = job
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned_s = -math.inf
        self._sock: socket.socket | None = None
        self._answers: dict[int, wire.Message] = {}
        self._next_id = 0
        self._changed = threading.Condition()
        self._refusal: DaemonError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="daemon-link", daemon=True)

    @property
    def socket_path(self) -> Path:
        """Path of the daemon's unix socket, known before the daemon runs."""
        return self._run_dir / "resilientd.sock"

    def start(self) -> None:
        """Start a daemon unless one listens, and open the job in the background; `wait_open` reports the outcome."""
        if not self._listening():
            self._spawn()
        self._thread.start()

    def wait_open(self) -> None:
        """Block until the daemon has accepted the job.

        Raises:
            DaemonError: The daemon refused the job, or none could be reached within 20 s.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._sock or self._refusal, timeout=_START_TIMEOUT_S)
            if self._refusal:
                raise self._refusal
            if self._sock is None:
                raise DaemonError(
                    f"no daemon answers at {self.socket_path} within {_START_TIMEOUT_S:.0f} s; "
                    f"see {self._run_dir / 'resilientd.log'}"
                )

    def request(self, op: str, *, answer_within_s: float = _ANSWER_TIMEOUT_S, **fields: Any) -> wire.Message:
        """Return the daemon's answer to `op` about this job; survives one restart of the daemon in between.

        Raises:
            CheckpointError: The daemon's refusal, as the class it names.
            DaemonError: No answer within `answer_within_s`.
        """
        deadline = time.monotonic() + answer_within_s
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._sock, timeout=max(0.0, deadline - time.monotonic())):
                    raise DaemonError(f"no daemon answers at {self.socket_path} ({op}, {answer_within_s:.0f} s)")
                sock = self._sock
                assert sock is not None
                self._next_id += 1
                request_id = self._next_id
            try:
                sock.sendall(wire.encode({"id": request_id, "op": op, "run_id": self._job.run_id, **fields}))
            except OSError:
                self._drop(sock)
                continue
            with self._changed:
                self._changed.wait_for(
                    lambda: request_id in self._answers or self._sock is not sock,  # noqa: B023
                    timeout=max(0.0, deadline - time.monotonic()),
                )
                answer = self._answers.pop(request_id, None)
            if answer is not None:
                return _checked(answer)
            if time.monotonic() >= deadline:
                raise DaemonError(f"daemon at {self.socket_path} did not answer {op} within {answer_within_s:.0f} s")

    def close(self, *, discard: bool) -> None:
        """End the job on this host; with `discard` its slots go too."""
        self._closing = True
        try:
            if self._sock is not None:
                self.request("close_job", answer_within_s=5.0, discard=discard)
        except DaemonError as error:
            log.warning("could not close the job at the daemon: %s", error)
        with self._changed:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while not self._closing:
            sock = self._connect()
            if sock is None:
                return
            self._read(sock)
            self._drop(sock)
            sock.close()
            if not self._closing:
                log.warning("lost the daemon at %s; training goes on, reconnecting", self.socket_path)

    def _connect(self) -> socket.socket | None:
        """Return a connection with the job open, or None when refused or closing."""
        while not self._closing:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(str(self.socket_path))
                sock.sendall(wire.encode({"id": 0, "op": "open_job", "pid": os.getpid(), **self._job.message()}))
                answer = wire.recv_message(sock)
            except (OSError, WireError):
                sock.close()
                self._respawn()
                time.sleep(_RETRY_S)
                continue
            if answer is None:
                sock.close()
                continue
            if not answer.get("ok"):
                sock.close()
                with self._changed:
                    self._refusal = DaemonError(str(answer.get("message")))
                    self._changed.notify_all()
                return None
            with self._changed:
                self._sock = sock
                self._changed.notify_all()
            return sock
        return None

    def _read(self, sock: socket.socket) -> None:
        while True:
            try:
                message = wire.recv_message(sock)
            except (OSError, WireError):
                return
            if message is None:
                return
            if message.get("op") == "event":
                self._on_event(message)
            else:
                with self._changed:
                    self._answers[message.get("id", 0)] = message
                    self._changed.notify_all()

    def _drop(self, sock: socket.socket) -> None:
        with self._changed:
            if self._sock is sock:
                self._sock = None
            self._changed.notify_all()

    def _listening(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket_path))
            except OSError:
                return False
            return True

    def _respawn(self) -> None:
        """Start a daemon again when none runs, though not in a tight loop when each ends at once."""
        running = self._process is not None and self._process.poll() is None
        if running or self._listening() or time.monotonic() < self._spawned_s + _RESPAWN_S:
            return
        self._spawn()

    def _spawn(self) -> None:
        self._spawned_s = time.monotonic()
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "resilient_run.daemon"]
        command += [
            "--run-dir",
            str(self._run_dir),
            "--shm-dir",
            str(self._shm_dir),
            "--idle-exit",
            str(_IDLE_EXIT_S),
        ]
        with open(self._run_dir / "resilientd.log", "ab") as log_file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
            )
        log.info("started resilientd (pid %d), log in %s", self._process.pid, log_file.name)


def _checked(answer: wire.Message) -> wire.Message:
    if answer.get("ok"):
        return answer
    raise BY_NAME.get(str(answer.get("error")), DaemonError)(str(answer.get("message")))
