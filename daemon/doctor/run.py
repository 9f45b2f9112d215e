"""Checks of the daemon here and of its runs: do commits keep up, and who holds what would be restored?"""

import os
import time
from collections.abc import Iterator
from typing import Any

from resilient_run.ckpt.errors import CheckpointError
from resilient_run.ckpt.format.version import FORMATS

from ..base.ask import ask_daemon
from ..base.settings import Settings, server_pid
from ..base.supervise import task_lines
from .examine import Check, Finding, fail, ok, warn
from .plan import RunPlan

_ANSWER_S = 2.5
_WATCHED_S = 2.0
_LATE_STEPS = 3
_LEASE_S = 5.0

_REMEDIES = {
    "hang": "look at the ranks that it names (py-spy dump); put what takes that long into Checkpointer.pause()",
    "peer_unreachable": "open TCP between the two hosts (--rr-port), or restart that daemon; its log says more",
    "memory": "end what uses the memory, or use fewer replicas (--rr-replicas)",
    "disk": "make room there",
    "tmpfs": "remove what else is in it, or enlarge it (mount -o remount,size=…)",
    "load": "end other processes that use the CPUs",
    "gpu": "see `nvidia-smi -q` and the driver's messages in `dmesg`; a GPU that stays broken has to be replaced",
    "replication_slow": "a faster network, or replication.max_every: docs/operations/memory.md#when-replicas-travel",
    "corruption": "a rank computes wrongly: take the host that is blamed out of the run, and test it",
}

_Job = dict[str, Any]


def run_checks(plan: RunPlan) -> list[Check]:
    """Return the checks of the daemon and of its runs."""
    late = "the daemon is stuck: its log says with what"
    return [Check(name="daemon", look=lambda: _daemon(plan), within_s=2 * _ANSWER_S + _WATCHED_S + 1, when_late=late)]


def _daemon(plan: RunPlan) -> Iterator[Finding]:
    settings = plan.settings
    address = settings.address()
    where = f"see {settings.log_path}" if not settings.is_service else "see `journalctl -u 'resilientd@*'`"
    if not os.path.lexists(address):
        yield from _no_daemon(settings, plan)
        return
    try:
        before = ask_daemon(address, "status", within_s=_ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError):
        yield from _stale(settings, where)
        return
    except PermissionError as error:
        yield fail("daemon", str(error), "choose directories of your own (RESILIENT_RUN_DIR, RESILIENT_SHM_DIR)")
        return
    except (TimeoutError, BlockingIOError):
        found = f"{address} accepts connections, but does not answer within {_ANSWER_S:g} s (pid {server_pid(address)})"
        yield fail("daemon", found, f"kill -CONT it, if it was stopped; else {where}, and kill it: another one starts")
        return
    except (OSError, CheckpointError) as error:
        yield fail("daemon", f"{address}: {error}", where)
        return
    yield _version(before, settings)
    yield from _tasks("the daemon", before.get("tasks", []), where)
    jobs = [job for job in before["jobs"] if plan.run_id in (None, job["run_id"])]
    if plan.run_id is not None and not jobs:
        known = ", ".join(sorted({job["run_id"] for job in before["jobs"]})) or "none"
        remedy = "name one of them, or ask on a host of that run; RESILIENT_RUN_DIR says which daemon is asked"
        yield fail("run", f"the daemon here knows no run {plan.run_id!r} (it knows {known})", remedy)
    if any(job.get("attached_ranks") for job in jobs):
        time.sleep(_WATCHED_S)
        after = ask_daemon(address, "status", within_s=_ANSWER_S)
    else:
        after = before
    later = {(job["run_id"], job["host"]): job for job in after["jobs"]}
    for job in jobs:
        try:
            yield from _run(job, later.get((job["run_id"], job["host"]), job), where)
        except KeyError as error:  # formats alone do not tell versions apart
            found = f"the daemon tells no {error} of run {job['run_id']}: it is of another resilient-run"
            yield fail("daemon", found, f"kill {before['pid']}, between runs: the next launcher starts one")


def _no_daemon(settings: Settings, plan: RunPlan) -> Iterator[Finding]:
    if settings.is_service:
        found = f"the service of {settings.run_dir} does not run"
        yield fail("daemon", found, "systemctl start resilientd@USER, or --rr-run-dir with a directory of your own")
    elif plan.run_id is not None:
        remedy = "ask on a host of the run; RESILIENT_RUN_DIR and RESILIENT_SHM_DIR say which daemon is asked"
        yield fail("daemon", f"none runs at {settings.address()}", remedy)
    else:
        yield ok("daemon", "none runs; a launcher starts one")


def _stale(settings: Settings, where: str) -> Iterator[Finding]:
    """A daemon that ends takes its socket along."""
    found = f"{settings.address()} was left by a killed daemon, and nothing serves it"
    if settings.is_service:
        yield fail("daemon", found, f"systemctl start resilientd@USER; {where}")
    else:
        yield warn("daemon", found, f"the next launcher starts one, which goes on with its slots; {where}")


def _version(answer: dict[str, Any], settings: Settings) -> Finding:
    pid, theirs = answer["pid"], answer.get("formats", {})
    differing = [
        f"{name} {theirs.get(name, 'unknown')}, not {ours}"
        for name, ours in FORMATS.items()
        if theirs.get(name) != ours
    ]
    if not differing:
        return ok("daemon", f"pid {pid}, {len(answer['jobs'])} run(s), of this version")
    start = "systemctl restart resilientd@USER" if settings.is_service else f"kill {pid}: the next launcher starts one"
    return fail("daemon", f"pid {pid} is of another resilient-run ({'; '.join(differing)})", f"{start}, between runs")


def _tasks(owner: str, tasks: list[dict[str, Any]], where: str) -> Iterator[Finding]:
    for task, line in zip(tasks, task_lines(tasks, time.time()), strict=True):
        found = f"{owner}: {line.strip()}"
        yield warn("tasks", found, where) if task["running"] else fail("tasks", found, where)


def _run(before: _Job, job: _Job, where: str) -> Iterator[Finding]:
    run = f"run {job['run_id']} on host {job['host']}"
    if job.get("failure"):
        yield fail("run", f"{run}: {job['failure']}", f"put that right and restart the launcher; {where}")
        return
    if job.get("launcher_pid") is None:
        yield warn(
            "run",
            f"{run} has no launcher: its slots are kept for a while",
            "start it again with the same --rdzv-id, or `resilientctl gc` removes its slots",
        )
        if (tier := job.get("persist")) is not None:
            yield _persistent_tier(run, tier)
        return
    missing = sorted(set(job["own_ranks"]) - set(job["attached_ranks"]))
    yield ok("run", f"{run}: generation {job['generation']}, ranks {job['own_ranks']} of {job['world_size']}")
    if missing:
        yield warn(
            "trainers",
            f"{run}: ranks {missing} have no Checkpointer yet",
            "a script that has just been started makes it soon; else let every rank make one (docs/api.md)",
        )
    yield from _etcd(run, job)
    if job["attached_ranks"]:
        yield _commits(run, before, job)
        yield _captures(run, before, job)
    yield from _replicas(run, job)
    if (tier := job.get("persist")) is not None:
        yield _persistent_tier(run, tier)
    for host, quarantine in sorted(job["root"]["quarantines"].items()):
        if (left_s := quarantine["until_unix_s"] - time.time()) > 0:
            found = f"{run}: host {host} is avoided for another {left_s:.0f} s: {quarantine['reason']}"
            yield warn("quarantine", found, f"check host {host}, and keep a standby until then")
    for seen in job.get("observations", []):
        if seen["severity"] != "info":
            level = fail if seen["severity"] == "fail" else warn
            remedy = _REMEDIES.get(seen["kind"], "see docs/operations/monitoring.md#what-the-daemon-watches")
            yield level(seen["kind"].replace("_", "-"), f"{run}: {seen['message']}", remedy)
    yield from _tasks(run, job.get("tasks", []), where)


def _etcd(run: str, job: _Job) -> Iterator[Finding]:
    silent_s = job.get("etcd_silent_s")
    again = f"see `resilientctl doctor --etcd-endpoint {job['etcd']}`"
    if silent_s is None:
        yield fail("etcd-lease", f"{run}: etcd at {job['etcd']} has never confirmed this daemon's lease", again)
    elif silent_s > _LEASE_S:
        yield fail("etcd-lease", f"{run}: etcd at {job['etcd']} has been silent for {silent_s:.0f} s", again)
    else:
        yield ok("etcd-lease", f"{run}: confirmed {silent_s:.1f} s ago by {job['etcd']}")


def _commits(run: str, before: _Job, job: _Job) -> Finding:
    committed, risk = _committed(job), job["protection"]["steps_at_risk"]
    moved = committed - _committed(before)
    done = (committed + risk) - (_committed(before) + before["protection"]["steps_at_risk"])
    found = f"{run}: step {committed} is committed, {risk} more {'is' if risk == 1 else 'are'} at risk"
    remedy = "`resilientctl status` on every host shows whose replicas are behind; then its network, memory and etcd"
    if not job["protection"]["protected"]:
        return fail("commits", f"{found}: {job['protection']['reason']}", remedy)
    if moved <= 0 and risk > _LATE_STEPS * job["replication"]["every"]:
        return fail("commits", f"{found}: nothing was committed in {_WATCHED_S:g} s", remedy)
    return ok("commits", f"{found}; {max(done, 0)} completed and {max(moved, 0)} committed in {_WATCHED_S:g} s")


def _captures(run: str, before: _Job, job: _Job) -> Finding:
    every, reason = job["replication"]["every"], job["replication"]["reason"]
    missed = job["protection"]["missed_captures"]
    lately = missed - before["protection"]["missed_captures"]
    if lately > 0:
        return warn(
            "captures",
            f"{run}: {lately} were skipped in {_WATCHED_S:g} s, {missed} in all",
            "steps are shorter than commits, or the state changes while it is copied: "
            "docs/operations/monitoring.md#when-a-run-is-not-protected",
        )
    if every > 1:
        remedy = "a faster network between the hosts, or replication.max_every = 1"
        return warn("captures", f"{run}: one of {every} steps is captured: {reason}", remedy)
    return ok("captures", f"{run}: every step is captured; {missed} were skipped in all")


def _replicas(run: str, job: _Job) -> Iterator[Finding]:
    holders, wanted = job["holders"], job["replicas"]
    if (watermark := job.get("watermark")) is None or not holders:
        return
    pair = watermark["generation"], watermark["step"]
    here = {slot["rank"] for slot in job["slots"] if (slot["generation"], slot["step"]) == pair}
    found = f"{run}: {len(holders)} of step {pair[1]}, on {', '.join(holders)}"
    if absent := sorted(set(job["own_ranks"]) - here):
        remedy = "wait until they are fetched; `resilientctl status` shows what is here"
        yield warn("replicas", f"{found}; this host does not hold ranks {absent} yet", remedy)
    elif len(holders) < min(wanted, 2) and job.get("persist") is None:
        yield warn(
            "replicas",
            f"{found} alone: what is committed is lost with this host",
            "run on more hosts than one, or keep steps beyond them with --rr-persist",
        )
    else:
        yield ok("replicas", found)


def _persistent_tier(run: str, tier: dict[str, Any]) -> Finding:
    if tier["error"]:
        remedy = "make it reachable and writable for the daemon, whose environment has the credentials"
        return fail("persistent-tier", f"{run}: {tier['target']}: the last attempt failed: {tier['error']}", remedy)
    written = f"this host wrote step {tier['written'][1]}" if tier["written"] else "nothing was due yet"
    return ok("persistent-tier", f"{run}: {tier['target']}: {written}")


def _committed(job: _Job) -> int:
    return 0 if job.get("watermark") is None else int(job["watermark"]["step"])
