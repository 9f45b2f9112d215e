"""Hosts of a network with a high latency: network namespaces, and a thread that passes each packet on after a delay."""

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_MOST_BYTES = 1 << 16
_DEVICE = "tun0"


class DelayedHost:
    """One host. Its namespace ends with this process and those that were started in it."""

    def __init__(self, index: int) -> None:
        self.address = f"10.77.0.{index + 1}"
        # Only the calling thread leaves its namespace, so it is one that ends here.
        with ThreadPoolExecutor(max_workers=1) as thread:
            self._namespace, self.packets = thread.submit(self._build).result()

    def _build(self) -> tuple[int, int]:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace: run this as root")
        packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(packets, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN_NO_PI))
        for arguments in (
            ("address", "add", f"{self.address}/24", "dev", _DEVICE),
            ("link", "set", _DEVICE, "up"),
            ("link", "set", "lo", "up"),
        ):
            subprocess.run(["ip", *arguments], check=True)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC), packets

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on this host, as `LabHost.popen` does."""
        entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}", *command]
        return subprocess.Popen(entered, env={**os.environ, "GLOO_SOCKET_IFNAME": _DEVICE, **env}, **options)

    def close(self) -> None:
        """Take the host off the network."""
        os.close(self.packets)
        os.close(self._namespace)


class DelayedHosts:
    """A context manager with `hosts`, between which each IPv4 packet takes `delay_s` one way; needs root."""

    def __init__(self, count: int, *, delay_s: float) -> None:
        self.hosts = [DelayedHost(index) for index in range(count)]
        self._delay_s = delay_s
        self._end = Event()
        self._switch = Thread(target=self._pass_on)

    def __enter__(self) -> Self:
        self._switch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._switch.join()
        for host in self.hosts:
            host.close()

    def _pass_on(self) -> None:
        by_address = {host.address: host.packets for host in self.hosts}
        on_way: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._end.is_set():
            wait_s = max(0.0, on_way[0][0] - time.monotonic()) if on_way else 0.1
            for packets in select.select(list(by_address.values()), [], [], wait_s)[0]:
                packet = os.read(packets, _MOST_BYTES)
                target = by_address.get(".".join(map(str, packet[16:20]))) if packet[0] >> 4 == 4 else None
                if target is not None:
                    count += 1
                    heapq.heappush(on_way, (time.monotonic() + self._delay_s, count, target, packet))
            while on_way and on_way[0][0] <= time.monotonic():
                os.write(on_way[0][2], heapq.heappop(on_way)[3])
