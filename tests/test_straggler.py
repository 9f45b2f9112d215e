"""Stragglers: who is named on traces of every kind of training, and who is not; and how their work gets to the root."""

import random
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
from cluster import wait_until
from hosts import Hosts
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.capture.injected import Injected
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.daemon.base.fields import MAX_INTEGER
from resilient_run.daemon.base.policy import DetectPolicy
from resilient_run.daemon.health.straggler import Stragglers, slowness
from resilient_run.daemon.health.threshold import Judge
from resilient_run.daemon.run.observation import Observation, parse_observations
from resilient_run.daemon.run.rounds import Round, Seat
from resilient_run.daemon.run.work import RankWork, is_due, read_work, work_rows

Trace = Callable[[int, int], float]
"""Rank and step → the seconds that the rank computes in it."""

MB = 1 << 20


def round_of(ranks: int, generation: int = 1) -> Round:
    return Round(generation=generation, seats=tuple(Seat(host=f"host{rank}", nproc=1) for rank in range(ranks)))


class Run:
    """A synchronous run: each step takes as long as its slowest rank computes, and each host looks at its own clock."""

    def __init__(self, trace: Trace, *, ranks: int, sizes: Callable[[int], int] = lambda rank: 64 * MB) -> None:
        self.trace, self.ranks, self.sizes = trace, ranks, sizes
        self.round = round_of(ranks)
        self.now_s = 0.0
        self.step = 0
        self.worked = [100.0 * rank for rank in range(ranks)]
        self.work: dict[int, RankWork] = {}
        self.policy = DetectPolicy(straggler_replace_s=60.0)
        self.stragglers = Stragglers(self.policy)
        self.judge = Judge(wall=lambda: self.now_s)

    def train(self, steps: int) -> Iterator[dict[str, Observation]]:
        """Yield what is wrong after each step."""
        for _ in range(steps):
            self.step += 1
            own = [self.trace(rank, self.step) for rank in range(self.ranks)]
            self.now_s += max(own) + 0.05
            for rank, seconds in enumerate(own):
                self.worked[rank] += seconds
                at_s = self.now_s + 1000 * rank
                if is_due(self.work.get(rank), self.step, at_s):
                    point = RankWork(self.step, self.worked[rank], at_s, self.sizes(rank))
                    self.work = {**self.work, rank: point}
                    # Its report may come before that of the others.
                    self.stragglers.hear(self.round, 1, self.work)
            yield self.judge.judge(self.stragglers.measures(self.round))

    def named_in(self, steps: int) -> dict[str, int]:
        """Return who is named within so many steps, and at which step first."""
        found: dict[str, int] = {}
        for wrong in self.train(steps):
            for name in wrong:
                found.setdefault(name, self.step)
        return found


def noisy(seed: int, sigma: float = 0.05, base_s: float = 0.3) -> Trace:
    """Steps that vary by so much, each rank for itself, and by as much again for all at once."""
    chance = random.Random(seed)
    common: dict[int, float] = {}

    def seconds(rank: int, step: int) -> float:
        together = common.setdefault(step, chance.lognormvariate(0, sigma))
        return base_s * together * chance.lognormvariate(0, sigma)

    return seconds


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_slow_rank_is_named_within_30_steps_and_no_other_one(ranks: int, factor: float) -> None:
    soon = 0
    for seed in range(10):
        usual, slow = noisy(seed), seed % ranks
        run = Run(lambda rank, step: usual(rank, step) * (factor if rank == slow and step > 47 else 1), ranks=ranks)  # noqa: B023
        assert run.named_in(47) == {}
        found = run.named_in(30)
        assert found.keys() <= {f"rank {slow}"}
        soon += len(found)
    assert soon >= 9


def test_it_is_said_who_and_since_when_and_that_it_is_over_and_where_it_lasts_its_host_has_failed() -> None:
    run = Run(lambda rank, step: 0.65 if rank == 1 and 40 < step <= 240 else 0.5, ranks=3)
    assert run.named_in(40) == {}
    (observation,) = next(wrong for wrong in run.train(40) if wrong).values()
    assert (observation.kind, observation.severity, observation.rank, observation.generation) == (
        "straggler",
        "warn",
        1,
        1,
    )
    assert observation.value == pytest.approx(1.3, abs=0.01)
    assert "rank 1 on host host1 computes 650 ms in each step since step 40, and its peers" in observation.message
    assert "wait for it, 500 ms (the limit is 1.2)" in observation.message
    severities = [wrong["rank 1"].severity for wrong in run.train(240 - run.step)]
    assert severities == sorted(severities, reverse=True)
    assert severities[-1] == "fail"
    *_, last = run.train(30)
    assert last == {}


def alike(rank: int) -> int:
    return 64 * MB


def stages(rank: int, step: int) -> float:
    """Two replicas of each of four stages."""
    return (0.2, 0.3, 0.45, 0.6)[rank // 2]


def sizes_of_stages(rank: int) -> int:
    return (64 + 8 * (rank // 2)) * MB


QUIET: dict[str, tuple[Trace, Callable[[int], int]]] = {
    "ordinary noise": (noisy(1), alike),
    "every rank has other data": (noisy(2, sigma=0.3), alike),
    "an evaluation on all ranks": (lambda rank, step: 30.0 if step % 50 == 0 else 0.3, alike),
    "an evaluation on one rank": (lambda rank, step: 30.0 if step % 50 == rank == 0 else 0.3, alike),
    "one rank loads data now and then": (lambda rank, step: 2.0 if step % 37 == 0 and rank == 2 else 0.3, alike),
    "one rank saves every tenth step": (lambda rank, step: 0.9 if step % 10 == 0 and rank == 0 else 0.3, alike),
    "stages of a pipeline": (stages, sizes_of_stages),
    "a rank that does something else": (
        lambda rank, step: 0.9 if rank == 7 else 0.3,
        lambda rank: (9 if rank == 7 else 8) * MB,
    ),
    "little work beside long communication": (lambda rank, step: 0.003 if rank == 1 else 0.002, alike),
}


@pytest.mark.parametrize("name", QUIET)
def test_nobody_is_named_for(name: str) -> None:
    trace, sizes = QUIET[name]
    assert Run(trace, ranks=8, sizes=sizes).named_in(2000) == {}


def test_slow_replica_of_a_stage_is_named() -> None:
    run = Run(lambda rank, step: stages(rank, step) * (1.3 if rank == 2 else 1), ranks=8, sizes=sizes_of_stages)
    assert run.named_in(60).keys() == {"rank 2"}


def test_an_hour_of_noise_on_two_ranks() -> None:
    run = Run(noisy(3, sigma=0.1), ranks=2)
    assert run.named_in(10_000) == {}
    assert run.now_s > 3600


def test_short_steps_are_compared_at_steps_that_all_hosts_have_noted() -> None:
    run = Run(lambda rank, step: 0.004 if rank else 0.002, ranks=2)
    assert run.named_in(400) == {}, "its cost is less than a twentieth of a step"
    run = Run(lambda rank, step: 0.2 if rank else 0.1, ranks=2)
    assert run.named_in(60).keys() == {"rank 1"}


def test_ranks_that_there_are_not_are_no_peers() -> None:
    run = Run(lambda rank, step: 0.1 if rank > 1 else 0.5, ranks=4)
    run.round = round_of(2)
    assert run.named_in(60) == {}
    run = Run(lambda rank, step: 0.9 if rank > 1 else 0.5, ranks=3)
    run.round = round_of(2)
    assert run.named_in(60) == {}


@pytest.mark.parametrize("term", [(2, 1), (1, 2)])
def test_another_generation_or_election_begins_anew(term: tuple[int, int]) -> None:
    """A root that is elected again has heard nothing in between."""
    run = Run(lambda rank, step: 0.5 if rank else 0.3, ranks=2)
    assert run.named_in(40)
    run.stragglers.hear(round_of(2, generation=term[0]), term[1], run.work)
    assert list(run.stragglers.measures(run.round)) == []


def test_a_host_has_failed_after_the_time_in_which_its_rank_was_slow_and_no_other() -> None:
    """All ranks evaluate for longer than the limit, and then the daemon of one is silent."""
    run = Run(lambda rank, step: 100.0 if step == 40 else 0.6 if rank else 0.4, ranks=2)
    *_, last = run.train(44)
    run.now_s += 1000.0
    later = run.judge.judge(run.stragglers.measures(run.round))
    assert [wrong["rank 1"].severity for wrong in (last, later)] == ["warn", "warn"]
    *_, last = run.train(100)
    assert last["rank 1"].severity == "fail"


def test_spread_of_peers_counts() -> None:
    assert slowness([1.0, 1.5], 1.5) == [(1.0, 1.25), (1.5, 1.0)]
    assert slowness([1.0, 1.01, 0.99, 1.5], 1.5)[3] == (1.5, 1.0)
    assert slowness([0.8, 1.0, 1.2, 1.5], 1.5)[3] == (1.0, 1.0), "they are as far from each other"
    assert slowness([0.0, 0.1], 1.0)[1][0] == 1.0, "a rank whose training thread does nothing is no measure"


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.floats(0, 40))
def test_slowness_is_what_comparing_each_rank_with_all_others_gives(own: list[int], step_s: float) -> None:
    """Which takes minutes for the ranks of 4,096 hosts, in the middle of their root's work."""
    for rank, found in enumerate(slowness(own, step_s)):
        others = own[:rank] + own[rank + 1 :]
        middle = statistics.median(others)
        spread = statistics.median(abs(other - middle) for other in others)
        is_slow = own[rank] > statistics.median(own) and own[rank] - middle > max(0.05 * step_s, 5 * spread)
        assert found[0] == (own[rank] / middle if is_slow and middle > 0 else 1.0)
        if is_slow:
            assert found[1] == middle


def test_work_reads_what_it_wrote_and_nothing_else() -> None:
    work = {3: RankWork(5, 1.5, 2.5, 7), 0: RankWork(MAX_INTEGER, 0.0, 1.0, 1 << 41)}
    assert read_work(work_rows(work)) == work
    for rows in ([[1, 2]], [[0, 1, 2.0, 3.0, -1]], [[0, 1, float("nan"), 3.0, 1]], [[0, 1, "2", 3.0, 1]], [3], 3):
        with pytest.raises((TypeError, ValueError)):
            read_work(rows)


def test_rank_that_is_told_to_be_slow_computes_for_longer_until_it_is_told_otherwise() -> None:
    injected, state = Injected(), TrainingState({}, rng=False)

    def worked(own_s: float) -> float:
        began_s = time.thread_time()
        while time.thread_time() < began_s + own_s:
            pass
        injected.strike(state)
        return time.thread_time() - began_s

    order = {"op": "inject", "kind": "slow-rank", "factor": 3.0, "duration_s": 0.0}
    injected.order(order)
    injected.strike(state)
    assert worked(0.02) >= 0.06
    injected.order({**order, "factor": 1.0})
    assert worked(0.02) >= 0.06, "the step that is under way"
    assert worked(0.02) < 0.06


@pytest.mark.jobs
def test_the_root_names_a_slow_rank_of_another_host(hosts: Hosts) -> None:
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy={"detect": {"straggler_factor": 1.25}})
    hosts.form_round(1, "ab")
    trainers = [hosts[name].trainer(rank, world_size=2, generation=1) for rank, name in enumerate("ab")]
    for trainer in trainers:
        trainer.attach()
    step = 0

    def found() -> list[Observation]:
        nonlocal step
        step += 1
        for rank, trainer in enumerate(trainers):
            trainer.notify("progress", step=step, worked_s=step * (0.1 + 0.05 * rank))
        entries = hosts.etcd(lambda etcd: etcd.list(f"{hosts.prefix}state/observations/"))
        items = [item for entry in entries.values() for item in parse_observations(entry.value)]
        return [item for item in items if item.kind == "straggler"]

    (item,) = wait_until(found, timeout_s=60, what="the observation")
    assert (item.rank, item.generation, item.value) == (1, 1, 1.5)
    assert "rank 1 on host b computes" in item.message
