"""The vault: the slots of every job of this host; they outlive the daemon and are adopted again by the next one."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
from pathlib import Path

from resilient_run.ckpt.errors import DaemonError

from .memory import MemoryBudget
from .record import JobRecord
from .slots import JobSlots

log = logging.getLogger(__name__)

_DIRECTORY_NAME = re.compile(r"[0-9a-f]{32}")


class Vault:
    """The slots of every job, below one private tmpfs directory.

    Args:
        shm_dir: The directory; made by `open_directory`.
        budget: What all slots together may take.
    """

    def __init__(self, shm_dir: Path, budget: MemoryBudget) -> None:
        self._shm_dir = shm_dir
        self.budget = budget
        self._jobs: dict[str, JobSlots] = {}

    def scan(self) -> list[JobSlots]:
        """Return the jobs that an earlier daemon left, not yet adopted; directories without a record are removed."""
        for directory in sorted(self._shm_dir.iterdir()):
            if not _DIRECTORY_NAME.fullmatch(directory.name):
                continue
            try:
                record = JobRecord.load(directory)
            except DaemonError as error:
                log.error("removing %s: %s", directory, error)
                shutil.rmtree(directory, ignore_errors=True)
                continue
            self._jobs[record.run_id] = JobSlots(directory=directory, record=record, budget=self.budget)
        return list(self._jobs.values())

    def open(self, record: JobRecord) -> JobSlots:
        """Return the slots of the job that `record` describes, those that exist included; the record is written.

        Raises:
            DaemonError: The run id belongs to another user.
        """
        slots = self._jobs.get(record.run_id)
        if slots is None:
            directory = self._shm_dir / hashlib.blake2b(record.run_id.encode(), digest_size=16).hexdigest()
            directory.mkdir(mode=0o700)
            if record.uid != os.geteuid():
                os.chown(directory, record.uid, -1)
            record.save(directory)
            slots = JobSlots(directory=directory, record=record, budget=self.budget, adopted=True)
            self._jobs[record.run_id] = slots
            return slots
        if slots.record.uid != record.uid:
            raise DaemonError(f"run id {record.run_id!r} is in use by another user on this host; choose another run id")
        slots.update_record(host=record.host, replicas=record.replicas, launcher_pid=record.launcher_pid)
        return slots

    async def remove(self, slots: JobSlots) -> int:
        """Remove a job with all its slots and return the bytes freed."""
        self._jobs.pop(slots.record.run_id, None)
        return await slots.remove()


def open_directory(path: Path, *, mode: int) -> None:
    """Make sure that `path` is a directory of ours that nobody else can write to.

    Raises:
        DaemonError: It is something else, or somebody else's.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode, parents=True)
    stat = path.lstat()
    if path.is_symlink() or not path.is_dir() or stat.st_uid != os.geteuid():
        raise DaemonError(
            f"{path} must be a directory owned by uid {os.geteuid()}, it belongs to uid {stat.st_uid}; "
            f"remove it or choose another (--run-dir, --shm-dir)"
        )
    path.chmod(mode)
