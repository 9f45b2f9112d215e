"""Every interleaving of a small job's commits, losses, fences and rounds; the pure functions of the daemon decide.

Who writes what is as in docs/protocol.md: a commit is guarded by the round, the watermark and the fence that the root
saw; a round by the round and the watermark that its launcher saw; a fence by the watermark. Between seeing and writing
anything may happen. At most one host is lost at a time (m = 2), the next one only when all replicas are there again.

The numbers in brackets are the invariants of the commit protocol: (2) with fewer than m hosts lost at once the
watermark can be restored from memory, always; (3) all ranks restore the same pair; (4) slots of a dead timeline are
never mixed in; (5) the watermark never goes back; (6) replicas of one pair are the same. (1), no reader sees a torn
slot, is about bytes: tests/test_slot.py and tests/test_hostile.py. tests/test_commit.py plays longer games with more
hosts at random.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from resilient_run.daemon.commit import Tally, advance, is_dead, may_overwrite
from resilient_run.daemon.rounds import Pair, Round

REPLICAS = 2
SLOTS = 2

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
    writes: int = 0
    """Revision of the watermark; and of the fence in the same count, so that one number guards both."""
    commit: tuple[Pair, int, int] | None = None
    """What the root is about to write: pair, and the generation and the writes that it saw."""
    forming: tuple[Pair | None, int] | None = None
    """What a launcher read before it forms the next round: watermark and writes."""
    lost: str = ""


@cache
def round_of(game: Game, members: str, generation: int, restore: Pair | None) -> Round:
    return Round(
        generation=generation,
        hosts=tuple(members),
        nprocs=(1,) * len(members),
        restore=restore,
        revision=generation,
        labels=tuple(map(game.label, members)),
    )


def held(slots: Slots, host: str, rank: int) -> list[Pair]:
    return sorted(pair for owner, kept, pair, _ in slots if (owner, kept) == (host, rank))


def room(slots: Slots, host: str, rank: int, watermark: Pair | None) -> Slots | None:
    """Return the slots with one of `rank` at `host` free, None when both must stay."""
    pairs = held(slots, host, rank)
    if len(pairs) < SLOTS:
        return slots
    if not may_overwrite(pairs[0], watermark):
        return None
    return frozenset(slot for slot in slots if slot[:3] != (host, rank, pairs[0]))


def moves(game: Game, world: World) -> Iterator[tuple[str, World]]:
    """Yield everything that can happen next."""
    round_ = round_of(game, world.members, world.generation, world.restore)
    present = [host for host in world.members if host not in world.lost]
    for rank, host in enumerate(world.members):
        if host in world.lost:
            continue
        yield from _trainer(game, world, rank, host)
        for keeper in round_.holders(rank, REPLICAS):
            if keeper in present:
                yield from _replica(world, rank, host, keeper)
    yield from _memory(world, round_, present)
    yield from _etcd(game, world, round_, present)


def _trainer(game: Game, world: World, rank: int, host: str) -> Iterator[tuple[str, World]]:
    """Captures, skipped captures, and captures that are given up behind a fence."""
    mine = held(world.slots, host, rank)
    if world.done[rank] >= game.steps or (
        world.restore and world.restore not in mine and world.watermark == world.restore
    ):
        return
    step = world.done[rank] + 1
    done = (*world.done[:rank], step, *world.done[rank + 1 :])
    free = room(world.slots, host, rank, world.watermark)
    if free is not None:
        made = (host, rank, (world.generation, step), world.restore)
        yield f"rank {rank} captures {step}", replace(world, slots=free | {made}, done=done)
        return
    yield f"rank {rank} skips {step}", replace(world, done=done)
    newest = mine[-1]
    if world.watermark is None or newest > world.watermark:
        slots = frozenset(slot for slot in world.slots if slot[:3] != (host, rank, newest))
        kept = {report for report in world.reports if report[0] != host} | {
            slot[:3] for slot in slots if slot[0] == host
        }
        fenced = replace(world, slots=slots, reports=frozenset(kept), writes=world.writes + 1)
        yield f"rank {rank} gives {newest} up", fenced


def _replica(world: World, rank: int, owner: str, keeper: str) -> Iterator[tuple[str, World]]:
    """A keeper fetches the owner's newest capture, or anyone's copy of what the round restores."""
    mine = held(world.slots, keeper, rank)
    wanted = [slot for slot in world.slots if slot[0] == owner and slot[1] == rank and slot[2][0] == world.generation]
    if world.restore is not None and world.watermark == world.restore:
        wanted += [slot for slot in world.slots if slot[1:3] == (rank, world.restore)][:1]
    for _, _, pair, content in wanted[-2:]:
        free = room(world.slots, keeper, rank, world.watermark)
        if (
            pair not in mine
            and free is not None
            and (pair == world.restore or pair == max(held(world.slots, owner, rank)))
        ):
            yield (
                f"{keeper} fetches {pair} of rank {rank}",
                replace(world, slots=free | {(keeper, rank, pair, content)}),
            )


def _memory(world: World, round_: Round, present: list[str]) -> Iterator[tuple[str, World]]:
    """A replica that others must keep now goes once they all have it."""
    for host, rank in {slot[:2] for slot in world.slots if slot[0] in present}:
        keepers = round_.holders(rank, REPLICAS)
        if host not in keepers and all(world.watermark in held(world.slots, keeper, rank) for keeper in keepers):
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
    pair = advance(world.watermark, Tally(round_, REPLICAS, seen))
    decided = None if pair is None else (pair, world.generation, world.writes)
    if decided is not None and decided != world.commit:
        yield "the root decides", replace(world, commit=decided)
    if world.commit is not None:
        pair, generation, writes = world.commit
        if (generation, writes) == (world.generation, world.writes):
            yield "the root commits", replace(world, watermark=pair, writes=world.writes + 1, commit=None)
        else:
            yield "the root is refused", replace(world, commit=None)
    if world.generation >= game.generations:
        return
    if not world.lost and _replicated(world, round_):
        for host in world.members:
            slots = frozenset(slot for slot in world.slots if slot[0] != host)
            yield f"{host} is lost", replace(world, slots=slots, lost=host)
    if world.forming is None:
        yield "a launcher reads the watermark", replace(world, forming=(world.watermark, world.writes))
    elif world.forming[1] != world.writes:
        yield "no round is formed", replace(world, forming=None)
    else:
        yield "a round is formed", _formed(game, world)


def _formed(game: Game, world: World) -> World:
    """The next generation; a newcomer takes the place of the lost host, and everybody clears what is dead."""
    fresh = next((host for host in game.newcomers if host not in world.members), "")
    members = world.members.replace(world.lost, fresh) if world.lost else world.members
    restore = world.forming[0] if world.forming else None
    round_ = round_of(game, members, world.generation + 1, restore)
    return replace(
        world,
        generation=round_.generation,
        members=members,
        restore=restore,
        slots=frozenset(slot for slot in world.slots if not is_dead(slot[2], round_)),
        done=(restore[1] if restore else 0,) * len(members),
        forming=None,
        lost="",
    )


def _replicated(world: World, round_: Round) -> bool:
    """Tell whether another host may be lost: all replicas of the watermark are where they belong."""
    return world.watermark is None or all(
        world.watermark in held(world.slots, keeper, rank)
        for rank in range(len(world.members))
        for keeper in round_.holders(rank, REPLICAS)
    )


# The invariants; each takes a world and the one that came before it.


def restorable(world: World, before: World) -> None:
    """(2) Some live host holds every rank at the watermark."""
    for rank in range(len(world.members)) if world.watermark else ():
        assert any(slot[1:3] == (rank, world.watermark) for slot in world.slots), f"rank {rank} is lost"


def same_restore(world: World, before: World) -> None:
    """(3) The plan of a round is final: what it restores stays the watermark until the round itself commits."""
    assert world.watermark == world.restore or (world.watermark and world.watermark[0] == world.generation)
    assert {slot[3] for slot in world.slots if slot[2][0] == world.generation} <= {world.restore}


def no_dead_timeline(world: World, before: World) -> None:
    """(4) Nothing in memory is of a timeline that the round has left."""
    generations = {slot[2] for slot in world.slots if slot[2][0] != world.generation}
    assert generations <= {world.restore}


def never_back(world: World, before: World) -> None:
    """(5) The watermark only grows."""
    assert before.watermark is None or (world.watermark is not None and world.watermark >= before.watermark)


def same_content(world: World, before: World) -> None:
    """(6) All replicas of a rank's pair have one content."""
    contents: dict[tuple[int, Pair], Pair | None] = {}
    for _, rank, pair, content in world.slots:
        assert contents.setdefault((rank, pair), content) == content


INVARIANTS: tuple[Callable[[World, World], None], ...] = (
    restorable,
    same_restore,
    no_dead_timeline,
    never_back,
    same_content,
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
    """Return the world before the first step, or the one in which step 1 is committed and everybody knows."""
    ranks = range(len(game.hosts))
    start = World(1, game.hosts, None, None, frozenset(), tuple(0 for _ in ranks), frozenset())
    if not game.begins_committed:
        return start
    holders = round_of(game, game.hosts, 1, None).keepers(REPLICAS)
    slots: Slots = frozenset((host, rank, (1, 1), None) for rank in ranks for host in holders[rank])
    reports = frozenset(slot[:3] for slot in slots)
    return replace(start, watermark=(1, 1), slots=slots, done=tuple(1 for _ in ranks), reports=reports, writes=1)


def _history(came_from: dict[World, tuple[World, str] | None], world: World) -> str:
    steps = []
    while (origin := came_from[world]) is not None:
        world, move = origin
        steps.append(move)
    return "\n".join(reversed(steps))


TWO_HOSTS = Game("ab", "c", "xyx", steps=2, generations=2)
FENCES = Game("ab", "c", "xxx", steps=3, generations=1)
MOVES = Game("abc", "de", "xxyyx", steps=1, generations=3, begins_committed=True)


@pytest.mark.parametrize(
    ("game", "expected"),
    [
        (TWO_HOSTS, {"is lost", "the root commits", "the root is refused", "no round is formed", "round is formed"}),
        (FENCES, {"rank skips", "rank gives up", "the root commits", "the root is refused"}),
        (MOVES, {"hands rank over", "is lost", "round is formed"}),
    ],
    ids=["two hosts", "skips and fences", "replicas move"],
)
def test_invariants_hold_in_every_interleaving(game: Game, expected: set[str]) -> None:
    worlds, happened = explore(game, 20_000)
    assert expected <= happened, f"{worlds} worlds and only {sorted(happened)}"


@pytest.mark.parametrize(
    ("game", "name", "wrong", "invariant"),
    [
        (FENCES, "may_overwrite", lambda pair, committed: True, "(2)"),
        (TWO_HOSTS, "is_dead", lambda pair, round_: False, "(4)"),
        (TWO_HOSTS, "advance", lambda current, tally: (1, 1), "(2)"),
        (FENCES, "advance", lambda current, tally: (1, 1) if current == (1, 2) else (1, 2), "(2)"),
    ],
)
def test_the_model_notices_a_wrong_decision(
    game: Game, name: str, wrong: Callable[..., object], invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises(AssertionError) as caught:
        explore(game, 20_000)
    assert str(caught.value).startswith(invariant)


def test_the_model_notices_a_commit_that_nothing_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root of an older round, or one that saw too little, writes whatever it decided."""

    def unguarded(game: Game, world: World) -> Iterator[tuple[str, World]]:
        yield from moves_as_they_are(game, world)
        if world.commit is not None:
            yield "the root commits all the same", replace(world, watermark=world.commit[0], commit=None)

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
