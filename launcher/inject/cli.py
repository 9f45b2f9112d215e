"""The command `resilient-inject`: break a run on purpose, and see how it recovers."""

import asyncio
import json
import tomllib
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.spec import Finite
from resilient_run.daemon.etcd.client import EtcdConfig, EtcdError
from resilient_run.daemon.run.faults import KINDS, Order, Scope

from .campaign import Campaign, plan_campaign
from .campaign_report import render, summarize
from .campaign_run import CampaignRun
from .injection import Injection, InjectionError, Outcome

T = TypeVar("T")


def _etcd_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--rdzv-conf", default="", help="As for resilient-run: user, passwordfile, cacert, cert, key."),
        click.option("--rdzv-endpoint", required=True, help="The run's, as `resilientctl status` shows it."),
        click.option("--run-id", required=True, help="The run's --rdzv-id."),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def resilient_inject() -> None:
    """Break a run on purpose, and see how it recovers.

    It only acts on hosts whose launchers were started with --rr-allow-injection.
    """


@resilient_inject.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_kinds(as_json: bool) -> None:
    """Show the kinds of faults and their parameters."""
    kinds: dict[str, dict[str, Any]] = {
        kind.name: {
            "scope": kind.scope.value,
            "what": kind.what,
            "parameters": kind.parameters().to_value(),
        }
        for kind in KINDS.values()
    }
    if as_json:
        click.echo(json.dumps(kinds))
        return
    for name, kind in kinds.items():
        parameters = ", ".join(f"{parameter}={default}" for parameter, default in kind["parameters"].items())
        click.echo(f"{name:<17} {kind['scope']:<8} {kind['what']}{f' ({parameters})' if parameters else ''}")


@resilient_inject.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@_etcd_options
@click.option("--rank", type=click.IntRange(min=0), help="The rank to strike, or whose host or replica.")
@click.option("--host", help="The host to strike, or that holds the replica; default: the one that runs the rank.")
@click.option("--at-step", type=click.IntRange(min=0), help="Wait until this many steps are completed there.")
@click.option("--after", "after_s", type=Finite(min=0), default=0.0, help="Seconds to wait after that.")
@click.option("-p", "--parameter", "parameters", multiple=True, metavar="NAME=VALUE", help="As `list` shows them.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Finite(min=0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for it to strike, --after not included; then it is taken back.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fault(
    kind: str,
    run_id: str,
    rdzv_endpoint: str,
    rdzv_conf: str,
    rank: int | None,
    host: str | None,
    at_step: int | None,
    after_s: float,
    parameters: tuple[str, ...],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Inject one fault of KIND, and print what it struck; fails if it is refused."""
    values = dict(_parameter(text) for text in parameters)

    async def order(injection: Injection) -> Outcome:
        target = host
        if target is None and rank is not None:
            target = injection.sight.host_of(rank)
        if target is None:
            raise InjectionError(f"{kind}: no host runs rank {rank}; say which (--rank or --host)")
        aims = KINDS[kind].scope in (Scope.RANK, Scope.REPLICA)
        value = {
            "kind": kind,
            "host": target,
            "rank": rank if aims else None,
            "at_step": at_step,
            "after_s": after_s,
            "parameters": values,
        }
        number = await injection.order(Order.parse(value, kind))
        if not await injection.wait_for(lambda sight: number in sight.outcomes, timeout_s=timeout_s + after_s):
            await injection.take_back(number)
            raise InjectionError(f"{kind}: host {target} did not carry it out within {timeout_s:g} s; taken back")
        return injection.sight.outcomes[number]

    outcome = _with_run(run_id, rdzv_endpoint, rdzv_conf, order)
    if as_json:
        click.echo(json.dumps(asdict(outcome)))
    else:
        click.echo(f"host {outcome.host}, step {outcome.step}: {outcome.what}")
    if not outcome.ok:
        raise click.ClickException(f"refused: {outcome.what}")


@resilient_inject.command()
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@_etcd_options
@click.option("--seed", type=click.IntRange(min=0), help="In place of the file's.")
@click.option("--report", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Write JSON here.")
def campaign(
    file: Path, run_id: str, rdzv_endpoint: str, rdzv_conf: str, seed: int | None, report: Path | None
) -> None:
    """Inject the faults that FILE describes, one after the other, and report what each led to.

    Fails when a fault was not recovered from.
    """
    try:
        planned = Campaign.load(file)
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    chosen = planned.limits.seed if seed is None else seed

    async def carry_out(injection: Injection) -> list[dict[str, Any]]:
        assert injection.sight.round is not None
        injection.check(injection.sight.round.hosts)
        plan = plan_campaign(planned, seed=chosen, world_size=injection.sight.round.world_size)
        run = CampaignRun(injection, planned, plan, lambda line: click.echo(line, err=True))
        await run.run()
        return run.entries

    entries = _with_run(run_id, rdzv_endpoint, rdzv_conf, carry_out)
    totals = summarize(entries)
    if report is not None:
        report.write_text(json.dumps({"seed": chosen, "summary": totals, "faults": entries}, indent=2) + "\n")
    click.echo(render(entries))
    if totals["not_recovered"]:
        raise click.ClickException(f"{totals['not_recovered']} fault(s) were not recovered from")


def _with_run(run_id: str, endpoint: str, conf: str, work: Callable[[Injection], Coroutine[Any, Any, T]]) -> T:
    """Return what `work` does with the run."""
    options = dict(part.partition("=")[::2] for part in conf.split(",") if part)

    async def connected() -> T:
        async with Injection(EtcdConfig.parse(endpoint, options), run_id) as injection:
            return await work(injection)

    try:
        return asyncio.run(connected())
    except (InjectionError, EtcdError, DaemonError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _parameter(text: str) -> tuple[str, Any]:
    """Return name and value of NAME=VALUE; a value that is no TOML value is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--parameter")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


if __name__ == "__main__":
    resilient_inject(prog_name="resilient-inject")
