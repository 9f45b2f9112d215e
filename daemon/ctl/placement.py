"""`resilientctl plan-placement`: which hosts would keep whose replicas, and what losses that survives."""

import json
from typing import Any

import click

from resilient_run.ckpt.format.placement import Placement, placement
from resilient_run.ckpt.format.survival import fatal_domains, survival, union_bound

MAX_HOSTS = 100_000


@click.command("plan-placement")
@click.option("--hosts", type=click.IntRange(1, MAX_HOSTS), required=True, help="Number of hosts, N.")
@click.option("--replicas", type=click.IntRange(min=1), required=True, help="Copies of each checkpoint, m.")
@click.option("--failures", type=click.IntRange(min=0), required=True, help="Hosts that are lost at once, k.")
@click.option(
    "--strategy",
    type=click.Choice(["mixed", "ring"]),
    default="mixed",
    show_default=True,
    help="Gemini's Algorithm 6.1, or one ring of all hosts for comparison.",
)
@click.option("--labels", metavar="A,B,…", help="Failure domain (rack, switch) of each host, in order.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_placement(hosts: int, replicas: int, failures: int, strategy: str, labels: str | None, as_json: bool) -> None:
    """Show the placement groups of N hosts and the probability that memory survives the loss of any k of them.

    Hosts are numbered from 0. No daemon is needed.
    """
    names = None if labels is None else [name.strip() for name in labels.split(",")]
    try:
        plan = placement(hosts, replicas, labels=names, strategy="ring" if strategy == "ring" else "mixed")
        answer: dict[str, Any] = {
            "strategy": plan.strategy,
            "groups": plan.groups,
            "survival": float(survival(plan, failures)),
            "bound": float(union_bound(plan, failures)),
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if names is not None:
        answer["fatal_domains"] = fatal_domains(plan, names)
    click.echo(json.dumps(answer) if as_json else _text(answer, plan, failures, names))


def _text(answer: dict[str, Any], plan: Placement, failures: int, labels: list[str] | None) -> str:
    lines = [f"{'group':>5}  hosts{' (domains)' if labels else ''}"]
    for number, group in enumerate(plan.groups):
        members = ", ".join(f"{host} ({labels[host]})" if labels else str(host) for host in group)
        lines.append(f"{number:>5}  {members}")
    lines.append(
        f"strategy {plan.strategy}, {plan.replicas} replicas: the loss of {failures} hosts at once is survived with "
        f"{answer['survival']:.2%} (Corollary 6.1 promises {answer['bound']:.2%})"
    )
    if labels is not None:
        fatal = ", ".join(answer["fatal_domains"]) or "none"
        lines.append(f"domains whose loss takes the last copy of a checkpoint: {fatal}")
    return "\n".join(lines)
