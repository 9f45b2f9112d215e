"""Requests and releases hosts, as replacements and standbys (the cloud operator of Gemini, 6.6.2)."""

import asyncio
import json
import logging
import os
import re
import shlex
import signal
import stat
from dataclasses import asdict, dataclass

from ..base.policy import RootPolicy
from ..base.process import restore_file_limit
from ..run.rounds import machine_of

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


class Operator:
    """Provides hosts as the policy says: by Slurm, by a command, or by telling people to.

    A new one takes part by starting a launcher with the run's `--rdzv-id`. A command finds its request as JSON on its
    standard input and in REQUEST_VARIABLE. `sbatch` submits the batch script, which finds the run id in RUN_ID and
    starts a launcher that names its host as Slurm does; `scancel` ends the job that runs on a host.

    Args:
        policy: Has the commands, as words in a shell (no shell interprets them), or the script, and their time limit.
    """

    def __init__(self, policy: RootPolicy) -> None:
        self._policy = policy

    async def provide(self, request: HostRequest) -> str:
        """Ask for one host and return, for people, what was done; takes as long as it needs and raises nothing."""
        if self._policy.slurm_script:
            return await self._submit(request)
        if self._policy.operator_command.strip():
            return await self._command("operator_command", self._policy.operator_command, request)
        what = f"a standby for host {request.host}" if request.host else "another standby"
        return f"waiting for {what}: start a launcher with --rdzv-id {request.run_id} on it"

    async def release(self, request: HostRequest) -> str:
        """Give a host back, as `provide` asks for one; its launcher is to be ended."""
        if self._policy.slurm_script:
            return await self._cancel(request)
        if self._policy.operator_command.strip():
            return await self._command("release_command", self._policy.release_command, request)
        return f"host {request.host} is not needed any more: end its launcher"

    async def _command(self, setting: str, command: str, request: HostRequest) -> str:
        body = json.dumps(asdict(request))
        who = f"{setting.replace('_', ' ')} for {_what(request)}"
        try:
            words = shlex.split(command)
        except ValueError as error:
            return f"{who} cannot be started: {error}; see root.{setting}"
        return await self._run(words, body.encode(), {REQUEST_VARIABLE: body}, who=who, setting=setting)

    async def _submit(self, request: HostRequest) -> str:
        try:
            script = _own(self._policy.slurm_script)
        except (OSError, ValueError) as error:
            return f"no job for {_what(request)}: {error}; see root.slurm_script"
        return await self._slurm(["sbatch", f"--job-name={_job(request)}"], script, {"RUN_ID": request.run_id}, request)

    async def _cancel(self, request: HostRequest) -> str:
        """Cancel the job on that host, if it is one of this run's."""
        node = machine_of(request.host)
        # To Slurm, "n[1-9]" or "a,b" would be several.
        if not all(re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in (node, _job(request))):
            return f"no job is cancelled for {_what(request)}: Slurm may read its name or the run id as a list"
        words = ["scancel", "--verbose", f"--user={os.geteuid()}", f"--name={_job(request)}", f"--nodelist={node}"]
        return await self._slurm(words, b"", {}, request)

    async def _slurm(self, words: list[str], body: bytes, env: dict[str, str], request: HostRequest) -> str:
        return await self._run(words, body, env, who=f"{words[0]} for {_what(request)}", setting="slurm_script")

    async def _run(self, words: list[str], body: bytes, env: dict[str, str], *, who: str, setting: str) -> str:
        """Run a command with `body` on its standard input, log what it prints, and return how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return f"{who} cannot be started: {error}; see root.{setting}"
        restore_file_limit(process.pid)
        try:
            async with asyncio.timeout(self._policy.operator_timeout_s):
                output, _ = await process.communicate(body)
        except TimeoutError:
            return f"{who} was killed after {self._policy.operator_timeout_s:g} s; see root.operator_timeout_s"
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        log.info("%s printed: %s", who, output[-_OUTPUT_BYTES:].decode(errors="replace").strip() or "nothing")
        return f"{who} exited with code {process.returncode}"


def _what(request: HostRequest) -> str:
    return f"host {request.host}" if request.host else "a standby"


def _job(request: HostRequest) -> str:
    return f"resilient-{request.run_id}"


def _own(path: str) -> bytes:
    """Return what is in a file that only this user and root can change.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
    """
    if not os.path.isabs(path):
        raise ValueError(f"{path} must be an absolute path")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in {0, os.geteuid()} or about.st_mode & 0o022:
            raise ValueError(
                f"others may change {path} (uid {about.st_uid}, mode {stat.filemode(about.st_mode)}): it must be a "
                f"regular file that belongs to you; chmod go-w {path}"
            )
        return file.read()
