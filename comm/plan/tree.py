"""Every way to synchronize one tensor: Espresso's decision tree (Espresso, Section 4.2; thesis, Section 4.5).

An *option* is a sequence of steps: collectives on dense or compressed data, compressions and decompressions. The tree
has 4341 options, of which 174 use no CPU. Each function below is one sub-tree; the numbers in its first line are its
options with both devices and with GPUs only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property


class Device(StrEnum):
    """Where a compression or decompression runs."""

    GPU = "gpu"
    CPU = "cpu"


class Phase(StrEnum):
    """Who takes part in a collective: the GPUs of a host, one GPU of each host, or all GPUs."""

    INTRA1 = "intra1"
    INTER = "inter"
    INTRA2 = "intra2"
    FLAT = "flat"


class Role(StrEnum):
    """What a collective is of its scheme: all of an indivisible one, or a step of a divisible one."""

    WHOLE = "whole"
    FIRST = "first"
    SECOND = "second"


class Routine(StrEnum):
    """A collective (Table 4.2)."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"

    @property
    def second(self) -> "Routine":
        """Return the second step that pairs with this first step."""
        return Routine.BROADCAST if self.rooted else Routine.ALL_GATHER

    @property
    def rooted(self) -> bool:
        """True when one participant receives or sends everything."""
        return self in (Routine.REDUCE, Routine.GATHER, Routine.BROADCAST)


FIRST_DENSE = (Routine.REDUCE_SCATTER, Routine.REDUCE)
FIRST_COMPRESSED = (Routine.ALL_TO_ALL, Routine.GATHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comm:
    """A collective on dense or on compressed data."""

    phase: Phase
    role: Role
    routine: Routine
    compressed: bool

    def __str__(self) -> str:
        return f"{self.routine}@{self.phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comp:
    """A compression of what the participant holds."""

    device: Device

    def __str__(self) -> str:
        return f"comp:{self.device}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decomp:
    """A decompression of all that was received, summed up."""

    device: Device

    def __str__(self) -> str:
        return f"decomp:{self.device}"


Step = Comm | Comp | Decomp
Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Option:
    """One path of the tree, from a gradient of this worker to the sum of all workers' gradients."""

    steps: Steps

    def __str__(self) -> str:
        return " > ".join(map(str, self.steps))

    @cached_property
    def compressions(self) -> int:
        """How often the tensor is compressed."""
        return sum(isinstance(step, Comp) for step in self.steps)

    @cached_property
    def devices(self) -> frozenset[Device]:
        """The devices it compresses and decompresses on; empty without compression."""
        return frozenset(step.device for step in self.steps if not isinstance(step, Comm))

    @cached_property
    def ways(self) -> tuple[tuple[Phase, ...], ...]:
        """For each step that compresses, the all-to-alls that part its output before it is decompressed; else none."""
        found: list[tuple[Phase, ...]] = []
        ahead: tuple[Phase, ...] = ()
        for step in reversed(self.steps):
            found.append(ahead if isinstance(step, Comp) else ())
            if not isinstance(step, Comm):
                ahead = ()
            elif step.routine is Routine.ALL_TO_ALL:
                ahead = (step.phase, *ahead)
        return tuple(reversed(found))

    @property
    def flat(self) -> bool:
        """True when all GPUs take part in one phase."""
        return self.comms[0].phase is Phase.FLAT

    @cached_property
    def comms(self) -> tuple[Comm, ...]:
        """The collectives, in order."""
        return tuple(step for step in self.steps if isinstance(step, Comm))


@cache
def all_options() -> tuple[Option, ...]:
    """Return all options, those without compression first."""
    paths = sorted((*flat(), *hierarchical()), key=lambda steps: any(isinstance(step, Comp) for step in steps))
    return tuple(map(Option, paths))


@cache
def _by_text() -> dict[str, Option]:
    return {str(option): option for option in all_options()}


def parse(text: str) -> Option:
    """Return the option that `str` wrote.

    Raises:
        ValueError: The tree has no such option.
    """
    try:
        return _by_text()[text]
    except KeyError:
        raise ValueError(f"{text!r} is not an option of the tree; `resilient-comm tree` lists them") from None


def flat() -> Iterator[Steps]:
    """One phase for all GPUs (63, 12)."""
    yield (_dense(Phase.FLAT, Role.WHOLE, Routine.ALL_REDUCE),)
    for first in FIRST_DENSE:
        for rest in last_dense(Phase.FLAT, first.second):
            yield (_dense(Phase.FLAT, Role.FIRST, first), *rest)
    for comp in _comps():
        for decomp in _decomps():
            yield (comp, _compressed(Phase.FLAT, Role.WHOLE, Routine.ALL_GATHER), decomp)
        for first in FIRST_COMPRESSED:
            for rest in last_compressed(Phase.FLAT, first.second):
                yield (comp, _compressed(Phase.FLAT, Role.FIRST, first), *rest)


def hierarchical() -> Iterator[Steps]:
    """Three phases: in the host, between hosts, in the host (4278, 162)."""
    for first in FIRST_DENSE:
        for rest in _between_hosts_from_dense(first.second):
            yield (_dense(Phase.INTRA1, Role.FIRST, first), *rest)
    for comp in _comps():
        for first in FIRST_COMPRESSED:
            head: Steps = (comp, _compressed(Phase.INTRA1, Role.FIRST, first))
            for rest in inter_compressed(first.second):
                yield (*head, *rest)
            for decomp in _decomps():
                for rest in _between_hosts_from_dense(first.second):
                    yield (*head, decomp, *rest)


def _between_hosts_from_dense(last: Routine) -> Iterator[Steps]:
    yield from inter_dense(last)
    for comp in _comps():
        for rest in inter_compressed(last):
            yield (comp, *rest)


def last_dense(phase: Phase, routine: Routine) -> Iterator[Steps]:
    """T1: the last step, of a dense tensor (5, 2)."""
    yield (_dense(phase, Role.SECOND, routine),)
    for comp in _comps():
        for decomp in _decomps():
            yield (comp, _compressed(phase, Role.SECOND, routine), decomp)


def last_compressed(phase: Phase, routine: Routine) -> Iterator[Steps]:
    """T2: the last step, of a compressed tensor (12, 3)."""
    for decomp in _decomps():
        yield (_compressed(phase, Role.SECOND, routine), decomp)
        for rest in last_dense(phase, routine):
            yield (decomp, *rest)


def inter_dense(last: Routine) -> Iterator[Steps]:
    """T3: between hosts, and the last step, of a dense tensor (63, 12)."""
    for rest in last_dense(Phase.INTRA2, last):
        yield (_dense(Phase.INTER, Role.WHOLE, Routine.ALL_REDUCE), *rest)
    for first in FIRST_DENSE:
        for rest in inter_second_dense(first.second, last):
            yield (_dense(Phase.INTER, Role.FIRST, first), *rest)


def inter_compressed(last: Routine) -> Iterator[Steps]:
    """T4: between hosts, and the last step, of a compressed tensor (152, 19)."""
    for rest in last_compressed(Phase.INTRA2, last):
        yield (_compressed(Phase.INTER, Role.WHOLE, Routine.ALL_GATHER), *rest)
    for first in FIRST_COMPRESSED:
        head = _compressed(Phase.INTER, Role.FIRST, first)
        for rest in last_compressed(Phase.INTRA2, last):
            yield (head, _compressed(Phase.INTER, Role.SECOND, first.second), *rest)
        for decomp in _decomps():
            for rest in inter_second_dense(first.second, last):
                yield (head, decomp, *rest)


def inter_second_dense(second: Routine, last: Routine) -> Iterator[Steps]:
    """T5: the second step between hosts, and the last step, of a dense tensor (29, 5)."""
    for rest in last_dense(Phase.INTRA2, last):
        yield (_dense(Phase.INTER, Role.SECOND, second), *rest)
    for comp in _comps():
        for rest in last_compressed(Phase.INTRA2, last):
            yield (comp, _compressed(Phase.INTER, Role.SECOND, second), *rest)


@cache
def _comps() -> tuple[Comp, ...]:
    return tuple(Comp(device=device) for device in Device)


@cache
def _decomps() -> tuple[Decomp, ...]:
    return tuple(Decomp(device=device) for device in Device)


@cache
def _dense(phase: Phase, role: Role, routine: Routine) -> Comm:
    return Comm(phase=phase, role=role, routine=routine, compressed=False)


@cache
def _compressed(phase: Phase, role: Role, routine: Routine) -> Comm:
    return Comm(phase=phase, role=role, routine=routine, compressed=True)
