"""The launcher's side of the daemon's unix socket: find or start `resilientd`, keep one job open, hear its events."""

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from resilient_run import __version__
from resilient_run.ckpt.errors import CheckpointError, DaemonError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.version import FORMATS
from resilient_run.ckpt.link.client import DaemonClient
from resilient_run.daemon.base.process import network_namespace
from resilient_run.daemon.base.settings import Settings, server_pid
from resilient_run.daemon.base.spec import JobSpec
from resilient_run.daemon.trust.private import open_directory, open_log

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0
_RESPAWN_S = 1.0
_JOIN_S = 5.0
_IDLE_EXIT_S = 60
_OF_THE_SERVICE = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})


class DaemonLink:
    """One job's life line to the host daemon; reopened by itself, for as long as it takes, to whatever daemon serves.

    A daemon that died is started again, unless it is a service: then its service manager does that.

    Args:
        settings: Where the daemon is to be found, or to be started.
        job: Sent with `open_job` at every (re)connection.
        on_event: Called from the reader thread with each `event` notification of the daemon.
    """

    def __init__(self, *, settings: Settings, job: JobSpec, on_event: Callable[[wire.Message], None]) -> None:
        self._settings = settings
        self._job = job
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned_s = -math.inf
        self._trouble = ""
        self._closing = False

    @property
    def socket_path(self) -> Path:
        """Path of the daemon's unix socket, the same for as long as the job lives; known before the daemon runs."""
        return self._client.address

    def start(self) -> None:
        """Start a daemon unless one listens, and open the job in the background; `wait_open` reports the outcome.

        Raises:
            DaemonError: A directory is somebody else's.
        """
        # The word that a directory is a service's counts only where nobody else could write it.
        if self._settings.run_dir.exists() or not self._settings.is_service:
            open_directory(self._settings.run_dir)
        if not self._settings.is_service:
            open_directory(self._settings.shm_dir)
        self._client = DaemonClient(
            self._settings.address(),
            {
                "op": "open_job",
                "pid": os.getpid(),
                "network": network_namespace(),
                "version": __version__,
                **FORMATS,
                **self._job.to_value(),
            },
            on_welcome=self._opened,
            on_message=self._hear,
            on_trouble=self._mend,
            name="daemon-link",
        )
        self._respawn()
        self._client.start()

    def wait_open(self) -> None:
        """Block until a daemon has accepted the job; at once when one did before, which is then waited for elsewhere.

        Raises:
            DaemonError: The daemon refused the job, or none could be reached within 20 s.
        """
        try:
            self._client.wait_welcome(_START_TIMEOUT_S)
        except CheckpointError as refusal:
            raise DaemonError(str(refusal)) from refusal
        except TimeoutError:
            remedy = f"see {self._settings.log_path}"
            if self._settings.is_service:
                remedy = (
                    "it is a service: start it (systemctl start resilientd@USER), or choose a daemon of your own with "
                    "--rr-run-dir"
                )
            trouble = f" ({self._trouble})" if self._trouble else ""
            raise DaemonError(
                f"no daemon answers at {self.socket_path} within {_START_TIMEOUT_S:.0f} s{trouble}; {remedy}"
            ) from None

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
        if daemon_within_s and self._client.away_s is not None:
            log.warning("waiting for the daemon at %s (%s), for up to %.0f s", self.socket_path, op, daemon_within_s)
            self._client.wait_back(daemon_within_s)
        return self._client.request(op, within_s=answer_within_s, run_id=self._job.run_id, **fields)

    def close(self, *, discard: bool) -> None:
        """End the job on this host once its last step is persisted; with `discard` its slots go at once instead."""
        self._closing = True
        persist = self._job.policy.persist
        grace_s = 0.0 if discard or persist.target is None else persist.grace_s
        try:
            if self._client.is_welcome:
                self.request("close_job", answer_within_s=grace_s + _CLOSE_TIMEOUT_S, discard=discard)
        except DaemonError as error:
            log.warning("could not close the job at the daemon: %s", error)
        self._client.close(_JOIN_S)

    def _opened(self, answer: wire.Message) -> None:
        if self._client.was_welcome:
            log.warning("the daemon at %s is back", self.socket_path)
        # Whoever has to start the next daemon gives it the same slots.
        self._settings = replace(self._settings, shm_dir=Path(answer.get("shm_dir", self._settings.shm_dir)))
        self._trouble = ""

    def _hear(self, message: wire.Message) -> None:
        if message["op"] == "event":
            self._on_event(message)

    def _mend(self, error: Exception) -> None:
        """Log once what is in the way, and start a daemon where none listens."""
        if self._closing:
            return
        if self._client.was_welcome and not self._trouble:
            self._note(f"lost the daemon at {self.socket_path}: {error}")
        if isinstance(error, (FileNotFoundError, ConnectionError)):
            self._respawn()
        elif isinstance(error, (OSError, WireError)):
            self._note(f"cannot reach the daemon at {self.socket_path}: {error}")
        else:
            # Another daemon may serve next, or this one may think better of it: the run has nobody else.
            self._note(f"the daemon at {self.socket_path} refuses to go on with the job: {error}")

    def _note(self, trouble: str) -> None:
        """Log what is in the way, once."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s; training goes on, trying again", trouble)

    def _respawn(self) -> None:
        """Start a daemon when none runs and no service is to, though not in a tight loop when each ends at once."""
        running = self._process is not None and self._process.poll() is None
        if running or time.monotonic() < self._spawned_s + _RESPAWN_S:
            return
        try:
            if server_pid(self.socket_path) is not None:
                return
            if self._settings.is_service:
                self._note(f"waiting for the service at {self.socket_path} to be started")
                return
            self._spawned_s = time.monotonic()
            self._process = self._spawn()
        except (OSError, DaemonError) as error:
            self._note(f"cannot start a daemon in {self._settings.run_dir}: {error}")

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # It may have gone with the login that made it.
        open_directory(self._settings.run_dir)
        command = [sys.executable, "-P", "-m", "resilient_run.daemon"]
        command += ["--run-dir", str(self._settings.run_dir), "--shm-dir", str(self._settings.shm_dir)]
        command += ["--idle-exit", str(_IDLE_EXIT_S)]
        # A service manager that started this launcher did not start the daemon.
        env = {name: value for name, value in os.environ.items() if name not in _OF_THE_SERVICE}
        with open(open_log(self._settings.log_path), "ab") as log_file:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, start_new_session=True
            )
        log.info("started resilientd (pid %d), log in %s", process.pid, self._settings.log_path)
        return process
