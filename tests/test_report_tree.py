"""Reports of steps reach the root through the tree of hosts, and its word reaches them, also where links are cut."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from etcd_scale import ADDRESS, Process, SimulatedHost, host_name, round_value
from hypothesis import given
from hypothesis import strategies as st

from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.run.commit import Missed, Unhealthy
from resilient_run.daemon.run.report import FAN_IN, DigestClaim, Report, Said, Tree, added
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.work import RankWork

TERM = (1, 7)
SAID = Said(term=TERM, number=1, watermark=(1, 1), watermark_revision=3, next=(1, 2), persist=None)


def round_of(hosts: int) -> Round:
    return Round.parse(round_value(hosts), revision=1)


@given(hosts=st.integers(1, 400), root=st.integers(0, 399))
def test_every_host_has_its_place(hosts: int, root: int) -> None:
    root %= hosts
    tree = Tree(round_of(hosts), host_name(root))
    seen = [host_name(root)]
    for host in seen:
        below = tree.below(host)
        assert len(below) <= FAN_IN
        assert all(tree.above(other)[0] == host for other in below)
        seen += below
    assert sorted(seen) == sorted(tree.round.hosts)
    assert all(tree.above(host)[-1] == host_name(root) for host in seen[1:])
    assert max(len(tree.above(host)) for host in seen) <= 3
    assert tree.above(host_name(root)) == ()
    assert tree.above("standby") == (host_name(root),)


@given(data=st.data(), hosts=st.integers(1, 60))
def test_the_root_hears_what_holds_for_all(data: st.DataObject, hosts: int) -> None:
    """Whoever reports past whom; where somebody says nothing, it knows that."""
    tree = Tree(round_of(hosts), host_name(data.draw(st.integers(0, hosts - 1))))
    pairs = [(1, 4), (1, 5)]
    own = {
        host: Report(
            term=TERM,
            complete=frozenset(data.draw(st.sampled_from([pairs, pairs, pairs[:1], pairs[1:]]))),
            missed=data.draw(
                st.none() | st.builds(Missed, next=st.just((1, 6)), step=st.integers(6, 9), late=st.booleans())
            ),
            unhealthy=data.draw(
                st.dictionaries(st.sampled_from([Pair(1, step) for step in (6, 7)]), st.just(Unhealthy(5, rank)))
            ),
            claims={(1, 5): {"s": {DigestClaim(mask="m", digest=data.draw(st.sampled_from("xy"))): ((rank, rank),)}}},
        )
        for rank, host in enumerate(tree.round.hosts)
    }
    cut = data.draw(st.sets(st.sampled_from(tree.round.hosts)))
    silent = data.draw(st.sets(st.sampled_from(tree.round.hosts), max_size=1)) - {tree.root}
    heard: dict[str, dict[str, Report]] = {host: {} for host in tree.round.hosts}
    for host in sorted(tree.round.hosts, key=lambda host: -len(tree.above(host))):
        report = added(own[host], tree.below(host), heard[host])
        if host == tree.root:
            break
        if host not in silent:
            over = next((other for other in tree.above(host) if other not in cut), tree.root)
            heard[over][host] = Report.parse(report.to_value())
    common = frozenset.intersection(*(frozenset(one.complete) for one in own.values()))
    if silent:
        assert set(report.absent) >= silent
    else:
        assert (report.absent, report.complete) == ((), common)
        missed = [one.missed for one in own.values() if one.missed]
        late = (
            Missed(next=(1, 6), step=max(it.step for it in missed), late=any(it.late for it in missed))
            if missed
            else None
        )
        assert report.missed == late
        calls = [(pair, told.rank) for one in own.values() for pair, told in one.unhealthy.items()]
        assert report.unhealthy == {
            pair: Unhealthy(5, min(rank for other, rank in calls if other == pair)) for pair, _ in calls
        }
        if (1, 5) in common:
            claimed = {rank for runs in report.claims[1, 5]["s"].values() for a, b in runs for rank in range(a, b + 1)}
            assert claimed == set(range(hosts))


def test_a_report_of_another_term_counts_for_nothing() -> None:
    own = Report(term=TERM, complete=frozenset({(1, 5)}), claims={})
    old = replace(own, term=(1, 6))
    assert added(own, ["b"], {"b": own}).absent == ()
    assert added(own, ["b"], {"b": old}).absent == ("b",)
    assert added(own, ["b"], {"b": replace(own, absent=("b", "c"))}).absent == ("c",), (
        "who is named twice is asked once"
    )


def test_only_what_is_more_is_said_at_once() -> None:
    before = Report(term=TERM, complete=frozenset({(1, 4), (1, 5)}), claims={(1, 5): {}})
    assert not replace(before, complete=frozenset({(1, 5)})).says_more_than(before)
    assert replace(before, complete=frozenset({(1, 4)})).says_more_than(before), "a replica was lost"
    assert replace(before, complete=frozenset({(1, 5), (1, 6)})).says_more_than(before)
    assert replace(before, claims={(1, 5): {"s": {}}}).says_more_than(before)
    assert replace(before, term=(2, 9)).says_more_than(before)
    assert replace(before, missed=Missed(next=(1, 6), step=6, late=False)).says_more_than(before)
    assert replace(before, unhealthy={Pair(1, 6): Unhealthy(5, 0)}).says_more_than(before)


def run_tree(hosts: int, scenario: Callable[[Process], Awaitable[None]]) -> None:
    """Run `scenario` over so many hosts that report to host0, with real connections."""

    async def main() -> None:
        process = Process(range(hosts))
        _, port = await process.server.listen(ADDRESS)
        process.addresses |= dict.fromkeys(process.hosts, (ADDRESS, port))
        lead(process, "host0", TERM[1])
        tasks = [asyncio.create_task(host.tree.run()) for host in process.hosts.values()]
        try:
            async with asyncio.timeout(60):
                await scenario(process)
        finally:
            for host in process.hosts.values():
                host.tree.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            process.server.close()

    asyncio.run(main())


def lead(process: Process, root: str, election: int) -> None:
    round_ = round_of(len(process.hosts))
    for host in process.hosts.values():
        host.begin(round_)
        host.view.leader, host.view.leader_revision = root, election
    process.hosts[root].tree.say(replace(SAID, term=(1, election)))


async def everywhere(process: Process, root: str, step: int) -> None:
    """All hold `step`: the root hears it, and says so to all."""
    for host in process.hosts.values():
        host.hold(step)
    top = process.hosts[root]

    def is_complete() -> bool:
        report = top.tree.report()
        return report is not None and not report.absent and (1, step) in report.complete

    await top.view.wait_for(is_complete)
    said = top.tree.said
    assert said is not None
    top.tree.say(replace(said, number=said.number + 1, watermark=(1, step)))
    for host in process.hosts.values():
        await host.knows(step)


@pytest.mark.jobs
def test_a_step_of_many_hosts_is_known_everywhere() -> None:
    async def scenario(process: Process) -> None:
        for step in range(2, 5):
            await everywhere(process, "host0", step)
        last = process.hosts["host39"]
        last.slots.pairs = frozenset()
        for host in process.hosts.values():
            if host is not last:
                host.hold(5)
        last.hold(5)
        await everywhere(process, "host0", 5)

    run_tree(40, scenario)


@pytest.mark.jobs
def test_the_root_hears_what_all_ranks_have_computed_and_keeps_it_between_steps() -> None:
    async def scenario(process: Process) -> None:
        top = process.hosts["host0"]
        for step in (4, 8):
            noted = {rank: RankWork(step, 0.5 * rank, 9.0, 1) for rank in range(len(process.hosts))}
            for rank, host in enumerate(process.hosts.values()):
                host.view.work = {rank: noted[rank]}
            while top.tree.work() != noted:
                await asyncio.sleep(0.05)
            await everywhere(process, "host0", step)
            assert top.tree.work() == noted
        lead(process, "host0", TERM[1] + 1)
        assert top.tree.work() == {0: noted[0]}, "reports of another term"

    run_tree(40, scenario)


@pytest.mark.jobs
def test_what_ranks_have_computed_is_known_of_hosts_that_reported_to_the_root_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the root heard of them itself is older than what the host between says, to whom they have returned."""
    monkeypatch.setattr("resilient_run.daemon.peers.tree._AVOIDED_S", 0.1)

    async def scenario(process: Process) -> None:
        top, inner, leaf = (process.hosts[name] for name in ("host0", "host1", "host17"))

        async def hears(step: int, via: SimulatedHost) -> None:
            leaf.view.work = {17: RankWork(step, 0.5, 9.0, 1)}
            while top.tree.work().get(17) != leaf.view.work[17] or "host17" not in via.tree._links:
                await asyncio.sleep(0.05)

        await everywhere(process, "host0", 2)
        await hears(4, inner)
        process.refused.add("host1")
        inner.tree.close()
        await hears(8, top)
        inner.tree._closed = False
        process.refused.clear()
        await hears(12, inner)

    run_tree(24, scenario)


@pytest.mark.jobs
@pytest.mark.parametrize("how", ["refuses", "says nothing"])
def test_a_host_that_cannot_be_reached_is_passed_by(how: str) -> None:
    """host1 still reports to the root, and none of the hosts below it can report to it any more."""

    class Deaf(SimulatedHost):
        async def reports(self, host: str, sock: Any) -> None:
            await asyncio.Event().wait()

    async def scenario(process: Process) -> None:
        await everywhere(process, "host0", 2)
        inner = process.hosts["host1"]
        if how == "refuses":
            process.refused.add("host1")
        else:
            inner.__class__ = Deaf
        inner.tree.close()
        while inner.tree._links:
            await asyncio.sleep(0)
        inner.tree._closed = False
        await everywhere(process, "host0", 3)
        await everywhere(process, "host0", 4)

    run_tree(24, scenario)


@pytest.mark.jobs
def test_another_root_hears_of_all() -> None:
    """Also one that was a leaf; what the one before it had said counts no more."""

    async def scenario(process: Process) -> None:
        await everywhere(process, "host0", 2)
        lead(process, "host20", 9)
        await everywhere(process, "host20", 3)
        process.hosts["host0"].tree.say(replace(SAID, number=100, watermark=(1, 50)))
        await everywhere(process, "host20", 4)

    run_tree(24, scenario)
