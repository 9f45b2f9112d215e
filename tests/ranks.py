"""Several ranks in one process: a thread each, with process groups of their own over real Gloo connections."""

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.transport import Transport

if TYPE_CHECKING:  # also for programs that do not have benchmarks/ on their path
    from netlab import LabHost

_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Transport], T]) -> list[T]:
    """Return what `work` returned on each of `size` ranks; the first error of any is raised."""
    return run_hosts(1, size, lambda fabric: work(fabric.flat))


def run_hosts(hosts: int, per_host: int, work: Callable[[Fabric], T], *, lab: "Sequence[LabHost]" = ()) -> list[T]:
    """Return what `work` returned on each rank, those of a host next to each other; the first error is raised.

    Args:
        hosts: How many.
        per_host: Ranks of each.
        work: What a rank does.
        lab: Hosts of a laboratory network whose ranks they are; else all talk over loopback.
    """
    stores: defaultdict[str, dist.HashStore] = defaultdict(dist.HashStore)
    lock = Lock()

    def join(name: str, rank: int, size: int) -> Transport:
        with lock:
            store = stores[name]
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [dist.ProcessGroupGloo.create_device(interface="eth0" if lab else "lo")]
        return Transport(dist.ProcessGroupGloo(store, rank, size, options))

    def rank(number: int) -> T:
        host, place = divmod(number, per_host)
        if lab:
            _enter(lab[host])
        flat = join("flat", number, hosts * per_host)
        if hosts == 1:
            return work(Fabric(flat=flat, intra=flat, inter=join(f"place {place}", 0, 1)))
        intra, inter = join(f"host {host}", place, per_host), join(f"place {place}", host, hosts)
        return work(Fabric(flat=flat, intra=intra, inter=inter))

    with ThreadPoolExecutor(hosts * per_host) as pool:
        return list(pool.map(rank, range(hosts * per_host)))


def _enter(host: "LabHost") -> None:
    """Let the connections that this thread makes from now on be those of a host of a laboratory network."""
    namespace = os.open(f"/run/netns/{host.prefix[-1]}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace of {host}")
    finally:
        os.close(namespace)
