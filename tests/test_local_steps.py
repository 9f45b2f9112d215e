"""Local steps with an outer optimizer: the published rounds, and real jobs that lose workers and hosts within one."""

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import aclosing
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from cluster import Cluster, Host, assert_same_training, recovered, wait_until
from ranks import run_ranks
from torch import Tensor, nn

from resilient_run.comm.errors import CommError
from resilient_run.comm.local_steps import LocalSteps
from resilient_run.comm.net.transport import Transport
from resilient_run.daemon.comparison.digests import EqualLeaves
from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig
from resilient_run.daemon.run.observation import Observation, parse_observations

pytestmark = pytest.mark.jobs

TRAINER = str(Path(__file__).parent / "local_trainer.py")
SCHEMES = ("dense", "int8", "topk")


def small(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


class Replica:
    """A model of one rank, its inner optimizer and its local steps; each rank begins with other numbers."""

    def __init__(self, ranks: Transport, *, every: int = 3, rate: float = 0.05, **options: object) -> None:
        self.model = small(ranks.rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.local = LocalSteps(
            self.model,
            every=every,
            group=ranks._group,
            least_elements=50,
            **options,  # type: ignore[arg-type]
        )
        self._generator = torch.Generator().manual_seed(ranks.rank)

    def train(self, *, poisoned: bool = False) -> bool:
        """Make a step and tell whether it was the last one of a round."""
        inputs = torch.randn(8, 6, generator=self._generator)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        if poisoned:
            with torch.no_grad():
                self.model[0].weight[0, 0] = torch.nan
        return self.local.step()

    def parameters(self) -> Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_rounds_are_those_of_the_paper(momentum: float) -> None:
    """Algorithm 1 by hand: the mean of what replicas moved is the gradient of torch's SGD with Nesterov momentum."""

    def work(ranks: Transport) -> list[Tensor]:
        replica = Replica(ranks, every=3, outer_lr=0.7, outer_momentum=momentum)
        seen = [replica.parameters()]
        for step in range(1, 13):
            # Where the replica stood before the outer step: of a twin that trains alike and never meets the others.
            if step % 3:
                assert not replica.train()
                continue
            twin = deepcopy((replica.model, replica.optimizer, replica._generator))
            model, optimizer, generator = twin
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            seen.append(torch.cat([each.detach().reshape(-1) for each in model.parameters()]))
            assert replica.train()
            seen.append(replica.parameters())
        return seen

    by_rank = run_ranks(3, work)
    outer = nn.Parameter(by_rank[0][0].clone())
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for end in range(1, len(by_rank[0]), 2):
        ends = torch.stack([seen[end] for seen in by_rank])
        assert not torch.equal(ends[0], ends[1]), "replicas train by themselves"
        outer.grad = outer.detach() - ends.mean(0)
        sgd.step()
        for seen in by_rank:
            torch.testing.assert_close(seen[end + 1], outer.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(seen[end + 1], by_rank[0][end + 1]), "replicas are equal after a round"


def test_buffers_and_inner_optimizers_stay_those_of_replicas() -> None:
    def work(ranks: Transport) -> tuple[Tensor, Tensor]:
        replica = Replica(ranks, every=2)
        first = replica.model[1].running_mean.clone()
        for _ in range(4):
            replica.train()
        return first, replica.model[1].running_mean

    (first, mean), (other_first, other_mean) = run_ranks(2, work)
    assert torch.equal(first, other_first)
    assert not torch.equal(mean, other_mean)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_sum_pseudo_gradients(scheme: str) -> None:
    options = {"density": 0.2} if scheme == "topk" else {}

    def work(ranks: Transport) -> tuple[Tensor, Tensor, int]:
        replica = Replica(ranks, every=4, scheme=scheme, **options)
        before = replica.parameters()
        for _ in range(16):
            replica.train()
        return before, replica.parameters(), replica.local.scheme.transport.traffic.rounds

    before, after, rounds = (results := run_ranks(3, work))[0]
    assert all(torch.equal(after, other) for _, other, _ in results)
    assert not torch.equal(before, after)
    assert rounds > 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_restored_in_the_middle_of_a_round(scheme: str) -> None:
    def work(ranks: Transport) -> None:
        replica, again = (Replica(ranks, every=4, scheme=scheme) for _ in range(2))
        for _ in range(6):
            replica.train()
        again.model.load_state_dict(replica.model.state_dict())
        again.local.load_state_dict(deepcopy(replica.local.state_dict()))
        again._generator.set_state(replica._generator.get_state())
        ends = [(replica.train(), again.train()) for _ in range(6)]
        assert ends == [(False, False), (True, True)] + 3 * [(False, False)] + [(True, True)]
        assert torch.equal(replica.parameters(), again.parameters())

    run_ranks(2, work)


def test_round_of_a_replica_that_diverged_is_given_up() -> None:
    def work(ranks: Transport) -> None:
        replica = Replica(ranks, every=2, scheme="int8")
        replica.train()
        replica.train()
        outer, state = replica.parameters(), deepcopy(replica.local.state_dict())
        replica.train()
        assert replica.train(poisoned=ranks.rank == 1)
        assert torch.equal(replica.parameters(), outer)
        after = replica.local.state_dict()
        assert all(torch.equal(after["momentum"][name], each) for name, each in state["momentum"].items())
        assert [replica.train() for _ in range(2)] == [False, True]
        assert replica.parameters().isfinite().all()
        assert not torch.equal(replica.parameters(), outer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, work)
    assert any("the round that ended with step 4 is given up" in str(each.message) for each in caught)


def test_half_precision_has_outer_parameters_in_float32() -> None:
    """Small outer steps add up; in bfloat16 they would be rounded away."""

    def work(ranks: Transport) -> None:
        model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        local = LocalSteps(model, every=1, outer_lr=1e-3, outer_momentum=0.0, group=ranks._group)
        for _ in range(100):
            with torch.no_grad():
                model.weight -= 0.25
            local.step()
        outer = local.state_dict()["outer"]["weight"]
        assert outer.dtype == torch.float32
        torch.testing.assert_close(outer, torch.full((8, 8), 0.975), rtol=0, atol=5e-3)

    run_ranks(2, work)


@pytest.mark.usefixtures("alone")
def test_wrong_arguments_and_states_are_refused() -> None:
    for wrong in ({"every": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}):
        with pytest.raises(CommError, match="give at least one step, a positive learning rate, and a momentum"):
            LocalSteps(small(0), **{"every": 2, **wrong})  # type: ignore[arg-type]
    with pytest.raises(CommError, match="local steps need trainable parameters"):
        LocalSteps(small(0).requires_grad_(False), every=2)
    with pytest.raises(CommError, match="there is no scheme and no compressor 'int7'"):
        LocalSteps(small(0), every=2, scheme="int7")
    local, plain = LocalSteps(small(0), every=2), LocalSteps(small(0), every=2, outer_momentum=0.0)
    other = LocalSteps(nn.Linear(2, 2), every=2)
    good = local.state_dict()
    for state in (plain.state_dict(), other.state_dict(), {}, {**good, "steps": None}, {**good, "outer": {}}):
        with pytest.raises(CommError, match="this is no state of local steps of such a model"):
            local.load_state_dict(state)
    local.load_state_dict(good)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def launched(host: Host, *script: str, nproc: int = 2, extra: tuple[str, ...] = ()) -> Host:
    host.launch(["--standalone", "--nproc-per-node", str(nproc), *extra], [TRAINER, *script])
    return host


@pytest.mark.parametrize("scheme", SCHEMES)
def test_worker_killed_within_a_round_goes_on_bit_by_bit(cluster: Cluster, scheme: str) -> None:
    undisturbed = launched(cluster.host("undisturbed"), scheme)
    assert undisturbed.wait() == 0, undisturbed.output
    killed = launched(cluster.host("killed"), scheme, "--kill-at", "13")
    assert killed.wait() == 0, killed.output
    assert recovered(killed) == 1
    assert_same_training([killed], undisturbed)
    assert next(line["replicas"] for line in killed.lines if "replicas" in line) == 2, "it ended within a round"


def test_host_lost_within_a_round_comes_back_from_its_peers(cluster: Cluster, etcd_endpoint: str) -> None:
    """Its replica differs from all others, and no other rank has it: the peer's copy of its capture does."""
    undisturbed = launched(cluster.host("undisturbed"), "int8", "--steps", "40", nproc=3)
    assert undisturbed.wait() == 0, undisturbed.output
    arguments = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3"]
    hosts = [cluster.host(name) for name in "abc"]
    for host in hosts:
        host.launch(arguments, [TRAINER, "int8", "--steps", "40"])
    wait_until(lambda: hosts[0].reached(2), timeout_s=60, what="step 2", host=hosts[0])
    standby = cluster.host("d")
    standby.launch(arguments, [TRAINER, "int8", "--steps", "40"])
    wait_until(lambda: hosts[0].reached(8), timeout_s=60, what="step 8", host=hosts[0])
    hosts[1].lose()
    for host in (hosts[0], hosts[2], standby):
        assert host.wait() == 0, host.output
    (newcomer,) = standby.recoveries()
    assert list(newcomer["ranks"].values()) == ["peer"]
    assert_same_training([*hosts, standby], undisturbed)


def keys(endpoint: str, prefix: str) -> dict[str, Entry]:
    """Return what etcd has below `prefix`."""

    async def read() -> dict[str, Entry]:
        etcd = await Etcd.connect(EtcdConfig(endpoints=(endpoint,)))
        try:
            async with aclosing(etcd.follow(prefix)) as states:
                return dict(await anext(states))
        finally:
            await etcd.close()

    return asyncio.run(read())


def test_replicas_within_a_round_are_no_corruption(cluster: Cluster, etcd_endpoint: str, tmp_path: Path) -> None:
    """Also if all that was seen for long were ends of rounds, where replicas are equal; what is outer is compared."""
    config = tmp_path / "rr.toml"
    config.write_text('[detect]\ncorruption = "rollback"\n')
    arguments = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rr-config", str(config)]
    host = cluster.host("solo")
    host.launch(arguments, [TRAINER, "dense", "--every", "4", "--at-ends", "80", "--steps", "100"])
    run, told, equal = f"/resilient-run/{cluster.name}", list[Observation](), set[int]()

    def over() -> bool:
        observations = [parse_observations(entry.value) for entry in keys(etcd_endpoint, f"{run}/obs/").values()]
        told.extend(each for several in observations for each in several if each.kind == "corruption")
        learned = keys(etcd_endpoint, f"{run}/ckpt/equal/")
        equal.update(
            int(EqualLeaves.parse(key.removeprefix(f"{run}/"), entry.value).mask.sum())
            for key, entry in learned.items()
        )
        assert host.launcher is not None
        return host.launcher.poll() is not None

    wait_until(over, timeout_s=120, what="the end", host=host, pause_s=0.1)
    assert host.wait() == 0, host.output
    assert not told
    assert not host.recoveries(), host.output
    # Of six parameters.
    assert max(equal, default=0) >= 12, "outer parameters and momentum are known to be equal"
