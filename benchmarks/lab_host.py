"""One host of a laboratory network: a namespace with a shaped link, directories and shared memory of its own."""

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_state import LabState, NetLabError, namespace_exists, parse_rate, run

BRIDGE = "bridge"
"""Device that joins the hosts' links, in a namespace of its own."""

NETWORK = ipaddress.ip_network("10.73.0.0/16")
"""Addresses of the hosts, the first host's first; every lab has the same, because none sees another."""

_CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_LINK = "eth0"
_BURST_S = 0.005
_BURST_BYTES = (16 << 10, 1 << 20)
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStatus:
    """What the kernel says about a host; `attached` is false while it is cut."""

    name: str
    address: str
    attached: bool
    rate_bit_s: int
    processes: int
    shm_used_bytes: int


class LabHost:
    """One host of a lab.

    Attributes:
        name: In the lab.
        address: IPv4 address in the lab's network.
        directory: Files of this host; `run_dir` and `shm_dir` (a tmpfs) are in it.
        prefix: Put it before a command to run that on this host.
    """

    def __init__(self, state: LabState, index: int) -> None:
        self.name = state.hosts[index]
        self.address = str(NETWORK[index + 1])
        self.directory = state.directory / self.name
        self.run_dir = self.directory / "run"
        self.shm_dir = self.directory / "shm"
        self._state = state
        self._namespace = state.namespace(self.name)
        self._port = f"port{index}"
        self._names = Path("/etc/netns", self._namespace)
        self.prefix = ("ip", "netns", "exec", self._namespace)

    def __repr__(self) -> str:
        return f"LabHost({self.name}, {self.address})"

    @property
    def env(self) -> dict[str, str]:
        """Variables that give a launcher, its daemon and its trainers this host's name, directories and link."""
        return {
            "RESILIENT_HOST_ID": self.name,
            "RESILIENT_RUN_DIR": str(self.run_dir),
            "RESILIENT_SHM_DIR": str(self.shm_dir),
            "GLOO_SOCKET_IFNAME": _LINK,
            "NCCL_SOCKET_IFNAME": _LINK,
        }

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `command` on this host; the process's pid is the command's own, and from now on among `pids`.

        Args:
            command: Program and arguments.
            env: Added to this process's environment and `self.env`.
            options: Of `subprocess.Popen`.
        """
        merged = {**os.environ, **self.env, **(env or {})}
        process = subprocess.Popen([*self.prefix, *command], env=merged, **options)
        # Until it has entered the namespace, a loss of the host would miss it.
        while process.poll() is None and process.pid not in self.pids():
            time.sleep(0.001)
        return process

    def cut(self) -> None:
        """Part the host from all others: packets vanish without a sign, as behind a broken switch."""
        run("ip", "-n", self._state.switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo `cut` and `slow`."""
        self._shape(self._state.rate_bit_s)
        run("ip", "-n", self._state.switch, "link", "set", self._port, "master", BRIDGE)

    def slow(self, rate: str) -> None:
        """Shape the host's link to `rate`, for example "10mbit", in both directions.

        Raises:
            NetLabError: `rate` is none.
        """
        self._shape(parse_rate(rate))

    def lose(self) -> None:
        """Let the host die as in a power cut: silence first, then no process and no memory; `heal` reconnects it."""
        self.cut()
        self.kill()
        for directory in (self.run_dir, self.shm_dir):
            _empty(directory)

    def kill(self) -> None:
        """SIGKILL every process on this host and wait until they have ended.

        Raises:
            NetLabError: One does not end.
        """
        deadline = time.monotonic() + _END_TIMEOUT_S
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > deadline:
                raise NetLabError(f"processes {pids} of host {self.name} do not end after SIGKILL")
            time.sleep(0.005)

    def pids(self) -> list[int]:
        """Return the processes on this host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self._namespace).split()]

    def status(self) -> HostStatus:
        """Return what the kernel says about the host now."""
        (port,) = json.loads(run("ip", "-n", self._state.switch, "-j", "link", "show", self._port))
        (shape,) = json.loads(run("tc", "-n", self._state.switch, "-j", "qdisc", "show", "dev", self._port))
        memory = os.statvfs(self.shm_dir)
        return HostStatus(
            name=self.name,
            address=self.address,
            attached=port.get("master") == BRIDGE,
            rate_bit_s=8 * shape["options"]["rate"],
            processes=len(self.pids()),
            shm_used_bytes=(memory.f_blocks - memory.f_bfree) * memory.f_frsize,
        )

    def build(self) -> None:
        """Make the namespace with its link, and the directories; the lab's bridge must be there.

        Raises:
            NetLabError: The kernel refuses.
        """
        own, switch = ("ip", "-n", self._namespace), self._state.switch
        run("ip", "netns", "add", self._namespace)
        veth = ("link", "add", _LINK, "netns", self._namespace, "type", "veth")
        run("ip", *veth, "peer", "name", self._port, "netns", switch)
        run(*own, "address", "add", f"{self.address}/{NETWORK.prefixlen}", "dev", _LINK)
        for device in ("lo", _LINK):
            run(*own, "link", "set", device, "up")
        # Every kernel has Reno, for every namespace. BBR, some machines' default, overruns queues as short as these.
        run(*self.prefix, "sh", "-c", f"echo reno > {_CONGESTION_CONTROL}")
        run("ip", "-n", switch, "link", "set", self._port, "master", BRIDGE, "up")
        self._shape(self._state.rate_bit_s)
        for directory in (self.directory, self.run_dir, self.shm_dir):
            directory.mkdir(mode=0o700)
        self._names.mkdir(parents=True)
        (self._names / "hosts").write_text(self._hosts_file())
        run("mount", "-t", "tmpfs", "-o", f"size={self._state.shm_bytes},mode=0700", "netlab", str(self.shm_dir))

    def remove(self) -> None:
        """Kill the host's processes and remove whatever of it exists."""
        if namespace_exists(self._namespace):
            self.kill()
            run("ip", "netns", "delete", self._namespace)
        if os.path.ismount(self.shm_dir):
            # Hosts of other labs may have a copy of this mount in their mount namespace: it must hold no memory.
            _empty(self.shm_dir)
            # Lazily: a process elsewhere that still maps a slot keeps its memory, and not the mount.
            run("umount", "--lazy", str(self.shm_dir))
        for directory in (self.directory, self._names):
            shutil.rmtree(directory, ignore_errors=True)

    def _hosts_file(self) -> str:
        """Return the /etc/hosts of this host: the lab's names, and this machine's name for the host itself."""
        names = {name: str(NETWORK[index + 1]) for index, name in enumerate(self._state.hosts)}
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {name}" for name, address in names.items())]
        return "\n".join([*lines, f"{self.address} {socket.gethostname()}", ""])

    def _shape(self, rate_bit_s: int) -> None:
        """Limit what leaves the host, and what the bridge sends to it."""
        rate_bytes_s = rate_bit_s // 8
        burst_bytes = sorted((*_BURST_BYTES, round(rate_bytes_s * _BURST_S)))[1]
        limits = ("burst", str(burst_bytes), "limit", str(burst_bytes + round(rate_bytes_s * self._state.queue_s)))
        for namespace, device in ((self._namespace, _LINK), (self._state.switch, self._port)):
            queue = ("qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate_bit_s}bit")
            run("tc", "-n", namespace, *queue, *limits)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
