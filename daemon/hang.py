"""Hangs: ranks that are alive and make no progress for longer than this run's steps have ever taken.

How long a step takes is learned anew in every generation. Until enough steps are known, and for the first one, which
may compile or load data, the longer `hang_start_s` holds. What is not watched: a rank that restores its state, and
every rank once one has detached, because then the steps of the run are done (or a process is gone, which its launcher
sees).
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from .observation import Observation
from .policy import DetectPolicy

STANDING = ("stopped", "zombie", "disk-sleep", "gone")
"""Process states, as `psutil` names them, in which a process cannot be the one that waits for others."""

_BLIND_S = 5.0
_NAMED = 16


@dataclass(kw_only=True, slots=True)
class _Rank:
    """One attached rank: its process, its last step, and when it last showed life (monotonic)."""

    pid: int
    step: int | None = None
    since_s: float
    restoring: bool = False


@dataclass(kw_only=True, slots=True)
class _Generation:
    """What is known of the generation under way; nothing of it outlives it."""

    number: int
    ranks: dict[int, _Rank] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    intervals: int = 0
    longest_s: float = 0.0
    hang: Observation | None = None
    first_step: int | None = None
    newest_step: int = 0


class HangDetector:
    """Hears of every rank of this host what its trainer does, and tells when the generation hangs.

    Args:
        policy: The limits.
        clock: Monotonic seconds.
        wall: Unix seconds.
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

    @property
    def idle_s(self) -> float | None:
        """Seconds since any rank of this host made a step in this generation, None before the first."""
        stepped = [watched.since_s for watched in self._now.ranks.values() if watched.step is not None]
        return self._clock() - max(stepped) if stepped else None

    def attached(self, rank: int, pid: int, generation: int) -> None:
        """Watch `rank` from now on; a new generation forgets everything of the one before."""
        if generation != self._now.number:
            self._now = _Generation(number=generation)
        self._now.finished.discard(rank)
        self._now.ranks[rank] = _Rank(pid=pid, since_s=self._clock())

    def restoring(self, rank: int) -> None:
        """Do not watch `rank` while it waits for its state."""
        if rank in self._now.ranks:
            self._now.ranks[rank].restoring = True

    def restored(self, rank: int) -> None:
        """Watch `rank` again."""
        if rank in self._now.ranks:
            self._now.ranks[rank].restoring = False
            self._now.ranks[rank].since_s = self._clock()

    def progressed(self, rank: int, step: int) -> None:
        """Hear that `rank` has done `step`; the time that it took teaches the limit, unless it passed for a hang."""
        watched, now_s = self._now.ranks.get(rank), self._clock()
        if watched is None:
            return
        if watched.step is not None and self._now.hang is None and now_s - self._checked_s <= _BLIND_S:
            self._now.intervals += 1
            self._now.longest_s = max(self._now.longest_s, now_s - watched.since_s)
        watched.step, watched.since_s, watched.restoring = step, now_s, False
        self._now.first_step = step if self._now.first_step is None else self._now.first_step
        self._now.newest_step = max(self._now.newest_step, step)

    def detached(self, rank: int) -> None:
        """Hear that the trainer of `rank` is done, or gone."""
        if self._now.ranks.pop(rank, None) is not None:
            self._now.finished.add(rank)

    def check(self, generation: int, own_ranks: Collection[int], state_of: Callable[[int], str]) -> Observation | None:
        """Return the hang of `generation`, the same one until progress resumes or the generation is over; else None.

        Args:
            generation: The present one.
            own_ranks: The ranks that run on this host in it.
            state_of: Returns the state of the process with a pid, as `psutil` names it, or "gone".
        """
        now_s = self._clock()
        blind_s, self._checked_s = now_s - self._checked_s, now_s
        if blind_s > _BLIND_S:
            # This process did not run (stopped, starved, suspended), so progress may have gone unheard.
            for watched in self._now.ranks.values():
                watched.since_s = min(watched.since_s + blind_s, now_s)
        late = [rank for rank, watched in self._now.ranks.items() if self._is_late(watched, now_s)]
        if generation != self._now.number or self._now.finished or not late:
            self._now.hang = None
        elif self._now.hang is None:
            self._now.hang = self._describe(late, own_ranks, state_of, now_s)
        return self._now.hang

    def _limit_of(self, watched: _Rank) -> float:
        return self._policy.hang_start_s if watched.step is None else self.limit_s

    def _is_late(self, watched: _Rank, now_s: float) -> bool:
        return not watched.restoring and now_s - watched.since_s > self._limit_of(watched)

    def _describe(
        self, late: list[int], own_ranks: Collection[int], state_of: Callable[[int], str], now_s: float
    ) -> Observation:
        culprits, certain = self._culprits(own_ranks, state_of)
        named = sorted(culprits)
        known = [self._now.ranks[rank] for rank in named if rank in self._now.ranks] or [self._now.ranks[late[0]]]
        stalled_s = now_s - min(rank.since_s for rank in known)
        limit_s = min(self._limit_of(self._now.ranks[rank]) for rank in late)
        some = ", ".join(map(str, named[:_NAMED])) + (", …" if len(named) > _NAMED else "")
        who = f"rank {some}" if len(named) == 1 else f"ranks {some}"
        return Observation(
            kind="hang",
            severity="fail" if self._policy.hang_action == "restart" else "warn",
            rank=named[0] if certain else None,
            generation=self._now.number,
            value=round(stalled_s, 3),
            limit=round(limit_s, 3),
            message=f"no progress for {stalled_s:.1f} s, the limit is {limit_s:.1f} s: {who} {culprits[named[0]]}",
            unix_s=round(self._wall() - stalled_s, 3),
        )

    def _culprits(self, own_ranks: Collection[int], state_of: Callable[[int], str]) -> tuple[dict[int, str], bool]:
        """Return the ranks that the others probably wait for, each with why, and whether they stand out from the rest.

        Those are the ranks that are missing or behind; when none is, those whose processes stand; else all.
        """
        steps = {rank: -1 if (known := self._now.ranks.get(rank)) is None else known.step or 0 for rank in own_ranks}
        lowest = min(steps.values())
        why = "did not attach" if lowest < 0 else f"did not get past step {lowest}"
        behind = {rank: why for rank, step in steps.items() if step == lowest}
        if len(behind) < len(steps):
            return behind, True
        states = {rank: state_of(self._now.ranks[rank].pid) for rank in steps}
        standing = {rank: f"did not get past step {lowest} and is {state}" for rank, state in states.items()}
        standing = {rank: why for rank, why in standing.items() if states[rank] in STANDING}
        return (standing, True) if standing else (behind, False)
