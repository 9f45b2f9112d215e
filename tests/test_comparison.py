"""What hosts claim of their digests: added up on its way, and compared before anything is let through."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seats import seats

from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.comparison.comparison import Comparer, agree, differing
from resilient_run.daemon.comparison.digests import EqualLeaves, HostDigests
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.run.observation import Observation
from resilient_run.daemon.run.report import Claims, DigestClaim, Report, Runs, added, joined
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.run.view import JobView

MASKS = {"s": "new"}
claims = st.dictionaries(
    st.sampled_from("st"),
    st.builds(DigestClaim, mask=st.sampled_from(["", "old", "new"]), digest=st.sampled_from("ab")),
)
PAIR = (1, 3)
OWN = Report(term=(1, 1), complete={PAIR}, claims={})


def said_by(host: int, ranks: list[dict[str, DigestClaim]], absent: tuple[str, ...] = ()) -> Report:
    found: dict[str, dict[DigestClaim, Any]] = {}
    for number, structures in enumerate(ranks):
        for structure, claim in structures.items():
            known = found.setdefault(structure, {})
            known[claim] = joined(*known.get(claim, ()), (2 * host + number, 2 * host + number))
    return Report(term=(1, 1), complete={PAIR}, claims={PAIR: found}, absent=absent)


@given(reports=st.lists(st.lists(claims, min_size=2, max_size=2), max_size=5))
def test_claims_are_added_up(reports: list[list[dict[str, DigestClaim]]]) -> None:
    """Of the ranks of a structure: all have the same digest of the newest mask, or a pair is not agreed on."""
    hosts = {f"host{host}": Report.parse(said_by(host, ranks).to_value()) for host, ranks in enumerate(reports)}
    total = added(OWN, hosts, hosts).claims
    found = [structures["s"] for ranks in reports for structures in ranks if "s" in structures]
    one = len(set(found)) == 1 and found[0].mask == "new"
    assert agree(total[PAIR], MASKS) is (one or len(found) < 2)
    differs = len({claim.digest for claim in found if claim.mask == "new"}) > 1
    assert differing(total, MASKS) == ([(PAIR, "s")] if differs else [])
    told = {
        rank: claim for claim, runs in total[PAIR].get("s", {}).items() for a, b in runs for rank in range(a, b + 1)
    }
    assert [told[rank] for rank in sorted(told)] == found
    assert agree({}, MASKS)


@given(bits=st.lists(st.booleans(), max_size=70))
def test_masks_are_read_back(bits: list[bool]) -> None:
    equal = EqualLeaves.of(4, np.array(bits, dtype=np.bool_))
    read = EqualLeaves.parse(equal.to_value())
    assert (read.generation, read.name, read.mask.tolist()) == (4, equal.name, bits)


class Tables(HostDigests):
    """The digests of one tensor on two ranks of this host, as a test says; claims are made as the daemon makes them."""

    def __init__(self, view: JobView) -> None:
        self.equal = {}
        self.view = view
        self.steps: dict[int, tuple[int, int]] = {}

    def all_claims(self) -> Claims:
        found: dict[Pair, dict[str, dict[DigestClaim, Runs]]] = {}
        for step, values in self.steps.items():
            for rank, value in enumerate(values):
                known = self.equal.get("s")
                name, digest = "", ""
                if known is not None and known.generation == self.view.generation:
                    name, digest = known.name, str(value) if known.mask.any() else "of nothing"
                claims = found.setdefault((self.view.generation, step), {}).setdefault("s", {})
                claim = DigestClaim(mask=name, digest=digest)
                claims[claim] = joined(*claims.get(claim, ()), (rank, rank))
        return found

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
        etcd = await Etcd.connect(etcd_config, prefix=f"/resilient-run/{tmp_path.name}/")
        revision = await etcd.commit({}, {"rdzv/round": {}})
        view = JobView(host="a", replicas=1)
        view.round = Round(generation=1, seats=seats("a", [2]), restore=None, revision=revision)
        tables, seen = Tables(view), list[Observation]()
        comparer = Comparer(
            etcd,
            view=view,
            claims=tables.all_claims,
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
        etcd = await GatedEtcd.connect(etcd_config, prefix=f"/resilient-run/{tmp_path.name}/")
        etcd.gate = asyncio.Event()
        etcd.gate.set()
        revision = await etcd.commit({}, {"rdzv/round": {}})
        view = JobView(host="a", replicas=1)
        view.round = Round(generation=1, seats=seats("a", [2]), restore=None, revision=revision)
        tables, seen = Tables(view), dict[str, Observation]()

        def observe(found: Mapping[str, Observation]) -> None:
            seen.clear()
            seen.update(found)

        comparer = Comparer(
            etcd, view=view, claims=tables.all_claims, digests=tables, action="rollback", observe=observe
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
