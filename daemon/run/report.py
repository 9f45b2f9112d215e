"""What hosts tell the root of a step, added up on its way there, and what the root says to them: the pure part.

The hosts of a round are a tree with the root on top. Each tells the one above it what holds for its whole subtree, so
a step costs every host the same, however many there are. A report is a state: it may be repeated, or lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from resilient_run.ckpt.format.pair import Pair, pair_of

from ..base.codec import Record, limited
from ..base.fields import Fields
from ..base.policy import MOST_KEPT
from .commit import Held, Missed, Unhealthy, is_dead, joined_unhealthy
from .rounds import MAX_WORLD_SIZE, Round
from .work import RankWork, read_work, work_rows

FAN_IN = 16
_MOST_ABSENT = 1 << 14
MAX_REPORT_BYTES = 16 << 20
"""Each rank of a sharded state has a structure of its own."""

Term = tuple[int, int]
"""Generation, and etcd revision of the election of its root: what is of another term counts for nothing."""


class DigestClaim(NamedTuple):
    """What is reported of one structure in one capture of one rank.

    Attributes:
        mask: Name of the mask that `digest` was made with, "" when the host knows of none for that structure.
        digest: Of all leaves that must be equal, 16 hexadecimal digits.
    """

    mask: str
    digest: str


Runs = tuple[tuple[int, int], ...]
"""The first and the last of each run of consecutive ranks, in order."""
Claims = Mapping[Pair, Mapping[str, Mapping[DigestClaim, Runs]]]
"""Pair → structure → claim → the ranks of which it is made; a capture has one structure for each registered object."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Who reports to whom: the hosts of a round by group rank, with the root in the place of the first one."""

    round: Round
    root: str

    def above(self, host: str) -> tuple[str, ...]:
        """Return the hosts above `host`, nearest first, the root last; without a seat it reports to the root itself."""
        place = self._place(host)
        found = []
        while place:
            place = (place - 1) // FAN_IN
            found.append(self._at(place))
        return (self.root,) if place is None else tuple(found)

    def below(self, host: str) -> tuple[str, ...]:
        """Return the hosts that report to `host`."""
        place = self._place(host)
        if place is None:
            return ()
        first = place * FAN_IN + 1
        return tuple(self._at(other) for other in range(first, min(first + FAN_IN, len(self.round.hosts))))

    def _place(self, host: str) -> int | None:
        place, first = self.round.place(host), self.round.place(self.root)
        return first if place == 0 else 0 if place == first else place

    def _at(self, place: int) -> str:
        first = self.round.place(self.root)
        return self.root if place == 0 else self.round.hosts[0] if place == first else self.round.hosts[place]


def _read_term(values: Fields, _: str) -> Term:
    return values.integer("term"), values.integer("election")


def _term_value(term: Term) -> dict[str, int]:
    return {"term": term[0], "election": term[1]}


def _read_complete(values: Fields, name: str) -> AbstractSet[Pair]:
    return values.made(name, "pairs", lambda pairs: frozenset(map(pair_of, pairs)))


def _read_unhealthy(values: Fields, name: str) -> Mapping[Pair, Unhealthy]:
    def read(rows: Any) -> Mapping[Pair, Unhealthy]:
        return {pair_of(row[:2]): Unhealthy(*pair_of(row[2:])) for row in rows}

    return values.made(name, "generations, steps, the steps before and ranks", read)


def _run(ranks: Sequence[Any]) -> tuple[int, int]:
    first, last = ranks
    if type(first) is int and type(last) is int and 0 <= first <= last < MAX_WORLD_SIZE:
        return first, last
    raise ValueError(f"the ranks {str(ranks)[:80]}")


def _claims_of(rows: Any) -> Claims:
    found: dict[Pair, dict[str, dict[DigestClaim, Runs]]] = {}
    for generation, step, structure, mask, digest, runs in rows:
        claim = DigestClaim(mask=str(mask), digest=str(digest))
        ranks = joined(*map(_run, runs))
        found.setdefault(pair_of((generation, step)), {}).setdefault(str(structure), {})[claim] = ranks
    return found


def _claim_rows(claims: Claims) -> list[list[Any]]:
    return [
        [*pair, structure, claim.mask, claim.digest, runs]
        for pair, structures in claims.items()
        for structure, made in structures.items()
        for claim, runs in made.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Record):
    """What holds for a host and all below it.

    Attributes:
        term: Of what this is.
        complete: Pairs of which all of them hold everything that they must.
        missed: The next capture that one of their ranks has missed, None while none has.
        claims: The digests of what is complete.
        unhealthy: Steps that one of their ranks calls unhealthy.
        absent: Hosts directly below one of them that it has not heard of: nothing is said of those.
        keep: For how many committed steps each of them has room.
        work: Rank → what it has computed; empty where that is not said now.
    """

    term: Term = limited(inline=True, read=_read_term, write=_term_value)
    complete: AbstractSet[Pair] = limited(
        frozenset(), read=_read_complete, write=lambda pairs: sorted(map(list, pairs))
    )
    missed: Missed | None = None
    claims: Claims = limited(read=lambda values, name: values.made(name, "claims", _claims_of), write=_claim_rows)
    unhealthy: Mapping[Pair, Unhealthy] = limited(
        factory=dict,
        read=_read_unhealthy,
        write=lambda unhealthy: [[*pair, *told] for pair, told in sorted(unhealthy.items())],
    )
    absent: tuple[str, ...] = limited((), high=_MOST_ABSENT)
    keep: int = limited(MOST_KEPT, low=1)
    work: Mapping[int, RankWork] = limited(
        factory=dict, read=lambda values, name: values.made(name, "work", read_work), write=work_rows
    )

    def says_more_than(self, before: Self | None) -> bool:
        """Tell whether the one above must hear of this at once, after `before`."""
        return bool(
            before is None
            or self.term != before.term
            or not self.complete <= before.complete
            # Else it is an older one, which the root allowed to be given up.
            or (before.complete and max(before.complete) not in self.complete)
            or self.missed != before.missed
            or self.absent != before.absent
            or self.keep < before.keep
            or self.unhealthy != before.unhealthy
            or any(before.claims.get(pair) != claims for pair, claims in self.claims.items())
        )


def complete(round_: Round, kept_ranks: Iterable[int], held: Held) -> frozenset[Pair]:
    """Return the pairs of the timeline of `round_` of which a host holds all the ranks that it must keep.

    What the round restores is none if another number of ranks captured it: the ranks of the round are not all of it.
    """
    kept = [frozenset(held.get(rank, ())) for rank in kept_ranks]
    common = frozenset.intersection(*kept) if kept else frozenset[Pair]()
    other = {round_.restore} if round_.reshapes else set()
    return frozenset(pair for pair in common - other if not is_dead(pair, round_))


def added(own: Report, below: Iterable[str], reports: Mapping[str, Report]) -> Report:
    """Return what holds for a host and its subtree.

    Args:
        own: What it says of itself.
        below: The hosts that report to it.
        reports: Host → what it has reported here; also hosts further down, to which those between cannot be reached.
    """
    found, absent, asked, wanted = [own], list[str](), set[str](), list(below)
    while wanted:
        host = wanted.pop()
        if host in asked:
            continue
        asked.add(host)
        report = reports.get(host)
        if report is None or report.term != own.term:
            absent.append(host)
        else:
            found.append(report)
            wanted += report.absent
    common = frozenset.intersection(*(frozenset(report.complete) for report in found))
    missed = [report.missed for report in found if report.missed is not None]
    return replace(
        own,
        complete=common,
        missed=_latest(missed),
        claims={pair: _joined(report.claims.get(pair, {}) for report in found) for pair in sorted(common)},
        unhealthy=joined_unhealthy(*(report.unhealthy for report in found)),
        absent=tuple(sorted(absent)),
        keep=min(report.keep for report in found),
    )


def _latest(missed: list[Missed]) -> Missed | None:
    """Return what all of these say of the newest capture that any of them is about."""
    if not missed:
        return None
    newest = max(found.next for found in missed)
    same = [found for found in missed if found.next == newest]
    return Missed(next=newest, step=max(found.step for found in same), late=any(found.late for found in same))


def _joined(many: Iterable[Mapping[str, Mapping[DigestClaim, Runs]]]) -> dict[str, dict[DigestClaim, Runs]]:
    found: dict[str, dict[DigestClaim, Runs]] = {}
    for structures in many:
        for structure, claims in structures.items():
            known = found.setdefault(structure, {})
            for claim, runs in claims.items():
                known[claim] = joined(*known.get(claim, ()), *runs)
    return found


def joined(*runs: tuple[int, int]) -> Runs:
    """Return the ranks of all of these runs."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said(Record):
    """What the root says to all hosts, as it stands in etcd.

    Attributes:
        term: Of what this is.
        number: Counts what roots have said.
        watermark: The newest committed pair.
        watermark_revision: etcd revision of that key, 0 while there is none.
        next: The pair from which on the first step is captured (`Agreed`); None while etcd has none.
        older: The committed pairs before it that stay in memory.
        persist: The value of `keys.PERSIST`, None while there is none.
    """

    term: Term = limited(inline=True, read=_read_term, write=_term_value)
    number: int
    watermark: Pair | None = None
    older: tuple[Pair, ...] = ()
    watermark_revision: int = 0
    next: Pair | None = None
    persist: Mapping[str, Any] | None = None
