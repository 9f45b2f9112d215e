"""Survival probabilities: the thesis's numbers, every small case by trying all losses, and sampling."""

import json
import random
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from wasted import sampled_survival

from resilient_run.ckpt.format.placement import Placement, placement
from resilient_run.ckpt.format.survival import fatal_domains, survival, union_bound
from resilient_run.daemon.ctl.cli import resilientctl


def tried(plan: Placement, failures: int) -> Fraction:
    """Survival by looking at every possible loss."""
    holders = plan.holders()
    losses = list(combinations(range(len(holders)), failures))
    fatal = sum(any(set(mine) <= set(lost) for mine in holders) for lost in losses)
    return 1 - Fraction(fatal, len(losses))


@pytest.mark.parametrize("strategy", ["mixed", "ring"])
@pytest.mark.parametrize("hosts", range(1, 11))
def test_counting_equals_trying(hosts: int, strategy: Any) -> None:
    for replicas in range(1, hosts + 2):
        plan = placement(hosts, replicas, strategy=strategy)
        for failures in range(hosts + 1):
            exact = survival(plan, failures)
            assert exact == tried(plan, failures), (hosts, replicas, failures)
            assert union_bound(plan, failures) <= exact


def test_the_thesis_numbers() -> None:
    """Section 6.7.2; its ring value for three losses, 25 % lower, is the bound that counts some losses twice."""
    group, ring = placement(16, 2), placement(16, 2, strategy="ring")
    assert survival(group, 2) == Fraction(14, 15)
    assert survival(group, 3) == Fraction(4, 5)
    assert survival(ring, 3) == Fraction(22, 35)
    assert union_bound(ring, 3) == Fraction(3, 5) == Fraction(3, 4) * survival(group, 3)


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_corollary_6_1(groups: int, replicas: int, data: st.DataObject) -> None:
    hosts = groups * replicas
    failures = data.draw(st.integers(0, hosts))
    plan = placement(hosts, replicas)
    if failures < replicas:
        assert survival(plan, failures) == union_bound(plan, failures) == 1
        return
    lost = Fraction(hosts * comb(hosts - replicas, failures - replicas), replicas * comb(hosts, failures))
    assert union_bound(plan, failures) == max(Fraction(0), 1 - lost)
    assert survival(plan, failures) >= union_bound(plan, failures)
    if failures < 2 * replicas:
        assert survival(plan, failures) == 1 - lost


def test_a_thousand_hosts_are_counted_exactly() -> None:
    plan = placement(1000, 2)
    assert survival(plan, 50) == Fraction(comb(500, 50) * 2**50, comb(1000, 50))
    assert survival(placement(1001, 2), 2) == 1 - Fraction(499 + 3, comb(1001, 2))
    assert survival(placement(1000, 3, strategy="ring"), 3) == 1 - Fraction(1000, comb(1000, 3))


@pytest.mark.parametrize("strategy", ["mixed", "ring"])
@pytest.mark.parametrize(("hosts", "replicas", "failures"), [(16, 2, 3), (17, 2, 4), (23, 3, 6), (64, 2, 8)])
def test_sampling_through_the_placement_agrees(hosts: int, replicas: int, failures: int, strategy: Any) -> None:
    plan = placement(hosts, replicas, strategy=strategy)
    exact, samples = float(survival(plan, failures)), 4000
    found = sampled_survival(plan, failures, samples=samples, rng=random.Random(hosts * failures))
    assert abs(found - exact) < 4 * (exact * (1 - exact) / samples) ** 0.5


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 4))
def test_fatal_domains_are_those_whose_loss_kills(labels: list[str], replicas: int) -> None:
    plan = placement(len(labels), replicas, labels=labels)
    for label in set(labels):
        lost = {host for host, name in enumerate(labels) if name == label}
        fatal = any(set(mine) <= lost for mine in plan.holders())
        assert (label in fatal_domains(plan, labels)) == fatal


@pytest.mark.parametrize("failures", [-1, 5])
def test_impossible_losses_are_refused(failures: int) -> None:
    for count in (survival, union_bound):
        with pytest.raises(ValueError, match="from 0 to 4"):
            count(placement(4, 2), failures)


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(resilientctl, ["plan-placement", *arguments])


@pytest.mark.parametrize(
    ("strategy", "failures", "expected"), [("mixed", 2, 0.9333), ("mixed", 3, 0.8), ("ring", 3, 0.6286)]
)
def test_plan_placement_prints_json(strategy: str, failures: int, expected: float) -> None:
    done = ctl("--hosts", "16", "--replicas", "2", "--failures", str(failures), "--strategy", strategy, "--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["survival"] == pytest.approx(expected, abs=1e-4)
    assert sorted(host for group in answer["groups"] for host in group) == list(range(16))
    assert answer["strategy"] == ("ring" if strategy == "ring" else "group")


def test_plan_placement_spreads_over_domains() -> None:
    arguments = ("--hosts", "4", "--replicas", "2", "--failures", "2", "--labels", "x, x, y, y")
    assert json.loads(ctl(*arguments, "--json").stdout)["groups"] == [[0, 2], [1, 3]]
    text = ctl(*arguments).stdout
    assert "0 (x), 2 (y)" in text
    assert "66.67%" in text
    assert "last copy of a checkpoint: none" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "0", "--replicas", "2", "--failures", "1"), "'--hosts'"),
        (("--hosts", "4", "--replicas", "0", "--failures", "1"), "'--replicas'"),
        (("--hosts", "4", "--replicas", "2", "--failures", "5"), "5 of 4 hosts cannot be lost"),
        (("--hosts", "4", "--replicas", "2", "--failures", "-1"), "'--failures'"),
        (("--hosts", "4", "--replicas", "2", "--failures", "1", "--labels", "a"), "1 labels for 4 hosts"),
        (("--hosts", "4", "--replicas", "2", "--failures", "1", "--strategy", "star"), "'star'"),
        (("--hosts", "x", "--replicas", "2", "--failures", "1"), "'x'"),
        (("--hosts", "4", "--failures", "1"), "'--replicas'"),
    ],
)
def test_plan_placement_refuses_bad_values(arguments: tuple[str, ...], message: str) -> None:
    done = ctl(*arguments)
    assert done.exit_code != 0
    assert message in done.stderr
