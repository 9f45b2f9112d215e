"""Every interleaving of launchers, daemons, lost leases, kills, late writes and a loss of etcd, to some depth.

The transactions are the real ones of `daemon/run/life.py` and of the root, on an etcd in memory that compares, puts and
deletes as etcd does. Between what somebody reads and what they write anything may happen. What a launcher or a daemon
remembers it may write at any later time, also after its lease is lost, its life is over, or etcd has lost its data and
counts revisions anew. The invariants are checked in every world.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
from life_states import TRANSITIONS, State

from resilient_run.ckpt.format.pair import Pair, pair_value
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.root.decide import Break, Decision, Stop
from resilient_run.daemon.root.root import transaction
from resilient_run.daemon.root.view import RootView
from resilient_run.daemon.run import keys, life
from resilient_run.daemon.run.life import Life, Transaction
from resilient_run.daemon.run.mirror import Mirror, pair_of_entry
from resilient_run.daemon.run.records import Agreement, Closed, Failure, Requirements
from resilient_run.daemon.run.rounds import Member, Round

Store = frozenset[tuple[str, str, int]]
Frozen = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, str], ...], tuple[str, ...]]
"""A `Transaction` that can be in a set."""

TERMS = Requirements(min_nodes=1, max_nodes=2)
OTHERS = Requirements(min_nodes=1, max_nodes=1)


@dataclass(frozen=True, slots=True)
class Launcher:
    """What one launcher knows: nothing, what it can do before it is in the run, or the life that it is in."""

    session: int = 0
    read: Life | None = None
    entered: Life | None = None
    seat_revision: int = 0
    pending: tuple[tuple[str, Frozen], ...] = ()
    over: Closed | None = None
    ended: Life | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Everything, at one moment.

    `incarnations` counts the first lives, `formed` has the generations of all of them, `newest` the newest watermark of
    each; `losses`, `kills` and `forgets` are still to come.
    """

    store: Store = frozenset()
    revision: int = 0
    launchers: tuple[Launcher, ...] = (Launcher(), Launcher(), Launcher())
    daemons: tuple[tuple[tuple[str, str, Frozen], ...], ...] = ((), ())
    incarnations: int = 0
    formed: frozenset[tuple[str, int]] = frozenset()
    newest: frozenset[tuple[str, Pair]] = frozenset()
    losses: int = 1
    kills: int = 1
    forgets: int = 1


@cache
def agreement(text: str) -> Agreement:
    return Agreement.parse(json.loads(text))


@cache
def seen(store: Store) -> Mirror:
    """Return what a mirror of all keys shows."""
    entries = {key: Entry(value=json.loads(value), revision=revision) for key, value, revision in store}
    return Mirror({keys.WATERMARK: pair_of_entry}).apply(entries)


def frozen(made: Transaction) -> Frozen:
    puts = tuple((key, json.dumps(value)) for key, value in made.puts.items())
    return tuple(made.guards.items()), puts, tuple(made.deletes)


def commit(world: World, made: Frozen) -> World | None:
    """Return the world after a transaction, None if a guard does not hold."""
    guards, puts, deletes = made

    def covers(key: str, name: str) -> bool:
        return name.startswith(key) if key.endswith("/") else name == key

    for key, revision in guards:
        found = [at for name, _, at in world.store if covers(key, name)]
        if any(at != revision for at in found) or (not found and revision):
            return None
    for key, _ in puts:
        assert not any(covers(gone, key) for gone in deletes), f"etcd refuses to put and delete {key}"
    written, now = {key for key, _ in puts}, world.revision + 1
    kept = {each for each in world.store if not any(covers(gone, each[0]) for gone in deletes)}
    if not puts and len(kept) == len(world.store):
        return world
    kept = {each for each in kept if each[0] not in written} | {(key, value, now) for key, value in puts}
    return replace(world, store=frozenset(kept), revision=now)


def without(world: World, *names: str) -> World:
    """Return the world after these keys are gone, as when a lease is."""
    store = frozenset(each for each in world.store if each[0] not in names)
    return world if store == world.store else replace(world, store=store, revision=world.revision + 1)


def job_of(world: World) -> Agreement | None:
    job: Agreement | None = seen(world.store).get(keys.JOB)
    return job


def state_of(world: World) -> State:
    mirror = seen(world.store)
    members = mirror.folders[keys.MEMBERS]
    return State.of(mirror.get(keys.JOB), mirror.get(keys.ROUND), mirror.folders[keys.FAILURES], members)


def revision_of(world: World, key: str) -> int:
    return seen(world.store).revisions.get(key, 0)


# What can happen.

Moves = Iterator[tuple[str, World]]


def moves(world: World) -> Moves:
    """Yield what can happen next, and the world after it."""
    for index, launcher in enumerate(world.launchers):
        host = "abc"[index]
        for what, after in launcher_moves(world, index, launcher):
            yield f"{host} {what}", after
        listed = keys.MEMBERS(host)
        if revision_of(world, listed):
            yield f"the lease of {host} is lost", without(world, listed)
        if world.kills and launcher.entered:
            after = with_launcher(world, index, Launcher(session=launcher.session + 1))
            yield f"{host} is killed and started again", replace(after, kills=0)
    for index, pending in enumerate(world.daemons):
        for what, after in daemon_moves(world, index, pending):
            yield f"daemon {index} {what}", after
    if world.losses and world.store:
        yield "etcd loses its data", replace(world, store=frozenset(), revision=0, losses=0)
    forgotten = commit(world, (((keys.MEMBERS(), 0),), (), keys.lasting())) if world.forgets else None
    if forgotten is not None and forgotten.store != world.store:
        yield "somebody forgets the run", replace(forgotten, forgets=0)


def with_launcher(world: World, index: int, launcher: Launcher) -> World:
    launchers = (*world.launchers[:index], launcher, *world.launchers[index + 1 :])
    return replace(world, launchers=launchers)


def launcher_moves(world: World, index: int, own: Launcher) -> Moves:
    """Yield what a launcher can do by what it knows, as `agree` and `Membership` do it."""
    if own.pending:
        (what, made), *rest = own.pending
        after = commit(world, made)
        joined = own
        if after is not None and what == "joins":
            joined = replace(own, entered=own.read)
        done = replace(joined, pending=tuple(rest))
        yield (
            what if after is not None else f"is refused: {what}",
            checked(world, with_launcher(after or world, index, done), own.entered if what != "clears" else None),
        )
    if own.over is not None:
        if not own.pending:
            yield "leaves", with_launcher(leaving(world, index), index, replace(own, pending=clearing(world, own)))
            yield "is started again", with_launcher(leaving(world, index), index, Launcher(session=own.session + 1))
    elif own.entered is None:
        if not own.pending:
            yield (
                "reads",
                with_launcher(
                    world, index, replace(own, read=Life.of(seen(world.store)), pending=opening(world, index))
                ),
            )
    else:
        yield from member_moves(world, index, own, own.entered)


def leaving(world: World, index: int) -> World:
    return without(world, keys.MEMBERS("abc"[index]))


def clearing(world: World, own: Launcher) -> tuple[tuple[str, Frozen], ...]:
    """Return what the last launcher does when it has left."""
    return () if own.ended is None else (("clears", frozen(own.ended.clear())),)


def opening(world: World, index: int) -> tuple[tuple[str, Frozen], ...]:
    """Return what a new launcher tries, one after the other."""
    mirror = seen(world.store)
    found, terms = Life.of(mirror), OTHERS if index == 2 else TERMS
    if found is None:
        first = Agreement(incarnation=f"i{world.incarnations}", token="t", **terms.required())
        return (("clears", frozen(life.sweep())), ("begins", frozen(life.begin(first, [], None))))
    if tries := found.openings(terms, abandoned=not mirror.folders[keys.MEMBERS]):
        return tuple(("opens", frozen(each)) for each in tries)
    if replace(found.job, **terms.required()) != found.job:
        return ()
    return (("joins", frozen(member(world, index, found, world.launchers[index].session))),)


def member(world: World, index: int, entered: Life, session: int) -> Transaction:
    host = "abc"[index]
    key = keys.MEMBERS(host)
    value = Member(host=host, session=f"{host}{session}", nproc=1, addr="x", pid=1, ready=1).to_value()
    return Transaction(guards={**entered.guard, key: revision_of(world, key)}, puts={key: value})


def member_moves(world: World, index: int, own: Launcher, entered: Life) -> Moves:
    host, mirror = "abc"[index], seen(world.store)
    if Life.of(mirror) != entered:
        now = Life.of(mirror)
        over = entered.why_over(now, forgotten=not world.losses)
        ended = now if now is not None and over is now.job.closed else None
        yield "sees the end", with_launcher(world, index, replace(own, over=over, ended=ended, pending=()))
    else:
        round_: Round | None = mirror.get(keys.ROUND)
        seated = round_ is not None and round_.rank_of(host, f"{host}{own.session}") is not None
        if seated and round_ is not None and own.seat_revision != round_.revision:
            yield "sees its seat", with_launcher(world, index, replace(own, seat_revision=round_.revision))
        if not own.pending:
            for what, made in plans(world, entered, own, seated=seated):
                yield f"plans: {what}", with_launcher(world, index, replace(own, pending=((what, frozen(made)),)))
            if not revision_of(world, keys.MEMBERS(host)):
                made = member(world, index, entered, own.session)
                yield "registers again", with_launcher(world, index, replace(own, pending=(("is back", frozen(made)),)))


def plans(world: World, entered: Life, own: Launcher, *, seated: bool) -> Iterator[tuple[str, Transaction]]:
    """Yield what a launcher decides by what its mirror shows, and writes at some later time."""
    mirror = seen(world.store)
    round_: Round | None = mirror.get(keys.ROUND)
    members = mirror.folders[keys.MEMBERS]
    if state_of(world) in (State.WAITING, State.BROKEN) and members:
        generation = entered.job.after_generation if round_ is None else round_.generation
        seats = tuple(members[host].seat for host in sorted(members))
        formed = Round(generation=generation + 1, seats=seats, restore=mirror.get(keys.WATERMARK))
        yield "forms", entered.form(formed, round_, mirror.revisions.get(keys.WATERMARK, 0), None)
    if seated and round_ is not None:
        failure = Failure(generation=round_.generation, kind="worker_exit")
        yield "fails", entered.create(keys.FAILURES(round_.generation), failure.to_value())
        for what, failed in (("ends well", False), ("ends badly", True)):
            yield what, entered.end(Closed(reason="it is over", failed=failed), own.seat_revision or None)


def daemon_moves(world: World, index: int, pending: tuple[tuple[str, str, Frozen], ...]) -> Moves:
    """Yield what a daemon does that takes itself for the root."""

    def with_daemon(world: World, pending: tuple[tuple[str, str, Frozen], ...]) -> World:
        return replace(world, daemons=(*world.daemons[:index], pending, *world.daemons[index + 1 :]))

    mirror = seen(world.store)
    round_: Round | None = mirror.get(keys.ROUND)
    found = Life.of(mirror)
    if pending:
        ((what, name, made),) = pending
        if (after := commit(world, made)) is None:
            yield f"is refused: {what}", with_daemon(world, ())
        else:
            job = job_of(world)
            assert job is not None, "(2) a daemon writes into nothing"
            assert job.name == name, f"(2) a daemon of {name} writes into {job.name}"
            yield what, checked(world, with_daemon(after, ()), None)
    elif found is not None and round_ is not None:
        watermark: Pair | None = mirror.get(keys.WATERMARK)
        step = 1 if watermark is None else watermark[1] + 1
        if step <= 2:
            guards = {key: mirror.revisions.get(key, 0) for key in (keys.ROUND, keys.WATERMARK)}
            puts = {keys.WATERMARK: pair_value(Pair(round_.generation, step))}
            made = frozen(Transaction(guards=guards | found.guard, puts=puts))
            yield "plans: commits", with_daemon(world, (("commits", found.job.name, made),))
        if found.job.closed is None:
            view = RootView(host="d", round=round_, life=found, revisions=mirror.revisions)
            for action in (Stop(reason="it is hopeless"), Break(kind="hang", host="a", rank=None, reason="it hangs")):
                made = frozen(transaction(view, Decision(actions=(action,), reason=""), 1.0))
                what = type(action).__name__
                yield f"plans: {what}", with_daemon(world, ((what, found.job.name, made),))


# The invariants.


def checked(before: World, after: World, writer: Life | None) -> World:
    """Return the world after a transaction with what it adds to the history, if that is as it should be."""
    if before.store == after.store:
        return after
    was, job = job_of(before), job_of(after)
    if writer is not None:
        # (2) no write of an old life in a newer one, and nobody goes on with what has ended.
        assert was is not None, f"(2) a launcher of {writer.job.name} writes into nothing"
        assert was == writer.job, f"(2) a launcher of {writer.job.name} writes into {was.name}, {was.closed}"
    lives = [key for key, *_ in after.store if key.startswith(keys.LIVES())]
    named = [keys.LIVES(job.name)] if job is not None else []
    assert lives == named, f"(1) there are the lives {lives}, and the job names {named}"
    change = state_of(before), state_of(after)
    assert change[0] == change[1] or change in TRANSITIONS, f"(6) from {change[0]} to {change[1]}"
    if job is None:
        lost = was is not None and was.closed is not None and was.closed.failed and revision_of(before, keys.WATERMARK)
        assert not lost, "(4) what a run has committed that failed is removed"
        assert not after.store, f"(7) {sorted(key for key, *_ in after.store)} is left of nothing"
        return after
    if was is None or was.incarnation != job.incarnation:
        after = replace(after, incarnations=after.incarnations + 1)
    mirror = seen(after.store)
    round_: Round | None = mirror.get(keys.ROUND)
    if round_ is not None and revision_of(before, keys.ROUND) != round_.revision:
        number = job.incarnation, round_.generation
        assert number not in after.formed, f"(3) {number} is formed twice"
        assert round_.restore == mirror.get(keys.WATERMARK), "(5) a round restores what is not committed"
        after = replace(after, formed=after.formed | {number})
    watermark: Pair | None = mirror.get(keys.WATERMARK)
    newest = max((pair for name, pair in after.newest if name == job.incarnation), default=None)
    assert newest is None or (watermark is not None and watermark >= newest), f"(4) back from {newest} to {watermark}"
    if watermark is not None and watermark != newest:
        assert round_ is None or watermark[0] == round_.generation, "(5) an old round commits"
        after = replace(after, newest=after.newest | {(job.incarnation, watermark)})
    return after


def explore(start: World, depth: int) -> tuple[int, set[str]]:
    """Visit every world up to `depth` moves away, nearest first; return how many there are and what happened."""
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    happened, nearest = set[str](), [start]
    for _ in range(depth):
        further = []
        for world in nearest:
            try:
                for move, found in moves(world):
                    happened.add(move.partition(" ")[2])
                    if found not in came_from:
                        came_from[found] = world, move
                        further.append(found)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{history(came_from, world)}\n{sorted(world.store)}") from error
        nearest = further
    return len(came_from), happened


def history(came_from: Mapping[World, tuple[World, str] | None], world: World) -> str:
    steps = []
    while (origin := came_from[world]) is not None:
        world, move = origin
        steps.append(move)
    return "\n".join(reversed(steps))


def after(world: World, *names: str) -> World:
    """Return the world after these things have happened."""
    for name in names:
        world = next(found for move, found in moves(world) if move == name)
    return world


def joined(*hosts: str) -> World:
    """Return the world in which these launchers are in the first life."""
    world = after(World(), f"{hosts[0]} reads", f"{hosts[0]} clears", f"{hosts[0]} begins")
    for host in hosts:
        world = after(world, f"{host} reads", f"{host} joins")
    return world


def begun(*hosts: str) -> World:
    """Return the world in which these launchers have formed the first round, and know it."""
    world = after(joined(*hosts), f"{hosts[0]} plans: forms", f"{hosts[0]} forms")
    return after(world, *(f"{host} sees its seat" for host in hosts))


def committed(*then: str) -> World:
    """Return the world in which two launchers have committed a step, and `then` this has happened."""
    return after(begun("a", "b"), "daemon 0 plans: commits", "daemon 0 commits", *then)


FAILED = ("daemon 0 plans: Stop", "daemon 0 Stop")
ALONE = ("the lease of a is lost", "the lease of b is lost")
STARTS = {
    "nothing": World,
    "joined": partial(joined, "a", "b"),
    "training": partial(begun, "a", "b"),
    "committed": committed,
    "broken": partial(committed, "daemon 0 plans: Break", "daemon 0 Break"),
    "failed": partial(committed, *FAILED, *ALONE),
    "succeeded": partial(committed, "a plans: ends well", "a ends well", "b sees the end"),
    "abandoned": partial(committed, *ALONE),
    "late": partial(committed, "a plans: fails", *ALONE, *FAILED),
    "lost": lambda: after(begun("a"), "a plans: fails", "etcd loses its data", "b reads", "b clears"),
}
"""Worlds from which more is reached than from nothing."""

DEPTHS = {
    "nothing": 8,
    "joined": 5,
    "training": 4,
    "committed": 4,
    "broken": 4,
    "failed": 6,
    "succeeded": 6,
    "abandoned": 4,
    "late": 6,
    "lost": 6,
}
"""How many moves from each start every world is visited: some thousand worlds; the nightly test goes two further."""


@pytest.mark.parametrize("start", DEPTHS)
def test_invariants_hold_in_every_interleaving(start: str) -> None:
    worlds, happened = explore(STARTS[start](), DEPTHS[start])
    assert worlds > 500
    assert {"reads", "joins", "is killed and started again"} <= happened


@pytest.mark.nightly
@pytest.mark.parametrize("start", DEPTHS)
def test_invariants_hold_deeper(start: str) -> None:
    worlds, _ = explore(STARTS[start](), DEPTHS[start] + 2)
    assert worlds > 5000


def unguarded(made: Transaction, *names: str) -> Transaction:
    """Return a transaction without the guards on what begins so."""
    return made._replace(guards={key: at for key, at in made.guards.items() if not key.startswith(names)})


def mutants() -> dict[str, tuple[str, object, str, str]]:
    """Return what each wrong guard is called → where it is, what is there, the world to begin with, and what breaks."""
    form, clear, end, follow = Life.form, Life.clear, Life.end, Life.follow
    return {
        "nothing guards a life": ("guard", property(lambda self: {}), "late", r"\([24]\)"),
        "a key without a name guards it": (
            "guard",
            property(lambda self: {keys.JOB: self.revision}),
            "lost",
            r"\(2\)",
        ),
        "a round may restore an older step": (
            "form",
            lambda *given: unguarded(form(*given), keys.WATERMARK),
            "broken",
            r"\(5\)",
        ),
        "of two rounds both are formed": (
            "form",
            lambda *given: unguarded(form(*given), keys.ROUND),
            "joined",
            r"\(3\)",
        ),
        "what failed is removed with what it committed": (
            "clear",
            lambda self: unguarded(clear(self), keys.WATERMARK),
            "failed",
            r"\(4\)",
        ),
        "what has begun meanwhile is removed": (
            "clear",
            lambda self: unguarded(clear(self), keys.LIVES()),
            "succeeded",
            r"\(6\) from waiting to unknown",
        ),
        "an end leaves the life as it was": (
            "end",
            lambda *given: end(*given)._replace(puts={keys.JOB: end(*given).puts[keys.JOB]}),
            "training",
            r"\(2\)",
        ),
        "a life begins twice": (
            "follow",
            lambda *given: unguarded(follow(*given), keys.LIVES()),
            "failed",
            r"\([124]\)",
        ),
    }


MUTANTS = mutants()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_a_wrong_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, wrong, start, broken = MUTANTS[name]
    monkeypatch.setattr(f"resilient_run.daemon.run.life.Life.{where}", wrong)
    with pytest.raises(AssertionError, match=broken):
        explore(STARTS[start](), DEPTHS[start])
