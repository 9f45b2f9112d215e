"""Campaigns: plans depend on file and seed alone, keep their constraints, and reports add up."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.run.faults import KINDS, Scope
from resilient_run.daemon.run.observation import Observation
from resilient_run.launcher.inject.campaign import Campaign, plan_campaign
from resilient_run.launcher.inject.campaign_report import render, summarize
from resilient_run.launcher.inject.cli import resilient_inject
from resilient_run.launcher.inject.injection import Sight

KILLS: dict[str, Any] = {"faults": 2000, "mtbf_steps": 40, "kinds": [{"kind": "kill-rank"}]}


def parse(**tables: Any) -> Campaign:
    return Campaign.parse(tables, where="test")


def test_equal_seeds_give_equal_plans() -> None:
    campaign = parse(**{**KILLS, "kinds": [{"kind": "kill-rank"}, {"kind": "raise", "weight": 2}]})
    plan = plan_campaign(campaign, seed=1, world_size=4)
    assert plan == plan_campaign(campaign, seed=1, world_size=4)
    assert plan != plan_campaign(campaign, seed=2, world_size=4)


@pytest.mark.parametrize("unit", ["steps", "s"])
def test_distances_are_exponential(unit: str) -> None:
    """Mean and standard deviation of an exponential distribution are equal; targets are spread evenly."""
    campaign = parse(**{"faults": 4000, f"mtbf_{unit}": 500, "min_distance_steps": 0, "kinds": [{"kind": "raise"}]})
    plan = plan_campaign(campaign, seed=5, world_size=4)
    moments = [(fault.at_step if unit == "steps" else fault.at_s) or 0 for fault in plan]
    distances = [after - before for before, after in pairwise(moments)]
    assert statistics.mean(distances) == pytest.approx(500, rel=0.06)
    assert statistics.stdev(distances) == pytest.approx(500, rel=0.08)
    for rank in range(4):
        assert sum(fault.rank == rank for fault in plan) == pytest.approx(1000, rel=0.15)


def test_kinds_come_by_weight_and_each_at_least_once() -> None:
    kinds = [{"kind": "kill-rank", "weight": 3}, {"kind": "raise", "weight": 1}]
    plan = plan_campaign(parse(**{**KILLS, "kinds": kinds}), seed=3, world_size=2)
    assert sum(fault.kind == "kill-rank" for fault in plan) == pytest.approx(1500, rel=0.1)
    everything = [{"kind": name, "weight": 1e-6 if name != "raise" else 1} for name in KINDS]
    campaign = parse(faults=40, mtbf_steps=5, every_kind=True, kinds=everything)
    assert {fault.kind for fault in plan_campaign(campaign, seed=3, world_size=2)} == KINDS.keys()


def test_faults_keep_their_distance() -> None:
    campaign = parse(**{**KILLS, "mtbf_steps": 2, "min_distance_steps": 7, "first_step": 20})
    steps = [fault.at_step or 0 for fault in plan_campaign(campaign, seed=3, world_size=2)]
    assert steps[0] >= 27
    assert all(after - before >= 6 for before, after in pairwise(steps))


def test_a_campaign_ends_with_its_duration() -> None:
    campaign = parse(mtbf_s=10, duration_s=1000, kinds=[{"kind": "raise"}])
    plan = plan_campaign(campaign, seed=1, world_size=1)
    assert 70 < len(plan) < 130
    assert all(fault.at_s is not None and fault.at_s <= 1000 for fault in plan)


def test_a_plan_becomes_orders_for_whoever_runs_the_rank() -> None:
    kinds = [{"kind": name, "parameters": {"duration_s": 2.5} if name == "hang-rank" else {}} for name in KINDS]
    campaign = parse(faults=60, mtbf_steps=5, every_kind=True, kinds=kinds)
    for fault in plan_campaign(campaign, seed=1, world_size=4):
        order = fault.order("h2", at_step=17)
        assert (order.kind, order.host, order.at_step) == (fault.kind, "h2", 17)
        aims = KINDS[fault.kind].scope in (Scope.RANK, Scope.REPLICA)
        assert order.rank == (fault.rank if aims else None)
        if fault.kind == "hang-rank":
            assert order.parameters.duration_s == 2.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": []}, "at least one kind"),
        ({"kinds": [{"kind": "kill"}]}, "no kind 'kill'"),
        ({"kinds": [{"kind": "raise", "wait": 1}]}, "no setting 'wait'; did you mean 'weight'"),
        ({"kinds": [{"kind": "raise", "weight": 0}]}, "field 'weight' must be a number of at least"),
        ({"kinds": [{"kind": "raise", "parameters": {"a": 1}}]}, "raise: no setting 'a'"),
        ({"mtbf_s": 1}, "either mtbf_s or mtbf_steps"),
        ({"faults": 0}, "give the number of faults"),
        ({"sed": 1}, "did you mean 'seed'"),
    ],
)
def test_wrong_campaigns_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DaemonError, match=message):
        parse(**{**KILLS, **change})


def test_a_file_that_is_no_campaign_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("faults = ")
    with pytest.raises(DaemonError, match=r"c\.toml"):
        Campaign.load(tmp_path / "c.toml")


def test_command_lists_every_kind() -> None:
    shown = CliRunner().invoke(resilient_inject, ["list"]).output
    assert [line.split()[0] for line in shown.splitlines()] == list(KINDS)
    kinds = json.loads(CliRunner().invoke(resilient_inject, ["list", "--json"]).output)
    assert kinds["fill-disk"]["parameters"]["directory"] == "/tmp"


def test_what_others_write_does_not_end_the_watch() -> None:
    sight = Sight()
    disk = Observation(kind="disk", severity="warn", value=1.0, limit=5.0, message="little room", unix_s=1.0).to_value()
    entries = {
        "rdzv/job": {},
        "rdzv/round": {"generation": 2, "members": [{"host": "a", "nproc": 2}], "restore": None},
        "rdzv/failure/one": {},
        "rdzv/failure/1": {"kind": "hang"},
        "state/watermark": {"generation": 2},
        "inject/outcomes/x": {"ok": "yes"},
        "rdzv/recovered/a/b": {},
        "state/observations/a": {"observations": 3},
        "state/observations/b": {"observations": [disk]},
        "state/observations/c": {"observations": [{**disk, "kind": ["disk"]}]},
    }
    state = {key: Entry(value=value, revision=1) for key, value in entries.items()}
    for _ in range(2):
        sight.see(state)
    assert sight.host_of(1) == "a"
    assert sight.host_of(2) is None
    assert sight.failures == {1: {"kind": "hang"}}
    assert (sight.watermark, sight.outcomes, sight.recoveries, sight.ended) == (None, {}, {}, False)
    assert sight.observations == [{"host": "b", **disk}]
    assert not sight.is_whole


def entry(number: int, **changes: Any) -> dict[str, Any]:
    outcome = {"ok": True, "what": "w", "host": "h1", "unix_s": 1.0, "generation": 3, "step": 30}
    event = {"total_s": 2.5, "sources": ["peer"], "steps_lost": 1}
    return {
        "number": number,
        "kind": "kill-rank",
        "rank": 1,
        "outcome": outcome,
        "recovered": True,
        "generation_after": 4,
        "detected": [{"kind": "worker_exit"}],
        "observations": [{"kind": "load"}],
        "recoveries": [event],
        "steps_lost": 1,
        **changes,
    }


def test_report_adds_up() -> None:
    refused = {"ok": False, "what": "no such rank", "host": "h1", "unix_s": 1.0, "generation": 3, "step": 30}
    entries = [
        entry(1),
        entry(2, outcome=refused, recovered=None),
        entry(3, outcome=None, error="host h1 did not carry it out"),
        entry(4, recovered=False, recoveries=[], detected=[], observations=[], generation_after=3, steps_lost=0),
    ]
    totals = summarize(entries)
    assert totals["by_kind"] == {"kill-rank": 2}
    assert {name: totals[name] for name in ("ordered", "struck", "refused", "unanswered")} == {
        "ordered": 4,
        "struck": 2,
        "refused": 1,
        "unanswered": 1,
    }
    assert (totals["new_generations"], totals["not_recovered"], totals["max_steps_lost"]) == (1, 1, 1)
    shown = render(entries)
    assert "2.50 s from peer" in shown
    assert "refused: no such rank" in shown
    assert "at most 1 step(s) lost" in shown
