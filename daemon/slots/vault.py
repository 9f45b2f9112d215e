"""The vault: the slots of every job of this host; they outlive the daemon and are adopted again by the next one."""

import hashlib
import logging
import re
import shutil
from pathlib import Path

from resilient_run.ckpt.errors import DaemonError

from ..base.record import RECORD_NAME, JobKey, JobRecord
from .memory import MemoryBudget
from .slots import JobSlots

log = logging.getLogger(__name__)

_DIRECTORY_NAME = re.compile(r"[0-9a-f]{32}")


class Vault:
    """The slots of every job, below one private tmpfs directory, which its owner has locked.

    A job is one host of a run: two launchers of a run on one machine have one each.

    Args:
        shm_dir: The directory; made by `open_directory`.
        budget: What all slots together may take.
    """

    def __init__(self, shm_dir: Path, budget: MemoryBudget) -> None:
        self._shm_dir = shm_dir
        self.budget = budget
        self._jobs: dict[JobKey, JobSlots] = {}

    def scan(self) -> list[JobSlots]:
        """Return the jobs that an earlier daemon left, not yet adopted; what cannot be read is left alone."""
        for directory in sorted(self._shm_dir.iterdir()):
            if not _DIRECTORY_NAME.fullmatch(directory.name) or directory.is_symlink():
                continue
            try:
                record = JobRecord.load(directory)
            except DaemonError as error:
                self._leave(directory, error)
                continue
            self._jobs[record.key] = JobSlots(directory=directory, record=record, budget=self.budget)
        return list(self._jobs.values())

    def open(self, record: JobRecord) -> JobSlots:
        """Return the slots of the job that `record` describes, those that exist included; the record is written.

        Raises:
            DaemonError: Its slots are another version's, or the tmpfs is full.
        """
        slots = self._jobs.get(record.key)
        if slots is None:
            name = "\0".join(record.key).encode()
            directory = self._shm_dir / hashlib.blake2b(name, digest_size=16).hexdigest()
            try:
                directory.mkdir(mode=0o700)
            except FileExistsError:
                raise DaemonError(
                    f"{directory} has what another version kept of run {record.run_id!r}: go on with that version, or "
                    f"remove the directory"
                ) from None
            try:
                record.save(directory)
            except OSError as error:
                shutil.rmtree(directory, ignore_errors=True)
                raise DaemonError(
                    f"cannot keep anything of run {record.run_id!r} in {self._shm_dir}: {error}; make room in the "
                    f"tmpfs, or choose another (--rr-shm-dir)"
                ) from error
            slots = JobSlots(directory=directory, record=record, budget=self.budget, adopted=True)
            self._jobs[record.key] = slots
            return slots
        changed = ("replicas", "keep", "launcher_pid", "launcher_ticks")
        slots.update_record(**{name: getattr(record, name) for name in changed})
        return slots

    async def remove(self, slots: JobSlots) -> int:
        """Remove a job with all its slots and return the bytes freed."""
        self._jobs.pop(slots.record.key, None)
        return await slots.remove()

    def _leave(self, directory: Path, error: DaemonError) -> None:
        """Count a directory whose record cannot be read, unless it is one that a daemon was about to make."""
        sizes_bytes = [path.lstat().st_size for path in directory.glob("*.slot")]
        if not sizes_bytes and not (directory / RECORD_NAME).exists():
            shutil.rmtree(directory, ignore_errors=True)
            return
        log.error("%s is left alone: %s; remove it when no version needs it", directory, error)
        self.budget.found(directory.name, sum(sizes_bytes))
