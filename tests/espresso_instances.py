"""Small planning problems: random ones with few chains, and a cluster to cost the decision tree on."""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from baselines.timeline import Timeline

from resilient_run.comm.espresso import maxplus
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.espresso.strategy import Choice, CostedStep, Problem, Strategy
from resilient_run.comm.plan.cluster import Cluster, Coder, CompressorCost, LinkCost
from resilient_run.comm.plan.curve import Affine
from resilient_run.comm.plan.tree import Device

GPU, CPU, INTRA, INTER = Resource.GPU, Resource.CPU, Resource.INTRA, Resource.INTER
ONE_LINK = ((INTER,), (GPU, INTER, GPU), (GPU, INTER), (GPU, INTER, GPU, INTER, GPU))
ALL_RESOURCES = (
    *ONE_LINK,
    (),
    (CPU, INTER, CPU),
    (INTRA, INTER, INTRA),
    (INTRA, GPU, INTER, GPU, INTRA),
    (GPU, INTRA, INTER, GPU, INTRA),
    (INTRA, CPU, INTER, GPU, INTRA),
    (CPU, INTRA, GPU, CPU, INTER, INTRA, GPU),
)


def bubbles(found: Timeline) -> list[tuple[int, float, float]]:
    """Return which tensors both links wait for, from when, and until when."""
    made, sent_s = [], 0.0
    for place, spans in groupby(found.spans, key=lambda span: span.group):
        on_links = [span for span in spans if span.lane in (INTRA, INTER)]
        if place and on_links and sent_s < on_links[0].begin_s:
            made.append((place, sent_s, on_links[0].begin_s))
        sent_s = max([sent_s, *(span.end_s for span in on_links)])
    return made


def steps(resources: Sequence[Resource], seconds: np.ndarray) -> Choice:
    """Return the choice of these steps; `seconds`: (steps, kinds)."""
    return tuple(
        CostedStep(resource=resource, seconds=taken, kind=str(resource))
        for resource, taken in zip(resources, seconds, strict=True)
    )


def random_problem(seeded: random.Random, *, tensors: int, choices: int, kinds: int, one_link: bool = False) -> Problem:
    """Return a problem with ties, steps that take no time and tensors that are computed in no time."""
    seconds = seeded.choice([(0.0, 1.0, 2.0, 3.0), tuple(seeded.uniform(0, 4) for _ in range(8))])

    def choice() -> Choice:
        resources = seeded.choice(ONE_LINK if one_link else ALL_RESOURCES)
        taken = [[seeded.choice(seconds) for _ in range(kinds)] for _ in resources]
        return steps(resources, np.array(taken))

    return Problem(
        backward_s=[seeded.choice((0.0, *seconds)) for _ in range(tensors)],
        kinds=[seeded.randrange(kinds) for _ in range(tensors)],
        choices=[choice() for _ in range(choices)],
    )


def random_problems(
    seed: int, count: int, *, tensors: tuple[int, int], choices: tuple[int, int], one_link: bool = False
) -> Iterator[Problem]:
    """Yield random problems with numbers of tensors and of choices in these ranges."""
    seeded = random.Random(seed)
    for _ in range(count):
        size = seeded.randint(*tensors)
        yield random_problem(
            seeded, tensors=size, choices=seeded.randint(*choices), kinds=seeded.randint(1, size), one_link=one_link
        )


def every_time_s(problem: Problem) -> np.ndarray:
    """Return F of every strategy, without the forward pass."""
    states, every = np.zeros((1, maxplus.WIDTH)), np.arange(len(problem.choices))
    for kind, backward_s in zip(problem.kinds, problem.backward_s, strict=True):
        states = maxplus.apply(maxplus.compute(states, backward_s), problem.matrices(kind, every))
        states = states.reshape(-1, maxplus.WIDTH)
    return states.max(axis=1)


def random_strategy(seeded: random.Random, problem: Problem) -> Strategy:
    return tuple(seeded.randrange(len(problem.choices)) for _ in problem.kinds)


def affine(alpha_s: float, beta_s_per_byte: float) -> Affine:
    return Affine(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)


def cluster(
    *, hosts: int = 2, gpus: int = 2, cpu: bool = True, inter_s_per_byte: float = 8 / 25e9, ratio: float = 0.02
) -> Cluster:
    """Return a cluster of the paper's kind: PCIe in hosts, Ethernet between them."""
    on_gpu = Coder(compress=affine(3e-4, 6e-11), decompress=affine(5e-5, 5e-12), accumulate=affine(1e-5, 1e-12))
    on_cpu = Coder(compress=affine(1e-4, 3e-10), decompress=affine(5e-5, 1e-10), accumulate=affine(1e-5, 5e-11))
    return Cluster(
        hosts=hosts,
        gpus_per_host=gpus,
        intra=LinkCost(cost=affine(1e-5, 8 / 100e9)),
        inter=LinkCost(cost=affine(3e-5, inter_s_per_byte)),
        compressor=CompressorCost(
            name="dgc", ratio=ratio, coders={Device.GPU: on_gpu, **({Device.CPU: on_cpu} if cpu else {})}
        ),
    )
