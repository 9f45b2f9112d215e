"""The goodput ledger: what each failure of a run cost, from the recovery events of its launchers (`--rr-events`).

Every host writes one event for each failure. The job waits for its slowest host, so its phases are the failure's.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from .codec import UNIX_S, Record, limited
from .fields import Fields, printable

MAX_CAUSE_BYTES = 1 << 16
"""A cause may quote the message of a failure."""

PHASES = ("detect", "decide", "stop", "rendezvous", "spawn", "restore", "first_step")


def _ranks(values: Fields, name: str) -> dict[str, str]:
    ranks = values.object(name)
    if not all(rank.isdecimal() and len(rank) < 10 and isinstance(source, str) for rank, source in ranks.items()):
        raise values.wrong(name, "sources by rank")
    return ranks


def _sizes(values: Fields, name: str) -> tuple[int, ...]:
    sizes = tuple(values.integers(name))
    if len(sizes) != 2:
        raise values.wrong(name, "two numbers of ranks")
    return sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery(Record):
    """The event of one host's recovery from one failure.

    Attributes:
        unix_s: When it ended.
        run_id: The run.
        host: The host.
        generation: The generation that recovered it, 0 when none was formed.
        kind: As in `rdzv/failure`.
        cause: The sentence a person wants.
        complete: Training went on afterwards, before another failure.
        restored_step: What its ranks restored, None for the beginning.
        sources: Where they had it from.
        ranks: Rank → where it had that from.
        steps_lost: Completed steps that were trained again, None when nobody knows.
        resized: How many ranks captured what they restored, and how many there are now, if that is not the same.
        phases_s: Phase → seconds, of those that it went through.
        total_s: Seconds without training, all phases together.
    """

    event: str = limited("recovery", choices=("recovery",))
    unix_s: float = limited(high=UNIX_S)
    run_id: str
    host: str
    generation: int
    kind: str
    cause: str = limited(
        "",
        high=MAX_CAUSE_BYTES,
        shown=True,
        read=lambda values, name: values.made(name, "text", lambda cause: printable(str(cause), MAX_CAUSE_BYTES)),
    )
    complete: bool
    restored_step: int | None = None
    sources: tuple[str, ...] = ()
    ranks: Mapping[str, str] = limited(factory=dict, read=_ranks)
    steps_lost: int | None = None
    resized: tuple[int, ...] | None = limited(None, read=_sizes)
    phases_s: Mapping[str, float] = limited(
        inline=True,
        read=lambda values, _: {
            phase: values.number(f"{phase}_s") for phase in PHASES if f"{phase}_s" in values.values
        },
        write=lambda phases_s: {f"{phase}_s": seconds for phase, seconds in phases_s.items()},
    )
    total_s: float


def reason(events: Iterable[Recovery]) -> Recovery:
    """Return the event that says why all of these hosts had to recover: the slowest one's, as far as that knows."""
    events = list(events)
    slowest = max(events, key=lambda event: event.total_s)
    # A host that is new knows of a worker's exit, and not that it was because of a host that was lost.
    lost_host = next((event for event in events if event.kind == "host_lost"), slowest)
    return lost_host if slowest.kind == "worker_exit" else slowest


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCost:
    """What one failure cost the whole job.

    Attributes:
        run_id: The run.
        generation: The generation that recovered it, 0 when none was formed.
        kind: As in `rdzv/failure`.
        cause: The sentence a person wants.
        start_unix_s: When it happened.
        complete: Training went on afterwards, before another failure.
        phases_s: Phase → seconds on the slowest host, those that it went through.
        down_s: Seconds without training, all phases together.
        steps_lost: Completed steps that were trained again, None when nobody knows.
        hosts: Names of the hosts that reported it.
    """

    run_id: str
    generation: int
    kind: str
    cause: str
    start_unix_s: float
    complete: bool
    phases_s: Mapping[str, float]
    down_s: float
    steps_lost: int | None
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, events: Iterable[Recovery]) -> Self:
        """Return the failure that these events of its hosts describe, at least one."""
        events = list(events)
        slowest = max(events, key=lambda event: event.total_s)
        why = reason(events)
        return cls(
            run_id=slowest.run_id,
            generation=slowest.generation,
            kind=why.kind,
            cause=why.cause,
            start_unix_s=slowest.unix_s - slowest.total_s,
            complete=all(event.complete for event in events),
            phases_s=slowest.phases_s,
            down_s=slowest.total_s,
            steps_lost=max((event.steps_lost for event in events if event.steps_lost is not None), default=None),
            hosts=tuple(sorted(event.host for event in events)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The failures of one or more runs in order of time, and what they cost together.

    Attributes:
        failures: All of them.
        step_s: Seconds of one training step, None when nobody said.
        period_s: Seconds that the runs took altogether, None when nobody said.
    """

    failures: tuple[FailureCost, ...]
    step_s: float | None = None
    period_s: float | None = None

    def lost_s(self, failure: FailureCost) -> float | None:
        """Return the seconds of training that are done again, None when a number for it is missing."""
        if failure.steps_lost == 0:
            return 0.0
        return None if self.step_s is None or failure.steps_lost is None else failure.steps_lost * self.step_s

    def wasted_s(self, failure: FailureCost) -> float | None:
        """Return the wasted time as Equation 6.1 counts it: the lost training and the retrieval, no other overhead."""
        lost_s = self.lost_s(failure)
        return None if lost_s is None else lost_s + failure.phases_s.get("restore", 0.0)

    @property
    def effective_ratio(self) -> float | None:
        """Effective training time ratio (Section 6.7.3): the share of `period_s` that made lasting progress.

        None when the period is not known, or steps were lost and the length of a step is not known.
        """
        lost_s = [self.lost_s(failure) for failure in self.failures if failure.steps_lost is not None]
        if self.period_s is None or any(seconds is None for seconds in lost_s):
            return None
        cost_s = sum(failure.down_s for failure in self.failures) + sum(seconds or 0.0 for seconds in lost_s)
        return max(0.0, 1 - cost_s / self.period_s)

    def describe(self) -> dict[str, Any]:
        """Return the ledger as a JSON object."""
        rows = [
            {
                "run_id": failure.run_id,
                "generation": failure.generation,
                "kind": failure.kind,
                "cause": failure.cause,
                "unix_s": round(failure.start_unix_s, 3),
                "complete": failure.complete,
                **{f"{phase}_s": failure.phases_s.get(phase) for phase in PHASES},
                "down_s": failure.down_s,
                "steps_lost": failure.steps_lost,
                "lost_s": self.lost_s(failure),
                "wasted_s": self.wasted_s(failure),
                "hosts": list(failure.hosts),
            }
            for failure in self.failures
        ]
        return {
            "failures": rows,
            "count": len(rows),
            "down_s": round(sum(failure.down_s for failure in self.failures), 4),
            "steps_lost": sum(failure.steps_lost or 0 for failure in self.failures),
            "step_s": self.step_s,
            "period_s": self.period_s,
            "effective_ratio": self.effective_ratio,
        }


def read_ledger(paths: Iterable[Path], *, step_s: float | None = None, period_s: float | None = None) -> Ledger:
    """Return the ledger of the events in these files; one file for each host, or one for all.

    Events of other kinds than "recovery" are left out.

    Raises:
        DaemonError: A file cannot be read, or a line of it is not an event; names file and line.
    """
    together: dict[tuple[Any, ...], list[Recovery]] = {}
    formed: dict[tuple[str, str], tuple[int, int]] = {}
    # A file of all hosts may be there beside those that it was made of.
    for line, where in {line: where for path in paths for where, line in _lines(path)}.items():
        value = _value(where, line)
        if Fields(value, where).text("event") != "recovery":
            continue
        event = Recovery.parse(value, where)
        # Before a generation is formed it has no number: such a failure is the host's first, second, … after the last.
        last, count = formed.get((event.run_id, event.host), (0, 0))
        key = (event.generation, 0) if event.generation else (last, count + 1)
        formed[event.run_id, event.host] = key
        together.setdefault((event.run_id, *key), []).append(event)
    failures = sorted(map(FailureCost.of, together.values()), key=lambda failure: failure.start_unix_s)
    return Ledger(failures=tuple(failures), step_s=step_s, period_s=period_s)


def _lines(path: Path) -> Iterable[tuple[str, str]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DaemonError(f"cannot read events from {path}: {error}") from error
    return [(f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _value(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DaemonError(f"{where}: not JSON ({error}); a launcher writes one JSON object per line") from error
    if not isinstance(value, dict):
        raise DaemonError(f"{where}: a JSON {type(value).__name__} and not an object; is it a file of --rr-events?")
    return value
