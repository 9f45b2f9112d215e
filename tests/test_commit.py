"""The pure part of the commit protocol, by examples and against a model with delays, losses and new generations."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from seats import everywhere, seats

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.run.commit import (
    Agreed,
    HeldPair,
    Lead,
    Missed,
    Unhealthy,
    advance,
    is_dead,
    joined_unhealthy,
    unhealthy_row,
)
from resilient_run.daemon.run.rounds import Round


def make_round(
    hosts: str = "abc", *, nproc: int = 1, generation: int = 1, restore: Pair | None = None, revision: int = 1
) -> Round:
    return Round(generation=generation, seats=seats(hosts, [nproc] * len(hosts)), restore=restore, revision=revision)


def test_round_knows_ranks_and_replicas() -> None:
    uneven = Round(generation=1, seats=seats("abc", (2, 1, 3)), restore=None, revision=1)
    assert [list(uneven.ranks(host)) for host in "abcx"] == [[0, 1], [2], [3, 4, 5], []]
    assert uneven.world_size == 6
    assert uneven.holders(2, 2) == ("b", "c")
    assert uneven.holders(6, 2) == ()
    assert uneven.kept("b", 2) == (2, 0, 1)
    assert uneven.kept("x", 2) == ()


@given(data=st.data(), count=st.integers(1, 4))
def test_steps_in_a_row_are_counted_over_all_ranks(data: st.DataObject, count: int) -> None:
    """Whichever ranks call them unhealthy, and however far apart their numbers are."""
    steps = sorted(data.draw(st.sets(st.integers(1, 99), min_size=1, max_size=12)))
    calls = [data.draw(st.sets(st.sampled_from(steps))) for _ in range(3)]
    before = dict(zip(steps, [0, *steps], strict=False))
    told = [{Pair(1, step): Unhealthy(before[step], rank) for step in mine} for rank, mine in enumerate(calls)]
    unhealthy = joined_unhealthy(*told)
    rows = [steps[at : at + count] for at in range(len(steps) - count + 1)]
    found = next((row for row in rows if set(row) <= set().union(*calls)), [])
    assert [pair.step for pair in unhealthy_row(unhealthy, count)] == found
    assert {pair.step: who.rank for pair, who in unhealthy.items()} == {
        step: next(rank for rank, mine in enumerate(calls) if step in mine) for step in set().union(*calls)
    }


def test_round_spreads_replicas_over_labels() -> None:
    def parsed(*labels: str | None) -> Round:
        seats = [{"host": host, "nproc": 2} for host in "abcd"]
        members = [
            seat if label is None else {**seat, "label": label} for seat, label in zip(seats, labels, strict=True)
        ]
        return Round.parse({"generation": 1, "members": members, "restore": None}, revision=1)

    racks = parsed("x", "x", "y", "y")
    assert [racks.holders(rank, 2) for rank in (0, 2, 4, 7)] == [("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")]
    assert racks.kept("c", 2) == (4, 5, 0, 1)
    assert parsed(None, None, None, None) == parsed("", "", "", "")
    assert parsed("", "", "", "").holders(0, 2) == ("a", "b")
    with pytest.raises(DaemonError, match="'label'"):
        Round.parse({"generation": 1, "members": [{"host": "a", "nproc": 1, "label": 5}]}, revision=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "'generation'|'members'"),
        ({"generation": 1, "members": []}, "at least one host"),
        ({"generation": 1, "members": [{"host": "a", "nproc": 1}] * 2}, "each once"),
        ({"generation": 0, "members": [{"host": "a", "nproc": 1}]}, "'generation'"),
        ({"generation": 1, "members": [{"host": "a", "nproc": 0}]}, "'nproc'"),
        ({"generation": 1, "members": "a"}, "'members'"),
        ({"generation": 1, "members": [{"host": "a", "nproc": 1}], "restore": {"step": 1}}, "'generation'"),
    ],
)
def test_malformed_rounds_name_the_field(value: dict[str, Any], message: str) -> None:
    with pytest.raises(DaemonError, match=message):
        Round.parse(value, revision=1)


def test_watermark_needs_every_replica_of_every_rank() -> None:
    round_ = make_round()
    full = {host: {rank: {(1, 4), (1, 5)} for rank in round_.kept(host, 2)} for host in "abc"}
    assert max(everywhere(round_, 2, full)) == (1, 5)
    for host in "abc":
        for rank in round_.kept(host, 2):
            less = {name: dict(held) for name, held in full.items()}
            less[host][rank] = {(1, 4)}
            assert max(everywhere(round_, 2, less)) == (1, 4)
            del less[host][rank]
            assert not everywhere(round_, 2, less)


def test_watermark_is_of_this_generation_or_what_it_restored() -> None:
    round_ = make_round("a", generation=3, restore=(2, 7))
    assert max(everywhere(round_, 2, {"a": {0: {(2, 7), (2, 8)}}})) == (2, 7)
    assert not everywhere(round_, 2, {"a": {0: {(1, 9), (4, 1)}}})
    assert max(everywhere(round_, 2, {"a": {0: {(2, 7), (3, 8)}}})) == (3, 8)
    assert not everywhere(make_round("a"), 1, {})


def test_a_step_of_another_number_of_ranks_is_not_whole() -> None:
    """All hosts may hold it of all ranks that are left; nobody could go back to it."""
    held = {host: {rank: {(2, 7), (3, 8)} for rank in range(2)} for host in "ab"}
    round_ = make_round("ab", generation=3, restore=(2, 7))
    same, fewer = (replace(round_, made_by=made_by) for made_by in (2, 3))
    assert everywhere(same, 2, held) == {(2, 7), (3, 8)}
    assert everywhere(fewer, 2, held) == {(3, 8)}


def test_more_replicas_than_hosts_are_one_on_each() -> None:
    assert max(everywhere(make_round("ab"), 5, {host: {0: {(1, 1)}, 1: {(1, 1)}} for host in "ab"})) == (1, 1)


def test_watermark_needs_what_standbys_keep() -> None:
    reports = {"a": {0: {(1, 5)}, 1: {(1, 5)}}, "s": {0: {(1, 5)}, 1: {(1, 4)}}}
    alone = make_round("a", nproc=2)
    assert max(everywhere(alone, 2, reports)) == (1, 5)
    assert not everywhere(alone, 2, reports, spares="s")
    reports["s"] = {rank: {(1, 5)} for rank in (0, 1)}
    assert max(everywhere(alone, 2, reports, spares="s")) == (1, 5)


def agreed(committed: Pair | None, next_: Pair) -> Agreed:
    return Agreed(committed=committed, next=next_)


def test_watermark_only_advances_to_what_was_captured_as_agreed() -> None:
    complete = {(1, 4), (1, 5)}
    assert advance(agreed(None, (1, 1)), complete) == (1, 5)
    assert advance(agreed((1, 4), (1, 5)), complete) == (1, 5)
    assert advance(agreed((1, 5), (1, 6)), complete) is None
    assert advance(agreed((1, 3), (1, 8)), complete) is None


def test_what_is_agreed_in_a_generation() -> None:
    first, later = make_round(), make_round(generation=3, restore=(2, 7))
    assert Agreed.of(None, None, None) == agreed(None, (0, 0))
    assert Agreed.of(first, None, None) == agreed(None, (1, 1))
    assert Agreed.of(first, None, (1, 6)) == agreed(None, (1, 6))
    assert Agreed.of(first, (1, 4), (1, 6)) == agreed((1, 4), (1, 6))
    assert Agreed.of(first, (1, 4), None) == Agreed.of(first, (1, 4), (1, 2)) == agreed((1, 4), (1, 5))
    # What a generation that is over has agreed says nothing, whatever came after the step that is restored.
    assert Agreed.of(later, (2, 7), (2, 19)) == agreed((2, 7), (3, 8))
    assert Agreed.of(later, (2, 9), (2, 19)) == agreed((2, 7), (3, 8))
    assert Agreed.of(later, (3, 9), (3, 12)) == agreed((3, 9), (3, 12))
    # Where the run goes back, the next generation begins what is captured next, and nothing of this one is.
    assert Agreed.of(later, (1, 4), (4, 5)) == agreed((2, 7), (4, 5))
    assert advance(Agreed.of(later, (1, 4), (4, 5)), {(2, 7), (3, 8)}) is None
    assert Agreed.of(make_round(generation=4, restore=(1, 4)), (1, 4), (4, 5)) == agreed((1, 4), (4, 5))
    for one in (agreed(None, (1, 1)), agreed((1, 4), (1, 6))):
        assert Agreed.parse(one.to_value()) == one
    with pytest.raises(DaemonError, match="'next'"):
        Agreed.parse({"watermark": None, "next": None}, "offer")
    assert agreed(None, (1, 1)).or_later(agreed((1, 4), (1, 6))) == agreed((1, 4), (1, 6))


def test_what_was_missed_survives_its_way_to_the_root() -> None:
    missed = Missed(next=(1, 4), step=6, late=True)
    assert Missed.parse(missed.to_value()) == missed
    for wrong in ({"late": 1}, {"next": None}, {"step": -1}):
        with pytest.raises(DaemonError, match="missed"):
            Missed.parse({**missed.to_value(), **wrong})


def test_the_next_capture_is_as_far_ahead_as_ranks_need_to_hear_of_it() -> None:
    lead = Lead()
    assert (lead.after(7, every=1), lead.after(7, every=4), lead.after(8, every=4)) == (8, 8, 12)
    lead.missed()
    lead.missed()
    assert lead.after(7, every=1) == 11
    kept = 0
    while lead.after(0, every=1) > 1:
        lead.kept(9)
        kept += 1
    assert kept < 64
    lead.missed()
    for _ in range(7):
        lead.kept(9)
    assert lead.after(0, every=1) == 2, "the lead was shortened too early, and is kept for longer now"
    lead.missed()
    lead.kept(0)
    assert lead.after(0, every=1) == 1, "a commit within a step"


def test_what_is_held_survives_its_way_through_etcd() -> None:
    held = {0: frozenset({(1, 4), (1, 5)}), 7: frozenset({(1, 4)}), 12: frozenset({(1, 5)})}
    report = HeldPair.of(held, Pair(1, 5)).to_value()
    assert report == {"generation": 1, "step": 5, "ranks": [0, 12]}
    assert HeldPair.parse(report) == HeldPair(pair=Pair(1, 5), ranks=frozenset({0, 12}))
    odd = [{**report, "ranks": [number]} for number in (float("inf"), 1.5, True, "7", -1, None)]
    for value in ({}, {**report, "ranks": {}}, {**report, "step": None}, *odd):
        with pytest.raises(DaemonError, match="field"):
            HeldPair.parse(value)


def test_what_may_be_given_up() -> None:
    known = agreed((1, 4), (1, 7))
    assert [pair for pair in (None, (1, 3), (1, 4), (1, 5), (1, 6), (1, 7)) if known.may_overwrite(pair)] == [
        None,
        (1, 3),
        (1, 5),
        (1, 6),
    ]
    assert not agreed(None, (1, 1)).may_overwrite((1, 1))
    assert is_dead((1, 5), make_round(generation=2, restore=(1, 4)))
    assert not is_dead((1, 4), make_round(generation=2, restore=(1, 4)))
    assert not is_dead((2, 5), make_round(generation=2, restore=(1, 4)))


class Protocol(RuleBasedStateMachine):
    """Hosts with two slots a rank and an etcd that some see late; fewer than m hosts are lost at a time.

    Invariants (2), the watermark is restorable while fewer than m hosts are lost, and (5), it never goes back, in long
    games with up to five hosts and three replicas; test_commit_model.py has all of them in every short game.

    The pure functions decide; the model only moves data: what a trainer captures, an offer carries, a report says, and
    what the root saw when it decided.
    """

    @initialize(count=st.integers(1, 5), replicas=st.integers(1, 3))
    def begin(self, count: int, replicas: int) -> None:
        self.hosts = "abcde"[:count]
        self.replicas = replicas
        self.revision = 1
        self.round = make_round(self.hosts)
        self.watermark: Pair | None = None
        self.writes = 0
        # Host → rank → two slots; what etcd has of it; and what the root saw of etcd.
        self.slots: dict[str, dict[int, list[Pair | None]]] = {host: {} for host in self.hosts}
        self.reports: dict[str, dict[int, set[Pair]]] = {host: {} for host in self.hosts}
        self.seen: tuple[dict[str, dict[int, set[Pair]]], set[int], int] = ({}, set(), 0)
        self.begin_generation()
        self.repairing = False

    def begin_generation(self) -> None:
        self.agreed = Agreed.of(self.round, self.watermark, None)
        # What each host has heard of it, which steps its rank has made and captured, and what that has missed.
        self.known = dict.fromkeys(self.hosts, self.agreed)
        restored = self.round.restore[1] if self.round.restore else 0
        self.done = dict.fromkeys(self.hosts, restored)
        self.taken = dict.fromkeys(self.hosts, 0)
        self.missed: dict[str, int] = {}

    def held(self, host: str) -> dict[int, set[Pair]]:
        return {rank: {pair for pair in pairs if pair} for rank, pairs in self.slots[host].items()}

    def slots_of(self, host: str, rank: int) -> list[Pair | None]:
        return self.slots[host].setdefault(rank, [None, None])

    def overwrite(self, slots: list[Pair | None], pair: Pair, known: Agreed) -> bool:
        free = [index for index, old in enumerate(slots) if known.may_overwrite(old)]
        if free:
            slots[free[0]] = pair
        return bool(free)

    @rule(choice=st.integers(0, 4), hears=st.booleans())
    def step(self, choice: int, hears: bool) -> None:
        """A trainer makes a step, not further ahead of the others than their gradients let it be."""
        rank = choice % len(self.hosts)
        host = self.hosts[rank]
        if self.repairing or self.done[host] > min(self.done.values()):
            return
        self.known[host] = self.agreed if hears else self.known[host]
        following, passed = self.known[host].next[1], self.done[host]
        self.done[host] += 1
        if self.taken[host] < following <= passed:
            self.missed[host] = following
        elif self.taken[host] < following <= self.done[host]:
            self.taken[host] = self.done[host]
            pair = (self.round.generation, self.done[host])
            assert self.overwrite(self.slots_of(host, rank), pair, self.known[host]), "a slot is always free"

    @rule(rank=st.integers(0, 4), choice=st.integers(0, 4), knows=st.booleans())
    def fetch(self, rank: int, choice: int, knows: bool) -> None:
        """A placement peer takes its owner's newest capture."""
        rank %= len(self.hosts)
        owner, peers = self.hosts[rank], self.round.holders(rank, self.replicas)[1:]
        if not peers:
            return
        peer = peers[choice % len(peers)]
        newest = max((pair for pair in self.slots_of(owner, rank) if pair), default=None)
        slots = self.slots_of(peer, rank)
        if newest is None or newest in slots or newest < self.known[owner].next:
            return
        self.known[peer] = self.agreed if knows else self.known[peer]
        self.overwrite(slots, newest, self.known[owner].or_later(self.known[peer]))

    @rule(looks=st.booleans())
    def go_on(self, looks: bool) -> None:
        """Everybody does their part of one step, and the root may or may not see it before something else happens."""
        for rank in range(len(self.hosts)):
            self.step(rank, True)
        for rank in range(len(self.hosts)):
            for choice in range(self.replicas):
                self.fetch(rank, choice, True)
        for choice in range(len(self.hosts)):
            self.report(choice)
        if looks:
            self.look()

    @rule(choice=st.integers(0, 4))
    def report(self, choice: int) -> None:
        host = self.hosts[choice % len(self.hosts)]
        self.reports[host] = self.held(host)

    @rule()
    def look(self) -> None:
        """The root's mirror of etcd catches up."""
        reports = {host: dict(held) for host, held in self.reports.items()}
        self.seen = (reports, set(self.missed.values()), self.writes)

    @rule()
    def commit(self) -> None:
        """The root decides on what it saw; the transaction applies only if what it saw of the guards is current."""
        reports, missed, writes = self.seen
        if writes != self.writes:
            return
        pair = advance(self.agreed, everywhere(self.round, self.replicas, reports))
        if pair is not None:
            assert self.watermark is None or pair > self.watermark, "the watermark went back"
            self.watermark = pair
        elif self.agreed.next[1] not in missed:
            return
        following = (self.round.generation, max(self.done.values()) + 1)
        self.agreed = agreed(self.watermark, following)
        self.writes += 1

    @precondition(lambda self: not self.repairing)
    @rule(first=st.integers(0, 4), count=st.integers(0, 2))
    def lose_hosts(self, first: int, count: int) -> None:
        """Fewer than m hosts lose their memory; a new generation restores the watermark."""
        copies = min(self.replicas, len(self.hosts))
        for index in range(min(count, copies - 1)):
            self.slots[self.hosts[(first + index) % len(self.hosts)]] = {}
        self.revision += 1
        self.round = make_round(
            self.hosts, generation=self.round.generation + 1, restore=self.watermark, revision=self.revision
        )
        self.writes += 1
        self.repairing = True
        for held in self.slots.values():
            for slots in held.values():
                slots[:] = [None if pair is None or is_dead(pair, self.round) else pair for pair in slots]
        self.begin_generation()

    @precondition(lambda self: self.repairing)
    @rule()
    def repair(self) -> None:
        """Every host fetches the replicas of the restored step that it must hold from whoever has them."""
        restore = self.round.restore
        for host in self.hosts if restore else ():
            for rank in self.round.kept(host, self.replicas):
                slots = self.slots_of(host, rank)
                if restore not in slots:
                    slots[slots.index(None)] = restore
        self.repairing = False

    @invariant()
    def committed_step_survives(self) -> None:
        """With fewer than m hosts lost, every rank's committed state is in somebody's memory."""
        for rank in range(len(self.hosts)) if self.watermark else ():
            holders = self.round.holders(rank, self.replicas)
            alive = [host for host in holders if self.watermark in self.slots_of(host, rank)]
            assert alive, f"rank {rank} at {self.watermark} is lost: {self.slots}"
            if not self.repairing:
                assert len(alive) == len(holders), f"rank {rank} at {self.watermark} is only on {alive}"


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
