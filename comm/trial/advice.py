"""What to say of a trial: which method of summing gradients pays, how much, and what to write for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, Final

BASE: Final = "all-reduce"
OWN: Final = "the script's own hook"
NOTHING: Final = "no sums"

LEAST_TURNS: Final = 4

_LEAST_GAIN: Final = 0.03
_IMPORT: Final = "from resilient_run.comm.hook import register"


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method of summing gradients.

    Attributes:
        name: What the report calls it.
        write: What the user writes for it.
        exact: Whether training is the same with it, apart from rounding.
        scheme: The scheme or compressor of ours, "" for none.
        options: Of the scheme.
    """

    name: str
    write: str
    exact: bool = False
    scheme: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def methods(ranks_per_host: int | None) -> list[Method]:
    """Return the methods tried besides all-reduce, those that lose nothing first; the number as of `register`."""
    hosts = "" if ranks_per_host is None else f", ranks_per_host={ranks_per_host}"

    def ours(scheme: str, *, exact: bool = False, **options: Any) -> Method:
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        label = scheme + (f" {100 * options['density']:g} %" if options else "")
        write = f'hook = register(model, "{scheme}"{given}{hosts})'
        return Method(name=label, write=write, exact=exact, scheme=scheme, options=options)

    return [
        ours("zen", exact=True),
        ours("bf16"),
        ours("int8"),
        ours("powersgd"),
        ours("onebit"),
        ours("topk", density=0.01),
        ours("spardl", density=0.01),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Seconds of a step: the median of the turns, and from where to where they spread."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, taken: Sequence[float]) -> "Turns":
        """Return the spread of at least one turn: deciles, of a few turns the least and the greatest."""
        if len(taken) < 2 * LEAST_TURNS:
            return cls(median_s=median(taken), low_s=min(taken), high_s=max(taken))
        deciles = quantiles(taken, n=10, method="inclusive")
        return cls(median_s=median(taken), low_s=deciles[0], high_s=deciles[-1])

    def __str__(self) -> str:
        return f"{_seconds(self.median_s)} ({_seconds(self.low_s)} to {_seconds(self.high_s)})"


def recommended(taken: Mapping[str, Sequence[float]], known: Mapping[str, Method]) -> str | None:
    """Return the method that pays, None where nothing does; `taken` has at least the one that the job has.

    A method pays if its turns lie below all-reduce's, outside of both spreads, and by 3 % at least. The fastest is
    taken; one that trains the same is preferred if it is no slower than that one beyond the spread.

    Args:
        taken: Name of a method → seconds of a step in each turn.
        known: What is known of each.
    """
    seen = {name: Turns.of(each) for name, each in taken.items()}
    base = seen[OWN if OWN in seen else BASE]
    pays = {
        name: spread
        for name, spread in seen.items()
        if name not in (OWN, NOTHING)
        and spread.high_s < base.low_s
        and spread.median_s <= (1 - _LEAST_GAIN) * base.median_s
    }
    if not pays:
        return None
    fastest = min(pays, key=lambda name: pays[name].median_s)
    same = [name for name in pays if known[name].exact and pays[name].low_s <= pays[fastest].high_s]
    return min(same, key=lambda name: pays[name].median_s, default=fastest)


def advice(taken: Mapping[str, Sequence[float]], known: Mapping[str, Method]) -> str:
    """Return what to do, in a paragraph."""
    seen = {name: Turns.of(each) for name, each in taken.items()}
    base_name = OWN if OWN in seen else BASE
    base, least = seen[base_name], seen[NOTHING]
    share = max(0.0, 1 - least.median_s / base.median_s)
    now = (
        f"A step takes {base} with {base_name}, and {least} if gradients are not summed at all, "
        f"so the sums cost {100 * share:.0f} % of it."
    )
    name = recommended(taken, known)
    if name is None:
        kept = "Leave them to DDP." if base_name == BASE else "Leave the script as it is."
        return f"Nothing pays. {now} No scheme that was tried makes steps shorter beyond the spread. {kept}"
    if name == BASE:
        return f"Plain all-reduce pays. {now} With DDP's all-reduce it takes {seen[BASE]}: leave the hook out."
    gain = base.median_s / seen[name].median_s
    method = known[name]
    said = [f"{name} pays: {gain:.2f} times as many steps. {now} With {name} it takes {seen[name]}."]
    if method.exact:
        said.append("It loses nothing: training stays the same, apart from rounding.")
    else:
        said.append("It changes what is trained: compare the losses of a longer run with those of all-reduce.")
        same = [other for other in seen if known[other].exact and other not in (base_name, NOTHING, BASE)]
        said += [f"{other}, which loses nothing, takes {seen[other]}." for other in same]
    write = "\n".join(f"    {line}" for line in (_IMPORT, method.write))
    return " ".join(said) + f" Write, after DistributedDataParallel(...) is made:\n\n{write}"


def choice(taken: Mapping[str, Sequence[float]], known: Mapping[str, Method], left_out: Mapping[str, str]) -> str:
    """Return what a hook says that takes the method that pays, in a line."""
    tried = {name: Turns.of(each) for name, each in taken.items()}
    if not taken or (name := recommended(taken, known)) is None:
        steps = [f"{name} {spread}" for name, spread in tried.items()]
        why = "; ".join([*steps, *(f"{name} left out: {reason}" for name, reason in left_out.items())])
        return f"gradients stay with all-reduce, no other sum makes a step shorter beyond the spread ({why})"
    gain = tried[BASE].median_s / tried[name].median_s
    return f"gradients are summed by {name}: {gain:.2f} times as many steps ({tried[name]}; all-reduce {tried[BASE]})"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
