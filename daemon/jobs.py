"""The jobs of this host: opened, failed apart from each other, closed, and collected when nobody comes back."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from .base.process import started_ticks
from .base.record import JobKey, JobRecord
from .base.spec import JobSpec
from .job import Job, describe_slots
from .slots.slots import JobSlots
from .slots.vault import Vault

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
_MAX_JOBS = 64


class Jobs:
    """Every job of this host, and what dead ones left.

    Args:
        vault: Their slots.
        spawn: Runs a function, with what is given besides, as a task that the daemon cancels at its end.
        disks: Directories of this host that need room.
    """

    def __init__(self, vault: Vault, spawn: Callable[..., asyncio.Task[None]], *, disks: Sequence[Path] = ()) -> None:
        self._vault = vault
        self._disks = tuple(disks)
        self._spawn = spawn
        self._jobs: dict[JobKey, Job] = {}
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._left: dict[JobKey, tuple[JobSlots, float]] = {}
        self._changing = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """Tell whether this host has no job and no slots."""
        return not self._jobs and not self._left

    def find(self, run_id: str, host: str = "") -> Job | None:
        """Return the job of `run_id` on `host`, "" for its only one; None when it was not opened since we started."""
        if host:
            return self._jobs.get((run_id, host))
        found = [job for key, job in self._jobs.items() if key[0] == run_id]
        return found[0] if len(found) == 1 else None

    async def find_opened(self, run_id: str, host: str, timeout_s: float) -> Job | None:
        """Return what `find` does, waiting up to `timeout_s` for its launcher to open it; None when none did."""
        deadline_s = time.monotonic() + timeout_s
        while (job := self.find(run_id, host)) is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_AGAIN_S)
        return job

    def scan(self) -> None:
        """Find what an earlier daemon left; `adopt` takes it over."""
        now_s = time.monotonic()
        self._left = {slots.record.key: (slots, now_s) for slots in self._vault.scan()}

    async def adopt(self) -> None:
        """Take over and verify what `scan` found; launchers may open these jobs meanwhile."""
        for slots, _ in list(self._left.values()):
            await slots.adopt()
            log.info("adopted run %r: holds %s", slots.record.run_id, slots.held())

    async def open(self, spec: JobSpec, *, pid: int, notify: Callable[[dict[str, Any]], None]) -> Job:
        """Return the job that `spec` describes, now held open by the launcher `pid`; what it left is found again.

        Raises:
            DaemonError: Another live launcher holds it open, nothing can be kept of it, or there are too many others.
        """
        async with self._changing:
            job = self._jobs.get(spec.key)
            if job is None and len(self._jobs) >= _MAX_JOBS:
                raise DaemonError(
                    f"this daemon has {_MAX_JOBS} runs open, and takes no more: end some (`resilientctl status` shows "
                    "them), or start one with a RESILIENT_RUN_DIR and RESILIENT_SHM_DIR of its own"
                )
            if job is not None and job.launcher_pid not in (None, pid) and job.slots.record.is_open:
                raise DaemonError(
                    f"run id {spec.run_id!r} already has a live launcher on host {job.spec.host}: pid "
                    f"{job.launcher_pid}; choose another run id (--rdzv-id), or another RESILIENT_HOST_ID and "
                    f"RESILIENT_RUN_DIR for a second host on one machine"
                )
            record = JobRecord(
                run_id=spec.run_id,
                host=spec.host,
                incarnation=None,
                replicas=spec.replicas,
                keep=spec.policy.replication.keep,
                attached=False,
                launcher_pid=pid,
                launcher_ticks=_ticks_of(pid),
            )
            slots = self._vault.open(record)
            self._left.pop(spec.key, None)
            if job is None or job.spec != spec or job.failure is not None:
                if job is not None:
                    await self._stop(job)
                job = self._jobs[spec.key] = Job(spec, slots, self._disks)
                self._tasks[job] = self._spawn(self._run, job)
            job.open(pid, notify)
            return job

    async def close(self, job: Job, *, discard: bool) -> None:
        """Give `job` up; with `discard` its slots go at once, else it stays as if its launcher had died.

        So other hosts still get what they need of it. Its last step is in the persistent tier, if there is one, when
        this returns. Whoever waits for that may then end the container, or the step of a scheduler, that this daemon
        is in.
        """
        async with self._changing:
            if self._jobs.get(job.spec.key) is not job:
                return
            if discard:
                await self._discard(job)
                return
            job.release()
        await job.persist()

    async def persist(self) -> None:
        """Let every job that has a persistent tier write its newest committed step there: the daemon is to end."""
        await asyncio.gather(*(job.persist() for job in list(self._jobs.values())))

    async def collect(self, orphan_ttl_s: float) -> None:
        """Remove what nobody has come back for in `orphan_ttl_s`, as far as `collect_garbage` would."""
        for run_id, _ in await self._remove_gone(before_s=time.monotonic() - orphan_ttl_s):
            log.info("no launcher came back for run %r; its slots are removed", run_id)

    async def collect_garbage(self) -> dict[str, Any]:
        """Remove every job that nobody has open, and return what was removed.

        While a launcher of its run lives on this machine it stays: the run may have no other copy of these slots.
        """
        found = await self._remove_gone(before_s=math.inf)
        return {"removed": [run_id for run_id, _ in found], "freed_bytes": sum(freed_bytes for _, freed_bytes in found)}

    async def _remove_gone(self, *, before_s: float) -> list[tuple[str, int]]:
        """Remove the jobs without a launcher since `before_s` whose slots nobody needs; return runs and freed bytes."""
        removed = []
        async with self._changing:
            gone = self._gone()
            for job in list(self._jobs.values()):
                if job.launcher_pid is None and job.orphaned_s < before_s and job.spec.key in gone:
                    removed.append((job.spec.run_id, await self._discard(job)))
            for key, (slots, since_s) in list(self._left.items()):
                if since_s < before_s and key in gone:
                    del self._left[key]
                    removed.append((slots.record.run_id, await self._vault.remove(slots)))
        return removed

    def describe(self) -> list[dict[str, Any]]:
        """Return every job, open or left, for `resilientctl status`."""
        open_jobs = [job.describe() for job in self._jobs.values()]
        return open_jobs + [describe_slots(slots) for slots, _ in self._left.values()]

    def totals(self) -> dict[str, int]:
        """Return what all slots together take and may take."""
        budget = self._vault.budget
        return {"used_bytes": budget.used_bytes, "limit_bytes": budget.limit_bytes}

    def _gone(self) -> set[JobKey]:
        """Return the jobs whose slots nobody needs: no launcher of their run lives here, and nothing keeps them."""
        found = [job.slots for job in self._jobs.values()] + [slots for slots, _ in self._left.values()]
        alive = {slots.record.run_id for slots in found if slots.record.is_open}
        return {slots.record.key for slots in found if slots.record.run_id not in alive and not slots.is_kept}

    async def _discard(self, job: Job) -> int:
        await self._stop(job)
        return await self._vault.remove(job.slots)

    async def _stop(self, job: Job) -> None:
        del self._jobs[job.spec.key]
        task = self._tasks.pop(job)
        task.cancel()
        await asyncio.wait([task])

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
        except Exception as error:  # the boundary between jobs
            log.exception("job %r failed", job.spec.run_id)
            job.fail(error)


def _ticks_of(pid: int) -> int | None:
    try:
        return started_ticks(pid)
    except OSError:
        return None  # the pid alone has to do
