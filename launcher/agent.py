"""torch's elastic agent with recovery: a failure is broadcast at once; one that memory can undo costs no restart."""

import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, cast

import click
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousStateError

from resilient_run.ckpt.errors import CheckpointError, DaemonError
from resilient_run.ckpt.format.pair import is_import
from resilient_run.ckpt.uncaught import drop_torn, told
from resilient_run.daemon.base.spec import JobSpec
from resilient_run.daemon.run.records import Failure
from resilient_run.daemon.trust.secret import host_key, key_proof

from .config import RunConfig
from .daemon_link import DaemonLink
from .fingerprint import fingerprint
from .kept import KeptWorkers
from .rendezvous.rendezvous import EtcdRendezvous
from .timeline import RecoveryTimeline, newest_step
from .workers.import_hook import AUTO
from .workers.warm import WorkerStarter

log = logging.getLogger(__name__)

_SETTLE_S = 0.5
_LAST_SETTLE_S = 2.0
_KILL_WAIT_S = 30
_DAEMON_S = 600.0
_PERSISTED_S = 150.0
_NAMED = 8

_OPEN = (
    "anyone who reaches this etcd can read and forge the state of this run: give all its hosts one run key "
    "(`resilientctl keygen PATH`, then --rr-key-file PATH), or let etcd ask for credentials (RESILIENT_ETCD_USER and "
    "RESILIENT_ETCD_PASSWORD, or cert= and key= in --rdzv-conf), or say --rr-insecure"
)

Way = tuple[int | None, int | None, str]

_TORCHS_HANDLER = "_terminate_process_handler"

ORDERED_KINDS = frozenset({"hang", "unhealthy", "unhealthy_steps", "memory_lost", "corruption"})
"""Failures that name a host none of whose workers has exited: somebody decided that they must not go on."""


def make_agent(*args: Any, run_config: RunConfig, starter: WorkerStarter, **kwargs: Any) -> LocalElasticAgent:
    """Return the agent for a worker spec: ours for the etcd v3 rendezvous, torch's own for any other backend."""
    spec = kwargs["spec"] if "spec" in kwargs else args[0]
    if isinstance(spec.rdzv_handler, EtcdRendezvous):
        return ResilientAgent(*args, run_config=run_config, starter=starter, **kwargs)
    return LocalElasticAgent(*args, **kwargs)


def _run_key(run_config: RunConfig, rdzv: EtcdRendezvous) -> str | None:
    """Return the secret by which the daemons of the run's hosts know each other, None for the one in etcd.

    Raises:
        click.UsageError: Whoever reaches etcd would have that, or there is no place for a secret of this host.
    """
    if run_config.run_key is not None or run_config.insecure:
        return run_config.run_key
    if not rdzv.stays_here:
        if rdzv.is_open:
            raise click.UsageError(_OPEN)
        return None
    try:
        return host_key()
    except DaemonError as error:
        raise click.UsageError(str(error)) from error


class ResilientAgent(LocalElasticAgent):
    """`LocalElasticAgent` over an `EtcdRendezvous` and the host daemon.

    Differences to torch's agent: it wakes at a worker's exit and at a broadcast failure instead of polling; a failure
    of a run whose workers use a `Checkpointer` is recovered without using up `--max-restarts` as long as steps get
    committed in between; workers that finished wait for the others, so that a late failure can still be recovered.
    """

    def __init__(self, *args: Any, run_config: RunConfig, starter: WorkerStarter, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = self._worker_group.spec
        assert isinstance(spec.rdzv_handler, EtcdRendezvous), "make_agent chooses the agent by the handler"
        self._config = run_config
        self._starter = starter
        self._rdzv = spec.rdzv_handler
        starter.keeps_lines = True
        self._kept = KeptWorkers(starter, limit_s=run_config.stop_timeout_s)
        try:
            run_key = _run_key(run_config, self._rdzv)
        except click.UsageError:
            self._rdzv.leave()
            raise
        self._rdzv.describe(
            spec.local_world_size,
            spec.role,
            key_proof="" if run_key is None else key_proof(run_key, self._rdzv.get_run_id()),
            fingerprint=fingerprint(spec.entrypoint, spec.args, run_key),
            allow_different=run_config.allow_different_script,
            elastic_s=run_config.elastic_s,
            sizes=run_config.sizes,
            keep=run_config.policy.replication.keep,
            persisted=self._persisted,
        )
        # The wait of the monitoring loop happens in `_monitor_workers`, where it can be interrupted.
        self._interval_s = spec.monitor_interval
        spec.monitor_interval = 0.0
        self._timeline = RecoveryTimeline(
            run_id=self._rdzv.get_run_id(),
            host=self._rdzv.host,
            events_path=run_config.events_path,
            publish=self._rdzv.report_recovery,
            missed_after_s=self._rdzv.missed_after_s,
        )
        self._link = DaemonLink(
            settings=run_config.settings,
            job=JobSpec(
                run_id=self._rdzv.get_run_id(),
                host=self._rdzv.host,
                replicas=run_config.replicas,
                nproc=spec.local_world_size,
                etcd=self._rdzv.etcd_config,
                addr=self._rdzv.addr,
                memory_limit_bytes=run_config.memory_limit_bytes,
                policy=run_config.policy,
                run_key=run_key,
                first_port=None if run_config.ports is None else run_config.ports[0],
                last_port=None if run_config.ports is None else run_config.ports[-1],
                injection=run_config.allow_injection,
            ),
            on_event=self._timeline.on_event,
        )
        self._finished: RunResult | None = None
        self._decided_generation = 0
        self._decision = False
        self._stalled = 0
        self._recovered_at: dict[str, int] | None = None
        self._verdict = ""
        self._seen: set[Way] = set()
        self._ended_by: signal.Signals | None = None
        self._told, self._is_final = "", False  # by the worker whose failure is being decided on

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the worker group to its end, as torch's agent does; a standby that was not needed succeeds with it."""
        self._link.start()
        succeeded = False
        try:
            result: RunResult | None = super().run(role)
            if result is None:
                result = RunResult(state=WorkerState.SUCCEEDED)
            else:
                self._rdzv.close(_reason(result) + self._verdict, failed=result.is_failed())
            succeeded = not result.is_failed()
            return result
        except SignalException:
            self._settle(answer_within_s=_LAST_SETTLE_S)
            raise
        finally:
            self._timeline.close(succeeded=succeeded)
            self._sum_up()
            left = self._rdzv.leave()
            self._link.close(discard=self._config.ephemeral or (succeeded and left and self._is_over()))

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except SignalException as error:
            # Before the workers here are stopped: those elsewhere would be blamed for what they make of that.
            if self._rdzv.round is not None and len(self._rdzv.round.seats) > 1:
                self._rdzv.report_failure(
                    kind="membership", message=f"host {self._rdzv.host} leaves: its launcher got {error.sigval.name}"
                )
            raise

    def _is_over(self) -> bool:
        """Tell whether the run ended as a success for all hosts, not for this one alone: nobody resumes from it."""
        ended = self._rdzv.ended
        if ended is not None and ended.failed:
            log.warning("the run failed on another host; its checkpoints stay in memory: %s", ended.reason)
        return ended is not None and not ended.failed

    def _persisted(self) -> tuple[list[list[int]], int | None]:
        """Return the pairs of this run id in its persistent tier, oldest first, and how many ranks made the newest.

        Raises:
            RendezvousStateError: The tier cannot be read, so nobody knows whether to start from the beginning.
        """
        if self._config.policy.persist.target is None:
            return [], None
        try:
            self._link.wait_open()
            answer = self._link.request("persisted", answer_within_s=_PERSISTED_S)
        except CheckpointError as error:
            raise RendezvousStateError(
                f"cannot tell what run {self._rdzv.get_run_id()!r} has persisted: {error}; make the target of "
                "--rr-persist readable, or start without it"
            ) from error
        return answer["pairs"], answer.get("world_size")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Do what torch's handler does, and keep in mind that it did: Python's logging swallows what it raises."""
        self._ended_by = signal.Signals(number)
        self._heed_signal()

    def _heed_signal(self) -> None:
        if self._ended_by is not None:
            raise SignalException(f"Process {os.getpid()} got signal: {self._ended_by}", sigval=self._ended_by)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._heed_signal()
        self._expect_workers()
        before = self._rdzv.round
        super()._rendezvous(worker_group)
        if self._rdzv.stood_by:
            self._timeline.abandon()
        self._timeline.mark("rendezvous")
        seen = self._rdzv.broke if self._rdzv.stood_by else None
        failure = self._rdzv.view.failures.get(self._rdzv.generation - 1, seen)
        if failure is not None:
            since_s = max(0.0, time.time() - failure.unix_s) if failure.unix_s else 0.0
            self._timeline.join(kind=failure.kind, cause=failure.message, since_s=since_s)
        failure = None if before is None else self._rdzv.view.failures.get(before.generation)
        if failure is not None and failure.kind == "host_lost":
            self._timeline.correct(kind=failure.kind, cause=failure.message)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Do what torch does through the store, where a launcher may wait for another one: all have the same round."""
        whole, host = self._rdzv.round, self._rdzv.host
        assert whole is not None, "ranks are assigned after the rendezvous"
        alike = replace(whole, seats=tuple(seat for seat in whole.seats if seat.role == spec.role))
        return [
            Worker(
                local_rank=local_rank,
                global_rank=rank,
                role_rank=role_rank,
                world_size=whole.world_size,
                role_world_size=alike.world_size,
            )
            for local_rank, (rank, role_rank) in enumerate(zip(whole.ranks(host), alike.ranks(host), strict=True))
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._heed_signal()
        self._finished, whole = None, self._rdzv.round
        assert whole is not None, "workers start after the rendezvous"
        if whole.restore is None or is_import(whole.restore):
            self._kept.end()  # What such a round begins with is made by a process of its own.
        os.environ["RESILIENT_SOCKET"] = str(self._link.socket_path)
        os.environ["RESILIENT_RUN_ID"], os.environ["RESILIENT_HOST"] = self._rdzv.get_run_id(), self._rdzv.host
        os.environ["RESILIENT_GENERATION"] = str(self._rdzv.generation)
        os.environ.pop(AUTO, None)
        if self._config.auto:
            os.environ[AUTO] = "begin" if whole.restore is None else "restore"
        self._timeline.spawned(
            generation=self._rdzv.generation,
            ranks={worker.global_rank for worker in worker_group.workers},
            resized=(whole.made_by, whole.world_size) if whole.made_by is not None and whole.reshapes else None,
        )
        ids: dict[int, Any] = super()._start_workers(worker_group)
        for number in signal.valid_signals():
            if getattr(signal.getsignal(number), "__name__", "") == _TORCHS_HANDLER:
                signal.signal(number, self._on_signal)
        # When a worker fails, torch closes the context by itself, and would give its siblings 30 s.
        context: Any = self._pcontext
        context.close = partial(self._kept.close, context, context.close, {*context.pids().values()})
        # Only now: a daemon that is just starting takes as long as a worker's first imports.
        self._link.wait_open()
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed_signal()
        self._wait_for_change()
        self._sum_up()
        if self._finished is not None:
            return self._succeeded(self._finished)
        failure, context = self._rdzv.failure, cast(Any, self._pcontext)
        if failure is None:
            if not self._broadcast_exit(worker_group):
                context.wait = lambda _: None  # for torch's agent looks at more than exits
        elif self._is_told(failure):
            self._seen.add(failure.way)
            ordered = failure.host == self._rdzv.host and failure.kind in ORDERED_KINDS
            # Where others were first, their workers may have exited because of one of these.
            if self._recoverable(failure.message) if ordered else not self._refuses(self._status(), failure.message):
                # `num_nodes_waiting` now makes the loop stop and restart these workers.
                return RunResult(state=WorkerState.HEALTHY)
            # Dead workers are a failure that torch's loop counts and reports.
            self._end_workers(signal.SIGKILL, _KILL_WAIT_S)
        restarts = self._remaining_restarts > 0 or (
            self._decision and self._decided_generation == self._rdzv.generation
        )
        with self._kept.while_closing(keep=restarts and self._may_keep()):
            result: RunResult = super()._monitor_workers(worker_group)
        vars(context).pop("wait", None)
        if result.state == WorkerState.SUCCEEDED:
            return self._succeeded(result)
        failed = result.state in {WorkerState.FAILED, WorkerState.UNHEALTHY}
        if failed and self._recoverable(exited=_first(result)):
            # torch's loop takes one attempt off; one more of both keeps TORCHELASTIC_RESTART_COUNT counting.
            worker_group.spec.max_restarts += 1
            self._remaining_restarts += 1
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        failure = self._rdzv.failure
        if self._rdzv.forgotten:
            assert self._rdzv.closed is not None
            log.error("the run is over: %s", self._rdzv.closed.reason)
            self._timeline.abandon()
        elif failure is not None and self._is_told(failure):
            detect_s = max(0.0, time.time() - failure.unix_s) if failure.unix_s else 0.0
            last_step, idle_s = self._progress(self._status())
            self._timeline.begin(
                kind=failure.kind, cause=failure.message, detect_s=detect_s, last_step=last_step, idle_s=idle_s
            )
            self._timeline.mark("decide")
            log.warning("generation %d is broken: %s; restarting workers", self._rdzv.generation, failure.message)
        with self._kept.while_closing(keep=self._may_keep()):
            super()._restart_workers(worker_group)

    def _may_keep(self) -> bool:
        """Tell whether workers may go on in another generation: nobody has decided that any of them must not."""
        failure = self._rdzv.failure
        return self._rdzv.closed is None and (failure is None or failure.kind not in ORDERED_KINDS)

    def _stop_workers(self, *args: Any, **kwargs: Any) -> None:
        """Stop workers whose state is worthless; at once in a hang, because a stopped process ignores SIGTERM."""
        failure = self._rdzv.failure
        if failure is not None and failure.kind == "hang":
            self._end_workers(signal.SIGKILL, _KILL_WAIT_S)
        else:
            self._end_workers(signal.SIGTERM, self._config.stop_timeout_s)
        self._settle()
        self._timeline.mark("stop")

    def _end_workers(self, death_sig: signal.Signals, timeout_s: int) -> None:
        """Do what `_shutdown` does, which has no timeout in torch 2.11."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout_s)
        self._shutdown()

    def _exit_barrier(self) -> None:
        """Nothing to wait for: success is only reported once every host's workers have succeeded."""

    def _wait_for_change(self) -> None:
        """Sleep for the monitor interval, less when a worker exits or the rendezvous changes."""
        with ExitStack() as stack:
            poller = select.poll()
            poller.register(self._rdzv.changed_fd, select.POLLIN)
            pids = self._pcontext.pids().values() if self._pcontext and self._finished is None else ()
            for pid in pids:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue  # It has ended, and the monitor knows.
                stack.callback(os.close, descriptor)
                poller.register(descriptor, select.POLLIN)
            for descriptor in self._kept.descriptors():
                poller.register(descriptor, select.POLLIN)
            poller.poll(self._interval_s * 1000)
        self._rdzv.clear_changed()

    def _broadcast_exit(self, worker_group: WorkerGroup) -> bool:
        """Announce a failed local worker to every host before torch's agent takes its time to stop its siblings.

        Return whether torch's agent may see exits: there is something to see, and nothing that was not announced.
        """
        if not isinstance(self._pcontext, SubprocessContext):
            return True
        handlers = self._pcontext.subprocess_handlers.items()
        exits = [(handler.proc.poll(), local_rank) for local_rank, handler in handlers]
        if exited := [(exitcode, local_rank) for exitcode, local_rank in exits if exitcode]:
            # One that a signal killed comes first: the others may have failed because of it.
            exitcode, local_rank = min(exited)
            for _, each in exited:
                drop_torn(self._pcontext.error_files[each])
            error_file = self._pcontext.error_files[local_rank]
            self._told, self._is_final = told(error_file)
            self._announce(worker_group, local_rank, exitcode, _died(exitcode, error_file))
        elif (line := self._kept.answer()) is not None:
            local_rank = next(local_rank for local_rank, handler in handlers if handler.proc.pid == line.process.pid)
            what = f"came out of loop() with {line.error}"
            if self._announce(worker_group, local_rank, 1, what):
                log.warning("pid %d %s; restarting workers", line.process.pid, what)
            else:
                self._kept.fail(line)
        return bool(exited) or all(exitcode is not None for exitcode, _ in exits)

    def _announce(self, worker_group: WorkerGroup, local_rank: int, exitcode: int, what: str) -> bool:
        """Break the generation for every host because of a worker of this one; return whether memory can undo that."""
        assert isinstance(self._pcontext, SubprocessContext)
        rank, pid = worker_group.workers[local_rank].global_rank, self._pcontext.pids()[local_rank]
        message = f"rank {rank} (pid {pid}) on host {self._rdzv.host} {what}{self._left_early(worker_group)}"
        status = self._status()
        last_step, idle_s = self._progress(status)
        self._timeline.begin(kind="worker_exit", cause=message, detect_s=0.0, last_step=last_step, idle_s=idle_s)
        _, step, raised = _way(status, rank, exitcode)
        self._rdzv.report_failure(
            kind="worker_exit", rank=rank, pid=pid, exitcode=exitcode, message=message, step=step, raised=raised
        )
        recoverable = self._recoverable(message, exited=(rank, exitcode))
        self._timeline.mark("decide")
        return recoverable

    def _left_early(self, worker_group: WorkerGroup) -> str:
        """Return which ranks had ended with status 0 when another one failed, which may have waited for them."""
        assert isinstance(self._pcontext, SubprocessContext)
        assert self._rdzv.round is not None
        left = [
            worker_group.workers[local_rank].global_rank
            for local_rank, handler in self._pcontext.subprocess_handlers.items()
            if handler.proc.poll() == 0
        ]
        for host in self._rdzv.round.hosts:
            if (self._rdzv.generation, host) in self._rdzv.view.done:
                left += self._rdzv.round.ranks(host)
        if not left:
            return ""
        some = ", ".join(map(str, sorted(left)[:_NAMED])) + (", …" if len(left) > _NAMED else "")
        return f"; rank{'' if len(left) == 1 else 's'} {some} ended with status 0"

    def _succeeded(self, result: RunResult) -> RunResult:
        """Report success once; until every host has, the group counts as healthy and can still be restarted."""
        if self._finished is None:
            self._finished = result
            self._rdzv.report_done()
        if self._rdzv.all_done():
            return result
        return RunResult(state=WorkerState.HEALTHY)

    def _recoverable(self, cause: str = "a worker failed", exited: tuple[int, int] | None = None) -> bool:
        """Decide, once per generation, whether memory can undo its failure: it holds the run and makes progress.

        The root stops a run that keeps failing in the same way; this rule also sees failures that differ, and works
        without a root.

        Args:
            cause: What failed.
            exited: Rank and exit code of a worker of this host, if one did.
        """
        if self._decided_generation == self._rdzv.generation:
            return self._decision
        self._decided_generation = self._rdzv.generation
        self._decision = False
        try:
            status = self._link.request("job_status", daemon_within_s=_DAEMON_S)
        except CheckpointError as error:
            log.warning("%s; cannot recover from memory: %s", cause, error)
            return False
        if self._refuses(status, cause, exited):
            return False
        left = self._remaining_restarts
        if not status["attached"]:
            if left or not self._told:  # What the worker told is shown at the end.
                log.warning("%s; no Checkpointer was at work, so only --max-restarts counts (%d left)", cause, left)
            return False
        if (repeats := self._repeats(status, exited)) is not None:
            self._verdict = f"; {repeats}"
            log.error("%s%s: only --max-restarts counts (%d left)", cause, self._verdict, left)
            return False
        self._stalled = self._stalled + 1 if status["watermark"] == self._recovered_at else 1
        self._recovered_at = status["watermark"]
        self._decision = self._stalled <= self._config.policy.root.stalled_recoveries
        if not self._decision:
            step = 0 if self._recovered_at is None else self._recovered_at["step"]
            self._verdict = f"; {self._stalled - 1} recoveries in a row committed nothing after step {step}"
            log.error("%s%s: a restart does not help", cause, self._verdict)
        return self._decision

    def _refuses(self, status: Mapping[str, Any], cause: str, exited: tuple[int, int] | None = None) -> bool:
        """Tell whether a worker of this host failed as no restart cures, and allow none."""
        # A script that a signal ended has caught what was refused, or its own error file says so.
        refused = None if exited is not None and _by_signal(exited[1]) else status.get("refused")
        if refused is None and not self._is_final:
            return False
        self._decided_generation, self._decision = self._rdzv.generation, False
        self._verdict = "; a restart does not help" + ("" if self._told else f": {refused}")
        self._remaining_restarts = 0
        if not self._told:  # else it is shown at the end
            log.error("%s%s", cause, self._verdict)
        return True

    def _repeats(self, status: Mapping[str, Any], exited: tuple[int, int] | None) -> str | None:
        """Return why the script itself fails, and would again, None where a restart may help.

        It does where it has failed before anything is committed, or as a worker did before, after the same step. One
        that a signal killed, or that exited because another host is gone, is no failure of the script.
        """
        if exited is None or _by_signal(exited[1]):
            return None
        way = _way(status, *exited)
        if status["watermark"] is None:
            why = "nothing is committed yet"
        elif way in self._seen:
            why = f"one did so before, after step {way[1] or 0} too"
        else:
            self._seen.add(way)
            return None
        return why if self._rdzv.broke_here() else None

    def _expect_workers(self) -> None:
        """Let a host that waits for its place, as a standby does, be as warm as one whose workers restart."""
        spec = self._worker_group.spec
        if isinstance(spec.entrypoint, str) and not any("${local_rank}" in str(arg) for arg in spec.args):
            # What torch's agent adds to every worker's environment and does not call TORCHELASTIC_.
            async_errors = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
            self._starter.expect((spec.entrypoint, *map(str, spec.args)), {**os.environ, **async_errors})

    def _sum_up(self) -> None:
        """Report the recovery of all hosts once each has told its own; the host of group rank 0 does."""
        round_ = self._rdzv.round
        if round_ is None or round_.hosts[0] != self._rdzv.host:
            return
        found = [self._rdzv.view.recovered.get((round_.generation, host)) for host in round_.hosts]
        events = [event for event in found if event is not None and event.complete]
        if len(events) == len(found):
            self._timeline.sum_up(round_.generation, events)

    def _is_told(self, failure: Failure) -> bool:
        """Tell whether this host learned of `failure` from others, not from a worker of its own that exited."""
        return failure.host != self._rdzv.host or failure.kind != "worker_exit"

    def _status(self) -> Mapping[str, Any]:
        """Return what the daemon says of the job, nothing if it is away."""
        try:
            return self._link.request("job_status", answer_within_s=2.0)
        except CheckpointError:
            return {}

    def _progress(self, status: Mapping[str, Any]) -> tuple[int | None, float]:
        """Return the newest step of this host's ranks, None when nobody knows, and how long there was none since."""
        ranks = {worker.global_rank for worker in self._worker_group.workers}
        return newest_step(status.get("last_steps", {}), ranks), status.get("idle_s") or 0.0

    def _settle(self, **how_long: float) -> None:
        """Give captures that are complete but not yet committed their chance before the next round fixes its step."""
        try:
            self._link.request("settle", timeout_s=_SETTLE_S, **how_long)
        except CheckpointError as error:
            log.warning("could not wait for the last commit: %s", error)


def _by_signal(exitcode: int) -> bool:
    """Tell whether a signal ended a worker; a shell tells of one by 128 and its number."""
    return exitcode < 0 or exitcode - 128 in signal.valid_signals()


def _died(exitcode: int, error_file: str) -> str:
    if exitcode < 0:
        why = " (as a write to a full tmpfs, such as /dev/shm, ends)" if exitcode == -signal.SIGBUS else ""
        how = f"was killed by {signal.Signals(-exitcode).name}{why}"
    else:
        how = f"exited with code {exitcode}"
    return ": ".join(filter(None, (how, told(error_file)[0])))


def _way(status: Mapping[str, Any], rank: int, exitcode: int) -> Way:
    """Return how a worker of this host exited, as `Failure.way`."""
    last_step = status.get("last_steps", {}).get(str(rank))
    raised, step = status.get("raised", {}).get(str(rank), ("", last_step))
    return exitcode, step, raised


def _first(result: RunResult) -> tuple[int, int] | None:
    """Return rank and exit code of the worker that failed first."""
    failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
    return next(((rank, failure.exitcode) for rank, failure in failures), None)


def _reason(result: RunResult) -> str:
    first = _first(result)
    if first is None:
        return "the training script succeeded on every host"
    failure = result.failures[first[0]]
    return f"rank {first[0]} (pid {failure.pid}) {_died(first[1], failure.error_file)}"
