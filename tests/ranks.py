"""Several ranks in one process: a thread each, with process groups of their own over real Gloo connections."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import TypeVar

import torch.distributed as dist

from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.transport import Transport

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Transport], T]) -> list[T]:
    """Return what `work` returned on each of `size` ranks; the first error of any is raised."""
    return run_hosts(1, size, lambda fabric: work(fabric.flat))


def run_hosts(hosts: int, per_host: int, work: Callable[[Fabric], T]) -> list[T]:
    """Return what `work` returned on each rank, those of a host next to each other; the first error is raised."""
    stores: defaultdict[str, dist.HashStore] = defaultdict(dist.HashStore)
    lock = Lock()

    def join(name: str, rank: int, size: int) -> Transport:
        with lock:
            store = stores[name]
        return Transport(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))

    def rank(number: int) -> T:
        host, place = divmod(number, per_host)
        flat = join("flat", number, hosts * per_host)
        if hosts == 1:
            return work(Fabric(flat=flat, intra=flat, inter=join(f"place {place}", 0, 1)))
        intra, inter = join(f"host {host}", place, per_host), join(f"place {place}", host, hosts)
        return work(Fabric(flat=flat, intra=intra, inter=inter))

    with ThreadPoolExecutor(hosts * per_host) as pool:
        return list(pool.map(rank, range(hosts * per_host)))
