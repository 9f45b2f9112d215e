"""Small fusion problems of hostile shapes, and the best of all their strategies, mixtures included."""

import random
from collections.abc import Sequence

import numpy as np
from baselines.system import System

from resilient_run.comm.cupcake.fusion import FusionProblem, Group, Strategy
from resilient_run.comm.plan.curve import FREE, Affine, Curve, Table
from resilient_run.comm.plan.model import Tensor


def problem_of(sizes: Sequence[int], backward_s: Sequence[float], system: System) -> FusionProblem:
    pairs = enumerate(zip(sizes, backward_s, strict=True))
    return FusionProblem([Tensor(name=f"t{i}", numel=n, backward_s=b) for i, (n, b) in pairs], system)


def hostile_problem(rng: random.Random, *, most: int) -> FusionProblem:
    """Return a problem with start-ups large and small against bytes, 1 to 3 busy resources, and sizes that alternate.

    Compression pays for some tensors and not for others more often than not. A third of the costs are measured points.
    """
    count = rng.randint(1, most)
    sizes = _sizes(rng, count)
    size_bytes = 4.0 * max(1, sum(sizes))
    compute_s = rng.choice([0.0, 10 ** rng.uniform(-2, 1)])
    pace = [rng.choice([0.0, 1.0, rng.random()]) for _ in sizes]
    if rng.random() < 0.5:
        pace = [size + 0.01 * rng.random() for size in sizes]
    backward_s = [compute_s * share / max(1e-9, sum(pace)) for share in pace]
    dense_s, ratio = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-2, 0.2)
    resources = rng.randint(1, 3)
    system = System(
        forward_s=rng.choice([0.0, 1.0]),
        bytes_per_element=4.0,
        compress=_cost(rng, 10 ** rng.uniform(-2, 0.5), size_bytes) if resources > 1 else FREE,
        communicate=_cost(rng, dense_s * ratio, size_bytes),
        decompress=_cost(rng, 10 ** rng.uniform(-2, 0.5), size_bytes) if resources > 2 else FREE,
        communicate_dense=_cost(rng, dense_s, size_bytes),
    )
    return problem_of(sizes, backward_s, system)


def _sizes(rng: random.Random, count: int) -> list[int]:
    kind = rng.randrange(4)
    if kind == 0:
        small, large = 10 ** rng.randint(0, 3), 10 ** rng.randint(3, 6)
        return [large if place % 2 else small for place in range(count)]
    if kind == 1:
        return [int(10 ** rng.uniform(0, 6)) for _ in range(count)]
    if kind == 2:
        return [10**5] * count
    return [rng.choice([0, 1, rng.randint(1, 10**5)]) for _ in range(count)]


def _cost(rng: random.Random, seconds: float, size_bytes: float) -> Curve:
    """Return what costs about so much for all bytes at once, more of it for each operation or for each byte."""
    share = rng.choice([0.0, 0.02, 0.2, rng.random(), 1.0])
    line = Affine(alpha_s=seconds * share, beta_s_per_byte=seconds * (1 - share) / size_bytes)
    if rng.random() < 2 / 3:
        return line
    knots = sorted({size_bytes * 10 ** rng.uniform(-3, 0) for _ in range(rng.randint(1, 4))})
    bent = [line(size) * rng.choice([1.0, 1.0, 0.3, 2.0]) for size in knots]
    return Table(sizes_bytes=tuple(knots), seconds=tuple(sorted(bent) if rng.random() < 0.8 else bent))


def best_of_all(problem: FusionProblem) -> tuple[float, Strategy]:
    """Return the least iteration time of all 2 · 3^(N-1) strategies, and the strategy."""
    modes = (True, False) if problem.system.communicate_dense is not None else (True,)
    # [encoding, end of communication, decoding from the end of all computation on, without decoding: last group's sum]
    every: list[tuple[np.ndarray, list[tuple[int, int, bool]]]] = [(np.zeros((4, 1)), [(-1, -1, True)])]
    for end in range(1, len(problem) + 1):
        found, origins = [], []
        for start in range(end):
            for compressed in modes:
                encode_s, send_s, decode_s = problem.costs_s(Group(start, end, compressed))
                encoding, sent, decoded, decoding = every[start][0]
                encoding = encoding + encode_s
                sent = np.maximum(sent, problem.backward_s[end] + encoding) + send_s
                decoded = np.maximum(decoded, sent) + decode_s
                found.append(np.stack([encoding, sent, decoded, decoding + decode_s]))
                origins += [(start, index, compressed) for index in range(len(encoding))]
        every.append((np.concatenate(found, axis=1), origins))
    encoding, _, decoded, decoding = every[-1][0]
    finish_s = np.maximum(decoded, problem.backward_s[-1] + encoding + decoding)
    end, index, groups = len(problem), int(finish_s.argmin()), []
    while end:
        start, before, compressed = every[end][1][index]
        groups.append(Group(start, end, compressed))
        end, index = start, before
    return problem.system.forward_s + float(finish_s.min()), tuple(groups[::-1])
