"""The root's incremental state is what one who reads every key anew sees, after any changes in any portions."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seats import member_value

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig, update
from resilient_run.daemon.root.state import RootState
from resilient_run.daemon.root.view import RootView
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.commit import HeldPair
from resilient_run.daemon.run.records import Agreement, Closed
from resilient_run.daemon.run.rounds import Round

REPLICAS = 2


def held(pair: Pair, *ranks: int) -> dict[str, Any]:
    return {"generation": pair[0], "step": pair[1], "ranks": list(ranks)}


def round_value(hosts: str, generation: int = 1, restore: Pair | None = None) -> dict[str, Any]:
    restored = None if restore is None else {"generation": restore[0], "step": restore[1]}
    return {"generation": generation, "members": [{"host": host, "nproc": 1} for host in hosts], "restore": restored}


PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))
STEPS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), unique=True, max_size=3)
OBSERVATION = {"kind": "gpu", "severity": "fail", "value": 1.0, "limit": 0.0, "message": "XID 79", "unix_s": 1.0}
FAILURE = {"host": "a", "kind": "worker_exit", "rank": 0, "exitcode": 1, "message": "m", "unix_s": 1.0}
OVER = Agreement(
    incarnation="i", min_nodes=1, max_nodes=2, token="t", closed=Closed(reason="over", failed=True)
).to_value()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rdzv/round": st.builds(
        round_value,
        st.sampled_from(["a", "ab", "abc", "dcab"]),
        st.integers(1, 3),
        st.sampled_from([None, (1, 1), (1, 2), (2, 1)]),
    ),
    "rdzv/job": st.just(OVER),
    "rdzv/store/1": st.just({}),
    "rdzv/failure/1": st.just(FAILURE),
    "rdzv/failure/2": st.just(FAILURE),
    "state/watermark": st.builds(lambda step: {"generation": 1, "step": step}, st.integers(1, 3)),
    "state/watermark/persist": st.just({}),
    "state/watermark/next": st.builds(lambda step: {"generation": 1, "step": step}, st.integers(1, 4)),
    "state/watermark/older": st.builds(lambda step: {"pairs": [[1, step]]}, st.integers(1, 4)),
    "state/persisted": st.builds(lambda pairs: {"pairs": [list(pair) for pair in pairs]}, STEPS),
    "state/persisted/a": st.just({}),
    "root/leader": st.just({"host": "a"}),
    "root/decisions": st.just({"decisions": [{"kind": "replace"}]}),
    "root/failures": st.just({"failures": [{**FAILURE, "generation": 1}]}),
}
for name in "abcd":
    VALUES |= {
        f"rdzv/members/{name}": st.builds(lambda ready: member_value("s", ready), st.integers(0, 2)),
        f"rdzv/quarantine/{name}": st.just({"since_unix_s": 1.0, "until_unix_s": 2.0, "reason": "r"}),
        f"ckpt/hosts/{name}": st.just({"addr": "x", "port": 1, "every": 1}),
        f"state/held/{name}": st.builds(lambda pair, ranks: held(pair, *ranks), PAIR, st.sets(st.integers(0, 3))),
        f"state/observations/{name}": st.builds(
            lambda kinds: {"observations": [{**OBSERVATION, "kind": kind} for kind in kinds]},
            st.lists(st.sampled_from(["gpu", "memory", "peer_unreachable"]), max_size=2),
        ),
    }
VITAL = ("rdzv/round", "state/watermark", "state/watermark/next")
MALFORMED = st.sampled_from([{}, {"ready": -1}, {"held": 3}, {"pairs": [[1]]}, {"observations": [{"kind": "gpu"}]}])


@st.composite
def changes(draw: Any) -> dict[str, dict[str, Any] | None]:
    """What one answer of etcd may bring, with more reports than anything else."""
    reports = st.sampled_from([key for key in VALUES if key.startswith("state/held/")])
    found: dict[str, dict[str, Any] | None] = {}
    for key in draw(st.lists(reports | st.sampled_from(list(VALUES)), max_size=6)):
        values = VALUES[key] | st.none()
        found[key] = draw(values if key in VITAL else values | MALFORMED)
    return found


def lasting(view: RootView) -> RootView:
    """`view` without what only a root knows that was there when its round was formed."""
    return replace(view, gone={number: hosts for number, hosts in view.gone.items() if number == view.generation})


def awaited_spare(view: RootView, round_: Round) -> list[str]:
    """The definition: beside a single host the first standby, unless somebody reports that it cannot keep a replica."""
    waiting = [host for host, ready in view.members.items() if ready and host in view.daemons and host not in round_]
    if len(round_.hosts) >= REPLICAS or not waiting:
        return []
    spare = min(waiting)
    kinds = {host: {item.kind for item in view.observations.get(host, ())} for host in (spare, *round_.hosts)}
    cut_off = any("peer_unreachable" in found for found in kinds.values())
    return [] if cut_off or "memory" in kinds[spare] else [spare]


@settings(max_examples=300, deadline=None)
@given(history=st.lists(changes(), max_size=12), looks=st.booleans())
def test_state_is_that_of_one_who_reads_everything_anew(
    history: list[dict[str, dict[str, Any] | None]], looks: bool
) -> None:
    state, entries = RootState("a", REPLICAS), dict[str, Entry]()
    for revision, values in enumerate(history, 1):
        changed = {
            key: None if value is None else Entry(value=value, revision=revision) for key, value in values.items()
        }
        update(entries, changed)
        state.apply(changed)
        if not looks and values is not history[-1]:
            continue
        anew = RootState("a", REPLICAS)
        anew.apply(entries)
        assert (lasting(state.view), state.ignored) == (anew.view, anew.ignored)
        assert state.revisions == anew.revisions
        round_ = state.view.round
        assert (state.agreed, state.get(keys.PERSIST), state.spares) == (
            anew.agreed,
            anew.get(keys.PERSIST),
            anew.spares,
        )
        assert state.spares == frozenset(() if round_ is None else awaited_spare(state.view, round_))
        reported = {
            key.rpartition("/")[2]: entry.value for key, entry in entries.items() if key.startswith("state/held/")
        }
        for host, ranks in state.view.held.items():
            assert round_ is not None
            assert reported[host] == held(round_.restore or (0, 0), *reported[host]["ranks"])
            assert ranks == set(reported[host]["ranks"])


def test_view_stays_as_it_was() -> None:
    state = RootState("a", REPLICAS)
    state.apply({"rdzv/members/b": Entry(value=member_value("s"), revision=1)})
    before = state.view
    assert state.view is before
    state.apply({"rdzv/members/b": None, "root/leader": Entry(value={}, revision=2)})
    assert (before.members.keys(), before.revisions) == ({"b"}, {"rdzv/members/b": 1})
    assert (state.view.members, state.view.revisions) == ({}, {"root/leader": 2})


def test_who_is_gone_is_settled_when_the_next_round_is_formed() -> None:
    def seats(generation: int, *sessions: str) -> dict[str, Any]:
        members = [{"host": session[0], "session": session, "nproc": 1} for session in sessions]
        return {"rdzv/round": Entry(value={"generation": generation, "members": members}, revision=1)}

    def launcher(session: str) -> dict[str, Any]:
        return {f"rdzv/members/{session[0]}": Entry(value=member_value(session), revision=1)}

    state = RootState("a", REPLICAS)
    state.apply({**seats(1, "a1", "b1", "c1"), **launcher("a1"), **launcher("b1"), **launcher("c1")})
    assert state.view.gone == {}, "nobody asks while it is whole"
    state.apply({"rdzv/failure/1": Entry(value=FAILURE, revision=1)})
    assert state.view.gone == {1: ()}
    state.apply({"rdzv/members/b": None})
    assert state.view.gone == {1: ("b",)}
    state.apply(launcher("b1"))
    assert state.view.gone == {1: ()}, "etcd was away"
    state.apply(launcher("b2"))
    assert state.view.gone == {1: ("b",)}, "another launcher"
    state.apply({**seats(2, "a1", "b2"), "rdzv/members/a": None})
    assert state.view.gone == {1: ("b",)}, "a is in the next round, and c stands by"
    state.apply({"rdzv/members/b": None, "rdzv/members/c": None})
    assert state.view.gone == {1: ("b",)}
    state.apply({"rdzv/failure/2": Entry(value=FAILURE, revision=1)})
    assert state.view.gone == {1: ("b",), 2: ("a", "b")}
    state.apply(seats(4, "a2"))
    assert state.view.gone == {}, "nobody saw how 3 was formed"


def test_every_value_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many hosts there are, one report makes the root read one report."""
    parsed: list[Any] = []

    parse = HeldPair.parse
    monkeypatch.setattr(HeldPair, "parse", lambda value: parsed.append(value) or parse(value))
    hosts = [f"host{index}" for index in range(100)]
    state = RootState("host0", REPLICAS)
    members = [{"host": host, "nproc": 1} for host in hosts]
    restore = {"generation": 1, "step": 1}
    state.apply({"rdzv/round": Entry(value={"generation": 2, "members": members, "restore": restore}, revision=1)})
    for revision, host in enumerate(hosts, 2):
        state.apply({f"state/held/{host}": Entry(value=held((1, 1), 0), revision=revision)})
        assert state.view.held.keys() == set(hosts[: revision - 1])
    assert len(parsed) == len(hosts)


@pytest.mark.parametrize("key", VITAL)
def test_what_everything_depends_on_must_have_its_form(key: str) -> None:
    with pytest.raises(DaemonError, match=key):
        RootState("a", REPLICAS).apply({key: Entry(value={}, revision=1)})


@pytest.mark.parametrize("name", ["", "x", "9" * 5000])
def test_a_failure_of_no_generation_counts_as_nothing(name: str) -> None:
    state, key = RootState("a", REPLICAS), f"rdzv/failure/{name}"
    state.apply({key: Entry(value={"kind": "hang", "unix_s": 1.0}, revision=1)})
    assert (state.view.failures, state.ignored.keys()) == ({}, {key})


def test_two_who_began_at_different_times_see_the_same(etcd_config: EtcdConfig) -> None:
    """Through a real etcd: one has followed from the beginning, the other one reads when all is done."""

    async def scenario() -> None:
        etcd = await Etcd.connect(etcd_config)
        prefix, early, late = "/root-state-test/", RootState("a", REPLICAS), RootState("a", REPLICAS)

        async def follow(state: RootState) -> None:
            async for changed in etcd.changes(prefix):
                state.apply({key.removeprefix(prefix): entry for key, entry in changed.items()})
                if state.view.closed:
                    return

        following = asyncio.create_task(follow(early))
        try:
            async with asyncio.timeout(30):
                await etcd.put(prefix + "rdzv/round", round_value("abc"))
                for step in range(1, 6):
                    await asyncio.gather(
                        *(etcd.put(f"{prefix}state/held/{host}", held((1, step), 0)) for host in "abc")
                    )
                    await etcd.put(prefix + "state/watermark", {"generation": 1, "step": step})
                await etcd.put(prefix + "state/observations/c", {"observations": [OBSERVATION]})
                await etcd.delete(prefix + "state/held/c")
                await etcd.put(prefix + "rdzv/job", OVER)
                await following
                await follow(late)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await etcd.commit({}, {}, [prefix])
            await etcd.close()
        assert lasting(early.view) == late.view
        assert early.get(keys.WATERMARK) == (1, 5)

    asyncio.run(scenario())
