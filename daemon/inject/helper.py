"""`python -m resilient_run.daemon.inject.helper`: faults that the daemon must not carry out, or undo, itself.

The helper lives in a session of its own, so it survives the daemon, launcher and network that it takes away, and what
it does for a while it undoes in any case. It reads a task (one JSON line) from stdin and answers `{"what"}` or
`{"error"}`; after "go" it leaves its parent behind, strikes, waits, and undoes. Without "go" it does nothing.
"""

import json
import os
import secrets
import shutil
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import psutil

from resilient_run.ckpt.errors import DaemonError

from ..base.codec import Record, limited
from ..base.fields import Fields
from .network import CutInterface, SlowInterface
from .victim import Victim, kill_all

MODULE = "resilient_run.daemon.inject.helper"

_DEATH_S = 5.0
_PID_BYTES = 16


class Task(Protocol):
    """One fault. The helper waits `duration_s` between its beginning and its end; 0: there is no end."""

    duration_s: float

    def what(self) -> str:
        """Return what will happen, for a person; raises DaemonError when it cannot or must not."""

    def strike(self) -> None:
        """Make it happen."""

    def undo(self) -> None:
        """Make it end."""


@dataclass(kw_only=True, slots=True)
class LoseHost(Record):
    """A host's launcher, workers and daemon are killed and its slots removed."""

    launcher: Victim
    daemon: Victim
    directory: Path
    duration_s: float = limited(0.0, outside=True)

    def what(self) -> str:
        """Return what will happen."""
        return f"SIGKILL to the launcher and all its workers and to the daemon, {self.directory} removed"

    def strike(self) -> None:
        """Kill everything, the launcher first: it would start the others again."""
        # Other helpers stay: they have something to undo.
        below = [process for process in self.launcher.descendants() if not _is_helper(process)]
        self.launcher.signal(signal.SIGKILL)
        self.daemon.signal(signal.SIGKILL)
        kill_all(below, _DEATH_S)
        shutil.rmtree(self.directory, ignore_errors=True)

    def undo(self) -> None:
        """Nothing: a lost host does not come back by itself."""


@dataclass(kw_only=True, slots=True)
class Standstill(Record):
    """Processes are stopped, and go on after a while."""

    victims: tuple[Victim, ...]
    duration_s: float

    def what(self) -> str:
        """Return what will happen."""
        pids = ", ".join(str(victim.pid) for victim in self.victims)
        return f"SIGSTOP to pid {pids} for {f'{self.duration_s:g} s' if self.duration_s else 'good'}"

    def strike(self) -> None:
        """Stop them."""
        for victim in self.victims:
            victim.signal(signal.SIGSTOP)

    def undo(self) -> None:
        """Let them go on."""
        for victim in self.victims:
            victim.signal(signal.SIGCONT)


@dataclass(kw_only=True, slots=True)
class FillRoom(Record):
    """A file takes the room of a file system for a while."""

    directory: Path
    size_bytes: int
    leave_bytes: int
    duration_s: float
    path: Path = limited(factory=lambda: Path(f"resilient-inject-{secrets.token_hex(8)}"), outside=True)

    def what(self) -> str:
        """Return what will happen."""
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise DaemonError(f"{self.directory} is not a directory that uid {os.geteuid()} can write to")
        return f"{self._needed_bytes()} bytes of {self.directory} taken for {self.duration_s:g} s"

    def strike(self) -> None:
        """Take the room."""
        descriptor = os.open(self.directory / self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(1, self._needed_bytes()))
        finally:
            os.close(descriptor)

    def undo(self) -> None:
        """Give it back."""
        (self.directory / self.path).unlink(missing_ok=True)

    def _needed_bytes(self) -> int:
        room = os.statvfs(self.directory)
        free_bytes = room.f_bavail * room.f_frsize
        return min(free_bytes, self.size_bytes) if self.size_bytes else max(0, free_bytes - self.leave_bytes)


@dataclass(kw_only=True, slots=True)
class EtcdDeath(Record):
    """A member of an etcd cluster is killed."""

    pid: int = limited(high=1 << 30)
    pid_file: str
    duration_s: float = limited(0.0, outside=True)
    victim: Victim | None = limited(None, outside=True)

    def what(self) -> str:
        """Return what will happen."""
        pid = self.pid
        if not pid:
            try:
                pid = _read_pid(self.pid_file)
            except OSError as error:
                raise DaemonError(f"no pid of an etcd member in {self.pid_file}: {error}") from error
            except ValueError:
                # Whoever reads the outcome need not be who may read the file.
                raise DaemonError(f"{self.pid_file} does not hold the pid of an etcd member") from None
        self.victim = Victim.find(pid)
        try:
            program = os.path.basename(psutil.Process(pid).exe())
        except psutil.Error as error:
            raise DaemonError(f"pid {pid} cannot be looked at: {error}") from error
        if program != "etcd":
            raise DaemonError(f"pid {pid} runs {program!r}, not etcd")
        return f"SIGKILL to the etcd member with pid {pid}"

    def strike(self) -> None:
        """Kill it."""
        assert self.victim is not None
        self.victim.signal(signal.SIGKILL)

    def undo(self) -> None:
        """Nothing: whoever runs the member starts it again."""


_TASKS: dict[str, Any] = {
    "lose": LoseHost,
    "stop": Standstill,
    "fill": FillRoom,
    "cut": CutInterface,
    "slow": SlowInterface,
    "kill-etcd": EtcdDeath,
}


def main() -> None:
    """Take one task from the daemon and carry it out."""
    line = sys.stdin.readline()
    if not line:
        return
    try:
        task = _parse(json.loads(line))
        _say({"what": task.what()})
    except (DaemonError, OSError, ValueError) as error:
        _say({"error": str(error)})
        return
    if sys.stdin.readline().strip() != "go":
        return
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork():
        # The daemon waits for this process; the other one is nobody's child from here on.
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    _carry_out(task)


def _parse(value: Any) -> Task:
    fields = Fields(value if isinstance(value, dict) else {}, "task")
    kind = _TASKS.get(fields.text("do"))
    if kind is None:
        raise DaemonError(f"no task {fields.text('do')!r}; there are: {', '.join(_TASKS)}")
    task: Task = kind.of_fields(fields)
    return task


def _carry_out(task: Task) -> None:
    try:
        task.strike()
        if task.duration_s:
            time.sleep(task.duration_s)
    finally:
        if task.duration_s:
            task.undo()


def _is_helper(process: psutil.Process) -> bool:
    try:
        return MODULE in process.cmdline()
    except psutil.Error:
        return False


def _read_pid(path: str) -> int:
    """Return the number that the regular file at `path` holds.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else, or is no regular file.
    """
    # Without waiting, which the opening of a FIFO would do.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError
        return int(file.read(_PID_BYTES))


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
