"""Another user of the host gets nothing from the etcd of a run, and nothing done by what it plants for the next one."""

import errno
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, Host, wait_until
from etcd_process import entries
from gated import STEPS, Gate, assert_undisturbed, jobs_at, train_to
from second_user import as_mallory

from resilient_run.launcher import etcd_server
from resilient_run.launcher.etcd_server import EmbeddedEtcd

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

PASSWORD = "not-for-everybody"


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    cluster = Cluster(tmp_path)
    yield cluster.host("a")
    cluster.close()


def test_another_user_reaches_neither_etcd_nor_its_data(host: Host, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    credentials = {"RESILIENT_ETCD_USER": "trainer", "RESILIENT_ETCD_PASSWORD": PASSWORD}
    host.launch(["--standalone", "--nproc-per-node", "2"], gate.script, **credentials)
    daemon = host.run_dir / "resilientd.sock"
    ((run_id, _), job) = wait_until(
        lambda: next(iter(jobs_at(daemon).items()), None), timeout_s=180, what="the job", host=host
    )
    train_to(2, gate, [host], daemon)
    assert host.launcher is not None
    (etcd,) = [child for child in psutil.Process(host.launcher.pid).children() if child.name() == "etcd"]

    # The user reaches it where `resilientctl status` says, and there is the secret.
    client = Path(job["etcd"].removeprefix("unix:"))
    token = entries(job["etcd"], f"/resilient-run/{run_id}/")[f"/resilient-run/{run_id}/rdzv/job"].value["token"]

    (data,) = [Path(part.removeprefix("--data-dir=")) for part in etcd.cmdline() if part.startswith("--data-dir=")]
    closed: list[Callable[[], object]] = [
        lambda: connect(client),
        lambda: connect(client.parent / "peer:0"),
        lambda: os.listdir(client.parent),
        lambda: os.listdir(data.parent),
        lambda: os.listdir(data),
        lambda: Path(f"/proc/{etcd.pid}/environ").read_bytes(),
    ]
    for act in closed:
        act()  # It is there.
        assert as_mallory(act) == errno.EACCES

    # There is no other way in, and nothing to be read in the process list.
    assert etcd.net_connections("inet") == []
    listening = {each.laddr for each in etcd.net_connections("unix") if each.type == socket.SOCK_STREAM}
    assert listening == {"", "client:0", "peer:0"}
    assert token not in " ".join(etcd.cmdline())
    assert not {token, PASSWORD} & set(etcd.environ().values())

    gate.open(STEPS)
    assert host.wait(300) == 0, host.output
    assert_undisturbed([host])
    assert not client.parent.exists()
    assert not data.parent.exists()


def test_what_another_user_plants_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        parent = Path(name)
        parent.chmod(0o1777)
        monkeypatch.setattr(etcd_server, "_SOCKETS_PARENT", name)
        ours, victim = tmp_path / "ours", tmp_path / "victim"
        for folder in (ours, victim, abandoned := parent / "resilient-run-etcd-abandoned"):
            folder.mkdir()
            (folder / "owner.lock").touch(mode=0o600)

        def plant() -> None:
            (parent / "resilient-run-etcd-link").symlink_to(victim)
            for kind in ("folder", "queue", "names"):
                (parent / f"resilient-run-etcd-{kind}").mkdir()
            (parent / "resilient-run-etcd-folder" / "owner.lock").touch()
            os.mkfifo(parent / "resilient-run-etcd-queue" / "owner.lock")
            (parent / "resilient-run-etcd-names" / "owner.lock").symlink_to(ours / "owner.lock")
            (parent / "resilient-run-etcd-file").touch()

        assert as_mallory(plant) == 0
        planted = {path for path in parent.rglob("*") if not path.is_relative_to(abandoned)}
        with EmbeddedEtcd() as server:
            connect(Path(server.endpoint.removeprefix("unix:")))
            assert not abandoned.exists()
            assert planted <= set(parent.rglob("*"))
        assert set(parent.rglob("*")) == planted
        assert [path.name for path in (*ours.iterdir(), *victim.iterdir())] == ["owner.lock"] * 2
