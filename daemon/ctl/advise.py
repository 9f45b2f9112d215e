"""`resilientctl advise`: how many standbys and replicas a run should have, and how often to persist it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from resilient_run.ckpt.errors import DaemonError

from ..base.advice import MOST_FAILURES, Question, StandbyChoice, compare, rate_interval, seen_failures
from ..base.costs import DAY_S, CheckpointCost, Failures, high_frequency_s
from ..base.goodput import read_ledger
from ..base.spec import Finite, parse_size

_GBIT_BYTES: Final = 1e9 / 8
_FEW: Final = 10
_LEAST: Final = 1e-6
_HOSTS: Final = click.IntRange(1, 4096)
# Losses of hosts are the chapter's, of OPT-175B. In 54 days, on 2,048 hosts in 1,024 racks, Llama 3's training had 54
# failures of software, and 35 of switches and cables (Table 5).
_RATES: Final = {"host": 0.015, "software": 0.0005}
_RECOVERY_S: Final = 420.0


def _number(name: str, unit: str, default: float | None, *, help: str, **limits: Any) -> Callable[[Any], Any]:
    kind = Finite(**{"min": 0, "max": 1e9, **limits})
    return click.option(name, type=kind, metavar=unit, default=default, show_default=default is not None, help=help)


@click.command()
@click.option("--hosts", type=_HOSTS, required=True, metavar="N", help="Hosts that train.")
@click.option("--rack-hosts", type=_HOSTS, metavar="N", help="Hosts of each rack.")
@_number("--host-failures", "X", None, help="Losses per host and day (0.015).", max=100)
@_number("--rack-failures", "X", 0.0006, help="Losses per rack and day.", max=100)
@_number("--software-failures", "X", None, help="Other failures per host and day (0.0005).", max=100)
@_number("--recovery", "S", None, help="Seconds of a recovery, with all hosts there (420).")
@_number("--replace", "S", 300.0, help="Seconds until another host is there.")
@_number("--step", "S", 62.0, help="Seconds of a step.", min=_LEAST)
@click.option("--state", callback=parse_size, default="1118G", show_default=True, metavar="SIZE", help="Of all ranks.")
@_number("--link", "GBIT", 400.0, help="Gbit/s of each host.", min=_LEAST)
@_number("--store", "GBIT", 20.0, help="Gbit/s of the persistent tier.", min=_LEAST)
@_number("--tier-stall", "S", 0.0, help="Seconds for which persisting stops training.")
@click.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Take what is in brackets from a run's --rr-events; for each host.",
)
@_number("--period", "S", None, help="Seconds that this run took.", min=_LEAST)
@click.option("--standbys", type=click.IntRange(0, 64), default=4, show_default=True, metavar="N", help="At most.")
@_number("--days", "X", 54.0, help="Days of a simulated run.", min=_LEAST)
@click.option("--seed", type=int, default=1, show_default=True, metavar="N", help="Of the simulation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(as_json: bool, **given: Any) -> None:
    """Simulate failures: how many standbys and replicas to keep, and how often to persist.

    Defaults: the Gemini chapter's job (Section 6.7), and Llama 3's racks, software and days.
    """
    try:
        question = _question(**given)
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    choices = compare(question)
    best = max(choices, key=lambda choice: choice.paid)
    said = _sentence(question, choices[0], best)
    if as_json:
        answer = {"question": asdict(question), "choices": [asdict(each) for each in choices]}
        best_of = {"standbys": best.standbys, "replicas": best.advised.replicas, "persist_s": best.advised.persist_s}
        click.echo(json.dumps({**answer, "advice": {**best_of, "text": said}}))
    else:
        click.echo("\n\n".join([_seen(question), _standbys(choices), _replicas(best), said]).strip())


def _question(
    *,
    hosts: int,
    rack_hosts: int | None,
    host_failures: float | None,
    rack_failures: float,
    software_failures: float | None,
    recovery: float | None,
    replace: float,
    step: float,
    state: int,
    link: float,
    store: float,
    tier_stall: float,
    events: tuple[Path, ...],
    period: float | None,
    standbys: int,
    days: float,
    seed: int,
) -> Question:
    if (rack_hosts or 0) > hosts:
        raise click.UsageError(f"--rack-hosts {rack_hosts} is more than --hosts {hosts}: give at most {hosts}")
    if bool(events) != (period is not None):
        raise click.UsageError("--events and --period are about the same run: give both or neither")
    rates = {"host": host_failures, "software": software_failures}
    default, counts, seen_hosts, seen_days, recovery_s = _RATES, dict[str, int](), 0, (period or 0.0) / DAY_S, None
    if events:
        counts, seen_hosts, recovery_s = seen_failures(read_ledger(events))
        seen_hosts = seen_hosts or hosts
        default = {name: (count + 0.5) / (seen_hosts * seen_days) for name, count in counts.items()}
    fetch_s = state / hosts / (link * _GBIT_BYTES)
    failures = Failures(
        hosts=hosts,
        **{name: default[name] if rate is None else rate for name, rate in rates.items()},
        rack=rack_failures if rack_hosts else 0.0,
        rack_hosts=rack_hosts or 0,
        replace_s=replace,
        fetch_s=fetch_s,
    )
    # Each host of a lost rack is one.
    per_day = failures.per_day + failures.racks * failures.rack * max(0, failures.rack_hosts - 1)
    if (count := per_day * days) > MOST_FAILURES:
        most = MOST_FAILURES / per_day
        raise click.UsageError(f"--days {days:g} would simulate {count:.0f} failures: give at most {most:.2g} days")
    # A checkpoint counts once the step is over that carries it (Section 6.7.2).
    interval_s = high_frequency_s(fetch_s, step)
    measured_s = _RECOVERY_S if recovery_s is None else recovery_s
    cost = CheckpointCost(
        interval_s=interval_s,
        checkpoint_s=interval_s,
        retrieval_s=0.0,
        overhead_s=measured_s if recovery is None else recovery,
    )
    return Question(
        cost=cost,
        failures=failures,
        write_s=state / (store * _GBIT_BYTES),
        tier_stall_s=tier_stall,
        most_standbys=standbys,
        days=days,
        seed=seed,
        seen={name: count for name, count in counts.items() if rates[name] is None},
        seen_hosts=seen_hosts,
        seen_days=seen_days,
    )


def _seen(question: Question) -> str:
    failures = question.failures
    lines = [f"{failures.hosts} hosts, {failures.per_day:.3g} failures a day, runs of {question.days:g} days"]
    for name, count in question.seen.items():
        low, high = rate_interval(count, question.host_days)
        lines.append(
            f"--{name}-failures: {count} seen on {question.seen_hosts} hosts in {question.seen_days:.3g} days,"
            f" {low:.2g} to {high:.2g} per host and day (90 %){'; few, so the range is wide' if count < _FEW else ''}"
        )
    return "\n".join(lines)


def _standbys(choices: Sequence[StandbyChoice]) -> str:
    rows = [
        [
            str(choice.standbys),
            f"{choice.goodput:.2%} ± {choice.error:.2%}",
            f"{choice.low:.2%} to {choice.high:.2%}",
            f"{choice.paid:.2%}",
            f"{choice.idle:.1f}",
        ]
        for choice in choices
    ]
    return table([["standbys", "goodput", "90 % of runs", "of all hosts", "idle"], *rows])


def _replicas(best: StandbyChoice) -> str:
    rows = [
        [
            str(each.replicas),
            f"{each.at_once:.2g}",
            "-" if each.with_rack is None else f"{each.with_rack:.2g}",
            f"{365 * each.lost_per_day:.2g}",
            _seconds(each.persist_s),
            f"{each.cost:.2%}",
        ]
        for each in best.replicas
    ]
    header = ["replicas", "P(lost | m hosts)", "P(lost | rack)", "losses a year", "persist every", "cost"]
    return table([header, *rows])


def _sentence(question: Question, none: StandbyChoice, best: StandbyChoice) -> str:
    hosts = question.failures.hosts + best.standbys
    gain = f", {100 * (best.paid - none.paid):.1f} points more than without standbys" if best.standbys else ""
    more = " More may be better: raise --standbys." if 0 < best.standbys == question.most_standbys else ""
    return (
        f"Keep {best.standbys or 'no'} standby{'' if best.standbys == 1 else 's'} and --rr-replicas"
        f" {best.advised.replicas}, and persist every {_seconds(best.advised.persist_s)} (persist.every_s):"
        f" {best.paid:.1%} of the time of all {hosts} hosts is progress{gain}.{more}"
    )


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
