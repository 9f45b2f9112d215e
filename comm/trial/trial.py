"""Tries methods of summing gradients one after the other in a job that trains: whose turn it is, what steps take.

A turn lasts some steps. Round after round changes the order, so that a slow minute of the machine hits all methods. All
ranks decide alike, because they decide by the same numbers: of each turn the time of the slowest rank.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from torch import Tensor

from .advice import BASE, LEAST_TURNS, Method, recommended

_FIRST_STEPS: Final = 6
_WARM_UP: Final = 2
_FIRST_WARM_UP: Final = 4
_ROUNDS: Final = 7
_LEAST_STEPS: Final = 2
_MOST_STEPS: Final = 50
_HOPELESS: Final = 1.3
_SPARSE_BELOW: Final = 0.25
_WORTH_ZEN: Final = 0.1

Agree = Callable[[Sequence[float]], Sequence[float]]
"""Returns the greatest of each number among all ranks, which call it together."""


class Trial:
    """The turns of methods, and what was measured in them.

    Args:
        tried: Methods besides the one that the job has.
        seconds: How long to measure, about; some rounds are always measured.

    Attributes:
        taken: Name of a method → seconds of a step in each of its turns.
        left_out: Name of a method that was not measured to the end → why.
        base: The method that the job has, with which it trains meanwhile.
        method: Whose turn it is.
        is_over: Whether all turns have been.
    """

    def __init__(self, tried: Iterable[Method], *, seconds: float) -> None:
        self.taken: dict[str, list[float]] = {}
        self.left_out: dict[str, str] = {}
        self.base = self.method = BASE
        self.is_over = False
        self._methods = {method.name: method for method in tried}
        self._seconds = seconds
        self._turns: Iterator[tuple[str, int, int]] | None = None
        self._warm_up = self._steps = 0
        self._step_s: list[float] = []
        self._sparse_elements = self._elements = 0

    @property
    def finished(self) -> bool:
        """Whether each method that is not left out was measured often enough."""
        return bool(self.taken) and all(len(turns) >= LEAST_TURNS for turns in self.taken.values())

    @property
    def known(self) -> dict[str, Method]:
        """Name → what is known of each method that was tried."""
        return {name: self._methods.get(name, Method(name=name, write="", exact=True)) for name in self.taken}

    @property
    def recommended(self) -> str | None:
        """The method that pays, None where nothing does."""
        return recommended(self.taken, self.known) if self.taken else None

    @property
    def looks(self) -> bool:
        """Whether `look_at` is to be called in the present step."""
        return not self.taken and len(self._step_s) == _FIRST_STEPS - 1

    def look_at(self, gradients: Iterable[Tensor], *, least_elements: int) -> None:
        """Learn from the gradients of one step whether they are sparse."""
        for gradient in gradients:
            self._elements += gradient.numel()
            is_large = gradient.numel() >= least_elements
            is_sparse = gradient.is_sparse or (is_large and _density(gradient) < _SPARSE_BELOW)
            self._sparse_elements += gradient.numel() if is_sparse else 0

    def passed(self, step_s: float) -> None:
        """Record what a step took."""
        self._step_s.append(step_s)

    def advance(self, agree: Agree) -> None:
        """Begin the next turn if one is over; all ranks call this before each step."""
        if self.is_over or len(self._step_s) < self._warm_up + self._steps:
            return
        self._turns = self._turns or self._schedule(agree)
        if (turn := next(self._turns, None)) is None:
            self.is_over = True
            self.method = self.base
        else:
            self.method, self._warm_up, self._steps = turn
        self._step_s.clear()

    def _schedule(self, agree: Agree) -> Iterator[tuple[str, int, int]]:
        """Yield turns: a method, steps that do not count, steps that do; hear after each how long it took."""
        started_s = time.monotonic()
        yield self.base, _FIRST_STEPS - 2, 2
        is_sparse = self._sparse_elements >= _WORTH_ZEN * max(self._elements, 1)
        step_s, sparse = agree([self._median_s(), float(is_sparse)])
        active = [*dict.fromkeys((self.base, BASE, *self._methods))]
        if not sparse and "zen" in active:
            active.remove("zen")
            self.left_out["zen"] = "no large gradient has fewer than a quarter of its elements"
        if len(active) == 1:
            return
        each = self._seconds / step_s / (LEAST_TURNS + 2) / len(active)
        steps = min(max(round(each) - _WARM_UP, _LEAST_STEPS), _MOST_STEPS)
        self.taken = {name: [] for name in active}
        for number in range(_ROUNDS):
            yield from self._round(agree, active if number % 2 == 0 else active[::-1], steps, first=number == 0)
            if number == 0:
                limit_s = _HOPELESS * self.taken[self.base][0]
                schemes = [name for name, method in self._methods.items() if method.scheme]
                for name in [name for name in schemes if name in active and self.taken[name][0] > limit_s]:
                    active.remove(name)
                    self.left_out[name] = f"its steps took {self.taken.pop(name)[0]:.3g} s in the first round"
            (elapsed_s,) = agree([time.monotonic() - started_s])
            if len(active) == 1 or (number + 1 >= LEAST_TURNS and elapsed_s >= self._seconds):
                break
        # The best of many is the luckiest, too: what seems to pay has to do so once more.
        if (best := self.recommended) is not None:
            for number in range(_ROUNDS):
                yield from self._round(agree, [self.base, best][:: 1 if number % 2 else -1], steps)

    def _round(
        self, agree: Agree, names: Iterable[str], steps: int, *, first: bool = False
    ) -> Iterator[tuple[str, int, int]]:
        for name in names:
            yield name, _FIRST_WARM_UP if first else _WARM_UP, steps
            (took_s,) = agree([self._median_s()])
            self.taken[name].append(took_s)

    def _median_s(self) -> float:
        return median(self._step_s[self._warm_up :])


def _density(gradient: Tensor) -> float:
    return int(gradient.count_nonzero()) / max(gradient.numel(), 1)
