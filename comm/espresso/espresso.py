"""Espresso: which option of the decision tree each tensor takes, by several planners (Chapter 4 of the thesis)."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..plan.cluster import Cluster
from ..plan.constraints import Constraint, compressed, cpu_only, gpu_only, same_device, uncompressed
from ..plan.model import Model
from ..plan.plan import ALL_REDUCE, DENSE, DOES_NOT_PAY, Plan, PlanGroup
from ..plan.tree import Comm, Device, Option, Step, all_options
from .cost import Costs
from .exact import Found, search
from .greedy import greedy, offload
from .strategy import Problem, Strategy

# The times of steps are rounded (`Problem`): options whose times differ by less are equally quick.
_ROUNDING_S = 1e-12
EXACT = "espresso"


class NoPlanError(ValueError):
    """A planner has no option to choose from; says what rules them out."""


class Espresso:
    """A model on a cluster, with the options that may be used.

    Args:
        model: The tensors, in ready order.
        cluster: Links, hosts and the compressor.
        options: What may be used; those on devices that the compressor has no costs for are left out.

    Raises:
        NoPlanError: No option is left.
    """

    def __init__(self, model: Model, cluster: Cluster, options: Sequence[Option] | None = None) -> None:
        self.model, self.cluster = model, cluster
        self.sizes_bytes = [tensor.numel * cluster.bytes_per_element for tensor in model.tensors]
        sizes = sorted(set(self.sizes_bytes))
        costed = Costs(cluster, sizes).options(all_options() if options is None else options)
        if not costed:
            raise NoPlanError(f"no option is left: {cluster.compressor.name} has no costs for their devices")
        self.options = tuple(option for option, _ in costed)
        self.problem = Problem(
            backward_s=[tensor.backward_s for tensor in model.tensors],
            kinds=[sizes.index(size) for size in self.sizes_bytes],
            choices=[steps for _, steps in costed],
        )
        self._found: dict[tuple[int, ...], Found] = {}

    def among(self, *constraints: Constraint) -> list[int]:
        """Return the options that meet all constraints.

        Raises:
            NoPlanError: There is none.
        """
        found = self._meeting(*constraints)
        if not found:
            names = ", ".join(constraint.__name__ for constraint in constraints)
            raise NoPlanError(f"no option is left that this planner may use ({names}); allow more, or another device")
        return found

    def or_dense(self, constraint: Constraint) -> list[int]:
        """Return the options that meet a constraint, of which there must be one, and those without compression."""
        return [*self.without, *self.among(compressed, constraint)]

    @property
    def without(self) -> list[int]:
        """The options without compression."""
        return [index for index, option in enumerate(self.options) if uncompressed(option)]

    def best(self, choices: Iterable[int]) -> Found:
        """Return what the exact planner finds among these options."""
        among = tuple(choices)
        if among not in self._found:
            self._found[among] = self._search(among, [self.problem.quickest(among)])
        return self._found[among]

    @cached_property
    def optimum(self) -> Found:
        """The best strategy of all options: the search begins with what the other planners find, and is no worse."""
        everything = range(len(self.options))
        starts = list(self.others.values())
        on_one_device = self._meeting(same_device)
        if 0 < len(on_one_device) < len(everything):
            starts.append(self._search(on_one_device, starts).strategy)
        return self._search(everything, starts)

    @cached_property
    def others(self) -> dict[str, Strategy]:
        """Planner → what it finds, of all planners but `espresso` that have options to choose from."""
        found = {}
        for name, planner in ESPRESSO_PLANNERS.items():
            if name != EXACT:
                with contextlib.suppress(NoPlanError):
                    found[name] = planner(self)
        return found

    def _meeting(self, *constraints: Constraint) -> list[int]:
        return [
            index for index, option in enumerate(self.options) if all(constraint(option) for constraint in constraints)
        ]

    def _search(self, choices: Sequence[int], starts: Iterable[Strategy]) -> Found:
        return search(self.problem, self.problem.fronts(choices), starts)

    def plain(self, strategy: Strategy) -> Strategy:
        """Return the strategy with flat all-reduces where other options compress nothing, unless slower."""
        plain = next((index for index, option in enumerate(self.options) if str(option) == ALL_REDUCE), None)
        if plain is None:
            return strategy
        used = [plain, *set(strategy)]
        alone_s = dict(zip(used, self.problem.alone_s(np.array(used)).T, strict=True))
        found = tuple(
            plain
            if (not size_bytes or uncompressed(self.options[choice]))
            and alone_s[plain][kind] <= alone_s[choice][kind] + _ROUNDING_S
            else choice
            for kind, choice, size_bytes in zip(self.problem.kinds, strategy, self.sizes_bytes, strict=True)
        )
        if found == strategy:
            return strategy
        limit_s = self.problem.iteration_s(strategy) + len(strategy) * _ROUNDING_S
        return found if self.problem.iteration_s(found) <= limit_s else strategy

    def on_cpu(self, choice: int) -> int:
        """Return the option that is the same with CPUs; itself where that does not exist."""
        moved = _on_cpu(self.options[choice])
        return next((index for index, option in enumerate(self.options) if option == moved), choice)


def _on_cpu(option: Option) -> Option:
    def moved(step: Step) -> Step:
        return step if isinstance(step, Comm) else replace(step, device=Device.CPU)

    return Option(tuple(moved(step) for step in option.steps))


Planner = Callable[[Espresso], Strategy]


def paper(job: Espresso) -> Strategy:
    """Return what Algorithm 4.1 finds, and then Algorithm 4.2 where the compressor runs on CPUs."""
    problem = job.problem
    fronts = problem.fronts(job.among(gpu_only))
    found = greedy(problem, fronts, problem.quickest(job.among(uncompressed)), job.sizes_bytes)
    if Device.CPU in job.cluster.compressor.coders:
        found = offload(problem, found, {choice: job.on_cpu(choice) for choice in set(found)})
    return found


def restricted(*constraints: Constraint) -> Planner:
    """Return the exact planner for the options that meet all constraints."""
    return lambda job: job.best(job.among(*constraints)).strategy


def or_dense(constraint: Constraint) -> Planner:
    """Return the exact planner for the options that meet a constraint and those without compression."""
    return lambda job: job.best(job.or_dense(constraint)).strategy


ESPRESSO_PLANNERS: dict[str, Planner] = {
    EXACT: lambda job: job.optimum.strategy,
    "espresso-greedy": paper,
    "espresso-all": restricted(compressed),
    "espresso-gpu": restricted(gpu_only),
    "espresso-cpu": or_dense(cpu_only),
    "espresso-dense": restricted(uncompressed),
}
"""Benchmarks add those that papers compare with."""


def espresso_plan(
    model: Model,
    cluster: Cluster,
    *,
    planner: str = EXACT,
    options: Sequence[Option] | None = None,
    baselines: bool = True,
) -> Plan:
    """Return the plan that one of `ESPRESSO_PLANNERS` makes.

    Args:
        model: The tensors, in ready order.
        cluster: Hosts, links and the compressor.
        planner: Its name.
        options: What may be used; all of the tree by default.
        baselines: Predict what the other planners achieve as well.

    Raises:
        NoPlanError: The planner has no option to choose from.
    """
    begin_s = time.perf_counter()
    job = Espresso(model, cluster, options)
    strategy = job.plain(ESPRESSO_PLANNERS[planner](job))
    planning_s = time.perf_counter() - begin_s
    makespan_s = job.problem.iteration_s(strategy)
    others: dict[str, float] = {}
    if baselines:
        everything = job.others | {EXACT: job.optimum.strategy}
        others = {
            name: cluster.forward_s + job.problem.iteration_s(everything[name])
            for name in ESPRESSO_PLANNERS
            if name != planner and name in everything
        }
    chosen = [job.options[choice] for choice in strategy]
    return Plan(
        planner=planner,
        model=model.name,
        compressor=cluster.compressor.name,
        groups=tuple(
            PlanGroup(tensors=(tensor.name,), option=DENSE if str(option) == ALL_REDUCE else str(option))
            for tensor, option in zip(model.tensors, chosen, strict=True)
        ),
        reason=_reason(job, planner, chosen, cluster.forward_s + makespan_s, others),
        iteration_s=cluster.forward_s + makespan_s,
        planning_s=planning_s,
        bound_s=cluster.forward_s + min(job.optimum.bound_s, makespan_s),
        baselines_s=others,
    )


def _reason(job: Espresso, planner: str, chosen: list[Option], iteration_s: float, others: Mapping[str, float]) -> str:
    count = sum(map(compressed, chosen))
    if not count:
        considered = planner == EXACT and len(job.without) < len(job.options)
        return DOES_NOT_PAY if considered else "this planner compresses nothing here"
    on_cpus = sum(Device.CPU in option.devices for option in chosen)
    reason = f"{count} of {len(chosen)} groups compressed, {on_cpus} of them on CPUs"
    if "espresso-dense" in others and iteration_s:
        reason += f"; {others['espresso-dense'] / iteration_s - 1:+.1%} speed against espresso-dense"
    return reason
