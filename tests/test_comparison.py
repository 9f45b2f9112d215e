"""What hosts claim of their digests: counted report by report, and compared before anything is let through."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seats import seats

from resilient_run.daemon.comparison.comparison import ClaimTally, Comparer
from resilient_run.daemon.comparison.digests import DigestClaim, EqualLeaves, HostDigests, parse_claims
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.run.observation import Observation
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView

MASKS = {"s": "new"}
claims = st.dictionaries(
    st.sampled_from("st"),
    st.builds(DigestClaim, mask=st.sampled_from(["", "old", "new"]), digest=st.sampled_from("ab")),
)
pairs = st.tuples(st.just(1), st.integers(1, 3))


@given(reports=st.lists(st.tuples(st.integers(0, 2), st.dictionaries(pairs, st.lists(claims, min_size=2, max_size=2)))))
def test_a_tally_is_what_the_newest_reports_say(
    reports: list[tuple[int, dict[tuple[int, int], list[dict[str, DigestClaim]]]]],
) -> None:
    """Of the ranks of a structure: all have the same digest of the newest mask, or a pair is not agreed on."""
    tally, newest = ClaimTally(), dict[int, dict[tuple[int, int], dict[int, dict[str, DigestClaim]]]]()
    for host, report in reports:
        newest[host] = {pair: {2 * host: rows[0], 2 * host + 1: rows[1]} for pair, rows in report.items()}
        tally.see(f"host{host}", newest[host])
    known: defaultdict[tuple[int, int], list[DigestClaim]] = defaultdict(list)
    for found in newest.values():
        for pair, rows in found.items():
            known[pair] += [structures["s"] for structures in rows.values() if "s" in structures]
    for pair, found in known.items():
        one = len(set(found)) == 1 and found[0].mask == "new"
        assert tally.agrees(pair, MASKS) is (one or len(found) < 2), (pair, found)
        assert len(tally.ranks.get(pair, {}).get("s", {})) == len(found)
    differing = [
        (pair, "s")
        for pair, found in sorted(known.items())
        if len({claim.digest for claim in found if claim.mask == "new"}) > 1
    ]
    assert tally.differing(MASKS) == differing
    assert tally.agrees((9, 9), MASKS)
    for host in newest:
        tally.see(f"host{host}", {})
    assert not tally.ranks


def test_what_a_host_reports_is_read_back() -> None:
    rows = [[1, 4, "00ff", "aa", "bb"], [1, 4, "0100", "", ""]]
    assert parse_claims({"held": {}, "digests": {"3": rows}}) == {
        (1, 4): {3: {"00ff": DigestClaim(mask="aa", digest="bb"), "0100": DigestClaim(mask="", digest="")}}
    }
    assert parse_claims({"held": {}}) == {}


@given(bits=st.lists(st.booleans(), max_size=70))
def test_masks_are_read_back(bits: list[bool]) -> None:
    equal = EqualLeaves.of(4, np.array(bits, dtype=np.bool_))
    read = EqualLeaves.parse("ckpt/equal/s", equal.to_value())
    assert (read.generation, read.name, read.mask.tolist()) == (4, equal.name, bits)


class Tables(HostDigests):
    """The digests of one tensor on two ranks of this host, as a test says; claims are made as the daemon makes them."""

    def __init__(self, view: JobView) -> None:
        self.equal = {}
        self.view = view
        self.steps: dict[int, tuple[int, int]] = {}

    def report(self) -> dict[str, Any]:
        rows: dict[str, Any] = {"0": [], "1": []}
        for step, values in self.steps.items():
            for rank, value in enumerate(values):
                known = self.equal.get("s")
                name, digest = "", ""
                if known is not None and known.generation == self.view.generation:
                    name, digest = known.name, str(value) if known.mask.any() else "of nothing"
                rows[str(rank)].append([self.view.generation, step, "s", name, digest])
        return rows

    async def ask(self, rank: int, pair: tuple[int, int], structure: str, wanted: Any = ()) -> Any:
        return np.array([self.steps[pair[1]][rank]], dtype="<u8"), ["model.weight"][: len(wanted)]


class GatedEtcd(Etcd):
    """etcd that answers commits when a test says so."""

    gate: asyncio.Event

    async def commit(self, *arguments: Any, **options: Any) -> int:
        await self.gate.wait()
        return await super().commit(*arguments, **options)


def test_what_was_learned_holds_in_the_next_generation(etcd_config: EtcdConfig, tmp_path: Any) -> None:
    """The first step after a recovery is compared, and a rank that differs in it is found."""

    async def scenario() -> None:
        etcd = await Etcd.connect(etcd_config)
        prefix = f"/resilient-run/{tmp_path.name}/"
        revision = await etcd.commit({}, {f"{prefix}rdzv/round": {}})
        view = JobView(host="a", replicas=1)
        view.round = Round(generation=1, seats=seats("a", [2]), restore=None, revision=revision)
        tables, seen = Tables(view), list[Observation]()
        comparer = Comparer(
            etcd,
            prefix,
            view=view,
            tally=ClaimTally(),
            digests=tables,
            action="rollback",
            observe=lambda found: seen.extend(found.values()),
        )
        running = asyncio.create_task(comparer.run())

        async def until(condition: Any) -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.001)

        try:
            for step in range(1, 5):
                tables.steps[step] = (step, step)
                await until(lambda step=step: comparer.agrees((1, step)))
                view.watermark = (1, step)
                comparer.wake()
                await until(lambda step=step: ((1, step), "s") in comparer._studied)
            await until(lambda: "s" in comparer._masks)
            tables.steps = {5: (5, 6)}
            view.round = Round(generation=2, seats=seats("a", [2]), restore=(1, 4), revision=revision)
            await until(lambda: not comparer.agrees((2, 5)) and comparer._generation == 2 and "s" in comparer._masks)
            tables.equal = {"s": EqualLeaves.of(2, np.array([True]))}
            assert not comparer.agrees((2, 5))
            comparer.wake()
            await until(lambda: seen)
            assert (seen[-1].severity, seen[-1].generation) == ("fail", 2)
            assert "step 5: rank 0 and rank 1 differ" in seen[-1].message
            # Once more in the next generation: it was not cured by going back.
            view.round = Round(generation=3, seats=seats("a", [2]), restore=(1, 4), revision=revision)
            await until(lambda: not comparer.agrees((3, 5)) and comparer._generation == 3 and "s" in comparer._masks)
            tables.equal = {"s": EqualLeaves.of(3, np.array([True]))}
            assert not comparer.agrees((3, 5))
            comparer.wake()
            await until(lambda: seen[-1].generation == 3)
            assert seen[-1].severity == "warn"
            assert "it is on purpose, or lasting, and training goes on" in seen[-1].message
            await until(lambda: comparer._masks["s"] == EqualLeaves.of(3, np.array([False])).name)
            tables.equal = {"s": EqualLeaves.of(3, np.array([False]))}
            assert comparer.agrees((3, 5))
        finally:
            running.cancel()
            await asyncio.wait([running])
            await etcd.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_late", [False, True])
def test_what_must_be_equal_is_told_before_more_is_let_through(
    etcd_config: EtcdConfig, tmp_path: Any, *, is_late: bool
) -> None:
    """It is known after step 4. Step 5, of which a rank differs, is complete before that is told, or even known."""

    async def scenario() -> None:
        etcd = await GatedEtcd.connect(etcd_config)
        etcd.gate = asyncio.Event()
        etcd.gate.set()
        prefix = f"/resilient-run/{tmp_path.name}/"
        revision = await etcd.commit({}, {f"{prefix}rdzv/round": {}})
        view = JobView(host="a", replicas=1)
        view.round = Round(generation=1, seats=seats("a", [2]), restore=None, revision=revision)
        tables, seen = Tables(view), dict[str, Observation]()

        def observe(found: Mapping[str, Observation]) -> None:
            seen.clear()
            seen.update(found)

        comparer = Comparer(
            etcd, prefix, view=view, tally=ClaimTally(), digests=tables, action="rollback", observe=observe
        )
        running = asyncio.create_task(comparer.run())

        async def until(condition: Any) -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.001)

        try:
            for step in range(1, 5):
                tables.steps[step] = (step, step)
                await until(lambda step=step: comparer.agrees((1, step)))
                if step == 4:
                    etcd.gate.clear()
                    tables.steps[5] = (5, 6)
                    assert not is_late or comparer.agrees((1, 5))
                view.watermark = (1, step)
                comparer.wake()
                await until(lambda step=step: ((1, step), "s") in comparer._studied)
            assert not comparer.agrees((1, 5)), "it is known, and not told"
            etcd.gate.set()
            await until(lambda: "s" in comparer._masks)
            tables.equal = {"s": EqualLeaves.of(1, np.array([True]))}
            comparer.agrees((1, 5))
            comparer.wake()
            await until(lambda: seen)
            (found,) = seen.values()
            assert found.severity == ("warn" if is_late else "fail")
            assert ("committed before that was known" in found.message) is is_late
        finally:
            running.cancel()
            await asyncio.wait([running])
            await etcd.close()

    asyncio.run(scenario())
