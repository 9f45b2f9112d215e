"""Every interleaving of a small job's commits, missed captures, losses and rounds; the daemon's pure functions decide.

Who writes what is as in docs/internals/protocol.md: a commit, and what is captured next, are guarded by the round and
both of them as the root saw them; a round by the round and the watermark that its launcher saw. Between seeing and
writing anything may happen, and every host hears of it at a moment of its own. At most one host is lost at a time (m =
2), the next one only when all replicas are there again. The numbers in brackets are the invariants of the commit
protocol: (2) with fewer than m hosts lost at once the watermark can be restored from memory, always; (3) all ranks
restore the same pair; (4) slots of a dead timeline are never mixed in; (5) the watermark never goes back; (6) replicas
of one pair are the same. (1), no reader sees a torn slot, is about bytes: tests/test_slot.py and
tests/test_hostile.py. tests/test_commit.py plays longer games with more hosts at random.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

import pytest
from seats import everywhere, seats

from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.run.commit import Agreed, advance, beside_newest, is_dead
from resilient_run.daemon.run.rounds import Round

REPLICAS = 2

Slots = frozenset[tuple[str, int, Pair, Pair | None]]
"""(host, rank, pair, the pair that its trainer had restored): the last one stands for the content."""


@dataclass(frozen=True, slots=True)
class Game:
    """How far the exploration goes: the first hosts, who may come later and in which rack each is."""

    hosts: str
    newcomers: str
    racks: str
    steps: int
    generations: int
    begins_committed: bool = False
    keep: int = 1

    def label(self, host: str) -> str:
        return self.racks[(self.hosts + self.newcomers).index(host)]


@dataclass(frozen=True, slots=True)
class World:
    """etcd, what is on its way to it, and every host's memory."""

    generation: int
    members: str
    restore: Pair | None
    watermark: Pair | None
    slots: Slots
    done: tuple[int, ...]
    """Rank → the step that its trainer has reached."""
    reports: frozenset[tuple[str, int, Pair]]
    next: int
    """The step from which on the next capture is made."""
    known: tuple[tuple[Pair | None, int, tuple[Pair, ...]], ...]
    """Rank → the watermark, `next` and the older pairs that its host has heard of."""
    taken: tuple[int, ...]
    """Rank → the step that its trainer has captured last."""
    missed: frozenset[tuple[str, int, int]] = frozenset()
    """(host, what its rank has missed, the step that it had completed then), in etcd."""
    writes: int = 0
    """Revision of the watermark and of `next` in one count, so that one number guards both."""
    commit: tuple[Pair | None, int, tuple[Pair, ...], int, int] | None = None
    """What the root is about to write: pair, next, older, and the generation and the writes that it saw."""
    forming: tuple[Pair | None, Pair | None] | None = None
    """What a launcher read before it forms the next round: the watermark (which stands for its revision too)."""
    lost: str = ""
    older: tuple[Pair, ...] = ()
    """Those of the round until the root says others in its generation."""
    base: tuple[Pair, ...] = ()
    """The older pairs of the round."""
    rolled_back: bool = False

    def agreed(self, rank: int) -> Agreed:
        committed, following, older = self.known[rank]
        return Agreed(committed=committed, next=(self.generation, following), older=older)


@cache
def round_of(game: Game, members: str, generation: int, restore: Pair | None, older: tuple[Pair, ...] = ()) -> Round:
    return Round(
        generation=generation,
        seats=seats(members, labels=tuple(map(game.label, members))),
        restore=restore,
        older=older,
        revision=generation,
    )


def held(slots: Slots, host: str, rank: int) -> list[Pair]:
    return sorted(pair for owner, kept, pair, _ in slots if (owner, kept) == (host, rank))


def room(game: Game, slots: Slots, host: str, rank: int, agreed: Agreed) -> Slots | None:
    """Return the slots with one of `rank` at `host` free, None when all must stay."""
    pairs = held(slots, host, rank)
    if len(pairs) <= game.keep:
        return slots
    free = [pair for pair in pairs if agreed.may_overwrite(pair)]
    if not free:
        return None
    # The newest of them is the worst choice.
    return frozenset(slot for slot in slots if slot[:3] != (host, rank, free[-1]))


def moves(game: Game, world: World) -> Iterator[tuple[str, World]]:
    """Yield everything that can happen next."""
    round_ = round_of(game, world.members, world.generation, world.restore, world.base)
    present = [host for host in world.members if host not in world.lost]
    for rank, host in enumerate(world.members):
        if host in world.lost:
            continue
        yield from _trainer(game, world, rank, host)
        for holder in round_.holders(rank, REPLICAS):
            if holder in present:
                yield from _replica(game, world, rank, host, holder)
    yield from _memory(world, round_, present)
    yield from _etcd(game, world, round_, present)


def _trainer(game: Game, world: World, rank: int, host: str) -> Iterator[tuple[str, World]]:
    """Steps with and without a capture, as ranks make that wait for each other; news, and missed captures."""
    mine, done = held(world.slots, host, rank), world.done[rank]
    round_ = round_of(game, world.members, world.generation, world.restore, world.base)
    # Whoever goes back says that the next generation captures next.
    following = Pair(world.generation + world.rolled_back, world.next)
    agreed = Agreed.of(round_, world.watermark, following, world.older)
    said = agreed.committed, agreed.next[1] + 1000 * world.rolled_back, agreed.older
    if world.known[rank] != said:
        news = (*world.known[:rank], said, *world.known[rank + 1 :])
        yield f"rank {rank} hears", replace(world, known=news)
    following = world.known[rank][1]
    missed = world.taken[rank] < following <= done
    if missed and (host, following, done) not in world.missed:
        others = frozenset(report for report in world.missed if report[0] != host)
        yield f"rank {rank} misses {following}", replace(world, missed=others | {(host, following, done)})
    restoring = world.restore and world.restore not in mine and world.watermark == world.restore
    if done >= game.steps or done > min(world.done) or restoring:
        return
    after = replace(world, done=(*world.done[:rank], done + 1, *world.done[rank + 1 :]))
    if world.taken[rank] >= following or missed or done + 1 < following:
        yield f"rank {rank} skips {done + 1}", after
        return
    free = room(game, world.slots, host, rank, world.agreed(rank))
    assert free is not None, f"rank {rank} has no slot for step {done + 1}: {world}"
    made = (host, rank, (world.generation, done + 1), world.restore)
    taken = (*world.taken[:rank], done + 1, *world.taken[rank + 1 :])
    yield f"rank {rank} captures {done + 1}", replace(after, slots=free | {made}, taken=taken)


def _replica(game: Game, world: World, rank: int, owner: str, holder: str) -> Iterator[tuple[str, World]]:
    """A holder fetches the owner's newest capture, or anyone's copy of what the round restores."""
    mine = held(world.slots, holder, rank)
    slots = sorted(world.slots, key=itemgetter(0, 1, 2))
    wanted = [slot for slot in slots if slot[0] == owner and slot[1] == rank and slot[2][0] == world.generation]
    if world.restore is not None and world.watermark == world.restore:
        wanted += [slot for slot in slots if slot[1:3] == (rank, world.restore)][:1]
    for _, _, pair, content in wanted[-2:]:
        agreed = world.agreed(rank).or_later(world.agreed(world.members.index(holder)))
        free = room(game, world.slots, holder, rank, agreed)
        if (
            pair not in mine
            and free is not None
            and (pair == world.restore or pair == max(held(world.slots, owner, rank)))
        ):
            yield (
                f"{holder} fetches {pair} of rank {rank}",
                replace(world, slots=free | {(holder, rank, pair, content)}),
            )


def _memory(world: World, round_: Round, present: list[str]) -> Iterator[tuple[str, World]]:
    """A replica that others must keep now goes once they all have it."""
    for host, rank in sorted({slot[:2] for slot in world.slots if slot[0] in present}):
        holders = round_.holders(rank, REPLICAS)
        if host not in holders and all(world.watermark in held(world.slots, holder, rank) for holder in holders):
            slots = frozenset(slot for slot in world.slots if slot[:2] != (host, rank))
            yield f"{host} hands rank {rank} over", replace(world, slots=slots)


def _etcd(game: Game, world: World, round_: Round, present: list[str]) -> Iterator[tuple[str, World]]:
    for host in present:
        mine = {slot[:3] for slot in world.slots if slot[0] == host}
        if mine != {report for report in world.reports if report[0] == host}:
            reports = frozenset({report for report in world.reports if report[0] != host} | mine)
            yield f"{host} reports", replace(world, reports=reports)
    seen: dict[str, dict[int, set[Pair]]] = {host: {} for host in world.members}
    for host, rank, pair in world.reports:
        seen.setdefault(host, {}).setdefault(rank, set()).add(pair)
    ours = world.watermark is not None and world.watermark[0] == world.generation
    agreed = Agreed(committed=world.watermark, next=(world.generation, world.next), older=world.older)
    complete = everywhere(round_, REPLICAS, seen)
    pair = advance(agreed, complete)
    missed = [step for _, following, step in world.missed if following == world.next]
    if (pair is not None or missed) and not world.rolled_back:
        following = max([world.done[0], *([pair[1]] if pair else missed)]) + 1
        older = agreed.older_after(complete, keep=game.keep, every=1) if pair else world.older
        decided = (pair, following, older, world.generation, world.writes)
        if decided != world.commit:
            yield "the root decides", replace(world, commit=decided)
    if world.older and not world.rolled_back:
        decided = (None, world.next, (), world.generation, world.writes)
        if decided != world.commit:
            yield "the root makes room", replace(world, commit=decided)
    if world.commit is not None:
        pair, following, older, generation, writes = world.commit
        if (generation, writes) != (world.generation, world.writes):
            yield "the root is refused", replace(world, commit=None)
        elif pair is None:
            written = {"next": following, "writes": world.writes + 1, "commit": None}
            yield "the root goes on", replace(world, older=older, **written)
        else:
            written = {"next": following, "writes": world.writes + 1, "commit": None}
            yield "the root commits", replace(world, watermark=pair, older=older, **written)
    if world.generation >= game.generations:
        return
    for back in world.older if ours else ():
        written = {"writes": world.writes + 1, "rolled_back": True}
        yield "somebody goes back", replace(world, watermark=back, **written)
    if not world.lost and _replicated(world, round_):
        for host in world.members:
            slots = frozenset(slot for slot in world.slots if slot[0] != host)
            yield f"{host} is lost", replace(world, slots=slots, lost=host)
    if world.forming is None:
        yield "a launcher reads the watermark", replace(world, forming=(world.watermark, world.watermark))
    elif world.forming[1] != world.watermark:
        yield "no round is formed", replace(world, forming=None)
    else:
        yield "a round is formed", _formed(game, world)


def _formed(game: Game, world: World) -> World:
    """The next generation; a newcomer takes the place of the lost host, and everybody clears what is dead."""
    fresh = next((host for host in game.newcomers if host not in world.members), "")
    members = world.members.replace(world.lost, fresh) if world.lost else world.members
    restore = world.forming[0] if world.forming else None
    before = tuple(pair for pair in world.older if restore is not None and pair < restore)
    base = beside_newest(before, game.keep)
    round_ = round_of(game, members, world.generation + 1, restore, base)
    agreed = Agreed.of(round_, restore, None)
    return replace(
        world,
        generation=round_.generation,
        members=members,
        restore=restore,
        slots=frozenset(slot for slot in world.slots if not is_dead(slot[2], round_)),
        done=(restore[1] if restore else 0,) * len(members),
        next=agreed.next[1],
        known=((restore, agreed.next[1], agreed.older),) * len(members),
        older=base,
        base=base,
        rolled_back=False,
        taken=(0,) * len(members),
        missed=frozenset(),
        forming=None,
        lost="",
    )


def _replicated(world: World, round_: Round) -> bool:
    """Tell whether another host may be lost: all replicas of the watermark are where they belong."""
    return world.watermark is None or all(
        world.watermark in held(world.slots, holder, rank)
        for rank in range(len(world.members))
        for holder in round_.holders(rank, REPLICAS)
    )


# The invariants; each takes a world and the one that came before it.


def restorable(world: World, before: World) -> None:
    """(2) Some live host holds every rank at the watermark."""
    for rank in range(len(world.members)) if world.watermark else ():
        assert any(slot[1:3] == (rank, world.watermark) for slot in world.slots), f"rank {rank} is lost"


def same_restore(world: World, before: World) -> None:
    """(3) The plan of a round is final: what it restores stays the watermark until the round itself commits."""
    if not world.rolled_back:
        assert world.watermark == world.restore or (world.watermark and world.watermark[0] == world.generation)
    assert {slot[3] for slot in world.slots if slot[2][0] == world.generation} <= {world.restore}


def no_dead_timeline(world: World, before: World) -> None:
    """(4) Nothing in memory is of a timeline that the round has left."""
    generations = {slot[2] for slot in world.slots if slot[2][0] != world.generation}
    assert generations <= {world.restore, *world.base}


def never_back(world: World, before: World) -> None:
    """(5) The watermark only grows, unless somebody goes back."""
    if world.rolled_back and not before.rolled_back:
        return
    assert before.watermark is None or (world.watermark is not None and world.watermark >= before.watermark)


def same_content(world: World, before: World) -> None:
    """(6) All replicas of a rank's pair have one content."""
    contents: dict[tuple[int, Pair], Pair | None] = {}
    for _, rank, pair, content in world.slots:
        assert contents.setdefault((rank, pair), content) == content


def older_stay(world: World, before: World) -> None:
    """(7) Whoever must hold a rank has all that somebody may go back to."""
    if world.watermark is None or world.watermark[0] != world.generation or world.rolled_back:
        return
    for pair in world.older:
        for rank, host in enumerate(world.members):
            assert host in world.lost or pair in held(world.slots, host, rank), f"{host} has no {pair} of rank {rank}"


INVARIANTS: tuple[Callable[[World, World], None], ...] = (
    restorable,
    same_restore,
    no_dead_timeline,
    never_back,
    same_content,
    older_stay,
)


def explore(game: Game, limit: int) -> tuple[int, set[str]]:
    """Visit up to `limit` worlds, nearest first, check each, and return how many there were and what happened."""
    start = _begin(game)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    queue, happened = deque([start]), set()
    while queue:
        world = queue.popleft()
        for move, after in moves(game, world):
            happened.add(" ".join(word for word in move.split() if word.isalpha() and len(word) > 1))
            if after in came_from:
                continue
            came_from[after] = (world, move)
            for invariant in INVARIANTS:
                try:
                    invariant(after, world)
                except AssertionError as error:
                    raise AssertionError(
                        f"{invariant.__doc__}: {error}\n{after}\n{_history(came_from, after)}"
                    ) from error
            if len(came_from) < limit:
                queue.append(after)
    return len(came_from), happened


def _begin(game: Game) -> World:
    """Return the world before the first step, or one in which as much as is kept is committed, and everybody knows."""
    ranks = range(len(game.hosts))
    zeros, news = tuple(0 for _ in ranks), tuple((None, 1, ()) for _ in ranks)
    start = World(1, game.hosts, None, None, frozenset(), zeros, frozenset(), 1, news, zeros)
    if not game.begins_committed:
        return start
    holders = round_of(game, game.hosts, 1, None).holders_by_host(REPLICAS)
    newest = 1 if game.keep == 1 else game.keep + 1  # then all slots are in use
    made = [Pair(1, step) for step in range(1, newest + 1)]
    slots: Slots = frozenset((host, rank, pair, None) for pair in made for rank in ranks for host in holders[rank])
    reports, older = frozenset(slot[:3] for slot in slots), tuple(made[-game.keep : -1])
    steps, news = tuple(newest for _ in ranks), tuple((made[-1], newest + 1, older) for _ in ranks)
    start = replace(start, watermark=made[-1], older=older, slots=slots, reports=reports, writes=1)
    return replace(start, done=steps, next=newest + 1, known=news, taken=steps)


def _history(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    steps = []
    while (origin := came_from[world]) is not None:
        world, move = origin
        steps.append(move)
    return "\n".join(reversed(steps))


TWO_HOSTS = Game("ab", "c", "xyx", steps=2, generations=2)
LATE = Game("ab", "c", "xxx", steps=5, generations=1, begins_committed=True)
BACK = Game("ab", "c", "xyx", steps=5, generations=2, begins_committed=True, keep=2)
MOVES = Game("abc", "de", "xxyyx", steps=1, generations=3, begins_committed=True)


@pytest.mark.parametrize(
    ("game", "expected"),
    [
        (TWO_HOSTS, {"is lost", "the root commits", "the root is refused", "no round is formed", "round is formed"}),
        (LATE, {"rank skips", "rank hears", "rank misses", "the root goes on", "the root commits"}),
        (MOVES, {"hands rank over", "is lost", "round is formed"}),
        (BACK, {"somebody goes back", "round is formed", "the root commits", "the root makes room"}),
    ],
    ids=["two hosts", "late news", "replicas move", "older steps"],
)
def test_invariants_hold_in_every_interleaving(game: Game, expected: set[str]) -> None:
    worlds, happened = explore(game, 20_000)
    assert expected <= happened, f"{worlds} worlds and only {sorted(happened)}"


@pytest.mark.parametrize(
    ("game", "name", "wrong", "invariant"),
    [
        (TWO_HOSTS, "is_dead", lambda pair, round_: False, "(4)"),
        (TWO_HOSTS, "advance", lambda agreed, tally: (1, 1), "(2)"),
        (LATE, "advance", lambda agreed, tally: (1, 2) if agreed.committed == (1, 3) else (1, 3), "(2)"),
    ],
)
def test_the_model_notices_a_wrong_decision(
    game: Game, name: str, wrong: Callable[..., object], invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises(AssertionError) as caught:
        explore(game, 20_000)
    assert str(caught.value).startswith(invariant)


def test_the_model_notices_a_slot_that_is_overwritten_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreed, "may_overwrite", lambda agreed, pair: True)
    with pytest.raises(AssertionError, match=r"^\(2\)"):
        explore(LATE, 20_000)


def test_the_model_notices_an_older_pair_that_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    committed_only = Agreed.may_overwrite
    monkeypatch.setattr(Agreed, "may_overwrite", lambda agreed, pair: committed_only(replace(agreed, older=()), pair))
    with pytest.raises(AssertionError, match=r"^\((2|7)\)"):
        explore(BACK, 20_000)


def test_the_model_notices_a_commit_that_nothing_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root of an older round, or one that saw too little, writes whatever it decided."""

    def unguarded(game: Game, world: World) -> Iterator[tuple[str, World]]:
        yield from moves_as_they_are(game, world)
        if world.commit is not None:
            pair = world.commit[0] or world.watermark
            yield "the root commits all the same", replace(world, watermark=pair, commit=None)

    moves_as_they_are = moves
    monkeypatch.setitem(globals(), "moves", unguarded)
    with pytest.raises(AssertionError, match=r"\((2|3|5)\)"):
        explore(TWO_HOSTS, 20_000)


def test_the_model_notices_a_replica_that_goes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host lets go of what it need not keep any more before those who must keep it have it."""

    def rash(world: World, round_: Round, present: list[str]) -> Iterator[tuple[str, World]]:
        for host, rank in {slot[:2] for slot in world.slots if slot[0] in present}:
            if host not in round_.holders(rank, REPLICAS):
                slots = frozenset(slot for slot in world.slots if slot[:2] != (host, rank))
                yield f"{host} drops rank {rank}", replace(world, slots=slots)

    monkeypatch.setitem(globals(), "_memory", rash)
    with pytest.raises(AssertionError, match=r"^\(2\)"):
        explore(MOVES, 20_000)
