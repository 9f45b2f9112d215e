"""The fusion planner for affine costs: dynamic programming over prefixes and group counts, exact where it ends."""

from collections import deque

from ..plan.curve import FREE, Affine
from .fusion import FusionProblem, Strategy, groups_of
from .fusion_baselines import layer_wise, one_group

# A strategy is better than another when it is by more than the rounding of its sums.
ROUNDING = 1e-12
# Where latencies of communication are next to nothing and those of decoding are not, nearly every range of counts has
# to be searched: Pareto fronts (`fusion_front`) take less time then.
PATIENCE = 2


def search(problem: FusionProblem, *, patience: float = PATIENCE) -> tuple[Strategy, bool]:
    """Return the best strategy of compressed groups found, and whether it is the best of all 2^(N-1); for affine costs.

    When the y-th group ends with tensor j it is encoded at C(j, y) = B_j + y alpha_h + beta_h X_j, whatever the groups
    are. So the best prefix is the one whose communication ends first:

        D[j][y] = min_i max(D[i][y-1], C(j, y)) + g(i, j)

    Of the i whose communication has ended by C(j, y) the last is the best, and of the others the one with the least
    D[i][y-1] - beta_g X_i: both advance with j, which makes O(N) of each y.

    Decoding takes the same time for every strategy of y groups. What it adds is a deadline for the communication of
    each group, so that its decoding and all after it end before the best time known. The search is repeated below that
    time, for ever smaller ranges of counts that may beat it, until nothing is left.

    Args:
        problem: Its costs are affine.
        patience: Give up after looking at so many counts for each tensor, each in O(N).

    Raises:
        ValueError: A cost is not affine.
    """
    return _GroupSearch(problem, patience * len(problem)).best()


class _GroupSearch:
    def __init__(self, problem: FusionProblem, counts: float) -> None:
        system = problem.system
        self._problem, self._count, self._counts_left = problem, len(problem), counts
        self._encode, self._send, self._decode = map(_affine, (system.compress, system.communicate, system.decompress))
        self._decodes_free = self._decode == FREE
        self._size = problem.size_bytes
        per_byte = self._encode.beta_s_per_byte
        self._ready = [ready_s + per_byte * size for ready_s, size in zip(problem.backward_s, self._size, strict=True)]
        self._best = min((one_group(problem), layer_wise(problem)), key=problem.finish_s)
        self._best_s = problem.finish_s(self._best)

    def best(self) -> tuple[Strategy, bool]:
        self._explore(1, self._count)
        return self._best, self._counts_left > 0

    def _explore(self, low: int, high: int) -> None:
        """Keep the best strategy of `low` … `high` groups."""
        before_s, high = self._best_s, self._sweep(low, high)
        if self._decodes_free or high < low:
            return
        if low == high or not self._decode.alpha_s:
            if self._best_s < before_s:
                self._explore(low, high)
            return
        middle = (low + high) // 2
        self._explore(low, middle)
        self._explore(middle + 1, high)

    def _budget_s(self) -> float:
        return self._best_s * (1 - ROUNDING)

    def _computed_s(self, count: int) -> float:
        """When the device can be done with all it has to do for `count` groups."""
        encoding_s = count * self._encode.alpha_s
        return self._ready[-1] + encoding_s + count * self._decode.alpha_s + self._decoding_s

    @property
    def _decoding_s(self) -> float:
        """Decoding of all tensors, without what each group takes anyway."""
        return self._decode.beta_s_per_byte * self._size[-1]

    def _sweep(self, low: int, high: int) -> int:
        """Consider strategies of `low` … `high` groups; return the largest number that may still be better, or 0.

        The deadlines are those of `low` groups, the latest ones.
        """
        sent, choices, largest = [0.0] + [float("inf")] * self._count, list[list[int]](), 0
        for count in range(1, high + 1):
            without_pause_s = self._ready[1] + self._encode.alpha_s + count * self._send.alpha_s
            without_pause_s += self._send.beta_s_per_byte * self._size[-1] + self._decode.alpha_s
            if max(without_pause_s, self._computed_s(count), min(sent)) >= self._budget_s():
                break  # more groups take longer still
            self._counts_left -= 1
            if self._counts_left <= 0:
                return 0
            finish_s, start = self._last(sent, count)
            decoding_s = max(1, low - count + 1) * self._decode.alpha_s + self._decoding_s
            sent, chosen = self._row(sent, count, self._budget_s() - decoding_s)
            if count >= low and max(finish_s, self._computed_s(count)) < self._budget_s():
                largest = count
                self._consider([*choices, [*chosen[:-1], start]])
            choices.append(chosen)
        return largest

    def _last(self, before: list[float], count: int) -> tuple[float, int]:
        """Return the least time until the last of `count` groups is decoded, and where that group begins."""
        encoded_s = self._ready[-1] + count * self._encode.alpha_s
        fixed_s = self._send.alpha_s + self._decode.alpha_s
        per_byte = self._send.beta_s_per_byte + self._decode.beta_s_per_byte
        return min(
            (max(sent_s, encoded_s) + fixed_s + per_byte * (self._size[-1] - self._size[start]), start)
            for start, sent_s in enumerate(before[: self._count])
        )

    def _row(self, before: list[float], count: int, deadline_s: float) -> tuple[list[float], list[int]]:
        """Return D[.][count] from D[.][count - 1], and where the last group of each begins.

        Args:
            before: When the communication of the first j tensors in `count - 1` groups ends; infinite if it cannot.
            count: Groups so far.
            deadline_s: When the communication of a group that begins with tensor 0 has to end; of others it is later,
                by the decoding of the bytes before them.
        """
        size, ready = self._size, self._ready
        encoding_s, latency_s, send_s = count * self._encode.alpha_s, self._send.alpha_s, self._send.beta_s_per_byte
        # A group that waits for the one before is sent at the lead of its start plus what all bytes up to its end take.
        leads_s = [sent_s - send_s * passed for sent_s, passed in zip(before, size, strict=True)]
        deadlines_s = [deadline_s + self._decode.beta_s_per_byte * passed for passed in size]
        sent, chosen = [float("inf")] * (self._count + 1), [-1] * (self._count + 1)
        idle = -1  # the last start before which communication has ended when the group is encoded
        busy: deque[int] = deque()  # the later starts that may be best for some end, the one with the least lead first
        for end in range(count, self._count + 1):
            encoded_s = ready[end] + encoding_s
            travel_s = latency_s + send_s * size[end]
            start = end - 1
            if before[start] < float("inf"):
                while busy and leads_s[busy[-1]] >= leads_s[start]:
                    busy.pop()
                busy.append(start)
            while busy and before[busy[0]] <= encoded_s:
                idle = busy.popleft()
            while busy and leads_s[busy[0]] + travel_s > deadlines_s[busy[0]]:
                busy.popleft()  # too late for this end and all further ones
            if busy:
                sent[end], chosen[end] = leads_s[busy[0]] + travel_s, busy[0]
            if idle >= 0:
                sent_s = encoded_s - send_s * size[idle] + travel_s
                if sent_s <= min(sent[end], deadlines_s[idle]):
                    sent[end], chosen[end] = sent_s, idle
        return sent, chosen

    def _consider(self, choices: list[list[int]]) -> None:
        """Keep the strategy that these choices lead to if it is better."""
        ends, end = [], self._count
        for chosen in reversed(choices):
            ends.append(end)
            end = chosen[end]
        strategy = groups_of(ends[::-1])
        finish_s = self._problem.finish_s(strategy)
        if finish_s < self._best_s:
            self._best, self._best_s = strategy, finish_s


def _affine(curve: object) -> Affine:
    if not isinstance(curve, Affine):
        raise ValueError("this planner needs affine costs; the Pareto front takes any")
    return curve
