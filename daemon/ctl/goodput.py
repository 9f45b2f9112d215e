"""`resilientctl goodput`: what the failures of a run cost."""

import json
from pathlib import Path

import click

from resilient_run.ckpt.errors import DaemonError

from ..base.goodput import PHASES, Ledger, read_ledger
from ..base.spec import Finite
from .advise import table

_POSITIVE = Finite(min=0, min_open=True)


@click.command()
@click.argument("events", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--step", "step_s", type=_POSITIVE, metavar="S", help="Seconds of one training step.")
@click.option("--period", "period_s", type=_POSITIVE, metavar="S", help="Seconds that the run took.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def goodput(events: tuple[Path, ...], step_s: float | None, period_s: float | None, as_json: bool) -> None:
    """Show what each failure cost, from the files of --rr-events of all hosts.

    --step adds the training that was repeated, --period the effective training time ratio.
    """
    try:
        ledger = read_ledger(events, step_s=step_s, period_s=period_s)
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(ledger.describe()) if as_json else _text(ledger))


def _text(ledger: Ledger) -> str:
    header = ["gen", "kind", *(phase.replace("_", " ") for phase in PHASES), "down", "lost", "wasted"]
    rows = [header]
    for failure in ledger.failures:
        numbers = [*(failure.phases_s.get(phase) for phase in PHASES), failure.down_s]
        rows.append(
            [
                str(failure.generation),
                failure.kind if failure.complete else f"{failure.kind} (cut short)",
                *map(_seconds, numbers),
                "-" if failure.steps_lost is None else f"{failure.steps_lost} step(s)",
                _seconds(ledger.wasted_s(failure)),
            ]
        )
    total = ledger.describe()
    lines = [
        table(rows),
        f"{total['count']} failure(s): {total['down_s']:.2f} s without training, {total['steps_lost']} step(s) lost",
    ]
    if ledger.effective_ratio is not None:
        lines.append(f"effective training time ratio: {ledger.effective_ratio:.2%} of {ledger.period_s:g} s")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
