"""The launcher's side of the daemon's unix socket: find or start `resilientd`, keep one job open, hear its events."""

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import BY_NAME, CheckpointError, DaemonError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.version import FORMATS
from resilient_run.daemon.base.settings import Settings, server_pid

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 30.0
_CONNECT_S = 5.0
_RETRY_S = 0.05
_REFUSED_S = 1.0
_RESPAWN_S = 1.0
_IDLE_EXIT_S = 60
_OF_THE_SERVICE = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


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
    """One job's life line to the host daemon; reopened by itself, for as long as it takes, to whatever daemon serves.

    A daemon that died is started again, unless it is a service: then its service manager does that.

    Args:
        settings: Where the daemon is to be found, or to be started.
        job: Sent with `open_job` at every (re)connection.
        on_event: Called from the reader thread with each `event` notification of the daemon.
    """

    def __init__(self, *, settings: Settings, job: JobRequest, on_event: Callable[[wire.Message], None]) -> None:
        self._settings = settings
        self._job = job
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned_s = -math.inf
        self._sock: socket.socket | None = None
        self._answers: dict[int, wire.Message] = {}
        self._next_id = 0
        self._changed = threading.Condition()
        self._opened = False
        self._refusal: DaemonError | None = None
        self._trouble = ""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="daemon-link", daemon=True)

    @property
    def socket_path(self) -> Path:
        """Path of the daemon's unix socket, the same for as long as the job lives; known before the daemon runs."""
        return self._address

    def start(self) -> None:
        """Start a daemon unless one listens, and open the job in the background; `wait_open` reports the outcome."""
        self._address = self._settings.address()
        try:
            self._respawn()
        except OSError as error:
            self._trouble = str(error)
        self._thread.start()

    def wait_open(self) -> None:
        """Block until a daemon has accepted the job; at once when one did before, which is then waited for elsewhere.

        Raises:
            DaemonError: The daemon refused the job, or none could be reached within 20 s.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self._refusal, timeout=_START_TIMEOUT_S)
            if self._refusal:
                raise self._refusal
            if not self._opened:
                remedy = f"see {self._settings.log_path}"
                if self._settings.is_service:
                    remedy = (
                        "it is a service: start it (systemctl start resilientd), or choose a daemon of your own with "
                        "--rr-run-dir"
                    )
                trouble = f" ({self._trouble})" if self._trouble else ""
                raise DaemonError(
                    f"no daemon answers at {self.socket_path} within {_START_TIMEOUT_S:.0f} s{trouble}; {remedy}"
                )

    def request(
        self, op: str, *, answer_within_s: float = _ANSWER_TIMEOUT_S, daemon_within_s: float = 0.0, **fields: Any
    ) -> wire.Message:
        """Return the daemon's answer to `op` about this job; survives a restart of the daemon in between.

        Args:
            op: The question.
            answer_within_s: How long the answer may take.
            daemon_within_s: How long a daemon that was there before may be away until then.
            fields: More fields of the question.

        Raises:
            CheckpointError: The daemon's refusal, as the class it names.
            DaemonError: No answer in time.
        """
        if daemon_within_s and self._opened and self._sock is None:
            log.warning("waiting for the daemon at %s (%s), for up to %.0f s", self._address, op, daemon_within_s)
            with self._changed:
                self._changed.wait_for(lambda: self._sock, timeout=daemon_within_s)
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
            with contextlib.suppress(OSError):  # the reader was faster
                sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        while not self._closing:
            try:
                with wire.dial(self._address, _CONNECT_S) as sock:
                    self._hold(sock)
            except (FileNotFoundError, ConnectionError):
                self._respawn_quietly()
                time.sleep(_RETRY_S)
            except (OSError, WireError) as error:
                self._note(f"cannot reach the daemon at {self._address}: {error}")
                time.sleep(_REFUSED_S)
            except CheckpointError as refusal:
                if not self._opened:
                    with self._changed:
                        self._refusal = DaemonError(str(refusal))
                        self._changed.notify_all()
                    return
                # Another daemon may serve next, or this one may think better of it: the run has nobody else.
                self._note(f"the daemon at {self._address} refuses to go on with the job: {refusal}")
                time.sleep(_REFUSED_S)

    def _hold(self, sock: socket.socket) -> None:
        """Open the job on `sock`, and return once the daemon is gone.

        Raises:
            CheckpointError: The daemon refuses the job.
            OSError: It was gone before it answered.
            WireError: It does not speak our language.
        """
        sock.sendall(wire.encode({"id": 0, "op": "open_job", "pid": os.getpid(), **FORMATS, **self._job.message()}))
        answer = wire.recv_message(sock)
        if answer is None:
            raise WireError("it closed the connection")
        _checked(answer)
        if self._opened:
            log.warning("the daemon at %s is back", self._address)
        # Whoever has to start the next daemon gives it the same slots.
        self._settings = replace(self._settings, shm_dir=Path(answer.get("shm_dir", self._settings.shm_dir)))
        with self._changed:
            self._sock, self._opened, self._trouble = sock, True, ""
            self._changed.notify_all()
        self._read(sock)
        self._drop(sock)
        if not self._closing:
            log.warning("lost the daemon at %s; training goes on, reconnecting", self._address)

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

    def _note(self, trouble: str) -> None:
        """Log what is in the way, once."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s; training goes on, trying again", trouble)

    def _respawn_quietly(self) -> None:
        try:
            self._respawn()
        except OSError as error:
            self._note(f"cannot start a daemon in {self._settings.run_dir}: {error}")

    def _respawn(self) -> None:
        """Start a daemon when none runs and no service is to, though not in a tight loop when each ends at once.

        Raises:
            OSError: It cannot be started.
        """
        running = self._process is not None and self._process.poll() is None
        if running or time.monotonic() < self._spawned_s + _RESPAWN_S or server_pid(self._address) is not None:
            return
        if self._settings.is_service:
            self._note(f"waiting for the service at {self._address} to be started")
            return
        self._spawned_s = time.monotonic()
        self._settings.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "resilient_run.daemon"]
        command += ["--run-dir", str(self._settings.run_dir), "--shm-dir", str(self._settings.shm_dir)]
        command += ["--idle-exit", str(_IDLE_EXIT_S)]
        # A service manager that started this launcher did not start the daemon.
        env = {name: value for name, value in os.environ.items() if name not in _OF_THE_SERVICE}
        with open(self._settings.log_path, "ab") as log_file:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
            )
        log.info("started resilientd (pid %d), log in %s", self._process.pid, log_file.name)


def _checked(answer: wire.Message) -> wire.Message:
    if answer.get("ok"):
        return answer
    raise BY_NAME.get(str(answer.get("error")), DaemonError)(str(answer.get("message")))
