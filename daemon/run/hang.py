"""Hangs: ranks that are alive and make no progress for longer than this run's steps have ever taken.

How long a step takes is learned anew in every generation. Until enough steps are known, and for the first one, which
may compile or load data, the longer `hang_start_s` holds. What is not watched: a rank that restores its state, and
every rank once one has detached, because then the steps of the run are done (or a process is gone, which its launcher
sees).

Steps are not the only sign of life. That a rank of the run pauses (the script says that it does something long) or
goes on making collectives is one of all ranks, because they may wait for it; but not of a process that is stopped or
gone. CPU time alone proves little, since a wait may spin: it makes the limit `hang_busy_factor` times as
long. Nobody keeps itself alive by what others say of themselves: a host tells others only of its own ranks.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ..base.policy import DetectPolicy
from .cpu_meter import CpuMeter
from .observation import Observation

STANDING = ("stopped", "zombie", "disk-sleep", "gone")
"""Process states, as `psutil` names them, in which a process cannot be the one that waits for others."""

ALIVE, BUSY, SILENT = "alive", "busy", ""
"""Signs that a host gives of its ranks: one pauses or makes collectives; one takes CPU time; neither."""

_STOPPED = ("stopped", "zombie", "gone")
_BLIND_S = 5.0
_NAMED = 16
_SHARED_AFTER_S = 5.0
"""Pauses that are shorter need not be told to other hosts."""


@dataclass(kw_only=True, slots=True)
class _WatchedRank:
    """One attached rank.

    Attributes:
        pid: Its process.
        began: The step that it started from.
        step: Its last step, None before the first.
        since_s: When that was (monotonic), later by the time that teaches nothing.
        life_s: When there was the last sign of its life.
        still_s: When that step was (monotonic), whatever came after it.
        heard_s: When it was last heard to make collectives.
        restoring: It waits for its state.
        paused_s: When it began to pause, None while it does not.
        pause_limit_s: How long it may.
        cpu: The CPU time that it takes, measured when it is late.
    """

    pid: int
    began: int = 0
    step: int | None = None
    since_s: float
    life_s: float
    still_s: float
    heard_s: float = -math.inf
    restoring: bool = False
    paused_s: float | None = None
    pause_limit_s: float | None = None
    cpu: CpuMeter = field(default_factory=CpuMeter)

    @property
    def at(self) -> int:
        """The step that it did not get past."""
        return self.began if self.step is None else self.step

    def is_overdue(self, now_s: float) -> bool:
        """Tell whether it pauses longer than it may."""
        return (
            self.paused_s is not None and self.pause_limit_s is not None and now_s > self.paused_s + self.pause_limit_s
        )

    def live(self, now_s: float) -> None:
        """Note a sign of life."""
        self.life_s = now_s
        self.cpu.forget()


@dataclass(kw_only=True, slots=True)
class _Generation:
    """What is known of the generation under way; nothing of it outlives it.

    Attributes:
        left_s: When the last rank that has detached made its last step.
    """

    number: int
    ranks: dict[int, _WatchedRank] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    intervals: int = 0
    longest_s: float = 0.0
    hang: Observation | None = None
    overlooked: bool = False
    first_step: int | None = None
    newest_step: int = 0
    left_s: float = -math.inf


class HangDetector:
    """Tracks the activity of each rank of this host, and detects a hung generation.

    Args:
        policy: The limits.
        clock: Monotonic seconds.
        wall: Unix seconds.

    Attributes:
        sign: What other hosts must know of the ranks of this one, as of the last `check`.
    """

    def __init__(
        self,
        policy: DetectPolicy,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._wall = wall
        self._checked_s = clock()
        self.sign = SILENT
        self._now = _Generation(number=0)

    @property
    def limit_s(self) -> float:
        """Seconds without a step after which a rank counts as hung, the first step of a generation apart."""
        if self._now.intervals < self._policy.hang_min_steps * len(self._now.ranks):
            return self._policy.hang_start_s
        return max(self._policy.hang_floor_s, self._policy.hang_factor * self._now.longest_s)

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the newest step that a rank of this host has done in this generation, None before the first."""
        return None if self._now.first_step is None else (self._now.first_step, self._now.newest_step)

    def idle_s(self, generation: int) -> float | None:
        """Return the seconds since any rank of this host made a step in `generation`, None before the first."""
        if generation != self._now.number:
            return None
        stepped = (watched.since_s for watched in self._now.ranks.values() if watched.step is not None)
        newest_s = max((self._now.left_s, *stepped))
        return None if newest_s == -math.inf else self._clock() - newest_s

    def attached(self, rank: int, pid: int, generation: int) -> None:
        """Watch `rank` from now on; a new generation forgets everything of the one before."""
        if generation != self._now.number:
            self._now = _Generation(number=generation)
        self._now.finished.discard(rank)
        now_s = self._clock()
        self._now.ranks[rank] = _WatchedRank(pid=pid, since_s=now_s, life_s=now_s, still_s=now_s)

    def restoring(self, rank: int) -> None:
        """Do not watch `rank` while it waits for its state."""
        if rank in self._now.ranks:
            self._now.ranks[rank].restoring = True

    def restored(self, rank: int, step: int = 0) -> None:
        """Watch `rank`, which has the state after `step`, again."""
        if (watched := self._now.ranks.get(rank)) is not None:
            watched.restoring, watched.began = False, step
            watched.since_s = watched.still_s = self._clock()
            watched.live(watched.since_s)

    def paused(self, rank: int, limit_s: float | None) -> None:
        """Record that `rank` begins something long, which may take `limit_s`."""
        if (watched := self._now.ranks.get(rank)) is not None:
            watched.paused_s, watched.pause_limit_s = self._clock(), limit_s
            watched.live(watched.paused_s)

    def resumed(self, rank: int) -> None:
        """Record that this is over."""
        if (watched := self._now.ranks.get(rank)) is not None:
            watched.paused_s = None
            watched.live(self._clock())

    def communicated(self, rank: int) -> None:
        """Record that `rank` has begun collectives since its last report."""
        if (watched := self._now.ranks.get(rank)) is not None:
            watched.heard_s = self._clock()
            watched.live(watched.heard_s)

    def suspects(self) -> dict[int, int]:
        """Return rank → pid of those whose CPU time `measured` should hear now."""
        now_s = self._clock()
        return {
            rank: watched.pid
            for rank, watched in self._now.ranks.items()
            if now_s - watched.life_s > self._limit_of(watched) / 2
            and now_s - watched.cpu.heard_s > self._limit_of(watched) / 16
        }

    def measured(self, cpu_s: Mapping[int, float]) -> None:
        """Record rank → the CPU time that its processes have taken in all."""
        now_s = self._clock()
        for rank, taken_s in cpu_s.items():
            if (watched := self._now.ranks.get(rank)) is not None:
                watched.cpu.hear(now_s, taken_s, self._limit_of(watched) / 4)

    def progressed(self, rank: int, step: int) -> None:
        """Record that `rank` has done `step`; the time that it took teaches the limit, unless it passed for a hang."""
        watched, now_s = self._now.ranks.get(rank), self._clock()
        if watched is None:
            return
        taught = self._now.hang is None or self._now.overlooked
        if watched.step is not None and taught and now_s - self._checked_s <= _BLIND_S:
            self._now.intervals += 1
            self._now.longest_s = max(self._now.longest_s, now_s - watched.since_s)
        watched.step, watched.since_s, watched.still_s, watched.restoring = step, now_s, now_s, False
        watched.live(now_s)
        self._now.first_step = step if self._now.first_step is None else self._now.first_step
        self._now.newest_step = max(self._now.newest_step, step)

    def detached(self, rank: int) -> None:
        """Forget `rank`: its trainer is done, or gone."""
        if (watched := self._now.ranks.pop(rank, None)) is not None:
            self._now.finished.add(rank)
            if watched.step is not None:
                self._now.left_s = max(self._now.left_s, watched.since_s)

    def check(
        self,
        generation: int,
        own_ranks: Collection[int],
        state_of: Callable[[int], str],
        *,
        elsewhere: str = SILENT,
        overlooked: bool = False,
    ) -> Observation | None:
        """Return the hang of `generation`, the same one until progress resumes or the generation is over; else None.

        What would be a hang if ranks gave no signs of life is returned as well, with severity "info".

        Args:
            generation: The present one.
            own_ranks: The ranks that run on this host in it.
            state_of: Returns the state of the process with a pid, as `psutil` names it, or "gone".
            elsewhere: The strongest sign of other hosts.
            overlooked: The root lets a hang of this generation be: if it ends, it was none, and teaches the limit.
        """
        now_s = self._clock()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        watches = generation == self._now.number and not self._now.finished
        self.sign = self._sign(state_of, now_s) if watches else SILENT
        self._now.overlooked = overlooked
        if passed_s > _BLIND_S:
            # This process did not run (stopped, starved, suspended), so progress may have gone unheard.
            for watched in self._now.ranks.values():
                watched.since_s = min(watched.since_s + passed_s, now_s)
                watched.life_s = min(watched.life_s + passed_s, now_s)
        elif ALIVE in (self._life(state_of, now_s), elsewhere):
            for watched in self._now.ranks.values():
                if state_of(watched.pid) not in _STOPPED:
                    watched.since_s = min(watched.since_s + passed_s, now_s)
                    watched.live(now_s)
        late = [rank for rank, watched in self._now.ranks.items() if self._is_late(watched, now_s)]
        if not watches or not late:
            self._now.hang = None
        elif self._now.hang is None:
            self._now.hang = self._judge(late, own_ranks, state_of, now_s, elsewhere)
        return self._now.hang or (self._excused(now_s, elsewhere) if watches else None)

    def _life(self, state_of: Callable[[int], str], now_s: float, *, shared: bool = False) -> str:
        """Return whether a rank of this host pauses or makes collectives; `shared`: for long enough to tell others."""
        least_s = min(_SHARED_AFTER_S, self._policy.hang_floor_s / 10) if shared else 0.0
        for watched in self._now.ranks.values():
            limit_s = self._limit_of(watched)
            pauses = (
                watched.paused_s is not None and now_s - watched.paused_s >= least_s and not watched.is_overdue(now_s)
            )
            heard = now_s - watched.heard_s < limit_s / 2 < now_s - watched.still_s
            if (pauses or heard) and state_of(watched.pid) not in _STOPPED:
                return ALIVE
        return SILENT

    def _sign(self, state_of: Callable[[int], str], now_s: float) -> str:
        if self._life(state_of, now_s, shared=True):
            return ALIVE
        return BUSY if any(watched.cpu.busy for watched in self._now.ranks.values()) else SILENT

    def _limit_of(self, watched: _WatchedRank) -> float:
        return self._policy.hang_start_s if watched.step is None else self.limit_s

    def _is_late(self, watched: _WatchedRank, now_s: float, times: float = 1.0) -> bool:
        if watched.is_overdue(now_s):
            return True
        return not watched.restoring and now_s - watched.life_s > times * self._limit_of(watched)

    def _judge(
        self, late: list[int], own_ranks: Collection[int], state_of: Callable[[int], str], now_s: float, elsewhere: str
    ) -> Observation | None:
        """Return what is wrong with the `late` ranks, None while those that the others wait for may just be at work."""
        culprits, certain = self._culprits(own_ranks, state_of, now_s)
        known = [self._now.ranks[rank] for rank in culprits if rank in self._now.ranks]
        if any(watched.cpu.busy for watched in known) or (not certain and elsewhere == BUSY):
            factor = self._policy.hang_busy_factor
            late = [rank for rank in late if self._is_late(self._now.ranks[rank], now_s, factor)]
            if not late:
                return None
        return self._describe(late, culprits, certain, state_of, now_s)

    def _excused(self, now_s: float, elsewhere: str) -> Observation | None:
        """Return what shows people that ranks make no step for long, and why that is no hang."""
        still = {rank: now_s - watched.still_s for rank, watched in self._now.ranks.items() if not watched.restoring}
        rank = max(still, key=lambda rank: still[rank], default=None)
        if rank is None or still[rank] <= (limit_s := self._limit_of(self._now.ranks[rank])):
            return None
        ranks = self._now.ranks.values()
        if any(watched.paused_s is not None for watched in ranks):
            why = "it pauses, or a rank that does is waited for"
        elif self.sign == ALIVE:
            why = "collectives go on"
        elif elsewhere == ALIVE:
            why = "a rank of another host pauses or makes collectives"
        elif BUSY in (self.sign, elsewhere):
            why = f"processes take CPU time, which makes the limit {self._policy.hang_busy_factor:g} times as long"
        else:
            return None
        return Observation(
            kind="hang",
            severity="info",
            generation=self._now.number,
            value=round(still[rank], 3),
            limit=round(limit_s, 3),
            message=f"no step for {still[rank]:.1f} s, the limit is {limit_s:.1f} s: rank {rank} is not hung, {why}",
            unix_s=round(self._wall() - still[rank], 3),
        )

    def _describe(
        self,
        late: list[int],
        culprits: dict[int, str],
        certain: bool,
        state_of: Callable[[int], str],
        now_s: float,
    ) -> Observation:
        named = sorted(culprits)
        known = [self._now.ranks[rank] for rank in named if rank in self._now.ranks] or [self._now.ranks[late[0]]]
        stalled_s = now_s - min(rank.life_s for rank in known)
        limit_s = min(self._limit_of(self._now.ranks[rank]) for rank in late)
        stopped = any(state_of(watched.pid) in _STOPPED for watched in known)
        some = ", ".join(map(str, named[:_NAMED])) + (", …" if len(named) > _NAMED else "")
        who = f"rank {some}" if len(named) == 1 else f"ranks {some}"
        return Observation(
            kind="hang",
            severity="fail" if self._policy.hang_action == "restart" else "warn",
            rank=named[0] if certain else None,
            generation=self._now.number,
            step=None if stopped else min(watched.at for watched in known),
            value=round(stalled_s, 3),
            limit=round(limit_s, 3),
            message=f"no progress for {stalled_s:.1f} s, the limit is {limit_s:.1f} s: {who} {culprits[named[0]]}",
            unix_s=round(self._wall() - stalled_s, 3),
        )

    def _culprits(
        self, own_ranks: Collection[int], state_of: Callable[[int], str], now_s: float
    ) -> tuple[dict[int, str], bool]:
        """Return the ranks that the others probably wait for, each with why, and whether they stand out from the rest.

        Those are the ranks that pause for too long, that are missing or behind; when none is, those whose processes
        stand; else all.
        """
        overdue = {
            rank: f"may pause for {watched.pause_limit_s:g} s after step {watched.at} and has not resumed"
            for rank, watched in self._now.ranks.items()
            if watched.is_overdue(now_s)
        }
        if overdue:
            return overdue, True
        steps = {rank: -1 if (known := self._now.ranks.get(rank)) is None else known.at for rank in own_ranks}
        lowest = min(steps.values())
        why = "did not attach" if lowest < 0 else f"did not get past step {lowest}"
        behind = {rank: why for rank, step in steps.items() if step == lowest}
        if len(behind) < len(steps):
            return behind, True
        states = {rank: state_of(self._now.ranks[rank].pid) for rank in steps}
        standing = {rank: f"did not get past step {lowest} and is {state}" for rank, state in states.items()}
        standing = {rank: why for rank, why in standing.items() if states[rank] in STANDING}
        return (standing, True) if standing else (behind, False)
