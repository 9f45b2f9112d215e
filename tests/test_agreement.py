"""Ranks that hear of commits at different moments capture the same steps all the same, and commit again and again.

The trainers' slots and the root's decisions are the real ones; what lies between them is a clock in steps and messages
that take their time.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seats import everywhere, seats
from solo_daemon import SoloDaemon

from resilient_run.ckpt.capture.slots import RankSlots
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import Slot
from resilient_run.daemon.run.commit import Agreed, Lead, advance
from resilient_run.daemon.run.rounds import Round

RANKS = 3
ROUND = Round(generation=2, seats=seats("abc"), restore=(1, 4), revision=1)


class Run:
    """A run of three ranks whose steps take one unit of time; a message of rank r takes `delays[r]` each way."""

    def __init__(self, pairs: list[RankSlots]) -> None:
        self.pairs = pairs
        self.delays = [0.1] * RANKS
        self.now = 4.0
        self.step = 4
        self.agreed = Agreed.of(ROUND, ROUND.restore, None)
        self.lead = Lead()
        self.held: dict[str, dict[int, set[Pair]]] = {}
        self.missed: set[tuple[int, bool]] = set()
        self.number = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.at_risk: list[int] = []
        self.captured: list[set[int]] = [set() for _ in range(RANKS)]
        for rank in range(RANKS):
            self.pairs[rank].hear(self.agreed.committed, self.agreed.next)

    def make_step(self, *, stride: int = 1, failing: int | None = None, raising: bool = False) -> None:
        """Let all ranks make a step, after the news that came before it.

        The capture of the rank `failing` fails; with `raising` no rank begins one, as where `state_dict()` raises.
        """
        self.now += 1
        while self.events and self.events[0][0] <= self.now:
            at, _, event = heapq.heappop(self.events)
            self.now, before = at, self.now
            event()
            self.now = before
        before, self.step = self.step, self.step + stride
        self.raising = raising
        for rank, pair in enumerate(self.pairs):
            if before not in self.captured[rank]:
                pair.give_up(before)
            self._capture(rank, fails=rank == failing)
            self._tell_missed(rank)
        assert self.agreed.committed is not None
        for rank, pair in enumerate(self.pairs):
            if self.agreed.committed[0] == 2:
                assert self.agreed.committed in [mapped.held for mapped in pair.slots], (
                    f"rank {rank} lost the watermark"
                )
        self.at_risk.append(math.ceil((self.step - self.agreed.committed[1]) / stride))

    def _capture(self, rank: int, *, fails: bool = False) -> None:
        """Capture the newest step if it is to be; that may also be heard after the step, but before the next one."""
        if self.raising:
            self.pairs[rank].give_up(self.step, failed=self.pairs[rank].wants(self.step))
            return
        if (mapped := self.pairs[rank].take(self.step)) is None:
            return
        assert mapped.held is None or mapped.held != self.agreed.committed, "what is committed was overwritten"
        self.captured[rank].add(self.step)
        mapped.held = None if fails else (2, self.step)
        if fails:
            self.pairs[rank].give_up(self.step)
        else:
            self._later(rank, self._root_hears)

    def _later(self, rank: int, event: Callable[[int], None]) -> None:
        entry = (self.now + self.delays[rank], next(self.number), lambda: event(rank))
        heapq.heappush(self.events, entry)

    def _tell_missed(self, rank: int) -> None:
        if (missed := self.pairs[rank].missed) is not None:

            def tell(rank: int) -> None:
                self.missed.add((missed["next"], missed["late"]))
                self._decide()

            self._later(rank, tell)

    def _root_hears(self, rank: int) -> None:
        held: dict[int, set[Pair]] = {rank: {slot.held for slot in self.pairs[rank].slots if slot.held}}
        self.held["abc"[rank]] = held
        self._decide()

    def _decide(self) -> None:
        pair = advance(self.agreed, everywhere(ROUND, 1, self.held))
        found = {late for next_, late in self.missed if next_ == self.agreed.next[1]}
        if pair is None and not found:
            return
        if pair is None and True in found:
            self.lead.missed()
        elif pair is None:
            self.lead.failed()
        else:
            self.lead.kept(self.step - pair[1])
        following = self.lead.after(max(self.step, self.agreed.next[1] if pair is None else pair[1]), every=1)
        self.agreed = Agreed(committed=pair or self.agreed.committed, next=(2, following))
        said = self.agreed

        def hear(rank: int) -> None:
            self.pairs[rank].hear(said.committed, said.next)
            self._capture(rank)
            self._tell_missed(rank)

        for rank in range(RANKS):
            self._later(rank, hear)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns a directory with two slots for each rank."""
    made = []
    for _ in range(RANKS):
        directory = tmp_path_factory.mktemp("rank")
        for index in range(2):
            Slot.create(directory / str(index), capacity_bytes=12288, payload_offset=8192).close()
        made.append(directory)
    return made


def _run(files: list[Path]) -> Iterator[Run]:
    pairs = []
    for directory in files:
        pair = RankSlots(SoloDaemon(directory).env(generation=2, world_size=RANKS))
        pair.use(pair.map([str(directory / str(index)) for index in range(2)], pin=False))
        pairs.append(pair)
    yield Run(pairs)
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("stride", [1, 7])
def test_every_step_is_committed_while_commits_are_faster_than_steps(files: list[Path], stride: int) -> None:
    for run in _run(files):
        run.delays = [0.05, 0.2, 0.45]
        for _ in range(50):
            run.make_step(stride=stride)
        assert set(run.at_risk) == {1}


@pytest.mark.parametrize("delay", [0.05, 0.4, 0.9, 1.7, 3.3])
@pytest.mark.parametrize("interval", [2, 3, 5])
def test_steps_without_a_capture_in_between_keep_no_others_from_being_committed(
    files: list[Path], delay: float, interval: int
) -> None:
    """Where `step()` raises at all steps but every second, say, and the script goes on."""
    for place in range(interval):
        for run in _run(files):
            run.delays = [delay] * RANKS
            for _ in range(200):
                run.make_step(raising=(run.step + 1) % interval != place)
            assert sorted(run.at_risk)[100] <= 4 * (interval + delay)
            assert max(run.at_risk) <= 12 * (interval + delay)


DELAYS = st.lists(st.floats(0.01, 9.0), min_size=RANKS, max_size=RANKS)
HISTORY = st.lists(st.tuples(DELAYS, st.sampled_from([None, None, 0, 2]), st.integers(1, 5)), max_size=40)


@given(HISTORY, DELAYS)
@settings(deadline=None, max_examples=150)
def test_ranks_commit_again_whatever_they_missed(
    files: list[Path], history: list[tuple[list[float], int | None, int]], delays: list[float]
) -> None:
    """However late news were, and whichever captures failed; what is lost then follows from how long a commit takes."""
    for run in _run(files):
        for run.delays, failing, stride in history:
            run.make_step(stride=stride, failing=failing)
        run.delays = delays
        for _ in range(400):
            run.make_step()
        commit_steps = 2 * max(delays)
        assert max(run.at_risk[-200:]) <= 4 * commit_steps + 8
        assert sorted(run.at_risk[-200:])[100] <= 2 * commit_steps + 3
