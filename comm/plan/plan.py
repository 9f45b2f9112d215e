"""A plan for the gradients of a model: what happens to each, predicted times, and the file that keeps both."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .fields import FileFields, read_object
from .tree import parse

VERSION = 1
COMPRESSED = "compressed"
DENSE = "dense"
ALL_REDUCE = "all_reduce@flat"
"""The option of the tree that `dense` stands for."""
FLAT = "comp:gpu > all_gather@flat > decomp:gpu"
"""The one that `compressed` stands for: the flat indivisible scheme, as planners of one network have it."""
DOES_NOT_PAY = "compression does not pay here: do not compress"
CLOSE = 0.03
"""Predictions are no better: what gains less than this share of an iteration over something simpler is left out."""
FEW_GROUPS = 0.005
"""Without compression, fewer groups may cost this share of an iteration: each all-reduce takes the processor's time,
which predictions leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanGroup:
    """Parameters whose gradients are communicated at once.

    Attributes:
        tensors: Names of the parameters, in ready order.
        option: `compressed`, `dense`, or the path through Espresso's decision tree.
    """

    tensors: tuple[str, ...]
    option: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run-time executes, and what was predicted for it.

    Attributes:
        planner: Its name.
        model: Name of the model.
        compressor: The compressor that its times are for; None if nobody says.
        groups: In the order of communication; each parameter is in one.
        reason: Why this plan.
        iteration_s: Predicted time of an iteration.
        planning_s: Time that planning took.
        bound_s: No plan that its family of planners chooses from takes less.
        baselines_s: Predicted times of an iteration of other planners, by name.
    """

    planner: str
    model: str
    compressor: str | None
    groups: tuple[PlanGroup, ...]
    reason: str
    iteration_s: float
    planning_s: float
    bound_s: float
    baselines_s: Mapping[str, float]

    @property
    def compress(self) -> bool:
        """Whether anything is compressed."""
        return any(group.option == COMPRESSED or "comp:" in group.option for group in self.groups)

    @property
    def plain(self) -> bool:
        """Whether everything is only all-reduced, by all ranks at once."""
        return all(group.option == DENSE for group in self.groups)

    @property
    def gap(self) -> float:
        """By which share of the optimum the plan may be slower than that, at most; 0 if it is the optimum."""
        return self.iteration_s / self.bound_s - 1 if self.bound_s else 0.0

    def document(self) -> dict[str, Any]:
        """Return the JSON form, which is the plan file and the answer of `resilient-comm plan --json`."""
        return {
            "version": VERSION,
            "planner": self.planner,
            "model": self.model,
            "compressor": self.compressor,
            "compress": self.compress,
            "reason": self.reason,
            "iteration_s": self.iteration_s,
            "planning_s": self.planning_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "baselines_s": dict(self.baselines_s),
            "groups": [list(group.tensors) for group in self.groups],
            "options": [group.option for group in self.groups],
        }

    def write(self, path: Path) -> None:
        """Write the plan file.

        Raises:
            OSError: It cannot be written.
        """
        path.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the plan of a file.

        Raises:
            FileError: The file is no plan.
        """
        fields = read_object(path)
        if "version" not in fields:
            raise fields.wrong("version", "plan files are written by `resilient-comm plan --out`")
        fields.version(VERSION)
        compress = fields.flag("compress", "whether anything is compressed")
        fields.ignore(["gap", "timeline"])  # plans of older versions have one
        baselines = fields.object("baselines_s", "the times of other strategies")
        plan = cls(
            planner=fields.text("planner", "the name of the planner"),
            model=fields.text("model", "the name of the model"),
            compressor=None if fields.null("compressor") else fields.text("compressor", "the compressor, or null"),
            groups=_groups(fields),
            reason=fields.text("reason", "why this plan"),
            iteration_s=fields.number("iteration_s", "seconds"),
            planning_s=fields.number("planning_s", "seconds"),
            bound_s=fields.number("bound_s", "seconds"),
            baselines_s={name: baselines.number(name, "seconds") for name in sorted(baselines.keys())},
        )
        fields.close()
        if compress is not plan.compress:
            raise fields.wrong("compress", f"the options say {str(plan.compress).lower()}")
        return plan


def _groups(fields: FileFields) -> tuple[PlanGroup, ...]:
    groups = fields.lists("groups", "names of parameters")
    options = fields.texts("options", "what happens to each group")
    if len(options) != len(groups):
        raise fields.wrong("options", f"write as many as there are groups, {len(groups)}")
    for option in sorted({*options} - {DENSE, COMPRESSED}):
        try:
            parse(option)
        except ValueError as error:
            raise fields.wrong("options", str(error)) from error
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name in seen:
            raise fields.wrong("groups", f'"{name}" is there twice: each parameter belongs to one group')
        seen.add(name)
    return tuple(PlanGroup(tensors=names, option=option) for names, option in zip(groups, options, strict=True))
