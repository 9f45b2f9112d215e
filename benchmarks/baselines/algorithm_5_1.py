"""Cupcake's Algorithm 5.1, mended: the reference for the exact planner."""

from collections.abc import Collection

from resilient_run.comm.cupcake.fusion import FusionProblem, Strategy, groups_of
from resilient_run.comm.plan.curve import Table

from .fusions import best_of, evenly_split, one_group
from .system import System


def algorithm_5_1(
    problem: FusionProblem, prunings: Collection[int] = (1, 2), start: Strategy | None = None
) -> Strategy:
    """Return the strategy that Cupcake's Algorithm 5.1 finds, mended; optimal for affine costs without decoding.

    As printed it never considers the single group, uses an undefined variable, lacks the case that nothing is left, and
    takes alpha for the operations on an empty rest. It begins with the better of one and two groups of the same number
    of tensors. Pruning 1 leaves out beginnings that cannot beat the best strategy so far; as printed it goes on with
    those that are as good at best, of which there can be very many. Pruning 2 lets a group that is encoded before the
    network is free take one more tensor. Exponential in the worst case: `cupcake.fused` is the planner to use, this is
    what it is checked against.

    Args:
        problem: Its costs are affine.
        prunings: Which of the two to use; neither is needed to find the optimum (Table 5.1 has what they save).
        start: The strategy to begin with; None for that of the paper.

    Raises:
        ValueError: Decoding is not free, or a cost is measured points, with which the prunings would lose the best.
    """
    if any(isinstance(cost, Table) for cost in (_system(problem).compress, _system(problem).communicate)):
        raise ValueError("Algorithm 5.1 needs affine costs, alpha_s and beta_s_per_byte; use cupcake, which takes any")
    if _system(problem).decompress(problem.size_bytes[-1]):
        raise ValueError("Algorithm 5.1 does not know decoding; use cupcake, which does")
    return _Algorithm51(problem, prunings, start or first(problem)).run()


def first(problem: FusionProblem) -> Strategy:
    """Return the strategy that the algorithm begins with."""
    return best_of(problem, [one_group(problem), evenly_split(problem, 2)])


class _Algorithm51:
    """The recursion with the incumbent that both prunings compare with."""

    def __init__(self, problem: FusionProblem, prunings: Collection[int], start: Strategy) -> None:
        self._problem = problem
        self._prunings = prunings
        self._best = start
        self._best_s = problem.finish_s(self._best)

    def run(self) -> Strategy:
        self._extend((), 0, 0.0, 0.0)
        return self._best

    def _extend(self, ends: tuple[int, ...], start: int, encoded_s: float, sent_s: float) -> None:
        """Try every next group from tensor `start` on; the groups before are encoded and sent at these times."""
        problem, system, count = self._problem, _system(self._problem), len(self._problem)
        delay_s = sent_s - encoded_s
        first = start + 1
        while 2 in self._prunings and ends and first < count and self._span(start, first + 1) <= delay_s:
            first += 1
        for end in range(first, count + 1):
            encoding_s = self._span(start, end)
            sending_s = system.communicate(self._bytes(start, end))
            rest_encoding_s = system.compress(self._bytes(end, count)) if end < count else 0.0
            rest_sending_s = system.communicate(self._bytes(end, count)) if end < count else 0.0
            computing_s = encoding_s + problem.backward_s[count] - problem.backward_s[end] + rest_encoding_s
            sending_all_s = max(encoding_s, delay_s) + sending_s + rest_sending_s
            if 1 in self._prunings and encoded_s + max(computing_s, sending_all_s) >= self._best_s:
                continue
            group_encoded_s = encoded_s + encoding_s
            group_sent_s = max(sent_s, group_encoded_s) + sending_s
            if end < count:
                self._extend((*ends, end), end, group_encoded_s, group_sent_s)
            elif group_sent_s < self._best_s:
                self._best, self._best_s = groups_of((*ends, end)), group_sent_s

    def _bytes(self, start: int, end: int) -> float:
        return self._problem.size_bytes[end] - self._problem.size_bytes[start]

    def _span(self, start: int, end: int) -> float:
        """Backward and encoding time of the tensors `start` … `end - 1` as one group."""
        backward_s = self._problem.backward_s[end] - self._problem.backward_s[start]
        return backward_s + _system(self._problem).compress(self._bytes(start, end))


def _system(problem: FusionProblem) -> System:
    assert isinstance(problem.system, System)
    return problem.system
