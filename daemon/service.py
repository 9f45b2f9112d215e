"""What launchers, trainers and `resilientctl` may ask of the daemon through its unix socket."""

import os
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.slot import MAX_RUN_ID_BYTES
from resilient_run.ckpt.format.version import FORMATS

from .base.fields import Fields
from .base.policy import Policy
from .base.process import network_namespace
from .base.spec import JobSpec
from .base.supervise import Supervisor
from .etcd.config import EtcdConfig, is_unix
from .job import Job
from .jobs import Jobs
from .peers.peers import PeerServer
from .tier.tier import Tier
from .trainers.link import Connection
from .trainers.trainer import Trainer

_MAX_SETTLE_S = 3600.0
_OPEN_TIMEOUT_S = 10.0
_VERSION: Final = metadata.version("resilient-run")  # now: an upgrade changes it below a running daemon


@dataclass(frozen=True, kw_only=True, slots=True)
class _Session:
    job: Job
    trainer: Trainer


class DaemonService:
    """Answers the messages of docs/internals/protocol.md.

    Args:
        jobs: The jobs of this host.
        peers: Listens for peers on the address of each job.
        supervisor: Of the daemon's own tasks.
        shm_dir: Where the slots are, for whoever starts this daemon again.
    """

    def __init__(self, jobs: Jobs, peers: PeerServer, supervisor: Supervisor, shm_dir: Path) -> None:
        self._jobs = jobs
        self._peers = peers
        self._supervisor = supervisor
        self._shm_dir = shm_dir
        self._launchers: dict[Connection, Job] = {}
        self._sessions: dict[Connection, _Session] = {}

    @property
    def is_idle(self) -> bool:
        """Tell whether no launcher and no trainer is connected."""
        return not self._launchers and not self._sessions

    @property
    def entrances(self) -> set[Path]:
        """The sockets through which launchers came: they and their workers come back through them."""
        return {connection.entrance for connection in self._launchers}

    async def handle(self, connection: Connection, op: str, fields: Fields) -> dict[str, Any]:
        """Return the answer to `op`.

        Raises:
            CheckpointError: The request is refused.
        """
        match op:
            case "open_job":
                return await self._open_job(connection, fields)
            case "job_status":
                return self._launched(connection, fields).status()
            case "settle":
                return await self._launched(connection, fields).settle(fields.number("timeout_s", high=_MAX_SETTLE_S))
            case "persisted":
                return await self._launched(connection, fields).persisted()
            case "close_job":
                return await self._close_job(connection, fields)
            case "attach":
                return await self._attach(connection, fields)
            case "status":
                jobs, tasks = self._jobs.describe(), self._supervisor.describe()
                return {"pid": os.getpid(), "formats": FORMATS, "jobs": jobs, "tasks": tasks, **self._jobs.totals()}
            case "gc":
                return await self._jobs.collect_garbage()
        if (session := self._sessions.get(connection)) is None:
            raise DaemonError(
                f"field 'op' names nothing that this connection may ask: {op!r}; a trainer sends attach first"
            )
        return await session.job.sessions.handle(session.trainer, op, fields)

    def gone(self, connection: Connection) -> None:
        """End what the connection held open."""
        session = self._sessions.pop(connection, None)
        if session is not None:
            session.job.sessions.detach(session.trainer)
        job = self._launchers.pop(connection, None)
        if job is not None and job not in self._launchers.values():
            job.release()

    def is_guest(self, connection: Connection) -> bool:
        """Tell whether the connection holds nothing open, neither a job nor a trainer's session."""
        return connection not in self._launchers and connection not in self._sessions

    async def _open_job(self, connection: Connection, fields: Fields) -> dict[str, Any]:
        _check_version(fields)
        _check_process(fields, connection)
        spec = JobSpec.of_fields(fields, policy=_policy(fields))
        _check_network(fields, spec.etcd)
        if spec.policy.persist.target is not None:
            Tier(spec.policy.persist.target, spec.run_id).check()
        spec = replace(spec, address=await self._peers.listen(spec.addr, spec.ports))
        for other, job in list(self._launchers.items()):
            if job.spec.key == spec.key and other is not connection and other.pid == connection.pid:
                # The same launcher has come back before its old connection was seen to break.
                del self._launchers[other]
                other.close()
        job = await self._jobs.open(spec, pid=connection.pid, notify=connection.notify)
        self._launchers[connection] = job
        addr, port = spec.address
        return {"pid": os.getpid(), "shm_dir": str(self._shm_dir), "peer_addr": addr, "peer_port": port}

    async def _close_job(self, connection: Connection, fields: Fields) -> dict[str, Any]:
        job, discard = self._launched(connection, fields), fields.flag("discard")
        del self._launchers[connection]
        await self._jobs.close(job, discard=discard)
        return {}

    async def _attach(self, connection: Connection, fields: Fields) -> dict[str, Any]:
        if connection in self._sessions:
            raise DaemonError(f"pid {connection.pid} is attached already; a trainer attaches once per connection")
        _check_version(fields)
        _check_process(fields, connection)
        run_id, host = fields.text("run_id", high=MAX_RUN_ID_BYTES), fields.optional_text("host")
        # Workers and the daemon start at the same time; a worker may be here first.
        job = await self._jobs.find_opened(run_id, host, _OPEN_TIMEOUT_S)
        if job is None:
            raise DaemonError("attach: field 'run_id' names no job that a launcher holds open here")
        trainer, answer = await job.sessions.attach(fields, connection.notify, connection.close)
        self._sessions[connection] = _Session(job=job, trainer=trainer)
        return answer

    def _launched(self, connection: Connection, fields: Fields) -> Job:
        job, run_id = self._launchers.get(connection), fields.text("run_id", high=MAX_RUN_ID_BYTES)
        if job is None or job.spec.run_id != run_id:
            raise DaemonError(f"this connection holds no job {run_id!r} open; send open_job first")
        return job


def _check_version(fields: Fields) -> None:
    """Check that whoever sent `fields` means the same by messages and slots as this daemon.

    Raises:
        DaemonError: It does not.
    """
    for name, ours in FORMATS.items():
        if (theirs := fields.optional_text(name) or ours) != ours:
            raise DaemonError(
                f"this daemon has version {ours} of the {name} format, resilient-run of the job has {theirs}: install "
                f"the same resilient-run for both; what is kept of the run stays"
            )


def _policy(fields: Fields) -> Policy:
    """Return the settings that a launcher sends, which it has checked itself.

    Raises:
        DaemonError: This daemon refuses one, so the two are of different versions.
    """
    try:
        return Policy.parse(fields.object("policy"), "configuration")
    except DaemonError as error:
        theirs = fields.optional_text("version") or "an older version that does not tell its number"
        raise DaemonError(
            f"{error}. The launcher accepted it: its resilient-run is {theirs}, this daemon's (pid {os.getpid()}) was "
            f"{_VERSION} when it started. Install the same on both sides and start the daemon again, if it is a "
            "service by systemctl restart resilientd@USER; what is kept of the run stays"
        ) from error


def _check_process(fields: Fields, connection: Connection) -> None:
    """Check that a number means the same process to whoever sent `fields` as to this daemon.

    By it the daemon tells launchers apart, and sees whether trainers work, wait or stand still.

    Raises:
        DaemonError: It does not.
    """
    if (pid := fields.integer("pid", low=1)) != connection.pid:
        raise DaemonError(
            f"this daemon (pid {os.getpid()}) is in another pid namespace: pid {pid} is "
            f"{connection.pid or 'no process'} to it; run launcher and daemon in one container (without a daemon the "
            "launcher starts one), or let their containers share processes (Kubernetes: shareProcessNamespace)"
        )


def _check_network(fields: Fields, etcd: EtcdConfig) -> None:
    """Check that what a launcher reaches over the network is what this daemon reaches.

    Raises:
        DaemonError: It may be another etcd, or none.
    """
    theirs, ours = fields.optional_integer("network"), network_namespace()
    if None not in (theirs, ours) and theirs != ours and not all(map(is_unix, etcd.endpoints)):
        raise DaemonError(
            f"this daemon (pid {os.getpid()}) is in another network namespace, where etcd at {etcd.where} may be out "
            "of reach: run launcher and daemon in one, or give this launcher a daemon of its own (--rr-run-dir and "
            "--rr-shm-dir)"
        )
