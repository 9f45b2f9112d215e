"""Replica placement: the examples of the paper's Figure 6.3, the algorithm as printed, and its properties."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, permutations
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient_run.ckpt.format.placement import placement, replica_hosts

HOSTS = st.integers(1, 60)
REPLICAS = st.integers(1, 8)


def _as_printed(hosts: int, replicas: int) -> tuple[list[list[int]], str]:
    """Algorithm 6.1 line by line, with its 1-based machines."""
    groups: list[list[int]] = []
    count = hosts // replicas
    for i in range(count):
        groups.append([replicas * i + j for j in range(1, replicas + 1)])
    strategy = "group"
    if hosts % replicas:
        strategy = "mixed"
        groups[-1] += range(count * replicas + 1, hosts + 1)
    return groups, strategy


def test_figure_6_3() -> None:
    assert replica_hosts(4, 2) == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert placement(5, 2).strategy == "mixed"
    assert placement(5, 2).groups == ((0, 1), (2, 3, 4))
    assert replica_hosts(5, 2) == ((0, 1), (1, 0), (2, 3), (3, 4), (4, 2))


@given(HOSTS, REPLICAS)
def test_the_groups_are_those_of_the_algorithm(hosts: int, replicas: int) -> None:
    plan = placement(hosts, replicas)
    groups, strategy = _as_printed(hosts, min(hosts, replicas))
    assert [[host + 1 for host in group] for group in plan.groups] == groups
    assert plan.strategy == strategy
    assert plan.replicas == min(hosts, replicas)


@given(HOSTS, REPLICAS)
def test_every_host_has_exactly_m_replicas_its_own_first(hosts: int, replicas: int) -> None:
    holders = replica_hosts(hosts, replicas)
    assert len(holders) == hosts
    for host, mine in enumerate(holders):
        assert mine[0] == host
        assert len(set(mine)) == len(mine) == min(hosts, replicas)
        assert all(0 <= other < hosts for other in mine)


@given(HOSTS, REPLICAS)
def test_every_host_keeps_equally_many(hosts: int, replicas: int) -> None:
    load = Counter(holder for holders in replica_hosts(hosts, replicas) for holder in holders)
    assert set(load.values()) == {min(hosts, replicas)}


@given(HOSTS, REPLICAS)
def test_replicas_stay_inside_the_group(hosts: int, replicas: int) -> None:
    plan = placement(hosts, replicas)
    holders = replica_hosts(hosts, replicas)
    assert all(set(holders[host]) <= set(group) for group in plan.groups for host in group)


@given(st.integers(2, 14), st.integers(2, 4))
def test_theorem_6_1_bounds_the_unlucky_losses(hosts: int, replicas: int) -> None:
    replicas = min(hosts, replicas)
    holders = replica_hosts(hosts, replicas)
    fatal = sum(any(set(mine) <= set(lost) for mine in holders) for lost in combinations(range(hosts), replicas))
    best = -(-hosts // replicas)
    slack = 0 if hosts % replicas == 0 else 2 * replicas - 3
    assert best <= fatal <= min(best + slack, comb(hosts, replicas))


@given(HOSTS, REPLICAS, st.sampled_from(["", "rack"]))
def test_without_different_labels_nothing_changes(hosts: int, replicas: int, label: str) -> None:
    assert placement(hosts, replicas, labels=[label] * hosts) == placement(hosts, replicas)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40), REPLICAS)
def test_labels_only_choose_the_hosts_of_the_groups(labels: list[str], replicas: int) -> None:
    plain, labelled = placement(len(labels), replicas), placement(len(labels), replicas, labels=labels)
    assert list(map(len, labelled.groups)) == list(map(len, plain.groups))
    assert sorted(host for group in labelled.groups for host in group) == list(range(len(labels)))
    assert (labelled.strategy, labelled.replicas) == (plain.strategy, plain.replicas)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_groups_span_domains_whenever_any_assignment_does(data: st.DataObject) -> None:
    """Against every way to put hosts with these labels into the groups and rings of the algorithm."""
    labels = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=7))
    replicas = data.draw(st.integers(2, len(labels)))
    holders = replica_hosts(len(labels), replicas)

    def spans(labels: Sequence[str], holders: tuple[tuple[int, ...], ...]) -> list[int]:
        return [len({labels[host] for host in mine}) for mine in holders]

    possible = [spans(order, holders) for order in set(permutations(labels))]
    ours = spans(labels, replica_hosts(len(labels), replicas, labels))
    if any(min(found) == replicas for found in possible):
        assert min(ours) == replicas
    assert ours.count(1) == min(found.count(1) for found in possible)


def test_two_racks_of_two_hosts() -> None:
    plan = placement(4, 2, labels=["x", "x", "y", "y"])
    assert plan.groups == ((0, 2), (1, 3))
    assert plan.holders() == ((0, 2), (1, 3), (2, 0), (3, 1))


def test_the_ring_of_the_comparison() -> None:
    plan = placement(4, 2, strategy="ring")
    assert plan.strategy == "ring"
    assert plan.holders() == ((0, 1), (1, 2), (2, 3), (3, 0))


@pytest.mark.parametrize(("hosts", "replicas"), [(0, 1), (1, 0), (-1, 2)])
def test_nonsense_is_refused(hosts: int, replicas: int) -> None:
    with pytest.raises(ValueError, match="at least one host"):
        placement(hosts, replicas)


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 labels for 3 hosts"):
        placement(3, 2, labels=["a", "b"])
    with pytest.raises(ValueError, match="ring strategy does not know labels"):
        placement(2, 2, labels=["a", "b"], strategy="ring")
