"""`resilientctl status`: what the daemon of this host holds, and what it knows of its jobs."""

import json
import time
from collections.abc import Iterator
from typing import Any

import click

from ..base.settings import Settings
from ..base.supervise import task_lines
from .ask import ask

_SHOWN_DECISIONS = 5
_SILENT_S = 5.0  # it confirms a lease far more often


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(settings: Settings, as_json: bool) -> None:
    """Show the jobs, ranks, slots, bytes, watermarks and observations of this host."""
    answer = ask(settings, "status")
    try:
        click.echo(json.dumps(answer) if as_json else _status_text(answer))
    except KeyError as error:
        raise click.ClickException(
            f"the daemon (pid {answer.get('pid')}) tells no {error}: it is of another resilient-run; --json prints "
            "what it tells, and the next launcher starts one of this version once it is ended between runs"
        ) from error


def _status_text(answer: dict[str, Any]) -> str:
    gib = 1 << 30
    used, limit = answer["used_bytes"] / gib, answer["limit_bytes"] / gib
    lines = [f"resilientd pid {answer['pid']}: {used:.3f} of {limit:.3f} GiB in slots, {len(answer['jobs'])} job(s)"]
    now_unix_s = time.time()
    lines += task_lines(answer.get("tasks", []), now_unix_s)
    for job in answer["jobs"]:
        lines += _job_lines(job, now_unix_s)
    return "\n".join(lines)


def _job_lines(job: dict[str, Any], now_unix_s: float) -> Iterator[str]:
    yield f"{job['run_id']} on host {job['host']}: {_state(job)}"
    if job.get("etcd"):
        silent_s = job.get("etcd_silent_s") or 0.0
        yield f"  etcd: {job['etcd']}{f', silent for {silent_s:.0f} s' if silent_s > _SILENT_S else ''}"
    if job.get("failure"):
        yield f"  failed: {job['failure']}"
    if (protection := job.get("protection")) is not None:
        why = f"; not protected, at most {protection['most_steps']}: {protection['reason']}"
        yield f"  {protection['steps_at_risk']} step(s) at risk{'' if protection['protected'] else why}"
    if len(job.get("holders", [])) > 1:
        yield f"  replicas every {job['replication']['every']} step(s): {job['replication']['reason']}"
    if (tier := job.get("persist")) is not None:
        step = f"step {tier['written'][1]}" if tier["written"] else "nothing yet"
        problem = f"; the last attempt: {tier['error']}" if tier["error"] else ""
        yield f"  persistent tier {tier['target']}: this host wrote {step}{problem}"
    for seen in job.get("observations", []):
        yield f"  {seen['severity']}: {seen['kind']}: {seen['message']}"
    yield from task_lines(job.get("tasks", []), now_unix_s)
    if "root" in job:
        yield from root_lines(job["root"], now_unix_s)
    for slot in job["slots"]:
        held = f"generation {slot['generation']} step {slot['step']}" if slot["step"] is not None else "-"
        size = f"{slot['bytes'] / (1 << 20):>10.1f} MiB"
        yield f"  rank {slot['rank']:<5} {slot['file']:<18} {size}  {slot['state']:<8}  {held}"


def _state(job: dict[str, Any]) -> str:
    if "generation" not in job:
        return "left by an earlier daemon, and no launcher has come back: what it committed is not known here"
    launcher = f"launcher pid {job['launcher_pid']}" if job["launcher_pid"] else "no launcher"
    watermark, own, all_ = job.get("watermark"), job["own_ranks"], job["world_size"]
    committed = f"step {watermark['step']} (generation {watermark['generation']})" if watermark else "nothing"
    ranks = f"standby for {all_} ranks" if job["launcher_pid"] and all_ and not own else f"ranks {own} of {all_}"
    return f"{launcher}, generation {job['generation']}, {ranks}, committed {committed}"


def root_lines(root: dict[str, Any], now_unix_s: float) -> list[str]:
    """Return the lines about who is root, which hosts are in quarantine, and what was decided last."""
    lines = [f"  root: host {root['host']}" if root["host"] else "  root: none elected"]
    for host, quarantine in sorted(root["quarantines"].items()):
        left_s = quarantine["until_unix_s"] - now_unix_s
        if left_s > 0:
            lines.append(f"  host {host} is in quarantine for another {left_s:.0f} s: {quarantine['reason']}")
    for entry in root["decisions"][-_SHOWN_DECISIONS:]:
        clock = time.strftime("%H:%M:%S", time.localtime(entry.get("unix_s", 0)))
        lines.append(f"  {clock} generation {entry.get('generation')}: {entry.get('reason')}")
    return lines
