"""Campaigns: which faults strike when, planned from a file and a seed alone."""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.codec import SettingsRecord, limited
from resilient_run.daemon.run.faults import KINDS, Order, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(SettingsRecord):
    """One kind of fault in a campaign.

    Attributes:
        kind: Its name.
        weight: How often it is drawn, relative to the others.
        parameters: As in an order.
    """

    kind: str
    weight: float = limited(1.0, low=1e-6)
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(SettingsRecord):
    """The settings of a campaign beside its kinds.

    Attributes:
        seed: Of every draw.
        faults: How many; 0: as many as there is room for.
        duration_s: Length, 0 for none.
        mtbf_s: Mean seconds between faults (exponentially distributed); 0 when steps count.
        mtbf_steps: Mean completed steps between faults (exponentially distributed); 0 when seconds count.
        first_step: No fault before this step.
        min_distance_steps: Least steps between the recovery from one fault and the next one.
        wait_for_recovery: Whether a fault waits until the one before is recovered from.
        lost_hosts_at_once: Faults that cost a host wait until fewer hosts than this are lost: m - 1 to lose nothing.
        recovery_timeout_s: How long a recovery may take before the campaign gives up.
        every_kind: Whether each kind comes at least once, if there are enough faults.
    """

    seed: int = 0
    faults: int = limited(0, high=100_000)
    duration_s: float = 0.0
    mtbf_s: float = 0.0
    mtbf_steps: float = 0.0
    first_step: int = 2
    min_distance_steps: int = 3
    wait_for_recovery: bool = True
    lost_hosts_at_once: int = limited(1, low=1)
    recovery_timeout_s: float = limited(180.0, low=1)
    every_kind: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What a campaign file says."""

    limits: Limits
    choices: tuple[Choice, ...]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the campaign in a TOML file.

        Raises:
            DaemonError: It cannot be read, or says something that is not possible.
        """
        try:
            return cls.parse(tomllib.loads(path.read_text()), where=str(path))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DaemonError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, tables: Mapping[str, Any], *, where: str) -> Self:
        """Return the campaign that `tables` describe; `where` names them in errors.

        Raises:
            DaemonError: They say something that is not possible.
        """
        settings = {name: value for name, value in tables.items() if name != "kinds"}
        limits = Limits.parse(settings, where)
        if bool(limits.mtbf_s) == bool(limits.mtbf_steps):
            raise DaemonError(f"{where}: give either mtbf_s or mtbf_steps")
        if not limits.faults and not (limits.duration_s and limits.mtbf_s):
            raise DaemonError(f"{where}: give the number of faults, or mtbf_s and duration_s")
        entries = tables.get("kinds")
        if not isinstance(entries, list) or not entries:
            raise DaemonError(f"{where}: give at least one kind, each as a table [[kinds]]")
        return cls(limits=limits, choices=tuple(_choice(entry, where) for entry in entries))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """One fault of a plan. It strikes `rank`, or the host that runs `rank` when the time has come.

    Attributes:
        number: From 1.
        kind: Name of the kind.
        rank: The target.
        at_step: When, in completed steps; None when seconds count.
        at_s: When, in seconds from the beginning of the campaign; None when steps count.
        within_s: Seconds after that moment, so that faults fall into any part of a step.
        parameters: As in an order.
    """

    number: int
    kind: str
    rank: int
    at_step: int | None
    at_s: float | None
    within_s: float
    parameters: Mapping[str, Any]

    def order(self, host: str, at_step: int | None) -> Order:
        """Return the order that lets it strike on `host` at `at_step`."""
        aims = KINDS[self.kind].scope in (Scope.RANK, Scope.REPLICA)
        value = {
            "kind": self.kind,
            "host": host,
            "rank": self.rank if aims else None,
            "at_step": at_step,
            "after_s": self.within_s,
            "parameters": self.parameters,
        }
        return Order.parse(value, f"fault {self.number}")


def plan_campaign(campaign: Campaign, *, seed: int, world_size: int) -> list[PlannedFault]:
    """Return the faults of a campaign on ranks 0 … `world_size` - 1, in order; equal arguments give equal plans."""
    limits, draw = campaign.limits, random.Random(seed)
    mean = limits.mtbf_s or limits.mtbf_steps
    moments: list[float] = []
    moment = 0.0 if limits.mtbf_s else float(limits.first_step)
    while not limits.faults or len(moments) < limits.faults:
        distance = draw.expovariate(1 / mean)
        if limits.mtbf_steps:
            distance = max(distance, float(limits.min_distance_steps))
        moment += distance
        if limits.duration_s and limits.mtbf_s and moment > limits.duration_s:
            break
        moments.append(moment)
    kinds = _draw_kinds(campaign, len(moments), draw)
    return [
        PlannedFault(
            number=number,
            kind=choice.kind,
            rank=draw.randrange(world_size),
            at_step=round(moment) if limits.mtbf_steps else None,
            at_s=moment if limits.mtbf_s else None,
            within_s=round(draw.uniform(0, 0.1), 4),
            parameters=choice.parameters,
        )
        for number, (moment, choice) in enumerate(zip(moments, kinds, strict=True), start=1)
    ]


def _draw_kinds(campaign: Campaign, count: int, draw: random.Random) -> list[Choice]:
    choices = list(campaign.choices)
    sure = choices if campaign.limits.every_kind and count >= len(choices) else []
    drawn = draw.choices(choices, weights=[choice.weight for choice in choices], k=count - len(sure))
    kinds = sure + drawn
    draw.shuffle(kinds)
    return kinds


def _choice(entry: Any, where: str) -> Choice:
    if not isinstance(entry, Mapping):
        raise DaemonError(f"{where}: {entry!r} is not a kind of fault: give a table with kind, weight and parameters")
    choice = Choice.parse(entry, f"{where}, kinds")
    value: dict[str, Any] = {"kind": choice.kind, "host": "any", "parameters": choice.parameters}
    kind = KINDS.get(choice.kind)
    if kind is not None and kind.scope is Scope.RANK:
        value["rank"] = 0
    return replace(choice, parameters=Order.parse(value, where).parameters.to_value())
