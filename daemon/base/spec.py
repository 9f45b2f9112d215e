"""What a launcher says about its job when it opens it."""

import re
from dataclasses import dataclass, field

from ..etcd.client import EtcdConfig
from .policy import Policy
from .record import JobKey


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What the launcher says about its job when it opens it; equal specs continue, a different one starts the job anew.

    Attributes:
        run_id: Name of the run in etcd.
        host: Name of this host in the run.
        replicas: Copies of each checkpoint, m.
        nproc: Ranks on this host.
        etcd: How to reach etcd.
        address: Where peers reach this daemon.
        memory_limit_bytes: What the job's slots may take on this host, None for the daemon's limit.
        policy: The job's configuration.
        run_key: The secret of the run's hosts, None where the one in etcd has to do; it is written down nowhere.
        injection: Whether faults may be ordered here: this word of the launcher is the only one that counts.
    """

    run_id: str
    host: str
    replicas: int
    nproc: int
    etcd: EtcdConfig
    address: tuple[str, int]
    memory_limit_bytes: int | None
    policy: Policy
    run_key: str | None = field(default=None, repr=False)
    injection: bool = False

    @property
    def key(self) -> JobKey:
        """Which job this is."""
        return self.run_id, self.host


def parse_ports(text: str) -> range:
    """Return the ports that `text` means: "29600", or "29600-29609".

    Raises:
        ValueError: It means none.
    """
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    ports = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(f"{text!r} is no port or range of ports: write 29600 or 29600-29609")
    return ports
