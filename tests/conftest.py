"""Fixtures that several test files share: a real etcd, a daemon of one rank, laboratory networks, a process group."""

import os

# Before torch is imported. What differs here from the interpreters of `launchers.py` is not forked from them.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from etcd_process import EtcdProcess
from framework_parts import Attempts
from hosts import Hosts
from netlab import NetLab, unavailable
from solo_daemon import SoloDaemon

from resilient_run.ckpt.integrations import remembered
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.launcher.etcd_server import EmbeddedEtcd

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

if not torch.cuda.is_available():
    # Read by numba when it is imported first; CUDA kernels then run in its simulator.
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Shorten the folder of one of several processes: the path of a socket has at most 107 bytes."""
    if hasattr(config, "workerinput"):
        config.option.basetemp = config.option.basetemp.replace("popen-gw", "")


_TIERS = ("lab", "jobs", "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is nightly unless ``-m`` names it, and mark what is in no other tier as fast.

    Long ones begin, so that processes end together.
    """
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    if nightly and "nightly" not in config.option.markexpr:
        items[:] = [item for item in items if item not in nightly]
        config.hook.pytest_deselected(items=nightly)
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in (*_TIERS, "nightly")):
            item.add_marker("fast")
    items.sort(key=lambda item: [item.get_closest_marker(tier) is None for tier in _TIERS])


@pytest.fixture(scope="session")
def etcd_endpoint() -> Iterator[str]:
    """A real etcd server for the whole session, "unix:/path"; a test keeps apart from others by its own run id."""
    with EmbeddedEtcd() as server:
        yield server.endpoint


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd of the test's own, which it may kill."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def tcp_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """A real etcd at a port of this host, for the whole session."""
    server = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def etcd_config(etcd_endpoint: str) -> EtcdConfig:
    """The configuration that reaches `etcd_endpoint`."""
    return EtcdConfig(endpoints=(etcd_endpoint,))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Hosts whose launchers the test starts."""
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def hosts(tmp_path: Path, etcd_config: EtcdConfig) -> Iterator[Hosts]:
    """Hosts with daemons only; the test is in all other roles."""
    made = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    yield made
    made.close()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[SoloDaemon]:
    """A daemon of one rank that the environment points to."""
    with ExitStack() as stack:
        directory = tmp_path
        if request.node.get_closest_marker("gpu") is not None:
            # CUDA page-locks no file of a disk.
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="resilient-test-", dir="/dev/shm")))
        made = SoloDaemon(directory)
        made.start()
        made.enter(monkeypatch)
        yield made
        made.stop()


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    """Runs loops that are ended by force, with a daemon of their own."""
    made = SoloDaemon(tmp_path)
    made.start()
    yield Attempts(made, monkeypatch)
    made.stop()


@pytest.fixture
def only_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Names the modules that count as the script under `--rr-auto`: a session of tests has imported hundreds more."""
    return lambda *names: monkeypatch.setattr(remembered, "_is_script", lambda name, _: name in names)


@pytest.fixture
def netlab() -> Iterator[Callable[..., NetLab]]:
    """Builds labs (arguments of `NetLab`) that are removed at the test's end; skips where none can be built."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with ExitStack() as labs:

        def build(*args: Any, **options: Any) -> NetLab:
            return labs.enter_context(NetLab(*args, **options))

        yield build


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
