"""The daemon's end of a fault helper: started beforehand, asked whether it can, and told to strike."""

import asyncio
import json
import subprocess
import sys
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from ..base.fields import Fields
from ..base.process import restore_file_limit
from .helper import MODULE


class Detached:
    """One helper process; `start` it early, because a new interpreter takes its time.

    Use it as an asynchronous context manager: without `go` the helper ends with it and has done nothing.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def start(cls) -> Self:
        """Return a helper, which may do what this daemon may do.

        Raises:
            DaemonError: It cannot be started.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise DaemonError(f"cannot start a process for the fault: {error}") from error
        restore_file_limit(process.pid)
        return cls(process)

    async def __aenter__(self) -> Self:
        """Return this object."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Let go of the helper."""
        await asyncio.to_thread(self._release)

    async def prepare(self, task: dict[str, Any]) -> str:
        """Hand the helper its task and return what it will do.

        Raises:
            DaemonError: It cannot, or must not.
        """
        answer = Fields(await asyncio.to_thread(self._ask, task), "the fault's process")
        try:
            return answer.text("what")
        except DaemonError:
            raise DaemonError(answer.text("error")) from None

    def go(self) -> None:
        """Let the helper strike."""
        self._send("go")

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdout is not None
        self._send(json.dumps(task))
        line = self._process.stdout.readline()
        if not line:
            raise DaemonError("the fault's process ended without an answer; see the daemon's log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _release(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # At the end of its input a helper that was not told to go ends; one that was has left this process behind.
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
