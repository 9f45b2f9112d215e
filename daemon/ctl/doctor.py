"""`resilientctl doctor`: is this host fit for a run, and is the run protected?"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from resilient_run.ckpt.errors import DaemonError

from ..base.settings import Settings
from ..base.spec import Finite, parse_ports
from ..doctor.etcd import etcd_checks
from ..doctor.examine import FAIL, WARN, Finding, examine
from ..doctor.host import host_checks
from ..doctor.network import network_checks
from ..doctor.plan import RunPlan
from ..doctor.run import run_checks
from ..trust.secret import find_key
from .etcd import etcd_options, parse_etcd

_SHOWN = {FAIL: "FAIL", WARN: "warn"}


@click.command()
@etcd_options(of_run=False)
@click.option("--state-gb", type=Finite(0, 1e6, min_open=True), help="GiB of one rank's state.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on this host.")
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    envvar="RESILIENT_REPLICAS",
    default=2,
    show_default=True,
    help="As --rr-replicas of the run.",
)
@click.option("--keep", type=click.IntRange(1, 64), default=1, show_default=True, help="As replication.keep.")
@click.option("--persist", is_flag=True, help="As --rr-persist.")
@click.option("--peer", "peers", multiple=True, metavar="HOST[:PORT]", help="Another host of the run; repeatable.")
@click.option(
    "--port",
    "ports",
    metavar="PORT|FIRST-LAST",
    callback=parse_ports,
    envvar="RESILIENT_PORT",
    help="As --rr-port of the run.",
)
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="RESILIENT_KEY_FILE",
    help="As --rr-key-file of the run.",
)
@click.option("--run-id", help="The run to look at. Default: all runs of this host.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def doctor(
    settings: Settings,
    etcd_endpoint: str | None,
    etcd_conf: str,
    state_gb: float | None,
    nproc: int,
    replicas: int,
    keep: int,
    persist: bool,
    peers: tuple[str, ...],
    ports: range | None,
    key_file: Path | None,
    run_id: str | None,
    as_json: bool,
) -> None:
    """Report what is wrong on this host and with its runs, and what to do about it; exits with 1 if something failed.

    Before a run, describe it (--etcd-endpoint, --state-gb, --nproc, --peer); while it runs, no option is needed.
    It changes nothing, needs no root, and ends within 10 seconds.
    """
    if etcd_conf and etcd_endpoint is None:
        raise click.UsageError("--etcd-conf needs --etcd-endpoint, the address of etcd")
    try:
        key = find_key(key_file, os.environ)
    except DaemonError as error:
        raise click.UsageError(f"--key-file: {error}") from error
    plan = RunPlan(
        settings=settings,
        etcd=None if etcd_endpoint is None else parse_etcd(etcd_endpoint, etcd_conf),
        peers=peers,
        state_bytes=None if state_gb is None else int(state_gb * (1 << 30)),
        nproc=nproc,
        replicas=replicas,
        keep=keep,
        persists=persist or bool(os.environ.get("RESILIENT_PERSIST")),
        ports=ports,
        has_key=key is not None,
        run_id=run_id,
        environ=os.environ,
    )
    findings = examine([*host_checks(plan), *network_checks(plan), *etcd_checks(plan), *run_checks(plan)])
    click.echo(json.dumps(_report(findings)) if as_json else "\n".join(_lines(findings)))
    sys.exit(1 if any(finding.level == FAIL for finding in findings) else 0)


def _report(findings: list[Finding]) -> dict[str, Any]:
    failed = sum(finding.level == FAIL for finding in findings)
    return {"failed": failed, "findings": [asdict(finding) for finding in findings]}


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
        lines.append(f"{_SHOWN.get(finding.level, 'ok'):<5} {finding.check:<{width}}  {finding.found}{remedy}")
    failed, warned = (sum(finding.level == level for finding in findings) for level in (FAIL, WARN))
    return [*lines, f"{len(findings)} findings: {failed} failed, {warned} with a warning"]
