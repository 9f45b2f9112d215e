"""Whole jobs with flipped bits of live tensors: each is found and named, and training goes on as configured."""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner
from cluster import PACED, Cluster, Host, kill, wait_until
from etcd_process import ask

from resilient_run.daemon.comparison.digests import EqualLeaves
from resilient_run.daemon.etcd.client import Entry, Etcd
from resilient_run.daemon.run.observation import Observation, parse_observations
from resilient_run.launcher.inject.cli import resilient_inject

pytestmark = pytest.mark.jobs

T = TypeVar("T")
LEARNED = {"gpt": 25 + 75, "mixed": 45, "hybrid": 26, "uneven": 16}
"""Of so many tensors of each script it is known in the end that ranks must hold the same."""
GPT = [*PACED, "--steps", "150"]
REPLICAS = str(Path(__file__).parent / "replica_trainer.py")


class Job:
    """One job of several hosts, its keys in etcd, and the fault that strikes it."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.cluster, self.endpoint, self.config = Cluster(root), endpoint, root / "rr.toml"
        self.run_id = root.name
        self.hosts: list[Host] = []

    def launch(self, script: Sequence[str], *, hosts: int, nproc: int, corruption: str = "", config: str = "") -> None:
        self.config.write_text(config or f'[detect]\ncorruption = "{corruption}"\n')
        arguments = ["--nnodes", str(hosts), "--nproc-per-node", str(nproc), "--rdzv-backend", "etcd-v3"]
        arguments += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id, "--local-addr", "127.0.0.1"]
        arguments += ["--rr-config", str(self.config), "--rr-allow-injection"]
        self.hosts = [self.cluster.host(name) for name in "abcd"[:hosts]]
        for host in self.hosts:
            host.launch(arguments, script)

    def learn(self, script: str = "gpt") -> None:
        """Let it train until it is known what ranks have in common in `script`."""
        wait_until(
            lambda: sum(int(equal.mask.sum()) for equal in self.equal()) >= LEARNED[script],
            timeout_s=120,
            what=lambda: f"what is in common: {self.equal()}",
            host=self.hosts[0],
            pause_s=0.05,
        )

    def flip(self, rank: int, leaf: str, *, seed: int = 5) -> int:
        """Flip a bit in the next step of the rank, and return the newest step that any rank had begun by then."""
        command = ["fault", "flip-bit", "--rank", str(rank), "--at-step", "0", "--json", "--timeout", "120"]
        command += ["-p", f"leaf={leaf}", "-p", f"seed={seed}", "--run-id", self.run_id]
        done = CliRunner().invoke(resilient_inject, [*command, "--rdzv-endpoint", self.endpoint])
        assert done.exit_code == 0, done.output
        return int(json.loads(done.stdout)["step"])

    def keys(self, name: str) -> dict[str, Entry]:
        """Return what etcd has below a key of the run."""
        prefix = f"/resilient-run/{self.run_id}/"

        async def read(etcd: Etcd) -> dict[str, Entry]:
            async with aclosing(etcd.follow(prefix + name)) as states:
                entries = await anext(states)
            return {key.removeprefix(prefix): entry for key, entry in entries.items()}

        return self._etcd(read)

    def equal(self) -> list[EqualLeaves]:
        """Return what is known to be equal on ranks."""
        return [EqualLeaves.parse(entry.value) for entry in self.keys("ckpt/equal/").values()]

    def corruptions(self) -> list[Observation]:
        """Return what corruption a host reports now."""
        found = [
            item for entry in self.keys("state/observations/").values() for item in parse_observations(entry.value)
        ]
        return [item for item in found if item.kind == "corruption"]

    def wait(self) -> list[int]:
        return [host.wait(240) for host in self.hosts]

    @property
    def output(self) -> str:
        return "\n".join(host.output for host in self.hosts)

    def _etcd(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        return ask(self.endpoint, work)


@pytest.fixture
def job(tmp_path: Path, etcd_endpoint: str) -> Iterator[Job]:
    made = Job(tmp_path, etcd_endpoint)
    yield made
    made.cluster.close()


def undisturbed(root: Path, script: Sequence[str], nproc: int) -> Host:
    """Return a host on which `script` has run to its end without a fault."""
    cluster = Cluster(root)
    host = cluster.host("reference")
    host.launch(["--standalone", "--nproc-per-node", str(nproc)], script)
    try:
        assert host.wait(240) == 0, host.output
    finally:
        cluster.close()
    return host


def recovery(job: Job) -> dict[str, Any]:
    events = [event for host in job.hosts for event in host.recoveries()]
    assert {event["generation"] for event in events} == {2}, events
    return events[0]


def assert_same_end(job: Job, reference: Host) -> None:
    """The parameters are bit-identical, and every loss is once the steps with the flipped bit were made again."""
    last = {(rank, step): loss for host in job.hosts for rank, step, loss in host.steps()}
    assert last == {(rank, step): loss for rank, step, loss in reference.steps()}
    assert {host.params_sha256() for host in job.hosts} - {None} == {reference.params_sha256()}


@pytest.mark.parametrize(
    ("hosts", "nproc", "leaf", "parameter"),
    [
        pytest.param(1, 2, "model.blocks.1.mlp.0.weight", "model.blocks.1.mlp.0.weight", id="one host"),
        pytest.param(
            2,
            1,
            "optimizer.state.3.exp_avg_sq",
            "model.blocks.0.norm_attention.bias",
            id="two hosts",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_training_goes_back_to_the_step_on_which_all_agreed(
    job: Job, tmp_path_factory: pytest.TempPathFactory, hosts: int, nproc: int, leaf: str, parameter: str
) -> None:
    """A parameter and a moment of Adam: neither is committed, and the run ends as if nothing had happened.

    The flipped moment may change its `parameter` in the same step. Either is named.
    """
    job.launch(GPT, hosts=hosts, nproc=nproc, corruption="rollback")
    job.learn()
    struck = job.flip(1, leaf)
    assert job.wait() == [0] * hosts, job.output
    event = recovery(job)
    assert event["kind"] == "corruption", event
    told = "rank 0 and rank 1 differ, and no majority says which is right, in "
    assert any(told + name in event["cause"] for name in (leaf, parameter)), event
    found = re.search(r"corruption: step (\d+):", event["cause"])
    assert found is not None, event
    assert struck <= int(found[1]), event
    assert_same_end(job, undisturbed(tmp_path_factory.mktemp("undisturbed"), GPT, 2))


def test_the_majority_names_the_rank(job: Job) -> None:
    """With "warn" training goes on, and keeps the difference, so that it is still told after a recovery.

    A difference that is known does not hide the next one.
    """
    job.launch([*PACED, "--steps", "100000"], hosts=1, nproc=3, corruption="warn")
    job.learn()
    job.flip(2, "model.blocks.0.norm_mlp.weight")
    (first,) = wait_until(job.corruptions, timeout_s=60, what="the observation", host=job.hosts[0], pause_s=0.1)
    assert (first.severity, first.rank, first.generation) == ("warn", 2, 1), first
    assert "rank 2 differs from ranks 0, 1 in model.blocks.0.norm_mlp.weight, which" in first.message, first
    job.flip(0, "optimizer.state.0.exp_avg")
    wait_until(
        lambda: any(
            re.search(r"rank 0 differs from ranks 1, 2 in .*optimizer\.state\.0\.exp_avg", item.message)
            for item in job.corruptions()
        ),
        timeout_s=60,
        what=lambda: f"the second observation; there are {job.corruptions()}",
        host=job.hosts[0],
        pause_s=0.1,
    )
    (host,) = job.hosts
    assert not host.recoveries()
    kill(host.pids()[1])
    (recovery,) = wait_until(host.recoveries, timeout_s=60, what="the recovery", host=host)
    wait_until(lambda: host.committed_step() > recovery["restored_step"], timeout_s=60, what="a commit", host=host)
    assert first in job.corruptions()


def test_every_tensor_that_replicas_have_is_compared(job: Job) -> None:
    """Frozen weights, averages, normalization, the second optimizer and a counter, one after the other."""
    job.launch([REPLICAS, "mixed", "1000000", "0"], hosts=1, nproc=2, corruption="warn")
    job.learn("mixed")
    leaves = ["model.0.weight", "average.module.4.weight", "model.1.weight", "critic_optimizer.state.0.momentum_buffer"]
    for number, leaf in enumerate([*leaves, "generator.state.3.step"]):
        job.flip(number % 2, leaf)
        wait_until(
            # Not all are named where many differ.
            lambda leaf=leaf: any(f" {leaf}," in item.message or " more" in item.message for item in job.corruptions()),
            timeout_s=60,
            what=lambda leaf=leaf: f"the observation of {leaf}; there are {job.corruptions()}",
            host=job.hosts[0],
            pause_s=0.1,
        )
    assert not job.hosts[0].recoveries()


def test_a_run_may_end_with_a_corruption(job: Job) -> None:
    job.launch(GPT, hosts=1, nproc=2, corruption="stop")
    job.learn()
    job.flip(0, "model.head.weight")
    assert job.wait() == [1], job.output
    assert "rank 0 and rank 1 differ, and no majority says which is right, in model.head.weight" in job.output
    assert not job.hosts[0].recoveries()


@pytest.mark.nightly
def test_replicas_of_shards_are_compared(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hybrid sharding over 2 x 2 ranks: rank 3 is compared with rank 1, which holds the same shards."""
    script = [REPLICAS, "hybrid", "150"]
    job.launch(script, hosts=2, nproc=2, corruption="rollback")
    job.learn("hybrid")
    job.flip(3, "model.0.weight")
    assert job.wait() == [0, 0], job.output
    event = recovery(job)
    assert "rank 1 and rank 3 differ, and no majority says which is right, in model.0.weight," in event["cause"], event
    reference = undisturbed(tmp_path_factory.mktemp("undisturbed"), script, 4)
    assert_same_end(job, reference)


@pytest.mark.nightly
def test_what_one_rank_has_more_of_hides_nothing(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An average on rank 0 only and uneven objects that shrink, all before the model, of which a bit is flipped."""
    script = [REPLICAS, "uneven", "60"]
    job.launch(script, hosts=2, nproc=1, corruption="rollback")
    job.learn("uneven")
    job.flip(1, "model.2.weight")
    assert job.wait() == [0, 0], job.output
    event = recovery(job)
    assert event["kind"] == "corruption", event
    assert "rank 0 and rank 1 differ, and no majority says which is right, in model.2.weight," in event["cause"], event
    assert_same_end(job, undisturbed(tmp_path_factory.mktemp("undisturbed"), script, 2))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([*GPT, "--steps", "60", "--fsdp"], id="fsdp"),
        pytest.param([REPLICAS, "mixed", "60", "16"], id="mixed", marks=pytest.mark.nightly),
    ],
)
def test_what_ranks_may_differ_in_is_no_corruption(job: Job, script: list[str]) -> None:
    """And what they hold in common is learned beside it."""
    job.launch(script, hosts=1, nproc=2, corruption="rollback")
    equal: dict[str, Entry] = {}

    def over() -> bool:
        equal.update(job.keys("ckpt/equal/"))
        assert not job.corruptions()
        assert job.hosts[0].launcher is not None
        return job.hosts[0].launcher.poll() is not None

    wait_until(over, timeout_s=240, what="the end", host=job.hosts[0], pause_s=0.2)
    assert job.wait() == [0], job.output
    assert not job.hosts[0].recoveries()
    apart = [int((~EqualLeaves.parse(entry.value).mask).sum()) for entry in equal.values()]
    # Running mean and variance of the model and of its average, and Adam's moments of the two tensors of `alone`. Of
    # `alone` itself nothing is equal, and nothing said.
    assert sum(apart) == (0 if "--fsdp" in script else 2 + 2 + 4), equal
    assert bool(equal) is ("--fsdp" not in script), equal
