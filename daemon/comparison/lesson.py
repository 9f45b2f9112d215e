"""Learning which leaves some ranks hold in common, and telling a corruption from what ranks may differ in.

Nobody says which tensors are replicated, so it is learned from digests. That two ranks hold the same bytes proves
little: zeros, a seed or a frozen weight are the same by chance. That a leaf *changes* to the same other bytes on all
ranks, several times, is what only replicas do that get the same updates. A leaf that never changes is compared once it
has been the same for long enough; when it begins to change on all ranks, differently, it was frozen and is nobody's
replica, but when it changes on some only, it was corrupted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from resilient_run.ckpt.format.digests import U64

ALIKE: Final = 3
"""After so many changes that were the same on all ranks a leaf counts as replicated."""

STILL: Final = 10
"""After so many looks at which it was the same on all ranks and had not changed, it counts as constant."""

NAMED: Final = 5
"""So many leaves or ranks are named, the others only counted."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDifference:
    """Ranks that must hold the same bytes, and do not.

    Attributes:
        leaves: Indices of the digests that differ.
        parties: The ranks that agree with each other, the largest party first.
    """

    leaves: tuple[int, ...]
    parties: tuple[tuple[int, ...], ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that most others disagree with; none when no party has the majority."""
        most, *others = self.parties
        rest = tuple(sorted(rank for party in others for rank in party))
        return rest if len(most) > len(rest) else ()

    def describe(self, names: list[str]) -> str:
        """Return the sentence that a person wants; `names` are those of the first leaves."""
        more = len(self.leaves) - len(names)
        shown = ", ".join(names) + (
            f"{' and ' if names else ''}{more} {'more' if names else 'tensor(s)'}" if more else ""
        )
        if self.culprits:
            who = f"{_ranks(self.culprits)} differs from {_ranks(self.parties[0])}"
        else:
            who = f"{' and '.join(map(_ranks, self.parties))} differ, and no majority says which is right,"
        return f"{who} in {shown}, which they had in common"


class Lesson:
    """What is known of the leaves of one structure.

    Args:
        count: How many digests it has.
        mask: What an earlier root has learned, None when nothing.
    """

    def __init__(self, count: int, mask: Mask | None = None) -> None:
        self._last: U64 | None = None
        self._alike = np.zeros(count, dtype=np.int64) if mask is None else np.where(mask, ALIKE, 0)
        self._still = np.zeros(count, dtype=np.int64)
        self._apart = np.zeros(count, dtype=np.bool_)

    @property
    def mask(self) -> Mask:
        """The leaves that must be equal."""
        return ~self._apart & ((self._alike >= ALIKE) | (self._still >= STILL))

    @property
    def replicated(self) -> Mask:
        """Those of them that have changed alike, and so must be equal in the next generation, too.

        What never changed is learned again there, because it may begin to.
        """
        return ~self._apart & (self._alike >= ALIKE)

    def study(self, digests: Mapping[int, U64]) -> RankDifference | None:
        """Learn from the digests of one step, by rank, and return what must not differ and does.

        A leaf that may differ, because it did not have to be the same yet, is never compared again.
        """
        table = np.stack(list(digests.values()))
        same = (table == table[0]).all(axis=0)
        constant = self._alike < ALIKE
        excused = np.zeros_like(same) if self._last is None else constant & (table != self._last).all(axis=0)
        wrong = ~same & self.mask & ~excused
        self._apart |= ~same & ~wrong
        if self._last is not None:
            changed = same & (table[0] != self._last)
            self._alike += changed
            self._still[same & ~changed] += 1
            self._still[changed & (self._still < STILL)] = 0
        self._last = np.where(same, table[0], 0 if self._last is None else self._last)
        return None if not wrong.any() else RankDifference(leaves=_indices(wrong), parties=_parties(digests, wrong))

    def drop(self, difference: RankDifference) -> None:
        """Compare what differs no longer: it has been said."""
        self._apart[list(difference.leaves)] = True


def _indices(mask: Mask) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(mask))


def _parties(digests: Mapping[int, U64], wrong: Mask) -> tuple[tuple[int, ...], ...]:
    found = {rank: values[wrong].tobytes() for rank, values in sorted(digests.items())}
    counted = Counter(found.values())
    return tuple(tuple(rank for rank in found if found[rank] == kind) for kind, _ in counted.most_common())


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED])) + (", …" if len(ranks) > NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
