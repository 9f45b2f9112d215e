"""The commands of `examples/kubernetes/run.yaml` in namespaces as a pod has them, and its secrets."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cluster import ENDLESS, EXAMPLE, wait_until
from lab import EtcdMember
from netlab import LabHost, NetLab

from resilient_run.daemon.tier.tier import Tier
from resilient_run.daemon.trust.private import read_secret
from resilient_run.daemon.trust.secret import make_key

pytestmark = pytest.mark.lab

MANIFEST = EXAMPLE.parent / "kubernetes" / "run.yaml"
_CTL = "import sys; from resilient_run.daemon.ctl.cli import resilientctl; sys.argv[0] = 'resilientctl'; resilientctl()"
_PROGRAMS = {
    "resilient-run": [sys.executable, "-P", "-m", "resilient_run"],
    "resilientctl": [sys.executable, "-P", "-c", _CTL],
}


def pod_spec() -> dict[str, Any]:
    """Return what the manifest says of a pod."""
    documents = yaml.safe_load_all(MANIFEST.read_text())
    return next(found for found in documents if found["kind"] == "Job")["spec"]["template"]["spec"]


class Container:
    """One container: its processes see no others, and it shares the network and /dev/shm of its pod.

    Args:
        pod: The laboratory host, whose tmpfs is the memory volume.
        root: Directory of the test, for what is on the container's own disk.
        command: What is process 1 in it.
    """

    def __init__(self, pod: LabHost, root: Path, command: list[str]) -> None:
        own = Path(tempfile.mkdtemp(dir=root))
        self.log_path = own / "log"
        inside = f'hostname {pod.name} && mount --bind {pod.shm_dir} /dev/shm && exec "$@"'
        wrapped = [*pod.prefix, "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        wrapped += ["sh", "-c", inside, "sh", *_PROGRAMS[command[0]], *command[1:]]
        # A container's /tmp is its own.
        env = {**os.environ, "RESILIENT_RUN_DIR": str(own / "run"), "OMP_NUM_THREADS": "1"}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(wrapped, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def terminate(self) -> None:
        """Ask process 1 to end, as the kubelet does."""
        (first,) = psutil.Process(self._process.pid).children()
        first.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until process 1 has ended, and the container with it."""
        self._process.wait(120)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Container]]:
    """Starts containers that end with the test."""
    made: list[Container] = []

    def start(*arguments: Any) -> Container:
        made.append(Container(*arguments))
        return made[-1]

    yield start
    for container in made:
        container.close()


@pytest.fixture
def net(netlab: Callable[..., NetLab]) -> NetLab:
    return netlab(["pod0", "pod1", "etcd0"], rate="1gbit")


@pytest.fixture
def etcd(net: NetLab, tmp_path: Path) -> Iterator[EtcdMember]:
    member = EtcdMember(net.host("etcd0"), tmp_path, {"etcd0": f"http://{net.host('etcd0').address}:2380"})
    member.start()
    yield member
    member.kill()


def test_pods_of_the_manifest(net: NetLab, etcd: EtcdMember, tmp_path: Path, start: Callable[..., Container]) -> None:
    """Two pods train, the exporter reads beside one of them, and their end leaves the last step in the tier."""
    wait_until(etcd.answers, timeout_s=60, what="etcd", pause_s=0.1)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("run.key", "exporter.password"):
        make_key(secrets / name)
    spec = pod_spec()
    ((exporter,), (launcher,)) = spec["initContainers"], spec["containers"]
    places = {"/secrets": str(secrets), "/checkpoints": str(tmp_path / "tier")}

    def command(container: dict[str, Any]) -> list[str]:
        words = []
        for word in container["command"]:
            name, equals, value = word.partition("=")
            value = {"--rdzv-endpoint": etcd.endpoint, "--nproc-per-node": "1"}.get(name, value)
            for place, here in places.items():
                name, value = name.replace(place, here), value.replace(place, here)
            words += ENDLESS if word == "train.py" else [name + equals + value]
        return words

    pods = [start(net.host(name), tmp_path, command(launcher)) for name in ("pod0", "pod1")]
    beside = start(net.host("pod0"), tmp_path, command(exporter))

    def logs() -> str:
        return "\n".join(container.log[-4000:] for container in (*pods, beside))

    for pod in pods:
        wait_until(lambda pod=pod: '"step": 8,' in pod.log, timeout_s=120, what=logs, pause_s=0.1)
    probe = exporter["readinessProbe"]["httpGet"]["path"]
    ask = f"import urllib.request; print(urllib.request.urlopen('http://10.73.0.1:9477{probe}').status)"
    asked = [*net.host("pod0").prefix, sys.executable, "-c", ask]

    def answered() -> subprocess.CompletedProcess[str]:
        return subprocess.run(asked, capture_output=True, text=True, timeout=60)

    wait_until(lambda: answered().stdout == "200\n", timeout_s=60, what=logs, pause_s=0.5)
    tier = Tier(str(tmp_path / "tier"), "my-run")
    assert not tier.published()
    for pod in pods:
        pod.terminate()
    for pod in pods:
        pod.wait()
    ((generation, step),) = tier.published()
    assert (generation, step >= 1) == (1, True)
    # The kubelet starts containers again in their pods.
    again = [start(net.host(name), tmp_path, command(launcher)) for name in ("pod0", "pod1")]
    for pod in again:
        wait_until(lambda pod=pod: '"step": ' in pod.log, timeout_s=120, what=logs, pause_s=0.1)
        first = next(line for line in pod.log.splitlines() if '"step": ' in line)
        assert yaml.safe_load(first)["step"] > step


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_mounted_secret_is_read() -> None:
    """The kubelet writes it as root, gives it to the pod's group, and puts two links before it."""
    spec = pod_spec()
    (mode,) = (volume["secret"]["defaultMode"] for volume in spec["volumes"] if volume["name"] == "secrets")
    user, group = spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "..2026").mkdir()
        path = root / "..2026" / "run.key"
        path.write_text("k" * 64 + "\n")
        path.chmod(mode | stat.S_IRGRP)
        (root / "..data").symlink_to("..2026")
        (root / "run.key").symlink_to("..data/run.key")
        for place in (root, root / "..2026"):
            place.chmod(0o755)
        os.chown(path, 0, group)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([group])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                code = 0 if read_secret(root / "run.key") == "k" * 64 else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
