"""Where the seconds of a recovery went: one JSON event and one human line per recovery and host, and one for all hosts.

A host that takes a lost one's place did not run what failed: to it all that was before its round is rendezvous. The
phases follow each other on one host's monotonic clock:

| phase | from → to |
|---|---|
| detect | the failure → this host knows (0 for an own worker: its exit is the failure, and wakes it) |
| decide | known → recover, restart or give up is decided and broadcast |
| stop | decided → this host's workers are gone and the last capture is committed |
| rendezvous | stopped → the next generation is formed |
| spawn | formed → every local worker has attached (fork, the script's own imports, process group, model) |
| restore | attached → every local worker has its state back |
| first_step | restored → every local worker has completed a step |

Nobody sees a hang begin or a host vanish. What shows it comes later: a limit without progress, an expired lease, or the
exit of a worker whose collectives fail, for which Python takes a second or more. So both began with the last step that
ranks of this host made, less the time in which silence says nothing; a host is not lost for longer than a lease can
last.
"""

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.goodput import PHASES, Recovery, reason
from resilient_run.daemon.base.logs import INFORMS
from resilient_run.daemon.trust.private import open_to_append

log = logging.getLogger(__name__)

_WORKER_PHASE = {"attached": "spawn", "restored": "restore", "first_step": "first_step"}


@dataclass(kw_only=True, slots=True)
class _Recovery:
    cause: str
    kind: str
    last_step: int | None
    start_s: float
    idle_s: float = 0.0
    not_before_s: float = -math.inf
    ends_s: dict[str, float] = field(default_factory=dict)
    generation: int = 0
    resized: tuple[int, int] | None = None
    restored_step: int | None = None
    sources: dict[int, str] = field(default_factory=dict)
    waiting: dict[str, set[int]] = field(default_factory=dict)


class RecoveryTimeline:
    """Collects the marks of the recovery under way and reports it when every local rank has completed a step.

    Args:
        run_id: Named in every event.
        host: Named in every event.
        events_path: JSON Lines file that events are appended to, or None.
        publish: Shows every event of a generation to the other hosts.
        missed_after_s: A host that is lost is missed this long afterwards, at most.
    """

    def __init__(
        self,
        *,
        run_id: str,
        host: str,
        events_path: Path | None,
        publish: Callable[[dict[str, Any]], None],
        missed_after_s: float,
    ) -> None:
        self._run_id = run_id
        self._host = host
        self._events_path = events_path
        self._publish = publish
        self._missed_after_s = missed_after_s
        self._lock = threading.Lock()
        self._recovery: _Recovery | None = None
        self._ended_s = -math.inf
        self._summed_up = 0
        self._protected = ""
        self._attached = False
        self._closed = False
        self._is_cut = False

    def begin(self, *, kind: str, cause: str, detect_s: float, last_step: int | None, idle_s: float = 0.0) -> None:
        """Start the timeline of a failure noticed now and `detect_s` old; an unfinished recovery ends where it starts.

        `last_step` is the newest that was completed before it, None when nobody knows, `idle_s` the time since then.
        """
        with self._lock:
            now = time.monotonic()
            recovery = _Recovery(
                kind=kind,
                cause=cause,
                last_step=last_step,
                start_s=now - detect_s,
                idle_s=idle_s,
                not_before_s=self._ended_s,
            )
            recovery.ends_s["detect"] = now
            self._date_back(recovery)
            before = self._recovery
            if before is not None and "stop" not in before.ends_s and not before.generation:
                # The same failure, of which more is known by now.
                recovery.start_s, recovery.not_before_s = min(before.start_s, recovery.start_s), before.not_before_s
            elif before is not None:
                recovery.not_before_s = self._ended_s = self._interrupt(before, recovery.start_s)
            recovery.start_s = max(recovery.start_s, recovery.not_before_s)
            self._recovery = recovery

    def join(self, *, kind: str, cause: str, since_s: float) -> None:
        """This host has a place in the round that follows a failure `since_s` ago; one under way goes on instead."""
        with self._lock:
            if self._recovery is None:
                now_s = time.monotonic()
                start_s = max(now_s - since_s, self._ended_s)
                self._recovery = _Recovery(kind=kind, cause=cause, last_step=None, start_s=start_s)
                self._recovery.ends_s["rendezvous"] = now_s

    def correct(self, *, kind: str, cause: str) -> None:
        """What a worker's exit began has another cause, which was seen only later."""
        with self._lock:
            if self._recovery is not None and self._recovery.kind == "worker_exit":
                self._recovery.kind, self._recovery.cause = kind, cause
                self._date_back(self._recovery)

    def mark(self, phase: str) -> None:
        """The launcher's `phase` (decide, stop, rendezvous) of the current recovery ends now.

        A phase that ends again, because workers had to be stopped again, takes in those that came after it.
        """
        with self._lock:
            if self._recovery is not None:
                self._recovery.ends_s[phase] = time.monotonic()
                for later in PHASES[PHASES.index(phase) + 1 :]:
                    self._recovery.ends_s.pop(later, None)

    def spawned(self, *, generation: int, ranks: set[int], resized: tuple[int, int] | None = None) -> None:
        """Workers with these global ranks were started for `generation`; their own events end the later phases.

        `resized` is how many ranks captured what they restore, and how many there are now, if that is not the same.
        """
        with self._lock:
            if self._recovery is not None:
                self._recovery.generation, self._recovery.resized = generation, resized
                self._recovery.waiting = {event: set(ranks) for event in _WORKER_PHASE}

    def on_event(self, message: dict[str, Any]) -> None:
        """Take a trainer event that the daemon forwarded (`attached`, `restored`, `first_commit`, `unprotected`, …)."""
        if message.get("event") in ("unprotected", "protected"):
            about = self._about(str(message["event"]), int(message["generation"]))
            with self._lock:
                self._write({**about, **{name: message[name] for name in ("step", "steps_at_risk", "reason")}})
            return
        if message.get("event") == "first_commit":
            line = protected_line(message["hosts"], message["replicas"], message["every"])
            self._protect(message["generation"], "; ".join([line, *message["caveats"]]))
            return
        with self._lock:
            recovery, event = self._recovery, message.get("event")
            self._attached = self._attached or event == "attached"
            if recovery is None or message.get("generation") != recovery.generation or event not in _WORKER_PHASE:
                return
            if any(phase in recovery.ends_s for phase in PHASES[PHASES.index(_WORKER_PHASE[event]) :]):
                return  # a worker tells a new daemon again that it has attached
            if event == "restored":
                recovery.restored_step = message.get("step")
                recovery.sources[int(message["rank"])] = str(message.get("source"))
            waiting = recovery.waiting.get(event, set())
            waiting.discard(int(message["rank"]))
            if waiting:
                return
            recovery.ends_s[_WORKER_PHASE[event]] = time.monotonic()
            if event == "first_step":
                self._report(recovery, complete=True)
                self._recovery, self._ended_s = None, recovery.ends_s["first_step"]

    def sum_up(self, generation: int, events: Sequence[Recovery]) -> None:
        """Report once what the recovery took on all hosts, whose complete events of `generation` these are."""
        with self._lock:
            if generation <= self._summed_up:
                return
            self._summed_up = generation
            event = {**self._about("recovered", generation), **whole(events)}
            self._write(event)
            log.warning("%s", _whole_line(event), extra=INFORMS)

    def abandon(self) -> None:
        """Forget the recovery under way: the others made it without this host, which stood by meanwhile."""
        with self._lock:
            self._recovery = None

    def close(self, *, succeeded: bool = False) -> None:
        """Report a recovery that never came to its first step, with the time of the phase in which the run ends.

        Where the run `succeeded`, its workers had no step left to do, and it is complete.
        """
        with self._lock:
            recovery, self._recovery, self._closed = self._recovery, None, True
            if recovery is None or (succeeded and not recovery.generation):
                return
            # After its restore a script has taken its own time.
            at_s = None if "restore" in recovery.ends_s else time.monotonic()
            self._interrupt(recovery, at_s, complete=succeeded)

    def _protect(self, generation: int, line: str) -> None:
        """Announce what protects the run from now on, unless that was announced before, or `generation` is over."""
        with self._lock:
            if line == self._protected or (self._recovery is not None and self._recovery.generation != generation):
                return
            self._protected = line
        log.warning("%s", line, extra=INFORMS)

    def _date_back(self, recovery: _Recovery) -> None:
        """Let a failure that nobody saw happen begin before it was noticed."""
        longest_s = {"hang": math.inf, "host_lost": self._missed_after_s}.get(recovery.kind, 0.0)
        noticed_s = recovery.ends_s.get("detect", recovery.start_s)
        began_s = min(recovery.start_s, noticed_s - min(recovery.idle_s, longest_s))
        recovery.start_s = max(began_s, recovery.not_before_s)

    def _interrupt(self, recovery: _Recovery, at_s: float | None, *, complete: bool = False) -> float:
        """Report a recovery whose unfinished phase, if any, ended at `at_s`, and return when the recovery did."""
        last = max(recovery.ends_s, key=PHASES.index)
        ended_s = recovery.ends_s[last]
        # Nobody knows since when a script without checkpoints has trained.
        if at_s is not None and (self._attached or not recovery.generation):
            ended_s = recovery.ends_s[PHASES[PHASES.index(last) + 1]] = max(at_s, ended_s)
        self._report(recovery, complete=complete)
        return ended_s

    def _report(self, recovery: _Recovery, *, complete: bool) -> None:
        durations, previous_s = {}, recovery.start_s
        for phase in PHASES:
            if phase in recovery.ends_s:
                durations[phase] = round(recovery.ends_s[phase] - previous_s, 4)
                previous_s = recovery.ends_s[phase]
        steps_lost = None
        if recovery.restored_step is not None and recovery.last_step is not None:
            steps_lost = max(0, recovery.last_step - recovery.restored_step)
        event = Recovery(
            unix_s=round(time.time() - (time.monotonic() - previous_s), 3),
            run_id=self._run_id,
            host=self._host,
            generation=recovery.generation,
            kind=recovery.kind,
            cause=recovery.cause,
            complete=complete,
            restored_step=recovery.restored_step,
            sources=tuple(sorted(set(recovery.sources.values()))),
            ranks={str(rank): source for rank, source in sorted(recovery.sources.items())},
            steps_lost=steps_lost,
            resized=recovery.resized,
            phases_s=durations,
            total_s=round(previous_s - recovery.start_s, 4),
        )
        value = event.to_value()
        self._write(value)
        if recovery.generation:
            self._publish(value)
        # At its end the run itself says why it is not recovered.
        level = logging.INFO if self._closed and not complete else logging.WARNING
        log.log(level, "%s", _line(event), extra=INFORMS if complete else None)

    def _about(self, event: str, generation: int) -> dict[str, Any]:
        about = {"event": event, "unix_s": round(time.time(), 3), "run_id": self._run_id, "host": self._host}
        return {**about, "generation": generation}

    def _write(self, event: dict[str, Any]) -> None:
        if self._events_path is None:
            return
        line = json.dumps(event).encode() + b"\n"
        try:
            _append(self._events_path, b"\n" + line if self._is_cut else line)
            self._is_cut = False
        except (OSError, DaemonError) as error:
            self._is_cut = self._is_cut or isinstance(error, _CutError)
            # Training goes on without.
            log.error("cannot write an event to %s: %s", self._events_path, error)


def newest_step(last_steps: Mapping[str, int], ranks: Collection[int]) -> int | None:
    """Return the newest step that the daemon has heard of, None unless it has of all `ranks` since it was started."""
    return max(last_steps.values(), default=0) if {str(rank) for rank in ranks} <= last_steps.keys() else None


def protected_line(hosts: Sequence[str], replicas: int, every: int) -> str:
    """Return what a person is told at the first commit: which steps are kept, how often, and where."""
    steps = "every step" if every == 1 else f"one of {every} steps"
    names = ", ".join(hosts[:_NAMED]) + (f", … ({len(hosts)} in all)" if len(hosts) > _NAMED else "")
    if len(hosts) == 1:
        return f"protected: {steps}, 1 replica on host {names}, and none elsewhere"
    each = "" if replicas == len(hosts) else " of each rank"
    return f"protected: {steps}, {replicas} replica{'' if replicas == 1 else 's'}{each} on hosts {names}"


def whole(events: Sequence[Recovery]) -> dict[str, Any]:
    """Return the event that tells a recovery on all hosts from the complete event of each: the slowest one decides."""
    slowest = max(events, key=lambda event: event.total_s)
    sources = {rank: source for event in events for rank, source in event.ranks.items()}
    why = reason(events)
    return {
        "event": "recovered",
        "generation": slowest.generation,
        "restored_step": slowest.restored_step,
        "resized": slowest.resized,
        "total_s": slowest.total_s,
        "kind": why.kind,
        "cause": why.cause,
        "slowest": slowest.host,
        "hosts": {event.host: event.total_s for event in events},
        "ranks": dict(sorted(sources.items(), key=lambda item: int(item[0]))),
        "steps_lost": max((event.steps_lost for event in events if event.steps_lost is not None), default=None),
    }


class _CutError(OSError):
    """Of a line only the beginning may be written, and it stays there."""


def _append(path: Path, line: bytes) -> None:
    """Append `line`; what was written of one that does not fit is taken back, which a pipe does not do.

    Raises:
        DaemonError: See `open_to_append`.
        OSError: It is not written now.
    """
    descriptor = open_to_append(path)
    try:
        if (count := os.write(descriptor, line)) < len(line):
            kind = BlockingIOError if _took_back(descriptor, count) else _CutError
            raise kind(errno.EAGAIN, "its end did not fit")
    finally:
        try:
            os.close(descriptor)
        except OSError as error:
            # A network file system may tell only now that it has no room.
            raise _CutError(*error.args) from error


def _took_back(descriptor: int, count: int) -> bool:
    """Remove the `count` bytes that were just written, and tell whether that is possible."""
    with suppress(OSError):
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:  # Else another launcher has written behind them.
            os.ftruncate(descriptor, end - count)
            return True
    return False


_NAMED = 8
_WHERE = {"local": "local memory", "peer": "peer memory", "persisted": "the persistent tier", "imported": "an import"}


def _line(event: Recovery) -> str:
    phases = " + ".join(f"{phase.replace('_', ' ')} {seconds:.2f}" for phase, seconds in event.phases_s.items())
    if not event.complete and not event.generation:
        return f"not recovered ({event.cause}): no workers were started again"
    if not event.complete:
        return f"recovery interrupted after {event.total_s:.2f} s ({event.cause}): {phases}"
    sources = " and ".join(_WHERE.get(name, name) for name in event.sources)
    outcome = _outcome(event.restored_step, event.steps_lost, event.resized, sources)
    return f"recovered in {event.total_s:.2f} s ({event.cause}): {outcome}; {phases}"


def _whole_line(event: Mapping[str, Any]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, source in event["ranks"].items():
        ranks.setdefault(source, []).append(rank)
    sources = " and ".join(
        f"{_WHERE.get(source, source)} ({'rank' if len(some) == 1 else 'ranks'} {', '.join(some[:_NAMED])}"
        f"{', …' if len(some) > _NAMED else ''})"
        for source, some in sorted(ranks.items())
    )
    slowest = f"{event['total_s']:.2f} s, the slowest is {event['slowest']}"
    outcome = _outcome(event["restored_step"], event["steps_lost"], event["resized"], sources)
    return f"all {len(event['hosts'])} host(s) recovered in {slowest}: {outcome}"


def _outcome(restored_step: int | None, steps_lost: int | None, resized: Sequence[int] | None, sources: str) -> str:
    where = f"step {restored_step} from {sources}"
    if restored_step is None:
        where = "from the beginning"
    elif not restored_step:
        where = "step 0 (nothing was committed yet)"
    where += "" if steps_lost is None else f", {steps_lost} step(s) lost"
    return where + ("" if resized is None else ", into {1} ranks in place of {0}".format(*resized))
