"""`resilientctl advise`: its simulation agrees with closed forms and the thesis, and it says what it was given."""

import json
import math
import random
import statistics
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from test_goodput import GEMINI, event, write

from resilient_run.ckpt.format.placement import placement
from resilient_run.ckpt.format.survival import domain_loss, fatal_domains, survival
from resilient_run.daemon.base import advice
from resilient_run.daemon.base.advice import Question, compare, drawn_rate, rate_interval, seen_failures
from resilient_run.daemon.base.costs import DAY_S, CheckpointCost, Failures, SimulatedRun, high_frequency_s, simulate
from resilient_run.daemon.base.goodput import read_ledger
from resilient_run.daemon.ctl.cli import resilientctl

EVENTS = [str(path) for path in sorted((Path(__file__).parent / "recorded").glob("events-*.jsonl"))]
# Checkpoints that cost and lose next to nothing.
FREE = CheckpointCost(interval_s=0.01, checkpoint_s=0.0, retrieval_s=0.0)


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the usual runs are enough here."""
    monkeypatch.setattr(advice, "_BUDGET", 20_000)
    monkeypatch.setattr(advice, "_RUNS", (20, 200))


def simulated(cost: CheckpointCost, failures: Failures, standbys: int, *, runs: int = 40) -> list[SimulatedRun]:
    return [
        simulate(cost, failures, standbys=standbys, days=54, rng=random.Random(f"run {run}")) for run in range(runs)
    ]


def mean(runs: list[SimulatedRun]) -> tuple[float, float]:
    """Mean of the ratios, and its standard error."""
    ratios = [run.ratio for run in runs]
    return statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))


def test_nothing_fails() -> None:
    (run,) = simulated(FREE, Failures(hosts=10), 2, runs=1)
    assert run.ratio == pytest.approx(1)
    assert (run.idle, run.losses) == (2, {})


@pytest.mark.parametrize("per_day", [1.0, 20.0])
def test_one_host_with_a_fixed_repair_is_a_renewal_process(per_day: float) -> None:
    """Without other costs a host is up for 1/λ and then replaced; what fails meanwhile is ordered at once, too."""
    failures = Failures(hosts=1, host=per_day, replace_s=3600.0)
    up_s = DAY_S / per_day
    # A host that is lost while one is awaited makes the wait longer: the busy period of an M/D/∞ queue.
    down_s = up_s * math.expm1(3600.0 / up_s)
    ratio, error = mean(simulated(FREE, failures, 0, runs=200))
    assert abs(ratio - up_s / (up_s + down_s)) < 4 * error + 1e-3


def test_enough_standbys_leave_the_cost_of_software_failures() -> None:
    hosts = Failures(hosts=100, host=0.2, replace_s=3600.0)
    software = Failures(hosts=100, software=0.2)
    ratio, error = mean(simulated(GEMINI, hosts, 20))
    assert abs(ratio - mean(simulated(GEMINI, software, 0))[0]) < 5 * error


def test_standbys_of_the_thesis_job_add_what_they_save_in_time() -> None:
    """1,000 hosts, of which 1.5 % are lost a day: 12 minutes without a standby, 7 with one (Section 6.7.3).

    A plain estimate leaves out failures during recoveries; a single run of 54 days lies up to 0.8 points off the mean.
    """
    failures = Failures(hosts=1000, host=0.015, replace_s=300.0, fetch_s=3.0)
    without, with_one = (simulated(GEMINI, failures, standbys, runs=100) for standbys in (0, 1))
    up_s = DAY_S / failures.per_day

    def exact(recovery_s: float) -> float:
        return 62 / up_s * math.exp(-(recovery_s + 62) / up_s) / math.expm1(62 / up_s)

    assert exact(723) == pytest.approx(0.868, abs=5e-4)
    assert exact(423) == pytest.approx(0.914, abs=5e-4)
    assert mean(without)[0] == pytest.approx(exact(723), abs=3e-3)
    # A standby that is not back yet costs a little.
    assert exact(423) - 4e-3 < mean(with_one)[0] < exact(423)
    assert mean(with_one)[0] - mean(without)[0] == pytest.approx(0.919 - 0.874, abs=3e-3)
    assert (up_s - 93) / (up_s + 723) == pytest.approx(0.874, abs=5e-4), "if nothing fails during a recovery"
    assert (up_s - 93) / (up_s + 423) == pytest.approx(0.917, abs=5e-4)
    for runs, expected in ((without, 0.874), (with_one, 0.919)):
        assert min(run.ratio for run in runs) < expected < max(run.ratio for run in runs)


def test_more_standbys_are_no_worse_and_more_failures_no_better() -> None:
    failures = Failures(hosts=500, host=0.05, rack=0.05, rack_hosts=10, replace_s=7200.0)
    by_standbys = [mean(simulated(GEMINI, failures, standbys, runs=10))[0] for standbys in (0, 1, 5, 10, 20)]
    assert by_standbys == sorted(by_standbys)
    assert by_standbys[-1] > by_standbys[0] + 0.1
    more = [mean(simulated(GEMINI, replace(failures, host=rate), 5, runs=10))[0] for rate in (0.01, 0.05, 0.2)]
    assert more == sorted(more, reverse=True)


def test_idle_standbys_are_those_that_are_not_ordered() -> None:
    failures = Failures(hosts=1000, host=0.015, replace_s=1800.0)
    runs = simulated(GEMINI, failures, 3)
    # Little's law: 15 losses a day and half an hour each, some of them while the pool is empty.
    assert statistics.mean(run.idle for run in runs) == pytest.approx(3 - 15.05 * 1800 / DAY_S, abs=0.02)


def test_a_rack_takes_all_of_its_hosts() -> None:
    (run,) = simulated(GEMINI, Failures(hosts=20, rack=0.05, rack_hosts=8), 0, runs=1)
    assert {lost for lost, _ in run.losses} == {8}
    assert sum(run.losses.values()) == pytest.approx(3 * 0.05 * 54, abs=8)


@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 4), st.data())
def test_domain_loss_bounds_what_trying_every_loss_gives(
    hosts: int, replicas: int, rack_hosts: int, data: st.DataObject
) -> None:
    racks = [str(host // rack_hosts) for host in range(hosts)]
    plan = placement(hosts, replicas, labels=racks)
    missing = data.draw(st.integers(0, hosts - rack_hosts if hosts > rack_hosts else 0))
    for labels in (racks, [str(host) for host in range(hosts)]):
        chances = []
        for label in set(labels):
            inside = {host for host in range(hosts) if labels[host] == label}
            others = [host for host in range(hosts) if host not in inside]
            losses = [inside | set(more) for more in combinations(others, min(missing, len(others)))]
            touched = [holders for holders in plan.holders() if inside & {*holders}]
            fatal = sum(any(lost.issuperset(holders) for holders in touched) for lost in losses)
            chances.append(fatal / len(losses))
        bound = domain_loss(plan, labels, missing)
        assert statistics.mean(chances) <= bound + 1e-9
        if not missing:
            assert bound == pytest.approx(len(fatal_domains(plan, labels)) / len(set(labels)))


def test_loss_of_one_host_after_others_is_that_of_the_survival() -> None:
    plan, hosts = placement(1000, 2), [str(host) for host in range(1000)]
    assert domain_loss(plan, hosts, 0) == 0
    assert domain_loss(plan, hosts, 1) == pytest.approx(1 - float(survival(plan, 2)))


def question(**changes: Any) -> Question:
    failures = Failures(hosts=64, host=0.2, replace_s=3600.0, fetch_s=3.0)
    plain = Question(cost=GEMINI, failures=failures, write_s=480.0, most_standbys=2, days=20)
    return replace(plain, **changes)


def test_replicas_are_worth_the_losses_that_they_prevent() -> None:
    for choice in compare(question()):
        lost = [each.lost_per_day for each in choice.replicas]
        assert lost == sorted(lost, reverse=True)
        # Every loss of a host takes the only copy.
        assert lost[0] == pytest.approx(64 * 0.2, rel=0.1)
        gains = [few.cost - more.cost for few, more in pairwise(choice.replicas)]
        assert gains[choice.advised.replicas - 1] < 0.001 <= gains[choice.advised.replicas - 2]
        assert [each.at_once for each in choice.replicas][:2] == [1, pytest.approx(1 / 63)]
        # Equation 6.1, for a tier that writes as often as it can.
        assert choice.replicas[0].persist_s == high_frequency_s(480, 62) == 496
        assert choice.advised.cost == pytest.approx(choice.advised.lost_per_day * (480 + 248 + 480) / DAY_S)


def test_a_tier_that_stops_training_is_used_as_rarely_as_young_says() -> None:
    (choice,) = compare(question(tier_stall_s=81.0, most_standbys=0))
    one = choice.replicas[0]
    best_s = math.sqrt(2 * 81 * DAY_S / one.lost_per_day)
    assert best_s <= one.persist_s < best_s + 62

    def cost(every_s: float) -> float:
        return one.lost_per_day * (960 + every_s / 2) / DAY_S + 81 / every_s

    assert one.cost == pytest.approx(cost(one.persist_s))
    assert one.cost < min(cost(one.persist_s / 1.5), cost(one.persist_s * 1.5))


def test_rates_that_were_seen_are_as_uncertain_as_their_number() -> None:
    for seen in (0, 3, 300):
        low, high = rate_interval(seen, 100.0)
        assert low < (seen + 0.5) / 100 < high
    draws = [drawn_rate(3, 100.0, random.Random(run)) for run in range(2000)]
    assert statistics.mean(draws) == pytest.approx(0.035, rel=0.05)
    assert statistics.stdev(draws) == pytest.approx(math.sqrt(3.5) / 100, rel=0.1)
    widths = []
    for seen in (2, 200):
        failures = Failures(hosts=64, host=0.2, replace_s=3600.0)
        (choice,) = compare(
            question(failures=failures, most_standbys=0, seen={"host": seen}, seen_hosts=1, seen_days=seen / 0.2)
        )
        widths.append(choice.high - choice.low)
    assert widths[0] > 2 * widths[1]


def test_failures_of_a_recorded_run() -> None:
    """Two hosts and a standby, two killed workers, then a lost host."""
    ledger = read_ledger(map(Path, EVENTS))
    assert [failure.kind for failure in ledger.failures] == ["worker_exit", "worker_exit", "host_lost"]
    seen, hosts, recovery_s = seen_failures(ledger)
    assert (seen, hosts) == ({"host": 1, "software": 2}, 2)
    assert recovery_s == pytest.approx(statistics.mean(failure.down_s for failure in ledger.failures[:2]))


def test_what_comes_by_itself_counts_and_what_was_ordered_does_not(tmp_path: Path) -> None:
    kinds = ("host_lost", "unhealthy", "worker_exit", "hang", "corruption", "unhealthy_steps")
    kinds += ("memory_lost", "restart", "membership", "rollback")
    events = [event(kind=kind, generation=number) for number, kind in enumerate(kinds, 2)]
    seen, _, _ = seen_failures(read_ledger([write(tmp_path / "events", *events)]))
    assert seen == {"host": 2, "software": 4}


def ctl(*arguments: str) -> Result:
    return CliRunner().invoke(resilientctl, ["advise", *arguments])


def test_the_thesis_job_gets_a_standby() -> None:
    arguments = ("--hosts", "1000", "--software-failures", "0", "--days", "10")
    text = ctl(*arguments).stdout
    assert "1000 hosts, 15 failures a day, runs of 10 days" in text
    assert "and --rr-replicas 2, and persist every 496 s (persist.every_s)" in text
    answer = json.loads(ctl(*arguments, "--json").stdout)
    assert answer["advice"]["text"] in text
    assert answer["advice"]["standbys"] in (1, 2)
    best = answer["choices"][answer["advice"]["standbys"]]
    assert best["paid"] == max(each["paid"] for each in answer["choices"])
    assert best["paid"] == pytest.approx(best["goodput"] * 1000 / (1000 + best["standbys"]))
    assert json.loads(ctl(*arguments, "--json").stdout) == answer
    assert json.loads(ctl(*arguments, "--json", "--seed", "2").stdout) != answer


def test_few_hosts_need_none_and_racks_are_shown() -> None:
    text = ctl("--hosts", "8", "--rack-hosts", "4", "--days", "5").stdout
    assert "Keep no standbys and --rr-replicas 2" in text
    table = [line.split() for line in text.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert [row[2] for row in table if len(row) == 7] == ["1", "0"], "a rack of two takes no pair of replicas"


def test_the_command_takes_rates_of_a_run() -> None:
    files = [argument for path in EVENTS for argument in ("--events", path)]
    text = ctl("--hosts", "16", "--period", "864000", *files).stdout
    assert "--host-failures: 1 seen on 2 hosts in 10 days, 0.0" in text
    assert "--software-failures: 2 seen on 2 hosts in 10 days, 0.0" in text
    assert text.count("few, so the range is wide") == 2
    given = ctl("--hosts", "2", "--period", "864000", "--host-failures", "0.5", "--recovery", "9", "--json", *files)
    answer = json.loads(given.stdout)["question"]
    assert (answer["seen"], answer["seen_hosts"], answer["failures"]["host"]) == ({"software": 2}, 2, 0.5)
    assert answer["failures"]["software"] == 2.5 / 20
    assert answer["cost"]["overhead_s"] == 9
    measured = json.loads(ctl("--hosts", "2", "--period", "864000", "--json", *files).stdout)["question"]
    assert 0 < measured["cost"]["overhead_s"] < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "'--hosts'"),
        (("--hosts", "0"), "'--hosts'"),
        (("--hosts", "4", "--rack-hosts", "8"), "--rack-hosts 8 is more than --hosts 4: give at most 4"),
        (("--hosts", "4", "--period", "3"), "--events and --period are about the same run: give both or neither"),
        (("--hosts", "4", "--events", "x"), "--events and --period are about the same run: give both or neither"),
        (("--hosts", "4", "--events", "/no/such", "--period", "3"), "cannot read events from /no/such"),
        (("--hosts", "4", "--step", "0"), "'--step'"),
        (("--hosts", "4", "--link", "nan"), "'--link'"),
        (("--hosts", "4", "--state", "much"), "'--state': 'much' is not a size"),
        (("--hosts", "4", "--host-failures", "-1"), "'--host-failures'"),
        (("--hosts", "4000", "--host-failures", "9"), "--days 54 would simulate 1944108 failures: give at most 0.56"),
        (
            ("--hosts", "99", "--rack-hosts", "99", "--rack-failures", "9"),
            "would simulate 48197 failures: give at most",
        ),
        (("--hosts", "4", "--standbys", "65"), "'--standbys'"),
        (("--hosts", "4", "--step", "1e-310"), "'--step'"),
        (("--hosts", "4", "--tier-stall", "1e300"), "'--tier-stall'"),
        (("--hosts", "4", "--days", "1e308", "--host-failures", "0", "--software-failures", "0"), "'--days'"),
    ],
)
def test_bad_values_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = ctl(*arguments)
    assert done.exit_code != 0
    assert message in done.stderr
