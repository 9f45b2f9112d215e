"""What names a checkpoint of a run: the generation that made it, and the step."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple


class Pair(NamedTuple):
    """A capture. Pairs of one run are ordered: a later generation starts behind what it restored."""

    generation: int
    step: int

    def __repr__(self) -> str:
        return f"({self.generation}, {self.step})"


IMPORT_GENERATION: Final = 0
"""Generation of an import: before everything that the run makes itself."""


def is_import(pair: Pair | None) -> bool:
    """Tell whether `pair` was imported: it lies in the persistent tier, and no memory ever holds it."""
    return pair is not None and pair[0] == IMPORT_GENERATION


def pair_value(pair: Pair | None) -> Any:
    """Return `pair` as messages and etcd values have it, null for None."""
    return None if pair is None else {"generation": pair[0], "step": pair[1]}


def read_pair(value: Mapping[str, Any] | None) -> Pair | None:
    """Return the pair in a message of the own daemon; see `pair_value`."""
    return None if value is None else Pair(value["generation"], value["step"])


def pair_of(numbers: Sequence[Any]) -> Pair:
    """Return the pair of a generation and a step that somebody else wrote.

    Raises:
        TypeError: They are no list.
        ValueError: They are not two numbers of 0 or more.
    """
    generation, step = numbers
    if type(generation) is int and type(step) is int and generation >= 0 <= step:
        return Pair(generation, step)
    raise ValueError(f"{str(numbers)[:80]} is not a generation and a step")
