"""Tries methods of summing gradients one after the other in a job that trains: whose turn it is, what steps take.

A turn lasts some steps. Round after round changes the order, so that a slow minute of the machine hits all methods. All
ranks decide alike, because they decide by the same numbers: of each turn the time of the slowest rank.
"""

import time
from collections.abc import Generator, Iterable, Sequence
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

_Turns = Generator[tuple[str, int, int], Sequence[float], None]
"""Yields turns: a method, steps that do not count, steps that do. Is sent what `said` came to on all ranks."""


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
        self._turns = self._schedule()
        _, self._warm_up, self._steps = next(self._turns)
        self._began_s: float | None = None
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
        self._began_s = self._began_s or time.monotonic()
        self._step_s.append(step_s)

    @property
    def turn_is_over(self) -> bool:
        """Whether all steps of the present turn have passed, so that the next one may begin."""
        return not self.is_over and len(self._step_s) >= self._warm_up + self._steps

    def said(self) -> list[float]:
        """Return what a turn that is over came to here; all ranks go on by the greatest of each of these numbers."""
        is_sparse = self._sparse_elements >= _WORTH_ZEN * max(self._elements, 1)
        return [median(self._step_s[self._warm_up :]), float(is_sparse), time.monotonic() - (self._began_s or 0.0)]

    def advance(self, heard: Sequence[float]) -> None:
        """Begin the next turn, all ranks before the same step; `heard` is the greatest of what each of them `said`."""
        try:
            self.method, self._warm_up, self._steps = self._turns.send(heard)
        except StopIteration:
            self.is_over = True
            self.method = self.base
        self._step_s.clear()

    def _schedule(self) -> _Turns:
        step_s, sparse, _ = yield self.base, _FIRST_STEPS - 2, 2
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
            names = active if number % 2 == 0 else active[::-1]
            elapsed_s = yield from self._round(names, steps, first=number == 0)
            if number == 0:
                limit_s = _HOPELESS * self.taken[self.base][0]
                schemes = [name for name, method in self._methods.items() if method.scheme]
                for name in [name for name in schemes if name in active and self.taken[name][0] > limit_s]:
                    active.remove(name)
                    self.left_out[name] = f"its steps took {self.taken.pop(name)[0]:.3g} s in the first round"
            if len(active) == 1 or (number + 1 >= LEAST_TURNS and elapsed_s >= self._seconds):
                break
        # The best of many is the luckiest, too: what seems to pay has to do so once more.
        if (best := self.recommended) is not None:
            for number in range(_ROUNDS):
                yield from self._round([self.base, best][:: 1 if number % 2 else -1], steps)

    def _round(
        self, names: Iterable[str], steps: int, *, first: bool = False
    ) -> Generator[tuple[str, int, int], Sequence[float], float]:
        """Yield a turn of each method, and return how long the trial has lasted."""
        elapsed_s = 0.0
        for name in names:
            took_s, _, elapsed_s = yield name, _FIRST_WARM_UP if first else _WARM_UP, steps
            self.taken[name].append(took_s)
        return elapsed_s


def _density(gradient: Tensor) -> float:
    return int(gradient.count_nonzero()) / max(gradient.numel(), 1)
