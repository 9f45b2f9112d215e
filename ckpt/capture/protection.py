"""Whether a failure now would cost little: how far commits are behind training, why, and who is told.

A capture that is skipped, a peer that is slow, a daemon or etcd that is silent: all of it shows as completed steps that
are not committed. So that is what is watched, from the trainer's side, where it is seen whatever else has failed.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..link.link import Link
from .capture import Capturer

_LIMIT_STEPS: Final = 3
_LIMIT_S: Final = 30.0
_LASTING_S: Final = 1.0
_LATE_COMMITS: Final = 3
_GOOD_COMMITS: Final = 8
_RELAPSE_S: Final = 600.0
_CALM_S: Final = (10.0, 300.0)
_LONG_SHARE: Final = 0.1
_KEPT_STEPS: Final = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """Whether a failure now would cost little; as a condition it is true when it would.

    Attributes:
        steps_at_risk: Completed steps that are not committed, to this rank's knowledge.
        seconds_at_risk: Since when the oldest of them has been completed; 0 without one.
        reason: Why it is not protected, "" while it is.
    """

    steps_at_risk: int
    seconds_at_risk: float
    reason: str

    def __bool__(self) -> bool:
        """Tell whether it is protected."""
        return not self.reason


class ProtectionWatch:
    """Compares the steps of one rank with what is committed; one rank of the run is `loud` and tells.

    Steps that are shorter than commits put some more at risk between any two commits, so one commit that comes late
    says nothing: it is told when several in a row are late, or when that lasts; again when twice as many steps are at
    risk; and when it has been over for several commits. What is over and comes back within ten minutes must stay over
    for ten seconds, twice as long each time, at most five minutes: else a run at the edge would fill its log.
    """

    def __init__(
        self,
        capturer: Capturer,
        link: Link,
        *,
        makes_captures: bool,
        every: Callable[[], int],
        loud: bool,
    ) -> None:
        """Begin with what is committed now.

        Args:
            capturer: Knows the watermark, and which captures failed.
            link: Tells the daemon, and whether that is there.
            makes_captures: Whether captures are made at all.
            every: Returns of how many steps one is captured at most.
            loud: Whether this rank tells.
        """
        self._capturer = capturer
        self._link = link
        self._makes_captures = makes_captures
        self._every = every
        self._loud = loud
        self._clock = time.monotonic
        self._lock = threading.Lock()
        self._committed = 0 if capturer.watermark is None else capturer.watermark[1]
        self._done = self._committed
        self._recent: deque[tuple[int, float]] = deque(maxlen=_KEPT_STEPS)
        self._first_s: float | None = None
        self._oldest_s: float | None = None
        self._moved_s = self._clock()
        self._commit_s = 0.0
        self._discarded = 0
        self._late_since_s: float | None = None
        self._late_commits = self._good_commits = 0
        self._good_since_s = self._calm_s = 0.0
        self._over_s = -math.inf
        self._worst = self._told = self._most = 0
        self._told_s = self._unprotected_s = 0.0

    @property
    def now(self) -> Protection:
        """The protection at this moment."""
        with self._lock:
            return self._protection(self._clock())

    def stepped(self, step: int) -> None:
        """Record that `step` is completed."""
        with self._lock:
            now_s = self._clock()
            self._first_s = now_s if self._first_s is None else self._first_s
            self._done = step
            self._recent.append((step, now_s))
            self._oldest_s = now_s if self._oldest_s is None else self._oldest_s
            self._judge(now_s)

    def committed(self) -> None:
        """Look whether the capturer knows of a newer commit."""
        watermark = self._capturer.watermark
        with self._lock:
            if watermark is None or watermark[1] <= self._committed:
                return
            now_s, peak = self._clock(), self._done - self._committed
            self._committed, self._moved_s = watermark[1], now_s
            self._discarded = self._capturer.stats.discarded
            self._commit_s = next((now_s - at_s for step, at_s in self._recent if step >= self._committed), 0.0)
            self._oldest_s = next((at_s for step, at_s in self._recent if step > self._committed), None)
            late = peak > self._limit
            self._late_commits = self._late_commits + 1 if late else 0
            self._good_since_s = now_s if late else self._good_since_s
            self._good_commits = 0 if late else self._good_commits + 1
            self._worst = max(self._worst, peak) if late else 0
            self._judge(now_s)

    def attached(self) -> None:
        """Report the state of protection to a daemon that may be a new one."""
        with self._lock:
            if self._told:
                self._notify(self._told, self._reason(self._clock()))

    def close(self) -> None:
        """Log how long the run was not protected, if that was long."""
        with self._lock:
            now_s = self._clock()
            total_s = now_s - (now_s if self._first_s is None else self._first_s)
            until_s = self._good_since_s if self._good_commits else now_s
            unprotected_s = self._unprotected_s + (max(0.0, until_s - self._told_s) if self._told else 0.0)
            if self._loud and unprotected_s > _LONG_SHARE * total_s:
                _log.warning(
                    "this run was not protected for %.1f of %.1f s: a failure would have cost up to %d steps",
                    unprotected_s,
                    total_s,
                    self._most,
                )

    @property
    def _limit(self) -> int:
        return _LIMIT_STEPS * self._every()

    @property
    def _step_s(self) -> float:
        (first, first_s), (last, last_s) = self._recent[0], self._recent[-1]
        return (last_s - first_s) / (last - first) if last > first else 0.0

    def _protection(self, now_s: float) -> Protection:
        at_risk = self._done - self._committed
        seconds = 0.0 if self._oldest_s is None or at_risk <= 0 else now_s - self._oldest_s
        late = at_risk > self._limit or (at_risk > 0 and seconds > max(_LIMIT_S, 2 * self._step_s))
        reason = self._reason(now_s) if late else ""
        return Protection(steps_at_risk=max(at_risk, 0), seconds_at_risk=seconds, reason=reason)

    def _judge(self, now_s: float) -> None:
        present = self._protection(now_s)
        if present:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = now_s
        lasting = self._late_since_s is not None and now_s - self._late_since_s >= _LASTING_S
        self._worst = max(self._worst, present.steps_at_risk if lasting else 0)
        if (lasting or self._late_commits >= _LATE_COMMITS) and self._worst >= 2 * self._told:
            if not self._told:
                first_s, most_s = _CALM_S
                relapsed = now_s - self._over_s < _RELAPSE_S
                self._told_s, self._calm_s = now_s, min(max(2 * self._calm_s, first_s), most_s) if relapsed else 0.0
            self._told = max(self._worst, 1)
            self._tell(self._told, self._reason(now_s))
        elif (
            self._told
            and present
            and self._good_commits >= _GOOD_COMMITS
            and now_s - self._good_since_s >= self._calm_s
        ):
            self._unprotected_s += max(0.0, self._good_since_s - self._told_s)
            self._told = self._worst = 0
            self._over_s = now_s
            self._tell(0, "")
        if self._told:
            self._most = max(self._most, self._worst)

    def _reason(self, now_s: float) -> str:
        standing_s = now_s - max(self._moved_s, self._first_s or 0.0)
        if not self._makes_captures:
            return 'replication.scheme is "none"'
        if (away_s := self._link.away_s) is not None and away_s >= _LASTING_S:
            return f"the daemon of this host has been away for {away_s:.1f} s"
        if self._capturer.stats.discarded - self._discarded >= _LATE_COMMITS:
            return "captures fail one after the other, because the state changes while it is copied"
        if standing_s >= max(_LASTING_S, 4 * self._commit_s):
            first = "" if self._committed else "check that every rank calls step(), and "
            return f"nothing has been committed for {standing_s:.1f} s: {first}see `resilientctl status` on every host"
        return f"steps take {1e3 * self._step_s:.3g} ms, commits {1e3 * self._commit_s:.3g} ms"

    def _tell(self, steps: int, reason: str) -> None:
        if not self._loud:
            return
        self._notify(steps, reason)
        if reason:
            _log.warning("not protected: a failure costs up to %d steps now (step %d): %s", steps, self._done, reason)
        else:
            _log.warning("protected again at step %d", self._done)

    def _notify(self, steps: int, reason: str) -> None:
        if self._loud:
            self._link.notify("protection", step=self._done, steps_at_risk=steps, reason=reason)
