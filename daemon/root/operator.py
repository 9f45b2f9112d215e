"""Who is asked for another host when one is lost and no standby is ready (the cloud operator of Gemini, 6.6.2)."""

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
    """One host that needs a replacement; as JSON it is what an operator command is given."""

    run_id: str
    host: str
    generation: int
    reason: str


class Operator(Protocol):
    """Provides hosts; a new one takes part by starting a launcher with the run's `--rdzv-id`."""

    async def replace(self, request: HostRequest) -> str:
        """Ask for one host and return, for people, what was done; takes as long as it needs and raises nothing."""
        ...


class NoOperator:
    """Provides nothing: somebody else has to start another launcher."""

    async def replace(self, request: HostRequest) -> str:
        """Log what the run is waiting for."""
        return f"waiting for a standby for host {request.host}: start a launcher with --rdzv-id {request.run_id} on it"


class Command:
    """Runs a command for every request, which finds it as JSON on its standard input and in REQUEST_VARIABLE.

    Args:
        command: Words as in a shell; no shell interprets them.
        timeout_s: When the command and its children are killed, seconds.
    """

    def __init__(self, command: str, timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s

    async def replace(self, request: HostRequest) -> str:
        """Run the command, log what it prints, and return how it ended."""
        body = json.dumps(asdict(request)).encode()
        who = f"operator command for host {request.host}"
        try:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, REQUEST_VARIABLE: body.decode()},
                start_new_session=True,
            )
        except (OSError, ValueError, KeyError) as error:
            return f"{who} cannot be started: {error}; see root.operator_command"
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
        return Command(policy.operator_command, policy.operator_timeout_s)
    return NoOperator()
