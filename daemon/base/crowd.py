"""How many connections of one kind there may be: nobody who opens many keeps the others out."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Crowd(Generic[T]):
    """Members, each from one source, such as an address. Over the limit, the busiest source loses its oldest member.

    Args:
        per_source: Most members of one source.
        in_all: Most members.
        may_go: Tells whether a member may be turned out; everybody may without it.
    """

    def __init__(self, *, per_source: int, in_all: int, may_go: Callable[[T], bool] | None = None) -> None:
        self._per_source = per_source
        self._in_all = in_all
        self._may_go = may_go
        self._sources: dict[T, Hashable] = {}
        self._counts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._sources)

    def add(self, member: T, source: Hashable) -> T | None:
        """Take `member` in and return who is turned out for it: nobody, another one, or itself if none may go."""
        self._sources[member] = source
        self._counts[source] += 1
        if self._counts[source] > self._per_source:
            return self._turn_out(source) or self._turned_out(member)
        if len(self._sources) > self._in_all:
            return self.turn_out() or self._turned_out(member)
        return None

    def discard(self, member: T) -> None:
        """Forget `member`, if it is one."""
        source = self._sources.pop(member, None)
        if source is not None:
            self._counts[source] -= 1
            if not self._counts[source]:
                del self._counts[source]

    def turn_out(self) -> T | None:
        """Forget and return the oldest member of the largest source, None when there is none that may go."""
        return next(filter(None, (self._turn_out(source) for source, _ in self._counts.most_common())), None)

    def _turn_out(self, source: Hashable) -> T | None:
        for member, found in self._sources.items():
            if found == source and (self._may_go is None or self._may_go(member)):
                return self._turned_out(member)
        return None

    def _turned_out(self, member: T) -> T:
        self.discard(member)
        return member
