"""What the doctor knows of the run that is to be, or is."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.settings import Settings
from ..etcd.address import is_local
from ..etcd.config import EtcdConfig
from ..slots.memory import host_bytes, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """A run as its launcher on this host would have it.

    Attributes:
        settings: Directories of the daemon.
        etcd: Where etcd is, None when nobody said.
        peers: Other hosts, as "host" or "host:port".
        state_bytes: Bytes of one rank's state, None when nobody said.
        nproc: Ranks of this host.
        replicas: Hosts that hold each rank's state, its own included.
        keep: Committed steps that stay in memory.
        persists: It has a persistent tier.
        ports: Where the daemon may listen for those of other hosts, None for any port.
        has_key: The hosts have a run key.
        run_id: The only run of interest, None for all that are here.
        environ: Variables that the launcher would have.
    """

    settings: Settings
    etcd: EtcdConfig | None = None
    peers: tuple[str, ...] = ()
    state_bytes: int | None = None
    nproc: int = 1
    replicas: int = 2
    keep: int = 1
    persists: bool = False
    ports: range | None = None
    has_key: bool = False
    run_id: str | None = None
    environ: Mapping[str, str]

    @property
    def several_hosts(self) -> bool:
        """Tell whether other machines take part, as far as can be told."""
        return bool(self.peers) or (self.etcd is not None and not all(map(is_local, self.etcd.endpoints)))

    @property
    def slots_bytes(self) -> int | None:
        """What the slots of this host will take, None when nobody said how much state there is."""
        if self.state_bytes is None:
            return None
        # As many hosts keep something here as keep something of ours.
        kept_ranks = self.nproc * (self.replicas if self.several_hosts else 1)
        copied_ranks = self.nproc * self.persists
        return host_bytes(self.state_bytes, kept_ranks=kept_ranks, copied_ranks=copied_ranks, keep=self.keep)

    @property
    def formula(self) -> str:
        """Where `slots_bytes` comes from."""
        hosts = self.replicas if self.several_hosts else 1
        copies = f" and {self.nproc} copies to persist" if self.persists else ""
        each = shown(self.state_bytes or 0)
        return f"{self.keep + 1} slots * {hosts} replicas * {self.nproc} ranks{copies}, {each} each"
