"""Who forms a round and with which ranks: examples of every rule, and invariants over random histories."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.run.life import Life
from resilient_run.daemon.run.quarantine import Quarantine
from resilient_run.daemon.run.records import Agreement, Closed, Failure
from resilient_run.daemon.run.rounds import Member, Round, Seat
from resilient_run.launcher.rendezvous.forming import Announcer, FormingDecision, next_round, standby
from resilient_run.launcher.rendezvous.rounds import View, assign_ranks, broken, newcomers, rendezvous_mirror

NOW_S = 1_000_000.0


def member(host: str, *, ready: int = 0, session: str = "", arrival: int = 0, label: str = "") -> Member:
    return Member(
        host=host,
        session=session or f"{host}.1",
        nproc=1,
        role="default",
        addr="10.0.0.1",
        pid=1,
        ready=ready,
        arrival=arrival,
        label=label,
    )


def seat(host: str) -> Seat:
    return member(host).seat


def view(members: Iterable[Member] = (), before: str = "", generation: int = 1, **other: Any) -> View:
    """A view whose round, if `before` names hosts, is `generation`."""
    formed = Round(generation=generation, seats=tuple(map(seat, before)), restore=None) if before else None
    known = {"stores": {}, "failures": {}, "done": frozenset(), "round": formed, **other}
    return View(members={item.host: item for item in members}, **known)


def decide(
    state: View, generation: int, nnodes: tuple[int, int], since_arrival_s: float = 0.0, broken_s: float = 0.0
) -> FormingDecision:
    return next_round(
        state,
        generation=generation,
        min_nodes=nnodes[0],
        max_nodes=nnodes[1],
        since_arrival_s=since_arrival_s,
        last_call_s=30.0,
        now_unix_s=NOW_S,
        broken_s=broken_s,
    )


def hosts(decision: FormingDecision) -> str:
    assert decision.members is not None, decision.reason
    return "".join(item.host for item in decision.members)


def ready(names: str, generation: int) -> list[Member]:
    return [member(host, ready=generation, arrival=arrival) for arrival, host in enumerate(names)]


@pytest.mark.parametrize(("hosts", "nproc"), [(2, 1 << 16), (200, 1 << 10), (20, 1 << 30)])
def test_a_round_of_absurd_size_is_refused_before_it_costs_anything(hosts: int, nproc: int) -> None:
    """Fifteen kilobytes in etcd kept a daemon, which serves all runs of its user, busy for minutes."""
    value = {"generation": 2, "members": [{"host": f"x#{n}", "nproc": nproc} for n in range(hosts)], "restore": None}
    with pytest.raises(DaemonError, match=r"field 'nproc'|ranks, a run has at most 131072"):
        Round.parse(value, revision=1)


def test_first_round_closes_at_once_when_it_is_full() -> None:
    assert hosts(decide(view(ready("cab", 1)), 1, (1, 3))) == "cab"


def test_first_round_waits_for_the_minimum() -> None:
    decision = decide(view(ready("ab", 1)), 1, (3, 3), since_arrival_s=1000)
    assert decision.members is None
    assert decision.reason == "2 of at least 3 hosts are ready"
    assert not decision.notable


def test_first_round_has_a_last_call() -> None:
    early = decide(view(ready("ab", 1)), 1, (2, 3), since_arrival_s=10)
    assert early.members is None
    assert early.wait_s == pytest.approx(20.0)
    assert hosts(decide(view(ready("ab", 1)), 1, (2, 3), since_arrival_s=30)) == "ab"


def test_only_readiness_for_this_generation_counts() -> None:
    assert decide(view([member("a", ready=1)], before="b", generation=1), 2, (1, 1)).members is None


def test_a_standby_does_not_take_the_rank_of_a_member_that_is_still_stopping() -> None:
    state = view([*ready("sab", 2), member("c")], before="abc")
    decision = decide(state, 2, (3, 3))
    assert decision.members is None
    assert decision.reason == "waiting for c to stop its workers"
    assert hosts(decide(view(ready("sabc", 2), before="abc"), 2, (3, 3))) == "abc"


def test_a_standby_takes_the_rank_of_a_lost_member() -> None:
    assert hosts(decide(view(ready("tsac", 2), before="abc"), 2, (3, 3))) == "atc"


def test_a_later_round_has_a_short_last_call() -> None:
    state = view(ready("ac", 2), before="abc")
    early = decide(state, 2, (2, 3))
    assert early.wait_s == pytest.approx(1.0)
    assert early.reason.endswith("lost: b")
    assert hosts(decide(state, 2, (2, 3), since_arrival_s=1.0)) == "ac"


def test_a_run_that_starts_again_has_the_long_last_call_until_all_are_back() -> None:
    again = [member(host, ready=2, session=f"{host}.2") for host in "ab"]
    assert decide(view(again, before="abc"), 2, (2, 4)).wait_s == pytest.approx(30.0)
    back = [*again, member("c", ready=2, session="c.2")]
    assert decide(view(back, before="abc"), 2, (2, 4)).wait_s == pytest.approx(1.0)


def test_a_run_that_starts_again_keeps_its_ranks() -> None:
    again = [member(host, ready=8, session=f"{host}.2", arrival=n) for n, host in enumerate("cba")]
    decision = decide(view(again, before="abc", generation=7), 8, (3, 3))
    assert hosts(decision) == "abc"
    assert decision.members is not None
    assert all(item.session.endswith(".2") for item in decision.members)


@pytest.mark.parametrize(
    ("newcomers", "ranked"),
    [("2x 1y", "2b1"), ("1y 2x", "2b1"), ("1z 2z", "1b2"), ("1x 2x", "1b2"), ("1z 2y 3x", "3b2")],
)
def test_a_newcomer_takes_the_rank_of_a_host_of_its_own_rack(newcomers: str, ranked: str) -> None:
    before = tuple(member(host, label=label).seat for host, label in ("ax", "bx", "cy"))
    now = [member("b", label="x"), *(member(host, label=label) for host, label in newcomers.split())]
    members = {item.host: replace(item, arrival=arrival) for arrival, item in enumerate(now)}
    assert "".join(seat.host for seat in assign_ranks(before, members, 3)) == ranked


@pytest.mark.parametrize(
    ("before", "now", "limit", "ranked"),
    [
        ("abc", "abc", 3, "abc"),
        ("abc", "xabc", 3, "abc"),
        ("abc", "yxb", 3, "ybx"),
        ("abcd", "bcd", 4, "bcd"),
        ("abcd", "xcd", 4, "cdx"),
        ("abc", "ab", 4, "ab"),
        ("abc", "xab", 4, "abx"),
        ("abc", "dcbae", 5, "abcde"),
        ("abcd", "abcd", 2, "ab"),
        ("", "ba", 2, "ba"),
    ],
)
def test_ranks(before: str, now: str, limit: int, ranked: str) -> None:
    members = {item.host: item for item in ready(now, 1)}
    assert "".join(item.host for item in assign_ranks(tuple(map(seat, before)), members, limit)) == ranked


names = st.permutations("abcdefgh").flatmap(lambda order: st.integers(0, 8).map(lambda n: "".join(order[:n])))


@given(before=names, now=names, limit=st.integers(1, 8))
def test_ranks_are_unique_and_stable(before: str, now: str, limit: int) -> None:
    members = {item.host: item for item in ready(now, 1)}
    ranked = [item.host for item in assign_ranks(tuple(map(seat, before)), members, limit)]
    survivors = [host for host in before if host in now][:limit]
    assert len(ranked) == min(len(now), limit)
    assert len(set(ranked)) == len(ranked)
    assert set(survivors) <= set(ranked)
    if all(before.index(host) < len(ranked) for host in survivors):
        assert all(ranked.index(host) == before.index(host) for host in survivors)
    else:
        assert ranked[: len(survivors)] == survivors
    entered = [host for host in ranked if host not in survivors]
    assert entered == [host for host in now if host not in before][: len(entered)]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["come", "ready", "go"])), max_size=40))
def test_history_of_a_run(history: list[tuple[str, str]]) -> None:
    """In any order of arrivals, losses and stops, a formed round has between min and max live, ready hosts."""
    low, high = 2, 3
    state = view()
    for arrival, (host, event) in enumerate(history):
        members = dict(state.members)
        generation = state.round.generation if state.round else 0
        if event == "go":
            members.pop(host, None)
        else:
            known = members.get(host, member(host, arrival=arrival, session=f"{host}.{arrival}"))
            at = generation + 1 if event == "ready" else known.ready
            members[host] = member(host, ready=at, session=known.session, arrival=known.arrival)
        state = View(members=members, round=state.round, stores={}, failures={}, done=frozenset())
        decision = decide(state, generation + 1, (low, high), since_arrival_s=60)
        if decision.members is None:
            continue
        taken = [item.host for item in decision.members]
        assert low <= len(taken) <= high
        assert len(set(taken)) == len(taken)
        assert all(members[name].ready == generation + 1 for name in taken)
        formed = Round(generation=generation + 1, seats=decision.members, restore=None)
        after = [member(m.host, session=m.session, arrival=m.arrival) for m in members.values() if m.host in taken]
        standbys = [m for m in members.values() if m.host not in taken]
        state = View(
            members={m.host: m for m in [*after, *standbys]},
            round=formed,
            stores={},
            failures={},
            done=frozenset(),
        )
        assert broken(state, generation + 1) is None


FAILURE = Failure(
    generation=1, host="a", kind="worker_exit", rank=0, pid=5, exitcode=1, unix_s=1.0, message="rank 0 exited"
)


def test_broken_by_a_reported_failure() -> None:
    whole = view(ready("ab", 0), before="ab")
    assert broken(whole, 1) is None
    assert broken(view(ready("ab", 0), before="ab", failures={1: FAILURE}), 1) == FAILURE
    assert broken(view(ready("ab", 0), before="ab", generation=2, failures={1: FAILURE}), 2) is None


def test_broken_by_a_lost_host() -> None:
    lost = broken(view(ready("a", 0), before="ab"), 1)
    assert lost is not None
    assert (lost.kind, lost.host) == ("host_lost", "b")
    replaced = broken(view([member("a"), member("b", session="b.2")], before="ab"), 1)
    assert replaced is not None
    assert (replaced.kind, replaced.host) == ("host_lost", "b")


def test_broken_because_the_run_went_on() -> None:
    later = broken(view(ready("ab", 0), before="ab", generation=3), 2)
    assert later is not None
    assert "generation 3" in later.message
    ended = broken(view(ready("ab", 0)), 2)
    assert ended is not None
    assert "ended" in ended.message


@pytest.mark.parametrize(
    ("after", "standbys", "failure", "blamed"),
    [
        (("a.1", "b.1"), "", FAILURE, "a"),
        (("a.1", "b.2"), "", FAILURE, "b"),
        (("a.1", "c.1"), "", FAILURE, "b"),
        (("a.1", "c.1"), "b", FAILURE, "a"),
        (("a.2", "c.1"), "", FAILURE, "a"),
        (("a.1", "b.2"), "", replace(FAILURE, exitcode=-9), "a"),
        (("a.1", "b.2"), "", replace(FAILURE, kind="hang"), "a"),
    ],
)
def test_worker_exit_is_explained_by_a_host_that_is_gone_in_the_next_round(
    after: tuple[str, ...], standbys: str, failure: Failure, blamed: str
) -> None:
    before = Round(generation=1, seats=(seat("a"), seat("b")), restore=None)
    seats = tuple(replace(seat(session[0]), session=session) for session in after)
    now = replace(view(ready(standbys, 0)), round=Round(generation=2, seats=seats, restore=None))
    found = failure.explained(before.gone(now.members, now.round))
    assert found.host == blamed
    assert (found is failure) == (blamed == "a")
    if found is not failure:
        assert (found.kind, found.message) == ("host_lost", "host b is lost, and rank 0 exited")


def test_who_waits_for_long_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    monkeypatch.setattr("resilient_run.launcher.rendezvous.forming.time.monotonic", lambda: now_s[0])
    announcer = Announcer("r")
    for seconds in (0, 59, 1, 60):
        now_s[0] += seconds
        announcer.tell(decide(view(ready("a", 1)), 1, (2, 2)), 1, 500.0)
    line = "run r, generation 1: 1 of at least 2 hosts are ready"
    seen = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert seen == [f"{line} (for another 500 s, join_timeout)"] * 2


def test_newcomers_are_wanted_only_while_there_is_room() -> None:
    members = [*ready("ab", 0), member("y", ready=2, arrival=9), member("x", ready=2, arrival=8), member("z", ready=1)]
    assert newcomers(view(members, before="ab"), 3, NOW_S) == ["x", "y"]
    assert newcomers(view(members, before="ab"), 2, NOW_S) == []
    assert newcomers(view(members), 3, NOW_S) == []


RESTORES = (3, 17)


def sized(sizes: str, *, arrival: int = 0) -> list[Member]:
    """Ready hosts from "a2 b4": name and number of ranks."""
    return [
        replace(member(item[0], ready=5, arrival=arrival + n), nproc=int(item[1:]))
        for n, item in enumerate(sizes.split())
    ]


@pytest.mark.parametrize(
    ("before", "now", "nnodes", "taken"),
    [
        ("a1 b1", "a1", (1, 2), None),
        ("a1 b1", "a1 c1", (1, 2), "ac"),
        ("a1", "a1 b1", (1, 2), "a"),
        ("a1 b1 c1", "c1 a1", (2, 3), None),
        ("a1 b1 c1", "c1 a1 d1", (2, 3), "adc"),
        ("a2 b4", "a2 c2", (1, 2), None),
        ("a2 b4", "a2 c2 d4", (1, 2), "ad"),
        ("a2 b2", "c4", (1, 2), "c"),
        ("", "a1", (1, 4), None),
        ("", "a1 b1", (1, 4), "ab"),
        # Nobody who may still come changes anything: the script says what is wrong.
        ("a2", "a1", (1, 1), "a"),
        ("a1 b1", "a1", (1, 1), "a"),
        ("", "a1", (1, 1), "a"),
    ],
)
def test_run_that_has_something_to_restore_keeps_its_size(
    before: str, now: str, nnodes: tuple[int, int], taken: str | None
) -> None:
    seats = tuple(item.seat for item in sized(before))
    formed = Round(generation=4, seats=seats, restore=RESTORES) if seats else None
    members = {item.host: item for item in sized(now)}
    ranks = formed.world_size if formed else 2
    state = View(members=members, round=formed, committed=ranks, stores={}, failures={}, done=frozenset())
    decision = decide(state, 5, nnodes, since_arrival_s=0.0)
    if taken is None:
        assert decision.members is None
        assert f"of {ranks} ranks are ready, and no other number can restore what is committed" in decision.reason
        assert decision.notable
        assert decision.wait_s is not None
    else:
        assert hosts(decision) == taken


def test_only_what_fits_no_other_number_of_ranks_binds_a_run() -> None:
    formed = Round(generation=4, seats=(seat("a"),), restore=None)
    nothing = view([*ready("a", 0), member("b", ready=5)], round=formed)
    assert (nothing.bound, standby(nothing, "b", 2, NOW_S)) == (None, None)
    assert newcomers(nothing, 2, NOW_S) == ["b"]
    imported = replace(nothing, round=replace(formed, restore=(0, 9)))
    assert (imported.bound, newcomers(imported, 2, NOW_S)) == (None, ["b"])
    for bound in (replace(nothing, round=replace(formed, restore=RESTORES)), replace(nothing, committed=1)):
        assert (bound.bound, newcomers(bound, 2, NOW_S)) == (1, [])
        waits = standby(bound, "b", 2, NOW_S)
        assert waits is not None
        assert waits.notable
        assert waits.reason.startswith("no number of ranks but 1 can restore what is committed, so generation 4 does")


@pytest.mark.parametrize(
    ("before", "now", "sizes", "broken_s", "taken"),
    [
        # A lost host is waited for, and then the run goes on without it.
        ("a1 b1 c1", "a1 b1", (), 29.0, "2 of 3 ranks are ready, and the run goes on with fewer after 30 s"),
        ("a1 b1 c1", "a1 b1", (), 30.0, "ab"),
        ("a1 b1 c1", "a1 b1 d1", (), 0.0, "abd"),
        ("a2 b2 c2 d2", "a2 b2 c2", (2, 4, 8), 30.0, "ab"),
        ("a2 b2 c2 d2", "b2 c2 d2", (2, 4, 8), 30.0, "bc"),
        ("a2 b2 c2 d2", "a2 b2 c2", (8,), 30.0, "6 ranks are ready, and --rr-sizes allows 8 on at least 1 hosts"),
        # Hosts that were lost are in the round again: all who are ready take part, whatever committed last.
        ("a1", "a1 b1 c1", (), 0.0, "abc"),
        ("a1", "a1 b1 c1", (1, 2, 4), 0.0, "ab"),
    ],
)
def test_elastic_run_goes_on_with_those_that_are_left(
    before: str, now: str, sizes: tuple[int, ...], broken_s: float, taken: str
) -> None:
    formed = Round(generation=4, seats=tuple(item.seat for item in sized(before)), restore=RESTORES)
    members = {item.host: item for item in sized(now)}
    state = View(
        members=members,
        round=formed,
        committed=formed.world_size,
        stores={},
        failures={},
        done=frozenset(),
        job=elastic(sizes),
    )
    decision = decide(state, 5, (1, 8), since_arrival_s=60.0, broken_s=broken_s)
    if decision.members is None:
        assert decision.reason.startswith(taken)
        assert decision.notable
        assert decision.wait_s is not None
    else:
        assert hosts(decision) == taken


def test_elastic_run_takes_a_host_in_quarantine_rather_than_none_of_its_sizes() -> None:
    formed = Round(generation=4, seats=tuple(item.seat for item in sized("a1 b1")), restore=RESTORES)
    state = view(sized("a1 b1"), round=formed, committed=2, job=elastic((2,)), quarantines=quarantined("b"))
    assert hosts(decide(state, 5, (1, 8), since_arrival_s=60.0, broken_s=60.0)) == "ab"
    assert hosts(decide(replace(state, job=elastic()), 5, (1, 8), since_arrival_s=60.0, broken_s=60.0)) == "a"


def test_elastic_run_grows_to_the_sizes_that_it_may_have() -> None:
    formed = Round(generation=4, seats=tuple(item.seat for item in sized("a1 b1")), restore=RESTORES, made_by=3)
    two = [*ready("ab", 0), member("c", ready=5)]
    grows = view(two, round=formed, committed=3, job=elastic())
    assert (grows.bound, grows.captured_by, newcomers(grows, 4, NOW_S)) == (None, 3, ["c"])
    waits = standby(grows, "c", 4, NOW_S)
    assert waits is not None
    assert waits.reason == "generation 4 grows once it has lasted for 30 s: this host waits"
    # Also before etcd has shown a host its own key.
    assert standby(view(ready("ab", 0), round=formed, committed=3, job=elastic()), "c", 4, NOW_S) == waits
    drained = standby(replace(grows, quarantines=quarantined("c")), "c", 4, NOW_S)
    assert drained is not None
    assert drained.reason == "generation 4 grows once this host's quarantine is over: this host waits"
    full = standby(grows, "c", 2, NOW_S)
    assert full is not None
    assert full.reason == "generation 4 is full: this host waits as a standby"
    assert newcomers(replace(grows, job=elastic((2, 4))), 4, NOW_S) == []
    more = replace(grows, members={**grows.members, "d": member("d", ready=5)})
    assert newcomers(replace(more, job=elastic((2, 4))), 4, NOW_S) == ["c", "d"]


@pytest.mark.parametrize(
    ("restore", "made_by", "committed", "watermark", "expected"),
    [
        (None, None, None, None, None),
        (None, None, None, (4, 9), 2),  # committed in the round that broke
        ((3, 7), 3, 3, (3, 7), 3),  # nothing was committed in the round
        ((3, 7), 3, 2, (4, 9), 2),
        ((3, 7), 3, 4, (1, 2), 4),  # set back to what the persistent tier has
        ((0, 7), None, None, (0, 7), None),  # an import
    ],
)
def test_round_knows_how_many_ranks_captured_what_it_restores(
    restore: tuple[int, int] | None,
    made_by: int | None,
    committed: int | None,
    watermark: tuple[int, int] | None,
    expected: int | None,
) -> None:
    formed = Round(generation=4, seats=(seat("a"), seat("b")), restore=restore, made_by=made_by)
    state = view(ready("ab", 5), round=formed, committed=committed)
    assert state.made_by(watermark) == expected


def elastic(sizes: tuple[int, ...] = ()) -> Agreement:
    return Agreement(incarnation="i", min_nodes=1, max_nodes=8, token="t", elastic_s=30.0, sizes=sizes)


def quarantined(names: str, *, left_s: float = 60.0) -> dict[str, Quarantine]:
    return {
        host: Quarantine(since_unix_s=NOW_S - 99 + n, until_unix_s=NOW_S + left_s, reason="it failed three times")
        for n, host in enumerate(names)
    }


@pytest.mark.parametrize(
    ("before", "now", "avoided", "nnodes", "taken"),
    [
        ("", "abc", "a", (2, 2), "bc"),
        ("", "abc", "a", (1, 3), "bc"),
        ("", "ab", "a", (2, 2), "ab"),
        ("", "a", "a", (1, 1), "a"),
        ("abc", "abcd", "b", (3, 3), "adc"),
        ("abc", "abc", "b", (3, 3), "abc"),
        ("abc", "abc", "b", (2, 3), "abc"),
        ("ab", "abc", "b", (2, 3), "ac"),
        ("abc", "acde", "ed", (3, 3), "aec"),
        ("abc", "abde", "db", (3, 3), "abe"),
        ("abc", "abd", "db", (3, 3), "abd"),
        ("abc", "abc", "abc", (3, 3), "abc"),
    ],
)
def test_host_in_quarantine_is_used_only_for_want_of_another(
    before: str, now: str, avoided: str, nnodes: tuple[int, int], taken: str
) -> None:
    state = view(ready(now, 2 if before else 1), before=before, quarantines=quarantined(avoided))
    decision = decide(state, 2 if before else 1, nnodes, since_arrival_s=60)
    assert hosts(decision) == taken
    left_out = sorted(set(avoided) - set(taken))
    assert (f"in quarantine: {', '.join(left_out)}" in decision.reason) is (bool(left_out) and len(taken) < nnodes[1])


def test_host_in_quarantine_is_used_where_no_other_makes_the_ranks_that_can_restore() -> None:
    formed = Round(generation=4, seats=tuple(item.seat for item in sized("a1 b1")), restore=RESTORES)
    state = view(sized("a1 b1 c2"), round=formed, committed=2, quarantines=quarantined("b"))
    assert hosts(decide(state, 5, (2, 2))) == "ab"
    assert hosts(decide(replace(state, members={item.host: item for item in sized("a1 b1 c1")}), 5, (2, 2))) == "ac"


def test_quarantine_that_is_over_means_nothing() -> None:
    state = view(ready("abc", 1), quarantines=quarantined("a", left_s=0.0))
    assert hosts(decide(state, 1, (2, 2))) == "ab"
    assert state.cool_down_s(NOW_S) is None


def test_round_does_not_grow_by_a_host_in_quarantine_until_its_cool_down_ends() -> None:
    members = [*ready("ab", 0), member("x", ready=2)]
    state = view(members, before="ab", quarantines=quarantined("x"))
    assert newcomers(state, 3, NOW_S) == []
    assert state.cool_down_s(NOW_S) == 60.0
    assert newcomers(state, 3, NOW_S + 60.0) == ["x"]
    assert view(ready("ab", 0), before="ab", quarantines=quarantined("x")).cool_down_s(NOW_S) is None


def test_every_key_is_read_back_as_written() -> None:
    closed = Closed(reason="done", failed=False)
    job = Agreement(incarnation="i", min_nodes=1, max_nodes=2, token="t", life=3, closed=closed)
    formed = Round(generation=4, seats=(seat("a"), seat("b")), restore=(3, 17), revision=20)
    a, failure = member("a", ready=5, arrival=11, label="rack-1"), replace(FAILURE, generation=4)
    values = {
        "rdzv/job": job.to_value(),
        "rdzv/job/i.3": {},
        "rdzv/round": formed.to_value(),
        "rdzv/committed": {"world_size": 2},
        "rdzv/members/a": a.to_value(),
        "rdzv/failure/4": failure.to_value(),
        "rdzv/store/4": {"addr": "10.0.0.1", "port": 1234},
        "rdzv/done/4/b": {},
        "rdzv/quarantine/c": quarantined("c")["c"].to_value(),
    }
    assert View.of(
        rendezvous_mirror().apply({key: Entry(value=value, revision=20, created=11) for key, value in values.items()})
    ) == View(
        members={"a": a},
        round=formed,
        stores={4: ("10.0.0.1", 1234)},
        failures={4: failure},
        done=frozenset({(4, "b")}),
        job=job,
        life=Life(job, 20),
        committed=2,
        quarantines=quarantined("c"),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rdzv/job", {"incarnation": "i", "min_nodes": "1", "max_nodes": 2, "token": "t"}),
        ("rdzv/round", {"generation": 1, "members": [{"host": "a"}], "restore": None}),
        ("rdzv/round", {"generation": 1, "members": ["a"], "restore": None}),
        ("rdzv/round", {"generation": 1, "members": [], "restore": {"generation": 1}}),
        (
            "rdzv/job",
            {
                **Agreement(incarnation="i", min_nodes=1, max_nodes=2, token="t").to_value(),
                "closed": {"reason": "r", "failed": 1},
            },
        ),
        ("rdzv/committed", {"world_size": "2"}),
        ("rdzv/members/a", {**member("a").to_value(), "label": 1}),
        ("rdzv/members/a", {"session": "s", "nproc": True, "role": "", "addr": "", "pid": 1, "ready": 0}),
        ("rdzv/failure/x", FAILURE.to_value()),
        ("rdzv/failure/1", {**FAILURE.to_value(), "rank": "0"}),
        ("rdzv/store/1", {"addr": "a"}),
        ("rdzv/done/a/b/c", {}),
        ("rdzv/quarantine/a", {"until_unix_s": 1.0}),
    ],
)
def test_damaged_keys_are_ignored_and_named(key: str, value: dict[str, Any]) -> None:
    mirror = rendezvous_mirror().apply({key: Entry(value=value, revision=1)})
    assert list(mirror.ignored) == [key]
    assert View.of(mirror) == View.of(rendezvous_mirror())


@pytest.mark.parametrize("text", ["a\nb\0c\ud800", "ü" * 100_000])
def test_what_a_person_is_told_is_read_whatever_it_says(text: str) -> None:
    """Nobody ignores that a generation broke, or that the run ended, because of the words."""
    failure = Failure(generation=3, host="a", kind="worker_exit", message=text)
    assert Failure.parse(json.loads(json.dumps(failure.to_value())), generation=3).message[:3] in ("a?b", "üüü")
    assert Failure.parse(json.loads(json.dumps(failure.to_item()))).message[:3] in ("a?b", "üüü")
    closed = Closed(reason=text, failed=True)
    assert Closed.parse(json.loads(json.dumps(closed.to_value()))).reason[:3] in ("a?b", "üüü")
