"""Local steps with an outer optimizer: the published rounds, and real jobs that lose workers and hosts within one."""

import threading
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from cluster import Cluster, Host, assert_same_training, recovered, wait_until
from etcd_process import entries
from launchers import run_trainers
from ranks import run_ranks
from tiers import nightly_but
from torch import Tensor, nn

from resilient_run.comm.errors import CommError
from resilient_run.comm.local_steps import LocalSteps
from resilient_run.comm.net.transport import Transport
from resilient_run.daemon.comparison.digests import EqualLeaves
from resilient_run.daemon.run.observation import Observation, parse_observations

pytestmark = pytest.mark.jobs

TRAINER = str(Path(__file__).parent / "local_trainer.py")
SCHEMES = ("dense", "int8", "topk")


def small(seed: int) -> nn.Sequential:
    """Return a model that only `seed` decides: ranks are threads here, and torch's generator is of all of them."""
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    generator = torch.Generator().manual_seed(seed)
    for layer in (model[0], model[2]):
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return model


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
        self.before = self.parameters()
        return self.local.step()

    def parameters(self) -> Tensor:
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    ("fragments", "delay", "mixing"), [(1, 0, None), (1, 0, 0.25), (3, 0, None), (1, 5, 0.0), (3, 2, None), (2, 1, 0.8)]
)
def test_rounds_are_those_of_the_papers(momentum: float, fragments: int, delay: int, mixing: float | None) -> None:
    """By hand: the mean of what replicas moved is the gradient of torch's SGD with Nesterov momentum."""
    every, steps, size = 6, 20, 3

    def work(ranks: Transport) -> tuple[Tensor, list[tuple[Tensor, Tensor, bool]], list[int]]:
        replica = Replica(ranks, every=every, outer_momentum=momentum, fragments=fragments, delay=delay, mixing=mixing)
        first = replica.parameters()
        seen = []
        for _ in range(steps):
            moved = replica.train()
            seen.append((replica.before, replica.parameters(), moved))
        replica.local.close()
        named = dict(replica.model.named_parameters())
        return first, seen, [sum(named[name].numel() for name in names) for names in replica.local._fragments]

    by_rank = run_ranks(size, work)
    first, _, sizes = by_rank[0]
    assert len(sizes) == fragments
    assert min(sizes) > 0
    assert sum(sizes) == first.numel()
    outer = [nn.Parameter(part.clone()) for part in first.split(sizes)]
    optimizers = [torch.optim.SGD([part], lr=0.7, momentum=momentum, nesterov=momentum > 0) for part in outer]
    kept = mixing if mixing is not None else 0.5 if delay else 0.0
    moves = 0
    for step in range(1, steps + 1):
        expected = [list(seen[step - 1][0].split(sizes)) for _, seen, _ in by_rank]
        begun = step - delay
        due = [p for p in range(fragments) if begun > 0 and (begun - (p + 1) * every // fragments) % every == 0]
        assert [seen[step - 1][2] for _, seen, _ in by_rank] == [bool(due)] * size
        for place in due:
            ends = torch.stack([seen[begun - 1][0].split(sizes)[place] for _, seen, _ in by_rank])
            assert not torch.equal(ends[0], ends[1]), "replicas train by themselves"
            outer[place].grad = outer[place].detach() - ends.mean(0)
            optimizers[place].step()
            for parts in expected:
                parts[place] = kept * parts[place] + (1 - kept) * outer[place].detach()
            moves += 1
        for (_, seen, _), parts in zip(by_rank, expected, strict=True):
            torch.testing.assert_close(seen[step - 1][1], torch.cat(parts), rtol=1e-5, atol=1e-6)
    assert moves >= 2 * fragments


def test_training_goes_on_while_a_sum_is_on_its_way() -> None:
    ahead = threading.Event()

    def work(ranks: Transport) -> None:
        replica = Replica(ranks, every=4, delay=2)
        for step in range(1, 7):
            if ranks.rank == 1 and step == 4:
                assert ahead.wait(30), "the first rank waits for the second one"
            assert replica.train() == (step == 6)
            if ranks.rank == 0 and step == 5:
                ahead.set()
        replica.local.close()

    run_ranks(2, work)


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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("at", [9, 10, 11])
def test_restored_while_a_sum_is_on_its_way(scheme: str, at: int) -> None:
    """Ends of rounds are 8 and, of the other fragment, 12; outer steps 10 and 14."""

    def work(ranks: Transport) -> None:
        replica, again = (Replica(ranks, every=8, fragments=2, delay=2, scheme=scheme) for ranks in (ranks, ranks))
        for _ in range(at):
            replica.train()
        state = deepcopy(replica.local.state_dict())
        assert (state["sending"] >= 0) == (at == 9)
        model, generator = deepcopy(replica.model.state_dict()), replica._generator.get_state()
        went = [(replica.train(), replica.parameters()) for _ in range(12)]
        replica.local.close()
        again.train()
        again.model.load_state_dict(model)
        again.local.load_state_dict(state)
        again._generator.set_state(generator)
        for name, each in again.local.state_dict().items():
            assert str(each) == str(state[name])
        for moved, parameters in went:
            assert again.train() == moved
            assert torch.equal(again.parameters(), parameters)
        again.local.close()

    run_ranks(2, work)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_closed_while_a_sum_is_on_its_way(scheme: str) -> None:
    """Whoever goes on all the same, or from a state of after that, makes the sum once, as if not closed."""

    def work(ranks: Transport) -> None:
        plain, closed, again = (Replica(ranks, every=6, delay=3, scheme=scheme) for _ in range(3))
        for replica, steps in ((plain, 25), (closed, 13)):
            for _ in range(steps):
                replica.train()
            replica.local.close()
        again.model.load_state_dict(deepcopy(closed.model.state_dict()))
        again.local.load_state_dict(deepcopy(closed.local.state_dict()))
        again._generator.set_state(closed._generator.get_state())
        for replica in (closed, again):  # one after the other: they have one process group
            for _ in range(12):
                replica.train()
            replica.local.close()
            assert torch.equal(replica.parameters(), plain.parameters())

    run_ranks(2, work)


ENDS_EARLY = """
import atexit, os, time
import torch
import torch.distributed as dist
from resilient_run.comm.local_steps import LocalSteps

atexit.register(os._exit, 0)  # the last of all: a thread of Gloo can abort in Python's own end (docs/api.md)
os.dup2(1, 2)
dist.init_process_group("gloo")
local = LocalSteps(torch.nn.Linear(200, 200), every=4, delay=3)
time.sleep(dist.get_rank())
for _ in range(5):
    local.step()
dist.destroy_process_group()
"""


def test_a_script_that_does_not_close_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_EARLY)
    assert "call close() after the last step" in run_trainers([str(script)], 2)


def test_a_replica_that_diverged_goes_back_whole() -> None:
    """Where only a fragment is summed, too: the rest of the replica would make it diverge again."""

    def work(ranks: Transport) -> None:
        replica = Replica(ranks, every=4, fragments=2, delay=1)
        for _ in range(5):
            replica.train()
        outer = deepcopy(replica.local.state_dict()["outer"])
        replica.train(poisoned=ranks.rank == 1)  # the end of a round of the fragment with the poisoned weight
        assert replica.train()
        for name, each in replica.model.named_parameters():
            assert torch.equal(each, outer[name])
        for _ in range(8):
            replica.train()
        assert replica.parameters().isfinite().all()
        replica.local.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, work)
    assert any("the round that ended with step 6 is given up" in str(each.message) for each in caught)


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
    for wrong in ({"fragments": 0}, {"fragments": 5}, {"delay": -1}, {"fragments": 2, "delay": 3}, {"delay": 4}):
        with pytest.raises(CommError, match=r"fragments \d, delay -?\d: give one fragment to as many as a round"):
            LocalSteps(small(0), **{"every": 4, **wrong})  # type: ignore[arg-type]
    with pytest.raises(CommError, match=r"mixing 1\.0: give a share"):
        LocalSteps(small(0), every=2, mixing=1.0)
    with pytest.raises(CommError, match="local steps need trainable parameters"):
        LocalSteps(small(0).requires_grad_(False), every=2)
    with pytest.raises(CommError, match="there is no scheme and no compressor 'int7'"):
        LocalSteps(small(0), every=2, scheme="int7")
    local, plain = LocalSteps(small(0), every=2), LocalSteps(small(0), every=2, outer_momentum=0.0)
    other = LocalSteps(nn.Linear(2, 2), every=2)
    streaming = LocalSteps(small(0), every=2, delay=1)
    good = local.state_dict()
    # The first parameter is the largest fragment of two and of three.
    alike = [LocalSteps(small(0)[:2], every=6, fragments=count, delay=1) for count in (2, 3)]
    assert alike[0].state_dict()["sent"].shape == alike[1].state_dict()["sent"].shape
    with pytest.raises(CommError, match="this is not a state of local steps of such a model"):
        alike[1].load_state_dict(alike[0].state_dict())
    wrong_states = (streaming.state_dict(), {}, {**good, "steps": None}, {**good, "outer": {}}, {**good, "sending": 1})
    for state in (plain.state_dict(), other.state_dict(), *wrong_states):
        with pytest.raises(CommError, match="this is not a state of local steps of such a model"):
            local.load_state_dict(state)
    local.load_state_dict(good)


def launched(host: Host, *script: str, nproc: int = 2, extra: tuple[str, ...] = ()) -> Host:
    host.launch(["--standalone", "--nproc-per-node", str(nproc), *extra], [TRAINER, *script])
    return host


@pytest.mark.parametrize(
    "arguments",
    nightly_but(["topk", "int8 --fragments 2 --delay 2"], ["dense", "int8", "topk", "int8 --fragments 2 --delay 2"]),
)
def test_worker_killed_within_a_round_goes_on_bit_by_bit(cluster: Cluster, arguments: str) -> None:
    undisturbed = launched(cluster.host("undisturbed"), *arguments.split())
    assert undisturbed.wait() == 0, undisturbed.output
    killed = launched(cluster.host("killed"), *arguments.split(), "--kill-at", "13")
    assert killed.wait() == 0, killed.output
    assert recovered(killed) == 1
    assert_same_training([killed], undisturbed)
    assert next(line["replicas"] for line in killed.lines if "replicas" in line) == 2, "it ended within a round"


def test_host_lost_within_a_round_comes_back_from_its_peers(cluster: Cluster, etcd_endpoint: str) -> None:
    """Its replica differs from all others, and no other rank has it: the peer's copy of its capture does."""
    undisturbed = launched(cluster.host("undisturbed"), "int8", "--steps", "100", nproc=3)
    assert undisturbed.wait() == 0, undisturbed.output
    arguments = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3"]
    hosts = [cluster.host(name) for name in "abc"]
    for host in hosts:
        host.launch(arguments, [TRAINER, "int8", "--steps", "100"])
    wait_until(lambda: hosts[0].reached(2), timeout_s=60, what="step 2", host=hosts[0])
    standby = cluster.host("d")
    standby.launch(arguments, [TRAINER, "int8", "--steps", "100"])
    wait_until(lambda: hosts[0].reached(8), timeout_s=60, what="step 8", host=hosts[0])
    hosts[1].lose()
    for host in (hosts[0], hosts[2], standby):
        assert host.wait() == 0, host.output
    (newcomer,) = standby.recoveries()
    assert list(newcomer["ranks"].values()) == ["peer"]
    assert_same_training([*hosts, standby], undisturbed)


@pytest.mark.parametrize(
    "streaming", [(), ("--fragments", "2", "--delay", "2", "--every", "60", "--at-ends", "0", "--steps", "150")]
)
def test_replicas_within_a_round_are_no_corruption(
    cluster: Cluster, etcd_endpoint: str, tmp_path: Path, streaming: tuple[str, ...]
) -> None:
    """Also if all that was seen for long were ends of rounds, where replicas are equal; what is outer is compared."""
    config = tmp_path / "rr.toml"
    config.write_text('[detect]\ncorruption = "rollback"\n')
    arguments = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rr-config", str(config)]
    host = cluster.host("solo")
    host.launch(arguments, [TRAINER, "dense", "--every", "4", "--at-ends", "80", "--steps", "100", *streaming])
    run, told, equal = f"/resilient-run/{cluster.name}", list[Observation](), set[int]()

    def over() -> bool:
        observations = [
            parse_observations(entry.value) for entry in entries(etcd_endpoint, f"{run}/state/observations/").values()
        ]
        told.extend(each for several in observations for each in several if each.kind == "corruption")
        learned = entries(etcd_endpoint, f"{run}/ckpt/equal/")
        equal.update(int(EqualLeaves.parse(entry.value).mask.sum()) for key, entry in learned.items())
        assert host.launcher is not None
        return host.launcher.poll() is not None

    wait_until(over, timeout_s=120, what="the end", host=host, pause_s=0.1)
    assert host.wait() == 0, host.output
    assert not told
    assert not host.recoveries(), host.output
    # Of six parameters.
    assert max(equal, default=0) >= 12, "outer parameters and momentum are known to be equal"
