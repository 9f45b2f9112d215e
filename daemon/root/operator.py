"""Who is asked for hosts, to replace one or to stand by, and takes them back (the cloud operator of Gemini, 6.6.2)."""

import asyncio
import json
import logging
import os
import shlex
import signal
from dataclasses import asdict, dataclass
from typing import Protocol

from ..base.files import restore_file_limit
from ..base.policy import RootPolicy

log = logging.getLogger(__name__)

REQUEST_VARIABLE = "RESILIENT_OPERATOR_REQUEST"

_OUTPUT_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRequest:
    """One host that is asked for or given back; as JSON it is what a command of the operator is given.

    Attributes:
        run_id: The run.
        host: The host that needs a replacement, "" where a standby is asked for; or the one that is given back.
        generation: In which it was decided.
        reason: What a person wants to know.
    """

    run_id: str
    host: str
    generation: int
    reason: str


class Operator(Protocol):
    """Provides hosts; a new one takes part by starting a launcher with the run's `--rdzv-id`."""

    async def provide(self, request: HostRequest) -> str:
        """Ask for one host and return, for people, what was done; takes as long as it needs and raises nothing."""
        ...

    async def release(self, request: HostRequest) -> str:
        """Give a host back, as `provide` asks for one; its launcher is to be ended."""
        ...


class NoOperator:
    """Provides nothing: somebody else has to start another launcher, or end one."""

    async def provide(self, request: HostRequest) -> str:
        """Return what the run is waiting for."""
        what = f"a standby for host {request.host}" if request.host else "another standby"
        return f"waiting for {what}: start a launcher with --rdzv-id {request.run_id} on it"

    async def release(self, request: HostRequest) -> str:
        """Return what is not needed any more."""
        return f"host {request.host} is not needed any more: end its launcher"


class Command:
    """Runs a command for every request, which finds it as JSON on its standard input and in REQUEST_VARIABLE.

    Args:
        command: Asks for a host. Words as in a shell; no shell interprets them.
        release_command: Gives one back, likewise.
        timeout_s: When a command and its children are killed, seconds.
    """

    def __init__(self, command: str, release_command: str, timeout_s: float) -> None:
        self._command = command
        self._release_command = release_command
        self._timeout_s = timeout_s

    async def provide(self, request: HostRequest) -> str:
        """Run the command, log what it prints, and return how it ended."""
        return await self._run("operator_command", self._command, request)

    async def release(self, request: HostRequest) -> str:
        """Do the same with the command that gives a host back."""
        return await self._run("release_command", self._release_command, request)

    async def _run(self, setting: str, command: str, request: HostRequest) -> str:
        body = json.dumps(asdict(request)).encode()
        who = f"{setting.replace('_', ' ')} for {f'host {request.host}' if request.host else 'a standby'}"
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, REQUEST_VARIABLE: body.decode()},
                start_new_session=True,
            )
        except (OSError, ValueError, KeyError) as error:
            return f"{who} cannot be started: {error}; see root.{setting}"
        restore_file_limit(process.pid)
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate(body)
        except TimeoutError:
            return f"{who} was killed after {self._timeout_s:g} s; see root.operator_timeout_s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        log.info("%s printed: %s", who, output[-_OUTPUT_BYTES:].decode(errors="replace").strip() or "nothing")
        return f"{who} exited with code {process.returncode}"


def make_operator(policy: RootPolicy) -> Operator:
    """Return the operator that `policy` names."""
    if policy.operator_command.strip():
        return Command(policy.operator_command, policy.release_command, policy.operator_timeout_s)
    return NoOperator()
