"""Every way to synchronize one tensor: Espresso's decision tree (Espresso, Section 4.2; thesis, Section 4.5).

An *option* is a sequence of steps: collectives on dense or compressed data, compressions and decompressions. The tree
has 4341 options, of which 174 use no CPU. It is all ways through a few sequences of collectives (`_SCHEMES`), where
data is compressed, decompressed, or summed up and compressed again before each collective, or none of that. T1 to T5 of
the thesis are the ways from some collective on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple


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
    def rooted(self) -> bool:
        """True when one participant receives or sends everything."""
        return self in (Routine.REDUCE, Routine.GATHER, Routine.BROADCAST)


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


_COMPS = [Comp(device=device) for device in Device]
_DECOMPS = [Decomp(device=device) for device in Device]


class Meeting(NamedTuple):
    """A collective of a scheme: who takes part, what it is of its scheme, and whether that has a root."""

    phase: Phase
    role: Role
    rooted: bool = False


_ROUTINES = {
    Role.WHOLE: ((Routine.ALL_REDUCE, Routine.ALL_GATHER),),
    Role.FIRST: ((Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL), (Routine.REDUCE, Routine.GATHER)),
    Role.SECOND: ((Routine.ALL_GATHER, Routine.ALL_GATHER), (Routine.BROADCAST, Routine.BROADCAST)),
}
"""Role → without and with a root → of dense and of compressed data."""


def in_one_phase(phase: Phase) -> list[list[Meeting]]:
    """Return the schemes within a phase: an indivisible one, and divisible ones without and with a root."""
    divisible = [[Meeting(phase, role, rooted) for role in (Role.FIRST, Role.SECOND)] for rooted in (False, True)]
    return [[Meeting(phase, Role.WHOLE)], *divisible]


def around(between: list[Meeting]) -> list[list[Meeting]]:
    """Return the schemes that have `between` between the steps of a divisible one within hosts."""
    return [
        [Meeting(Phase.INTRA1, Role.FIRST, rooted), *between, Meeting(Phase.INTRA2, Role.SECOND, rooted)]
        for rooted in (False, True)
    ]


_SCHEMES = [
    *in_one_phase(Phase.FLAT),
    *(scheme for between in in_one_phase(Phase.INTER) for scheme in around(between)),
]
"""For all GPUs at once; and within hosts, between hosts, within hosts."""


@cache
def all_options() -> tuple[Option, ...]:
    """Return all options, those without compression first."""
    paths = [steps for scheme in _SCHEMES for steps in walk(scheme, compressed=False)]
    return tuple(map(Option, sorted(paths, key=lambda steps: any(isinstance(step, Comp) for step in steps))))


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


def walk(meetings: Sequence[Meeting], *, compressed: bool) -> Iterator[Steps]:
    """Yield all ways through these collectives to the sum, from dense or compressed data on."""
    if not meetings:
        yield from product(_DECOMPS) if compressed else [()]
        return
    meeting, *rest = meetings
    recoded: list[tuple[Steps, bool]] = [((), compressed)]
    if compressed:
        recoded += [((decomp,), False) for decomp in _DECOMPS]
    # Compressed data is summed up before it is compressed again.
    summed = product(_DECOMPS) if compressed else [()]
    recoded += [((*steps, comp), True) for steps, comp in product(summed, _COMPS)]
    for before, is_compressed in recoded:
        comm = _comm(meeting.phase, meeting.role, _ROUTINES[meeting.role][meeting.rooted][is_compressed], is_compressed)
        for after in walk(rest, compressed=is_compressed):
            yield (*before, comm, *after)


@cache
def _comm(phase: Phase, role: Role, routine: Routine, compressed: bool) -> Comm:
    return Comm(phase=phase, role=role, routine=routine, compressed=compressed)
