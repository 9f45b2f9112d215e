"""What the root decides: an example of every action and of every reason to do nothing, and that deciding ends."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seats import member_value, seats

from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.base.policy import RootPolicy
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.root.decide import (
    Answered,
    Ask,
    Break,
    Decision,
    FallBack,
    Note,
    Overlook,
    PutInQuarantine,
    Release,
    Stop,
    decide,
    shortage,
)
from resilient_run.daemon.root.requests import Request
from resilient_run.daemon.root.root import transaction
from resilient_run.daemon.root.state import RootState
from resilient_run.daemon.root.view import RootView
from resilient_run.daemon.run.commit import Unhealthy
from resilient_run.daemon.run.life import Life
from resilient_run.daemon.run.observation import Observation
from resilient_run.daemon.run.quarantine import Quarantine
from resilient_run.daemon.run.records import Agreement, Closed, Failure
from resilient_run.daemon.run.rounds import Round

NOW_S = 1_000_000.0
JOB = Agreement(incarnation="i", min_nodes=1, max_nodes=9, token="t")
ENDED = Life(replace(JOB, closed=Closed(reason="it is over", failed=True)), 0)
POLICY = RootPolicy()
SOON = Quarantine(since_unix_s=NOW_S - 10, until_unix_s=NOW_S + 100, reason="a test")
OVER = Quarantine(since_unix_s=NOW_S - 100, until_unix_s=NOW_S - 1, reason="a test")


def round_(names: str = "abc", generation: int = 4, restore: Pair | None = (3, 10)) -> Round:
    return Round(generation=generation, seats=seats(names), restore=restore, revision=7)


def failure(kind: str = "worker_exit", host: str = "a", generation: int = 4, **changes: Any) -> Failure:
    exited = {"rank": 0, "exitcode": 1} if kind == "worker_exit" else {"rank": None, "exitcode": None}
    message = f"{kind} on {host}"
    return Failure(**{"generation": generation, "host": host, "kind": kind, "message": message, **exited, **changes})


def noted(kind: str = "worker_exit", host: str = "a", generation: int = 4, **changes: Any) -> Failure:
    return failure(kind, host, generation, **{"began_step": 10, "unix_s": NOW_S - 60, **changes})


def seen(kind: str, host: str = "a", severity: str = "fail", **changes: Any) -> dict[str, tuple[Observation]]:
    values = {"message": f"{kind} of {host}", "value": 9.0, "limit": 5.0, "unix_s": NOW_S, **changes}
    return {host: (Observation(kind=kind, severity=severity, **values),)}


def request(host: str = "", generation: int = 4, *, age_s: float = 5.0, answer: str = "") -> Request:
    """A request that was made when the three hosts were there, and "s", which is no more."""
    return Request(host=host, generation=generation, unix_s=NOW_S - age_s, known=("a", "b", "c", "s"), answer=answer)


NOTHING = {host: frozenset[int]() for host in "abc"}


def whole(**changes: Any) -> RootView:
    """Three hosts that train generation 4 from step 10 of generation 3, each holding its own and its neighbour's."""
    held = {"a": frozenset({0, 1}), "b": frozenset({1, 2}), "c": frozenset({2, 0})}
    view = RootView(
        host="a",
        round=round_(),
        members=dict.fromkeys("abc", 0),
        daemons=frozenset("abc"),
        held=held,
        replicas=2,
        watermark=(3, 10),
    )
    return replace(view, **changes)


def broken(why: Failure, **changes: Any) -> RootView:
    """The same hosts after `why`, which the root has noted already."""
    return whole(failures={4: why}, history=(replace(why, began_step=10, unix_s=NOW_S - 1),), **changes)


def lost(names: str = "b", **changes: Any) -> RootView:
    """The same hosts without `names`, of which the first was found lost."""
    live = [host for host in "abc" if host not in names]
    members = dict.fromkeys(live, 5)
    return broken(failure("host_lost", names[0]), **{"members": members, "daemons": frozenset(live), **changes})


def kinds(decision: Decision) -> list[type]:
    return [type(action) for action in decision.actions]


QUIET: dict[str, tuple[RootView, str]] = {
    "no round": (RootView(host="a"), "no generation has begun"),
    "over": (whole(life=ENDED, observations=seen("gpu"), failures={4: failure()}), "the run is over"),
    "whole": (whole(), "generation 4 is whole on 3 host(s)"),
    "broken and noted": (broken(failure()), "generation 4 is broken: worker_exit on a"),
    "a warning": (whole(observations=seen("gpu", severity="warn")), "whole"),
    "a peer that cannot be reached": (whole(observations=seen("peer_unreachable")), "whole"),
    "an unhealthy host that is avoided, no standby": (
        whole(
            observations=seen("gpu"),
            quarantines={"a": SOON},
            requests=(request("a", 3),),
        ),
        "whole",
    ),
    "a standby that is not ready": (whole(members={**dict.fromkeys("abc", 0), "d": 3}), "whole"),
    "a hang in an earlier generation": (whole(observations=seen("hang", generation=3)), "whole"),
    "a hang that is only logged": (whole(observations=seen("hang", severity="warn", generation=4)), "whole"),
    "a hang while another host is alive": (
        whole(observations=seen("hang", generation=4, step=12), alive=frozenset("b")),
        "whole",
    ),
    "corruption that is only reported": (
        whole(observations=seen("corruption", severity="warn", generation=4)),
        "whole",
    ),
    "corruption in an earlier generation": (whole(observations=seen("corruption", generation=3)), "whole"),
    "a hang in a broken generation": (broken(failure(), observations=seen("hang", generation=4)), "broken"),
    "two failures": (whole(history=(noted(generation=2), noted(generation=3, began_step=9))), "whole"),
    "old failures": (
        whole(history=tuple(noted(generation=g, unix_s=NOW_S - 9999, began_step=g) for g in (1, 2, 3))),
        "whole",
    ),
    "failures before the last quarantine": (
        whole(
            history=tuple(noted(generation=g, unix_s=NOW_S - 200, began_step=g) for g in (1, 2, 3)),
            quarantines={"a": OVER},
        ),
        "whole",
    ),
    "failures of nobody": (
        whole(history=tuple(noted("hang", "", g, began_step=g) for g in (1, 2, 3))),
        "whole",
    ),
    "a host is lost and a standby is ready": (lost(members={"a": 5, "c": 5, "d": 5}), "broken"),
    "a launcher is away for a moment": (broken(failure(), members={"a": 5, "c": 5}, absent_s={"b": 3.0}), "broken"),
    "all launchers are gone": (lost(members={}), "broken"),
    "a lost host was asked for": (
        lost(requests=(request("b"),)),
        "broken",
    ),
    "memory lost and nothing is persisted": (whole(held=NOTHING), "whole"),
    "memory lost and just that step is persisted": (
        whole(held=NOTHING, persisted=((1, 5), (3, 10))),
        "whole",
    ),
    "memory may be lost, a daemon is not there": (
        whole(held=NOTHING, persisted=((1, 5),), daemons=frozenset("ab")),
        "whole",
    ),
    "memory may be lost, a daemon has not reported": (
        whole(held={host: frozenset[int]() for host in "ab"}, persisted=((1, 5),)),
        "whole",
    ),
    "a standby holds it": (
        whole(
            held={**NOTHING, "d": frozenset({0, 1, 2})},
            daemons=frozenset("abcd"),
            persisted=((1, 5),),
        ),
        "whole",
    ),
    "this generation has committed": (
        whole(held=NOTHING, persisted=((1, 5),), watermark=(4, 11)),
        "whole",
    ),
    "nothing was restored": (
        whole(held=NOTHING, persisted=((1, 5),), watermark=None, round=round_(restore=None)),
        "whole",
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_to_do(name: str) -> None:
    view, reason = QUIET[name]
    decision = decide(view, POLICY, NOW_S)
    assert decision.actions == ()
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("why", "view", "fault", "reason"),
    [
        (
            failure(),
            whole(),
            "software failure",
            "worker_exit on a; the same hosts go on at step 10 from their own memory",
        ),
        (
            failure("hang", ""),
            whole(),
            "software failure",
            "hang on ; the same hosts go on at step 10 from their own memory",
        ),
        (failure("host_lost", "b"), whole(), "hardware failure", "host_lost on b; peers hold step 10 of every rank"),
        (
            failure("host_lost", "b"),
            whole(members={"a": 5}),
            "hardware failure",
            "host_lost on b; no live host has reported a replica of rank 2 at step 10 yet",
        ),
        (
            failure("host_lost", "b"),
            whole(watermark=None),
            "hardware failure",
            "host_lost on b; nothing is committed yet, training starts over",
        ),
        (failure("membership", "b"), whole(), "planned", "membership on b; training goes on at step 10"),
        (
            failure("operator", "b"),
            whole(watermark=None),
            "planned",
            "operator on b; training goes on at the beginning",
        ),
    ],
)
def test_a_failure_is_noted_with_its_class(why: Failure, view: RootView, fault: str, reason: str) -> None:
    decision = decide(replace(view, failures={4: why}), RootPolicy(quarantine_failures=9), NOW_S)
    note = decision.actions[0]
    assert isinstance(note, Note)
    assert (note.fault, note.reason) == (fault, reason)
    assert note.failure == replace(why, began_step=10, unix_s=NOW_S)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("generation", [3, 4])
def test_worker_that_exits_because_a_host_is_lost_does_not_count_against_its_host(known: bool, generation: int) -> None:
    """Whether the root sees that before it notes the exit or only later, and also when the next round is there."""
    exit_, earlier = failure(generation=generation), tuple(noted(generation=g, began_step=g) for g in (1, 2))
    noted_exit = replace(exit_, began_step=8, unix_s=NOW_S - 1)
    history = (*earlier, noted_exit) if known else earlier
    view = whole(failures={generation: exit_}, gone={generation: ("c",)}, history=history)
    note, *others = decide(view, POLICY, NOW_S).actions
    assert isinstance(note, Note)
    cause = "host c is lost, and worker_exit on a"
    changes = {"host": "c", "kind": "host_lost", "rank": None, "exitcode": None, "message": cause}
    began_step, unix_s = (8, NOW_S - 1) if known else (10 if generation == 4 else None, NOW_S)
    assert note.failure == replace(exit_, **changes, began_step=began_step, unix_s=unix_s)
    assert note.fault == "hardware failure"
    assert note.reason.startswith(f"{cause}; ")
    assert others == [], "nobody has failed three times"
    puts = transaction(view, Decision(actions=(note,), reason=""), NOW_S).puts
    assert [item["host"] for item in puts["root/failures"]["failures"]] == ["a", "a", "c"]


@pytest.mark.parametrize(
    ("exit_", "gone"),
    [
        (failure(), ()),
        (failure(exitcode=-9), ("c",)),
        (failure(), ("a", "c")),
        (failure("hang"), ("c",)),
    ],
    ids=["nobody is gone", "killed by a signal", "its launcher is gone, too", "no exit"],
)
def test_worker_that_fails_by_itself_counts_against_its_host(exit_: Failure, gone: tuple[str, ...]) -> None:
    view = whole(failures={4: exit_}, gone={4: gone}, history=tuple(noted(generation=g, began_step=g) for g in (1, 2)))
    note, quarantine, *_ = decide(view, POLICY, NOW_S).actions
    assert isinstance(note, Note)
    assert isinstance(quarantine, PutInQuarantine)
    assert (note.failure.host, quarantine.host) == ("a", "a")


def test_host_that_comes_back_was_not_lost() -> None:
    """Its lease expired because etcd was away. A root that has not seen who was gone leaves what was noted."""
    as_lost = noted("host_lost", "c", began_step=8)
    view = whole(failures={4: failure()}, gone={4: ()}, history=(as_lost,))
    (note,) = decide(view, POLICY, NOW_S).actions
    assert isinstance(note, Note)
    assert note.failure == replace(failure(), began_step=8, unix_s=as_lost.unix_s)
    assert not decide(replace(view, gone={}), POLICY, NOW_S).actions


def test_a_new_root_notes_what_it_missed() -> None:
    decision = decide(whole(failures={3: failure(generation=3), 4: failure("host_lost", "b")}), POLICY, NOW_S)
    notes = [action.failure for action in decision.actions if isinstance(action, Note)]
    assert [(note.generation, note.began_step) for note in notes] == [(3, None), (4, 10)]


@pytest.mark.parametrize("kind", ["worker_exit", "hang", "host_lost", "unhealthy"])
def test_host_that_fails_again_and_again_is_put_in_quarantine(kind: str) -> None:
    history = tuple(noted(kind, "b", g, began_step=g) for g in (1, 2, 3))
    decision = decide(whole(history=history, members={**dict.fromkeys("abc", 0), "d": 5}), POLICY, NOW_S)
    (action,) = decision.actions
    assert isinstance(action, PutInQuarantine)
    assert (action.host, action.quarantine.until_unix_s) == ("b", NOW_S + POLICY.quarantine_cooldown_s)
    assert decision.reason == "host b failed 3 times within 1800 s; it is avoided for 1800 s"


def test_the_only_host_is_put_in_quarantine_only_where_another_one_may_come() -> None:
    history = tuple(noted(host="a", generation=generation) for generation in (1, 2, 3))
    view = whole(history=history, round=round_("a"), members={"a": 0}, observations=seen("gpu"))
    assert not decide(view, POLICY, NOW_S).actions
    assert PutInQuarantine in kinds(decide(view, RootPolicy(operator_command="more"), NOW_S))
    assert PutInQuarantine in kinds(decide(replace(view, members={"a": 0, "d": 5}), POLICY, NOW_S))


def test_quarantine_counts_from_its_last_beginning_on() -> None:
    history = tuple(noted("worker_exit", "b", g, began_step=g, unix_s=NOW_S - 50) for g in (1, 2, 3))
    view = whole(history=history, quarantines={"b": OVER}, members={**dict.fromkeys("abc", 0), "d": 5})
    assert kinds(decide(view, POLICY, NOW_S)) == [PutInQuarantine]


@pytest.mark.parametrize("kind", ["gpu", "memory", "disk", "tmpfs", "load"])
def test_unhealthy_host_is_swapped_for_a_standby(kind: str) -> None:
    members = {**dict.fromkeys("abc", 0), "d": 5}
    decision = decide(whole(observations=seen(kind, "c"), members=members), POLICY, NOW_S)
    quarantine, swap = decision.actions
    assert isinstance(quarantine, PutInQuarantine)
    assert isinstance(swap, Break)
    assert (quarantine.host, swap.host, swap.kind) == ("c", "c", "unhealthy")
    assert swap.reason == f"host c is unhealthy ({kind} of c): d takes its place"


def test_host_of_a_slow_rank_is_swapped_and_not_the_root_that_reports_it() -> None:
    """In the next generation that rank runs elsewhere."""
    members = {**dict.fromkeys("abc", 0), "d": 5}
    slow = seen("straggler", "a", rank=2, generation=4)
    quarantine, swap = decide(whole(observations=slow, members=members), POLICY, NOW_S).actions
    assert isinstance(quarantine, PutInQuarantine)
    assert isinstance(swap, Break)
    assert (quarantine.host, swap.host) == ("c", "c")
    for other in (seen("straggler", "a", rank=2, generation=3), seen("straggler", "a", rank=3, generation=4)):
        assert not decide(whole(observations=other, members=members), POLICY, NOW_S).actions


def test_rank_that_is_slow_on_its_second_host_too_is_let_be() -> None:
    """It does more than its peers, and would be slow on a third one."""
    view = whole(observations=seen("straggler", "a", rank=2, generation=4), members={**dict.fromkeys("abc", 0), "d": 5})
    *_, swap = decide(view, POLICY, NOW_S).actions
    assert isinstance(swap, Break)
    moved = Failure(generation=3, kind=swap.kind, host="x", rank=swap.rank)
    assert not decide(replace(view, history=(moved,)), POLICY, NOW_S).actions
    other = replace(moved, rank=1)
    assert kinds(decide(replace(view, history=(other,)), POLICY, NOW_S)) == [PutInQuarantine, Break]


def test_unhealthy_host_without_a_standby_trains_on_and_the_operator_is_asked() -> None:
    decision = decide(whole(observations=seen("gpu", "c")), POLICY, NOW_S)
    assert kinds(decision) == [PutInQuarantine, Ask]
    later = whole(
        observations=seen("gpu", "c"),
        quarantines={"c": SOON},
        members={**dict.fromkeys("abc", 0), "d": 5},
        requests=(request("c"),),
    )
    assert kinds(decide(later, POLICY, NOW_S)) == [Break, Answered]


def test_unhealthy_host_is_not_swapped_for_a_standby_of_other_ranks() -> None:
    """The next round would have the same host again, and be broken again."""
    members, nprocs = {**dict.fromkeys("abc", 0), "d": 5}, {**dict.fromkeys("abc", 2), "d": 4}
    decision = decide(whole(observations=seen("gpu", "c"), members=members, nprocs=nprocs), POLICY, NOW_S)
    assert kinds(decision) == [PutInQuarantine]


def test_unhealthy_standby_is_not_used() -> None:
    members = {**dict.fromkeys("abc", 0), "d": 5}
    decision = decide(whole(observations=seen("gpu", "c") | seen("gpu", "d"), members=members), POLICY, NOW_S)
    assert kinds(decision) == [PutInQuarantine, PutInQuarantine, Ask]


def test_hang_at_the_step_of_an_earlier_one_is_noted_once() -> None:
    """Most likely it is long work; but not where a process is stopped, and not at another step."""
    hang = seen("hang", "b", generation=4, rank=1, step=12)
    earlier = noted("hang", "c", 3, step=12)
    (action,) = decide(whole(observations=hang, history=(earlier,)), POLICY, NOW_S).actions
    assert isinstance(action, Overlook)
    assert action.reason.startswith("generation 4 stands still at step 12 as generation 3 did: it is not restarted")
    puts = transaction(whole(observations=hang, history=(earlier,)), Decision(actions=(action,), reason=""), NOW_S).puts
    decisions = tuple(puts["root/decisions"]["decisions"])
    assert [entry["kind"] for entry in decisions] == ["overlook"]
    assert not decide(whole(observations=hang, history=(earlier,), decisions=decisions), POLICY, NOW_S).actions
    for changes, history in (({"step": None}, earlier), ({"step": 13}, earlier), ({}, noted("worker_exit", "c", 3))):
        observations = seen("hang", "b", **{"generation": 4, "rank": 1, "step": 12, **changes})
        view = whole(observations=observations, history=(history,), decisions=decisions)
        assert kinds(decide(view, POLICY, NOW_S)) == [Break], changes
    stopped = seen("hang", "b", generation=4, rank=1, step=None)
    assert kinds(decide(whole(observations=stopped, alive=frozenset("a")), POLICY, NOW_S)) == [Break]


def test_all_go_back_where_steps_in_a_row_are_unhealthy() -> None:
    """On one rank or another; the steps are kept for those that skip them, and the failure loops like others."""
    told = {Pair(4, step): Unhealthy(step - 1, rank) for step, rank in ((12, 1), (13, 0), (14, 1), (15, 0))}
    view = whole(unhealthy=told, went_back=((3, 9),))
    assert not decide(view, RootPolicy(unhealthy_steps=0), NOW_S).actions
    assert not decide(view, RootPolicy(unhealthy_steps=5), NOW_S).actions
    decision = decide(view, POLICY, NOW_S)
    (action,) = decision.actions
    assert isinstance(action, Break)
    assert (action.kind, action.host, action.rank, action.step) == ("unhealthy_steps", "b", 1, 12)
    assert action.reason == "steps 12 to 14 (3 in a row) are unhealthy, first on rank 1"
    made = transaction(view, decision, NOW_S)
    guards, puts = made.guards, made.puts
    assert puts["ckpt/unhealthy"] == {"pairs": [(3, 9), (4, 12), (4, 13), (4, 14)]}
    assert guards.keys() >= {"ckpt/unhealthy", "rdzv/round"}
    after = Failure.parse(puts["rdzv/failure/4"], generation=4)
    note, *others = decide(replace(view, failures={4: after}), POLICY, NOW_S).actions
    assert isinstance(note, Note)
    assert note.reason == f"{action.reason}; all hosts go back to step 10"
    assert not others
    (action,) = decide(view, RootPolicy(unhealthy_steps=1), NOW_S).actions
    assert action.reason == "step 12 is unhealthy, first on rank 1"


def test_failure_of_a_hang_says_at_which_step() -> None:
    view = whole(observations=seen("hang", "b", generation=4, rank=1, step=12))
    puts = transaction(view, decide(view, POLICY, NOW_S), NOW_S).puts
    assert Failure.parse(puts["rdzv/failure/4"], generation=4).step == 12


def test_hang_breaks_the_generation() -> None:
    one = seen("hang", "b", generation=4, rank=1, message="rank 1 made no step for 60 s")
    (action,) = decide(whole(observations=one), POLICY, NOW_S).actions
    assert action == Break(kind="hang", host="b", rank=1, reason="generation 4 hangs: rank 1 made no step for 60 s")
    every = {name: seen("hang", name, generation=4, rank=rank)[name] for rank, name in enumerate("abc")}
    (action,) = decide(whole(observations=every), POLICY, NOW_S).actions
    assert isinstance(action, Break)
    assert (action.host, action.rank) == ("", None), "all wait for one: who is to blame is not known"
    waiting = seen("hang", "a", generation=4) | seen("hang", "c", generation=4)
    (action,) = decide(whole(observations=waiting), POLICY, NOW_S).actions
    assert isinstance(action, Break)
    assert (action.host, action.rank) == ("", None)
    (action,) = decide(whole(observations=waiting | one), POLICY, NOW_S).actions
    assert isinstance(action, Break)
    assert (action.host, action.rank) == ("b", 1), "one stands out"


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (lost("b"), ("b",)),
        (lost("bc", absent_s={"b": 20.0, "c": 20.0}), ("b", "c")),
        (lost("bc", absent_s={"b": 1.0, "c": 1.0}), ("b",)),
        (lost("bc", absent_s={"b": 20.0, "c": 20.0}, members={"a": 5, "d": 5}), ("c",)),
        (lost("b", members={"a": 5, "c": 5, "d": 5}, quarantines={"d": SOON}), ("b",)),
        (broken(failure(), members={"a": 5, "c": 5}, absent_s={"b": 20.0}), ("b",)),
        (
            lost("b", requests=(request("b", 2, age_s=500),)),
            ("b",),
        ),
        (whole(quarantines={"b": SOON}), ("b",)),
    ],
)
def test_operator_is_asked_when_no_standby_is_ready(view: RootView, wanted: tuple[str, ...]) -> None:
    decision = decide(view, POLICY, NOW_S)
    assert decision.actions == (Ask(hosts=wanted, reason=decision.reason),)


def standing(names: str = "", **changes: Any) -> RootView:
    """The whole run with these hosts beside it, all ready, as it has been for a while."""
    return whole(members={**dict.fromkeys("abc", 0), **dict.fromkeys(names, 5)}, short_s=20.0, **changes)


TWO = RootPolicy(standbys=2, operator_command="order", release_command="give-back")


@pytest.mark.parametrize(
    ("view", "missing"),
    [
        (standing(), 2),
        (standing("d"), 1),
        (standing("de"), 0),
        (standing("def"), 0),
        (standing("de", quarantines={"e": SOON}), 1),
        (standing("de", quarantines={"e": OVER}), 0),
        (whole(members={**dict.fromkeys("abc", 0), "d": 3}, short_s=20.0), 1),
        (standing(requests=(request(),)), 1),
        (standing(requests=(request(), request("b"))), 0),
        (standing(requests=(request(), request(age_s=TWO.standby_timeout_s + 1))), 1),
        (standing(requests=(request(answer="s"), request(answer="b"))), 2),
        (standing("s", quarantines={"b": SOON}, requests=(request("b"),)), 1),
        (standing("de", quarantines={"b": SOON}), 1),
        (lost("b", members={"a": 5, "c": 5, "d": 5, "e": 5}, short_s=20.0), 1),
        (lost("b", requests=(request("b"),), short_s=20.0), 2),
        (lost("abc", absent_s=dict.fromkeys("abc", 20.0), short_s=20.0), 0),
        (standing(life=ENDED), 0),
        (RootView(host="a", short_s=20.0), 0),
    ],
)
def test_standbys_are_asked_for_until_the_target_is_reached(view: RootView, missing: int) -> None:
    """Hosts that are on their way count, hosts in quarantine do not, and hosts in need take one each."""
    assert shortage(view, TWO, NOW_S) == missing
    added = [len(action.hosts) for action in decide(view, TWO, NOW_S).actions if isinstance(action, Ask)]
    assert added == ([missing] if missing else [])
    assert shortage(view, POLICY, NOW_S) == 0
    assert Ask not in kinds(decide(view, POLICY, NOW_S))
    assert Ask not in kinds(decide(replace(view, short_s=5.0), TWO, NOW_S)), "etcd may have been away"


def test_newcomers_answer_the_oldest_requests() -> None:
    late = request("b", age_s=9999)
    view = standing("de", requests=(late, request(answer="s"), request()))
    came = decide(view, TWO, NOW_S)
    assert came.actions == (
        Answered(request=late, host="d", reason="host d came in place of host b, as requested"),
        Answered(request=request(), host="e", reason="host e came as the standby requested"),
    )
    puts = transaction(view, came, NOW_S).puts
    assert [item["answer"] for item in puts["root/requests"]["requests"]] == ["d", "s", "e"]
    assert not decide(standing("s", requests=(request(),)), RootPolicy(standbys=1), NOW_S - 1).actions, "it was known"


@pytest.mark.parametrize(
    ("view", "host", "kept"),
    [
        (standing("def", requests=(request("x", answer="a"), request("y", answer="e"))), "e", 0),
        (standing("def", requests=(request("d", answer="a"),)), "d", None),
        (standing("def", requests=(request("x", answer="a"),)), "f", None),
    ],
)
def test_standby_too_many_is_given_back(view: RootView, host: str, kept: int | None) -> None:
    """What the operator provided, else what it replaced, else any other one; once for each host that came."""
    (action,) = decide(view, TWO, NOW_S).actions
    assert isinstance(action, Release)
    assert action.host == host
    assert action.reason == f"3 standby(s) are ready and 2 wanted: host {host} is released"
    made = transaction(view, Decision(actions=(action,), reason=""), NOW_S)
    guards, puts = made.guards, made.puts
    left = [] if kept is None else [view.requests[kept].to_value()]
    assert puts["root/requests"] == {"requests": left}
    assert {"root/requests", f"rdzv/quarantine/{host}"} <= guards.keys()
    quarantine = Quarantine.parse(puts[f"rdzv/quarantine/{host}"])
    assert 0 < quarantine.left_s(NOW_S) <= 60
    after = replace(view, requests=view.requests[:0] if kept is None else (view.requests[kept],))
    assert not decide(replace(after, quarantines={host: quarantine}), TWO, NOW_S).actions


@pytest.mark.parametrize(
    "view",
    [
        standing("de", requests=(request("d", answer="a"),)),
        standing("def"),
        standing("def", quarantines={"f": SOON}, requests=(request("d", answer="a"),)),
        standing("def", quarantines={"b": SOON}, requests=(request("d", answer="a"),)),
        broken(failure(), members=dict.fromkeys("abcdef", 5), requests=(request("d", answer="a"),)),
    ],
)
def test_no_host_is_given_back_that_is_needed_or_was_not_asked_for(view: RootView) -> None:
    assert Release not in kinds(decide(view, TWO, NOW_S))


def test_no_host_is_given_back_without_a_way_to() -> None:
    view = standing("def", requests=(request("d", answer="a"),))
    assert kinds(decide(view, TWO, NOW_S)) == [Release]
    assert not decide(view, replace(TWO, release_command=" "), NOW_S).actions


@pytest.mark.parametrize("is_broken", [False, True])
def test_lost_memory_falls_back_to_the_newest_persisted_step(is_broken: bool) -> None:
    held = {"a": frozenset({0}), "b": frozenset[int](), "c": frozenset({2})}
    view = whole(held=held, persisted=((1, 4), (2, 6)))
    if is_broken:
        view = replace(view, failures={4: failure()}, history=(noted(),))
    decision = decide(view, POLICY, NOW_S)
    assert kinds(decision) == ([FallBack] if is_broken else [FallBack, Break])
    fall_back = decision.actions[0]
    assert isinstance(fall_back, FallBack)
    assert fall_back.pair == (2, 6)
    assert "no live host holds step 10 of rank(s) 1: every rank falls back to step 6" in decision.reason
    made = transaction(view, decision, NOW_S)
    guards, puts = made.guards, made.puts
    assert {"rdzv/round", "state/watermark"} <= guards.keys()
    assert puts["state/watermark"] == {"generation": 2, "step": 6}
    assert ("rdzv/failure/4" in puts) is not is_broken


def loop(count: int, **changes: Any) -> tuple[Failure, ...]:
    """`count` failures that all happened at step 10; only the first of their generations began before it."""
    first = 4 - count
    return tuple(noted(generation=g, began_step=3 if g == first else 10, **changes) for g in range(first, 4))


def creeping(*, to: int = 10, by: int = 2, **changes: Any) -> tuple[Failure, ...]:
    """Three failures, each `by` steps after the one before it, the last of them at step `to`."""
    return tuple(
        noted(generation=g, began_step=to - by * (4 - g), **{"raised": f"type.text {g}", **changes}) for g in (1, 2, 3)
    )


LOOPS: list[tuple[str, RootView, bool]] = [
    ("just enough", whole(history=loop(3)), True),
    ("one too few", whole(history=loop(2)), False),
    ("of any rank", whole(history=(*loop(3)[:2], noted(generation=3, rank=2, host="c"))), True),
    ("another exit code", whole(history=(*loop(3)[:2], noted(generation=3, exitcode=-9))), False),
    ("another step", whole(history=loop(3), round=round_(restore=(3, 31)), watermark=(3, 31)), False),
    (
        "from the beginning",
        whole(
            history=tuple(noted(generation=g, began_step=0) for g in (1, 2, 3)),
            round=round_(restore=None),
            watermark=None,
        ),
        True,
    ),
    ("hangs", whole(history=tuple(noted("hang", generation=g) for g in (1, 2, 3))), True),
    ("lost hosts", whole(history=tuple(noted("host_lost", "d", generation=g) for g in (1, 2, 3))), False),
    ("a little further each time, with another text", whole(history=creeping()), True),
    ("just a little further", whole(history=creeping(to=100, by=10), round=round_(restore=(3, 100))), True),
    ("further", whole(history=creeping(to=100, by=11), round=round_(restore=(3, 100))), False),
    ("another exception", whole(history=(*creeping()[:2], *creeping(raised="other.text 3")[2:])), False),
    ("killed a little further each time", whole(history=creeping(exitcode=-9)), False),
    ("killed through a shell", whole(history=creeping(exitcode=137)), False),
    (
        "hangs a little further each time",
        whole(history=tuple(replace(each, kind="hang", exitcode=None) for each in creeping())),
        False,
    ),
    ("not the last one", whole(history=(*loop(3), noted(generation=4)), round=round_(generation=6)), False),
]


@pytest.mark.parametrize(("name", "view", "stops"), LOOPS, ids=[name for name, *_ in LOOPS])
def test_same_failure_at_the_same_step_ends_the_run(name: str, view: RootView, stops: bool) -> None:
    decision = decide(view, RootPolicy(crash_loop_failures=3, quarantine_failures=9), NOW_S)
    assert (Stop in kinds(decision)) is stops
    if stops:
        assert re.search(r"training failed 3 times at steps? \d+( to \d+)? in the same way, so a ", decision.reason)
        assert view.round is not None
        assert f"{view.round.began_step} in the same way" in decision.reason
        assert view.history[-1].message in decision.reason
        made = transaction(replace(view, life=Life(JOB, 5), revisions={"rdzv/job/i.1": 5}), decision, NOW_S)
        ended = Agreement.parse(made.puts["rdzv/job"])
        assert (made.guards["rdzv/job/i.1"], made.puts["rdzv/job/i.1"]) == (5, {})
        assert replace(ended, closed=None) == JOB
        assert ended.closed is not None
        assert ended.closed.failed


class Keys:
    """A run's keys, to which transactions are applied as etcd does."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.revision = len(values)
        self.entries = {key: Entry(value=value, revision=at) for at, (key, value) in enumerate(values.items(), 1)}

    def view(self, host: str = "a") -> RootView:
        state = RootState(host, 2)
        state.apply(self.entries)
        assert state.ignored == {}
        return replace(state.view, absent_s=dict.fromkeys("abcde", 99.0), short_s=99.0)

    def apply(self, decision: Decision, now_unix_s: float, seen: RootView) -> bool:
        made = transaction(seen, decision, now_unix_s)
        current = {key: entry.revision for key, entry in self.entries.items()}
        if any(current.get(key, 0) != revision for key, revision in made.guards.items()):
            return False
        self.revision += 1
        self.entries |= {key: Entry(value=value, revision=self.revision) for key, value in made.puts.items()}
        for key in made.deletes:
            del self.entries[key]
        return True


pairs = st.sampled_from([[3, 9], [3, 10], [2, 5]])
observation = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["hang", "gpu", "disk", "peer_unreachable"]),
        "severity": st.sampled_from(["info", "warn", "fail"]),
        "rank": st.sampled_from([None, 0, 1]),
        "generation": st.sampled_from([None, 3, 4]),
        "value": st.just(1.0),
        "limit": st.just(1.0),
        "message": st.just("something"),
        "unix_s": st.just(NOW_S),
    }
)


@st.composite
def runs(draw: Callable[..., Any]) -> dict[str, Any]:
    """The keys of a run in generation 4 in which anything may have happened."""
    hosts = draw(st.sampled_from(["ab", "abc"]))
    seats = [{"host": host, "session": "s", "nproc": 1, "role": ""} for host in hosts]
    values: dict[str, Any] = {
        "rdzv/job": JOB.to_value(),
        "rdzv/job/i.1": {},
        "rdzv/round": {"generation": 4, "members": seats, "restore": {"generation": 3, "step": 10}},
        "state/watermark": {"generation": 3, "step": 10},
        "state/persisted": {"pairs": draw(st.lists(pairs, max_size=2))},
    }
    for host in draw(st.sets(st.sampled_from("abcde"))):
        values[f"rdzv/members/{host}"] = member_value("s", draw(st.sampled_from([0, 5])))
    for host in draw(st.sets(st.sampled_from("abcde"))):
        values[f"ckpt/hosts/{host}"] = {"addr": "x", "port": 1}
        generation, step = draw(st.just((3, 10)) | pairs)
        ranks = sorted(draw(st.sets(st.integers(0, 2))))
        values[f"state/held/{host}"] = {"generation": generation, "step": step, "ranks": ranks}
    for host in draw(st.sets(st.sampled_from("abcde"))):
        values[f"state/observations/{host}"] = {"observations": draw(st.lists(observation, max_size=2))}
    for generation in draw(st.sets(st.sampled_from([3, 4]))):
        values[f"rdzv/failure/{generation}"] = {
            "host": draw(st.sampled_from(["", "a", "b"])),
            "kind": draw(st.sampled_from(["worker_exit", "hang", "host_lost", "unhealthy", "membership"])),
            "rank": None,
            "pid": None,
            "exitcode": draw(st.sampled_from([None, 1, -9])),
            "unix_s": NOW_S,
            "message": "something",
        }
    values["root/requests"] = {
        "requests": [
            request(draw(st.sampled_from(["", "a", "d"])), 3, answer=answer).to_value()
            for answer in draw(st.lists(st.sampled_from(["", "a", "d"]), max_size=3))
        ]
    }
    return values


@settings(max_examples=100, deadline=None)
@given(
    values=runs(),
    policy=st.builds(
        RootPolicy,
        quarantine_failures=st.integers(1, 3),
        standbys=st.integers(0, 2),
        release_command=st.sampled_from(["", "give-back"]),
    ),
)
def test_deciding_ends_and_keeps_its_promises(values: dict[str, Any], policy: RootPolicy) -> None:
    """Whatever the keys say: what is decided applies, soon there is nothing left, nothing is done twice."""
    keys = Keys(values)
    asked_before = len(values["root/requests"]["requests"])
    done: list[Any] = []
    for turn in range(6):
        before = keys.view()
        decision = decide(before, policy, NOW_S + turn)
        assert decision.reason
        if not decision.actions:
            break
        assert keys.apply(decision, NOW_S + turn, before)
        done += decision.actions
        assert not keys.apply(decision, NOW_S + turn, before)
    else:
        raise AssertionError(f"no end: {done}")
    assert sum(isinstance(action, Break | FallBack) for action in done) <= 2
    assert all("rdzv/failure/4" not in values for action in done if isinstance(action, Break))
    asked = [host for action in done if isinstance(action, Ask) for host in action.hosts if host]
    assert len(asked) == len(set(asked))
    # Whether a host is lost is only asked once its generation is broken.
    breaks = sum(isinstance(action, Break) for action in done)
    assert sum(isinstance(action, Ask) and not any(action.hosts) for action in done) <= 1 + breaks
    assert shortage(keys.view(), policy, NOW_S + 6) == 0
    assert sum(isinstance(action, Release) for action in done) <= asked_before
    after = keys.view()
    assert {failure.generation for failure in after.history} >= set(after.failures)
    for action in done:
        if isinstance(action, FallBack):
            assert list(action.pair) in values["state/persisted"]["pairs"]


@settings(max_examples=50, deadline=None)
@given(runs())
def test_of_two_roots_only_one_acts(values: dict[str, Any]) -> None:
    """Both see the same and decide the same; whoever comes second is refused."""
    keys = Keys(values)
    decision = decide(keys.view("a"), POLICY, NOW_S)
    if decision.actions:
        guards = transaction(keys.view("b"), decide(keys.view("b"), POLICY, NOW_S), NOW_S).guards
        assert keys.apply(decision, NOW_S, keys.view("a"))
        current = {key: entry.revision for key, entry in keys.entries.items()}
        assert any(current.get(key, 0) != revision for key, revision in guards.items())


def test_what_is_malformed_counts_as_nothing_and_is_named() -> None:
    values = {
        "rdzv/failure/4": {"kind": 3},
        "rdzv/failure/x": {},
        "rdzv/quarantine/a": {"until_unix_s": "soon"},
        "rdzv/members/a": {"ready": -1},
        "state/held/a": {"held": 3},
        "state/persisted": {"pairs": [[1]]},
        "state/observations/a": {"observations": [{"kind": "gpu"}]},
        "root/failures": {"failures": [3]},
        "root/decisions": {},
        "root/requests": {"requests": [{"host": "a"}]},
    }
    state = RootState("a", 2)
    state.apply({key: Entry(value=value, revision=1) for key, value in values.items()})
    assert list(state.ignored) == list(values)
    assert decide(state.view, POLICY, NOW_S).actions == ()


@pytest.mark.parametrize(("rank", "host"), [(1, "b"), (None, "")])
def test_corruption_breaks_the_generation_or_ends_the_run(rank: int | None, host: str) -> None:
    """The rank that the majority names is blamed, on whichever host the root is that reports it."""
    view = whole(observations=seen("corruption", generation=4, rank=rank))
    (action,) = decide(view, POLICY, NOW_S, corruption="rollback").actions
    assert action == Break(kind="corruption", host=host, rank=rank, reason="corruption: corruption of a")
    (action,) = decide(view, POLICY, NOW_S, corruption="stop").actions
    assert action == Stop(reason="corruption: corruption of a")
    thrice = tuple(noted("corruption", "b", generation, began_step=generation) for generation in (1, 2, 3))
    assert PutInQuarantine in kinds(decide(whole(history=thrice), POLICY, NOW_S))
