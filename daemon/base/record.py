"""What is written down beside a job's slots, so that the next daemon can adopt them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from resilient_run.ckpt.errors import DaemonError

from ..trust.private import open_new, read_file
from .codec import Record, limited
from .process import started_ticks

RECORD_NAME = "job.json"
_MAX_BYTES = 1 << 16

JobKey = tuple[str, str]
"""Run id, and the name of this host in that run: several launchers of a run on one machine are as many hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord(Record):
    """What `job.json` beside the slots says, enough to adopt them; no secrets.

    Attributes:
        run_id: The run that the slots belong to.
        host: Name of this host in that run.
        incarnation: Life of the run id that made the slots, None until it is known.
        generation: The newest that was seen here in that life, 0 before the first.
        round_revision: The etcd revision of its round, which tells it from another one of that number.
        replicas: Copies of each checkpoint.
        keep: How many committed steps stay in memory.
        attached: A Checkpointer was seen in this incarnation.
        launcher_pid: The launcher that holds the job open, None once it is gone.
        launcher_ticks: When it was started (`started_ticks`), None if an older version has written the record.
    """

    run_id: str
    host: str
    incarnation: str | None = None
    replicas: int = limited(low=1)
    keep: int = limited(1, low=1)
    attached: bool
    launcher_pid: int | None = None
    launcher_ticks: int | None = None
    generation: int = 0
    round_revision: int = 0

    @property
    def key(self) -> JobKey:
        """Which job this is."""
        return self.run_id, self.host

    @property
    def is_open(self) -> bool:
        """Tell whether a live launcher holds the job open, as far as anybody wrote down."""
        if self.launcher_pid is None:
            return False
        try:
            ticks = started_ticks(self.launcher_pid)
        except OSError:
            return psutil.pid_exists(self.launcher_pid)
        return ticks is not None and self.launcher_ticks in (None, ticks)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return the record in `directory`.

        Raises:
            DaemonError: There is none, or it is damaged.
        """
        path = directory / RECORD_NAME
        try:
            values = json.loads(read_file(path, max_bytes=_MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise DaemonError(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise DaemonError(f"{path} is not a JSON object")
        return cls.parse(values, str(path))

    def save(self, directory: Path) -> None:
        """Write the record into `directory`, all or nothing."""
        path = directory / f"{RECORD_NAME}.new"
        with open(open_new(path, 0o600), "w") as file:
            file.write(json.dumps(self.to_value()))
        path.rename(directory / RECORD_NAME)
