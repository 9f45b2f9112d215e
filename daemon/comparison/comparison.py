"""Comparing ranks that must hold the same bytes: in every pair by one digest per rank, by all digests when they differ.

Runs on the root, beside its commits. What is equal at all is learned in each generation (`lesson.py`), beginning with
the replicas that this root knows of the one before, and told to all hosts in etcd. A host reports one digest of those
leaves of each structure with each capture that its ranks make, in its reports of what it holds.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain

from resilient_run.ckpt.format.pair import Pair

from ..etcd.client import Etcd, EtcdUnavailable
from ..peers.fetch import PeerError
from ..run import keys
from ..run.observation import Observation
from ..run.report import Claims, DigestClaim, Runs, joined
from ..run.view import JobView
from .digests import EqualLeaves, HostDigests
from .lesson import NAMED, Lesson, RankDifference

log = logging.getLogger(__name__)

_FIRST_LOOKS = 16
_RETRY_S = 0.2
_UNSEEN_S = 30.0
"""After so long without the digests that differ it is said that they do, without where."""


class _NotYet(Exception):
    """Something is looked at again in a moment."""


def agree(claims: Mapping[str, Mapping[DigestClaim, Runs]], masks: Mapping[str, str]) -> bool:
    """Tell whether all ranks of each structure claim the same digest of a pair, made with the newest mask.

    Args:
        claims: Of one pair, by structure.
        masks: Structure → name of its newest mask.
    """
    for structure, found in claims.items():
        mask = masks.get(structure)
        if mask is not None and _count(found) > 1 and (len(found) > 1 or next(iter(found)).mask != mask):
            return False
    return True


def differing(claims: Claims, masks: Mapping[str, str]) -> list[tuple[Pair, str]]:
    """Return the pairs and structures of which ranks claim different digests of the newest mask, oldest first."""
    return sorted(
        (pair, structure)
        for pair, structures in claims.items()
        for structure, found in structures.items()
        if sum(1 for claim in found if claim.mask and claim.mask == masks.get(structure)) > 1
    )


def _count(found: Mapping[DigestClaim, Runs]) -> int:
    return sum(last - first + 1 for first, last in chain(*found.values()))


def _ranks(found: Mapping[DigestClaim, Runs]) -> list[int]:
    return [rank for first, last in joined(*chain(*found.values())) for rank in range(first, last + 1)]


class Comparer:
    """Learns what is equal, finds what differs, and says so; for as long as `run` runs.

    Args:
        etcd: The job's connection.
        view: What this host knows of the job.
        claims: Returns what hosts claim of what all of them hold.
        digests: Of this host, and access to those of others.
        action: What a difference leads to: "warn", "stop" or "rollback".
        observe: Takes what is wrong now.
    """

    def __init__(
        self,
        etcd: Etcd,
        *,
        view: JobView,
        claims: Callable[[], Claims],
        digests: HostDigests,
        action: str,
        observe: Callable[[Mapping[str, Observation]], None],
    ) -> None:
        self._etcd = etcd
        self._view = view
        self._claims = claims
        self._digests = digests
        self._action = action
        self._severity = "warn" if action == "warn" else "fail"
        self._observe = observe
        self._news = asyncio.Event()
        self._complete = Pair(0, 0)
        self._passed = Pair(0, 0)  # committed, or about to be
        self._found: dict[tuple[str, int], Observation] = {}  # by structure and step
        self._lessons: dict[str, Lesson] = {}
        self._reported: dict[tuple[str, int], set[int]] = {}  # by structure and step: the leaves
        self._begin(0, None)

    def wake(self) -> None:
        """Look again: something is reported or committed."""
        self._news.set()

    def agrees(self, pair: Pair) -> bool:
        """Tell whether `pair` may be committed: unless a difference is only reported, all ranks must agree on it.

        Until they do nothing newer is captured. So a pair that is refused is never left alone: either the next look
        changes what must be equal, and it is committed after all, or it is reported, and its generation ends.
        """
        if pair != self._complete:
            self._complete = pair
            self.wake()
        if self._action == "warn":
            return True
        if not pair[0] == self._generation == self._view.generation:
            # First `run` takes over what an earlier root of this generation has learned.
            self.wake()
            return False
        claims = self._claims().get(pair, {})
        if (self._untold | self._carried.keys()) & claims.keys():
            # It is known what must be equal, and not told yet: claims say nothing of it so far.
            self.wake()
            return False
        agrees = agree(claims, self._masks)
        if agrees:
            self._passed = max(self._passed, pair)
        else:
            self.wake()
        return agrees

    async def run(self) -> None:
        """Compare until cancelled."""
        try:
            self._tell()
            while True:
                await self._news.wait()
                self._news.clear()
                try:
                    self._follow_generation()
                    await self._look()
                except (PeerError, EtcdUnavailable, _NotYet) as error:
                    log.info("ranks are compared again in a moment: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    self._news.set()
        finally:
            self._observe({})

    def _follow_generation(self) -> None:
        if self._view.generation == self._generation:
            return
        if self._digests.equal is None:
            raise _NotYet("it is not known yet what has been learned")
        round_ = self._view.round
        self._begin(self._view.generation, None if round_ is None else round_.restore)
        self._tell()
        self._view.notify()

    def _begin(self, generation: int, restored: Pair | None) -> None:
        self._generation = generation
        # What was committed all the same, with action "warn", differs in what is restored, too.
        restored_step = 0 if restored is None else restored[1]
        self._found = {place: seen for place, seen in self._found.items() if place[1] <= restored_step}
        replicated = {structure: lesson.replicated for structure, lesson in self._lessons.items()}
        self._lessons = {}
        # What an earlier root of this generation has learned.
        known = (self._digests.equal or {}).items()
        self._masks = {structure: equal.name for structure, equal in known if equal.generation == generation}
        self._carried = {
            structure: mask for structure, mask in replicated.items() if mask.any() and structure not in self._masks
        }
        self._looks: Counter[str] = Counter()
        self._learned: Pair | None = None
        self._studied: set[tuple[Pair, str]] = set()
        self._untold: set[str] = set()
        self._judged: set[tuple[Pair, str]] = set()
        self._since_s: dict[tuple[Pair, str], float] = {}

    async def _look(self) -> None:
        found = self._claims()
        self._studied = {(pair, structure) for pair, structure in self._studied if pair in found}
        claimed = {structure for structures in found.values() for structure in structures}
        for structure in self._lessons.keys() - claimed:
            # A state that grows has another structure in every step.
            del self._lessons[structure], self._looks[structure]
            self._masks.pop(structure, None)
            self._untold.discard(structure)
        for structure in self._carried.keys() & claimed:
            mask = self._carried.pop(structure)
            self._lessons[structure] = Lesson(len(mask), mask)
            self._untold.add(structure)
        for structure in self._untold & self._lessons.keys():
            await self._publish(structure, self._lessons[structure])
        for pair, structure in differing(found, self._masks):
            # Before all ranks have captured it there may be no majority yet.
            if pair[0] == self._generation and pair <= self._complete:
                await self._judge(pair, structure)
        committed = self._view.watermark
        if committed is None or committed[0] != self._generation or committed == self._learned:
            return
        self._learned = committed
        for structure, claims in found.get(committed, {}).items():
            if _count(claims) > 1:
                self._looks[structure] += 1
                looks = self._looks[structure]
                if looks <= _FIRST_LOOKS or looks & (looks - 1) == 0:
                    await self._study(committed, structure)

    async def _judge(self, pair: Pair, structure: str) -> None:
        """Study a pair of which the claims differ; without its digests for long, say that much, as nothing goes on."""
        problem = "they are gone"
        try:
            if (pair, structure) in self._judged or await self._study(pair, structure) or self._action == "warn":
                return
        except PeerError as error:
            problem = str(error)
        if time.monotonic() < self._since_s.setdefault((pair, structure), time.monotonic()) + _UNSEEN_S:
            raise _NotYet(f"no digests of step {pair[1]}, which is not committed before they are compared: {problem}")
        self._judged.add((pair, structure))
        ranks = ", ".join(map(str, self._ranks_of(pair, structure)[: 2 * NAMED]))
        message = f"ranks {ranks} differ in what they had in common, and no digests say where: {problem}"
        self._say(pair, structure, message, rank=None, value=0, severity=self._severity)

    async def _study(self, pair: Pair, structure: str) -> bool:
        """Compare all digests of a pair, learn from them, and say what differs and must not; once for each pair.

        Returns:
            Whether there are digests of all ranks. Where a pair is overwritten before they are asked for, what differs
            in it still does in the next one.
        """
        if (pair, structure) in self._studied:
            return True
        ranks = self._ranks_of(pair, structure)
        answers = await asyncio.gather(*(self._digests.ask(rank, pair, structure) for rank in ranks))
        tables = {rank: answer[0] for rank, answer in zip(ranks, answers, strict=True) if answer is not None}
        counts = {len(table) for table in tables.values()}
        if len(tables) < max(len(ranks), 2) or len(counts) > 1:
            return False
        self._studied.add((pair, structure))
        lesson = self._lessons.get(structure)
        if lesson is None:
            known = (self._digests.equal or {}).get(structure)
            mask = known.mask if known is not None and known.generation == self._generation else None
            lesson = self._lessons[structure] = Lesson(counts.pop(), mask)
        difference = lesson.study(tables)
        self._untold.add(structure)
        if difference is not None:
            before = self._reported.setdefault((structure, pair[1]), set())
            excuse = ""
            if pair <= max(self._passed, self._view.watermark or Pair(0, 0)):
                # There is nothing to go back to.
                excuse = "the step was committed before that was known"
            elif before.issuperset(difference.leaves):
                excuse = "they did so before the run went back to the step before, so it is on purpose, or lasting"
            before.update(difference.leaves)
            await self._report(pair, structure, ranks, difference, excuse)
            if self._action == "warn" or excuse:
                lesson.drop(difference)
        await self._publish(structure, lesson)
        return True

    def _ranks_of(self, pair: Pair, structure: str) -> list[int]:
        return _ranks(self._claims().get(pair, {}).get(structure, {}))

    async def _publish(self, structure: str, lesson: Lesson) -> None:
        """Publish which leaves must be equal, when that is news."""
        equal = EqualLeaves.of(self._generation, lesson.mask)
        round_ = self._view.round
        news = equal.name != self._masks.get(structure) if structure in self._masks else bool(lesson.mask.any())
        if news and round_ is not None:
            guards = {keys.ROUND: round_.revision}
            if not await self._etcd.commit(guards, {keys.EQUAL(structure): equal.to_value()}):
                raise _NotYet("there is another round")
            self._masks[structure] = equal.name
        self._untold.discard(structure)
        # The mirror may have shown it before etcd has answered: what `agrees` says now is news.
        self._view.notify()

    async def _report(
        self, pair: Pair, structure: str, ranks: list[int], difference: RankDifference, excuse: str
    ) -> None:
        answer = None
        with contextlib.suppress(PeerError):
            answer = await self._digests.ask(ranks[0], pair, structure, difference.leaves[:NAMED])
        culprits, names = difference.culprits, [] if answer is None else answer[1]
        rank = culprits[0] if len(culprits) == 1 else None
        message = difference.describe(names)
        if excuse and self._action != "warn":
            message += f"; {excuse}, and training goes on"
        severity = "warn" if excuse else self._severity
        self._say(pair, structure, message, rank=rank, value=len(difference.leaves), severity=severity)

    def _tell(self) -> None:
        self._observe({f"{structure} {step}": seen for (structure, step), seen in self._found.items()})

    def _say(self, pair: Pair, structure: str, message: str, *, rank: int | None, value: int, severity: str) -> None:
        self._found[structure, pair[1]] = Observation(
            kind="corruption",
            severity=severity,
            rank=rank,
            generation=self._generation,
            value=value,
            limit=0,
            message=f"step {pair[1]}: {message}",
            unix_s=round(time.time(), 3),
        )
        self._tell()
