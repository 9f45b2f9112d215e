"""Gradients that come together are summed as each would be alone, to the last bit, in as many rounds as one of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_scheme import others
from ranks import run_hosts, run_ranks
from sparse_gradients import gradients
from tiers import nightly_but
from torch import Tensor

from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import SampledTopK
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import MessageError
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.rounds import Messages, Rounds, all_to_all, carry_out, swap
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.net.two_level import TwoLevel
from resilient_run.comm.runtime.choice import scheme_of
from resilient_run.comm.schemes import named
from resilient_run.comm.zen.zen import Zen

SHAPES = {"weight": (40, 12), "bias": (77,), "table": (300, 8), "half": (64, 9)}
SCHEMES: dict[str, dict[str, Any]] = {
    "dgc": {"density": 0.2},
    "fp16": {},
    "fp8": {"block": 8},
    "int8": {"block": 16, "rounding": "stochastic"},
    "onebit": {},
    "spardl": {"density": 0.05},
    "spardl, bruck": {"density": 0.05, "gather": "bruck"},
    "sampled": {},
    "topk": {"density": 0.05},
    "topk-a": {"density": 0.05},
    "zen": {"profile_steps": 1},
    "zen, gathered": {"route": "gather"},
    "zen, doubled": {"route": "hierarchical"},
    "zen, pushed and pulled": {"route": "parallel"},
}
# Sums of powersgd are rounded as what is all-reduced together lies in memory: test_powersgd.py.
SCHEMES |= {name: {} for name in others([*SCHEMES, "powersgd"])}
IN_OTHER_ROUNDS = ("bf16", "dense", "dgc", "fp16", "randomk", "zen")
"""Gradients that have different rounds, or are all-reduced one by one."""


def given(ranks: int, step: int, rank: int) -> list[tuple[str, Tensor]]:
    """Return this rank's gradients; those of one step in three are as good as dense, and others differ in density."""
    found = []
    for place, (key, shape) in enumerate(SHAPES.items()):
        density = 0.9 if step % 3 == 2 and place % 2 else 0.03 * (1 + place)
        dtype = torch.bfloat16 if key == "half" else torch.float32
        found.append((key, gradients(ranks, shape, density=density, seed=7 * step + place, dtype=dtype)[rank]))
    return found


def sampled(transport: Transport) -> Scheme:
    """Send messages of which each rank announces the size."""
    return Compressed(transport, ErrorFeedback(SampledTopK(0.1)))


@pytest.mark.parametrize("label", SCHEMES)
@pytest.mark.parametrize("ranks", nightly_but([3, 4], [2, 3, 4, 6]))
def test_sums_are_those_of_each_alone(label: str, ranks: int) -> None:
    name = label.partition(",")[0]

    def work(transport: Transport) -> None:
        choice = sampled if name == "sampled" else name
        alone, together = (scheme_of(choice, transport, **SCHEMES[label]) for _ in range(2))
        for step in range(6):
            each = given(ranks, step, transport.rank)
            most_rounds, expected = 0, []
            for key, gradient in each:
                transport.traffic.reset()
                expected.append(alone.reduce(key, gradient.clone()))
                most_rounds = max(most_rounds, transport.traffic.rounds)
            transport.traffic.reset()
            # Which gradients are in a bucket may change.
            mine = [(key, gradient.clone()) for key, gradient in each]
            found = together.reduce_together(mine) if step % 2 else []
            found = found or together.reduce_together(mine[:2]) + together.reduce_together(mine[2:])
            for (key, gradient), one, other in zip(each, expected, found, strict=True):
                assert one.dtype == other.dtype == gradient.dtype
                assert torch.equal(one, other), (key, step)
            if name not in IN_OTHER_ROUNDS and step % 2:
                assert transport.traffic.rounds == most_rounds
        assert_same(alone.state_dict(), together.state_dict())

    run_ranks(ranks, work)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_gradients_with_different_plans_go_together(ranks: int) -> None:
    """Some ranks have fewer rounds of recursive doubling than others where their number is no power of two."""
    routes = ("parallel", "hierarchical", "gather", "dense")

    def plan(scheme: Scheme, keys: list[str]) -> None:
        plans = {
            key: {
                "steps": 1,
                "counts": [],
                "plan": {"route": routes[place % 4], "width": 1 + place % 2, "received_bytes": 0, "reason": ""},
            }
            for place, key in enumerate(keys)
        }
        scheme.load_state_dict({"scheme": "zen", "seed": 0, "rows": [16, 64, 256], "keys": plans})

    def work(transport: Transport) -> None:
        each = [
            (f"w{place}", gradients(ranks, (50, 4), density=0.05 * (1 + place), seed=place)[transport.rank])
            for place in range(9)
        ]
        alone, together = Zen(transport), Zen(transport)
        for scheme in (alone, together):
            plan(scheme, [key for key, _ in each])
        expected = [alone.reduce(key, gradient.clone()) for key, gradient in each]
        transport.traffic.reset()
        found = together.reduce_together([(key, gradient.clone()) for key, gradient in each])
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        # Two all-reduces, and what doubling with a fold has.
        assert transport.traffic.rounds == 2 + (ranks.bit_length() - 1) + 2 * bool(ranks & (ranks - 1))

    run_ranks(ranks, work)


def test_sparse_gradients_go_together_between_hosts() -> None:
    def work(fabric: Fabric) -> None:
        each = [*given(4, 0, fabric.flat.rank)[:3], ("nothing", torch.empty(0, 3))]
        alone, together = (TwoLevel(fabric.intra, named("spardl", fabric.inter, density=0.1)) for _ in range(2))
        for _ in range(2):
            expected = [alone.reduce(key, gradient.clone().to_sparse(1)) for key, gradient in each]
            found = together.reduce_together([(key, gradient.clone().to_sparse(1)) for key, gradient in each])
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one.to_dense(), other.to_dense())

    run_hosts(2, 2, work)


def test_an_overflow_of_one_gradient_leaves_the_others_what_they_learnt() -> None:
    def work(transport: Transport) -> None:
        scheme = named("spardl", transport, density=0.1)
        good, bad = (gradients(2, (500,), density=1, seed=seed)[transport.rank] for seed in range(2))
        if transport.rank:
            bad[3] = torch.inf
        scheme.reduce_together([("good", good), ("nothing", torch.empty(0, 3)), ("bad", bad)])
        assert scheme.state_dict()["residuals"].get("good") is not None
        assert scheme.state_dict()["residuals"].get("bad") is None

    run_ranks(2, work)


def test_sizes_are_announced_once_for_all() -> None:
    """Messages of any length, also none, from some ranks to some, with and without known sizes in one round."""

    def numbers(rank: int, to: int, count: int) -> Tensor:
        return torch.full((count,), 16 * rank + to, dtype=torch.uint8)

    def ring(transport: Transport, count: int) -> Rounds[bool]:
        rank, size = transport.rank, transport.size
        to, source = (rank + 1) % size, (rank - 1) % size
        found = yield from swap(numbers(rank, to, count), to=to, source=source)
        return torch.equal(found, numbers(source, rank, count))

    def everybody(transport: Transport) -> Rounds[bool]:
        rank, ranks = transport.rank, range(transport.size)
        messages = [numbers(rank, to, 3 * to + rank) for to in ranks]
        found = yield from all_to_all(rank, messages, sizes_bytes=[3 * rank + source for source in ranks])
        return all(torch.equal(found[source], numbers(source, rank, 3 * rank + source)) for source in ranks)

    def work(transport: Transport) -> None:
        runs = [ring(transport, 5), everybody(transport), ring(transport, 0), ring(transport, 17)]
        transport.traffic.reset()
        assert carry_out(transport, runs) == [True] * 4
        assert transport.traffic.rounds == 1
        assert transport.traffic.header_bytes == 8 * (transport.size - 1)
        known = [everybody(transport), everybody(transport)]
        transport.traffic.reset()
        assert carry_out(transport, known) == [True] * 2
        assert transport.traffic.header_bytes == 0
        assert carry_out(transport, []) == []

    run_ranks(4, work)


def test_what_goes_to_all_is_joined_once() -> None:
    class Watching(Transport):
        def exchange(self, outgoing: Any, sources: Any, *, sizes_bytes: Any = None) -> dict[int, Tensor]:
            if sizes_bytes is None:  # no announcement
                assert len({message.data_ptr() for message in outgoing.values()}) == 1
            return super().exchange(outgoing, sources, sizes_bytes=sizes_bytes)

    def work(transport: Transport) -> None:
        scheme = Zen(Watching(transport._group), route="gather")
        each = [(f"w{place}", torch.eye(8) * transport.rank) for place in range(3)]
        for _, total in zip(each, scheme.reduce_together(each), strict=True):
            assert torch.equal(total, torch.eye(8) * 6)

    run_ranks(4, work)


@pytest.mark.parametrize("forge", [lambda whole: whole[:-1], lambda whole: whole[:5], lambda whole: whole | 255])
def test_messages_that_do_not_fit_their_sizes_are_refused(forge: Callable[[Tensor], Tensor]) -> None:
    class Forger(Transport):
        def exchange(self, outgoing: Any, sources: Any, *, sizes_bytes: Any = None) -> dict[int, Tensor]:
            if self.rank == 1 and sizes_bytes is None:  # no announcement
                outgoing = {rank: forge(message) for rank, message in outgoing.items()}
            return super().exchange(outgoing, sources, sizes_bytes=sizes_bytes)

    def one(rank: int) -> Rounds[Tensor]:
        other = 1 - rank
        received = yield Messages(
            outgoing={other: torch.arange(9, dtype=torch.uint8)}, sources=[other], sizes_bytes=None
        )
        return received[other]

    def work(transport: Transport) -> str:
        forger = Forger(transport._group)
        try:
            carry_out(forger, [one(forger.rank), one(forger.rank)])
        except MessageError as error:
            return str(error)
        return "taken"

    refused, taken = run_ranks(2, work)
    assert "rank 1 sent" in refused
    assert "not 2 messages with their sizes; run the same version" in refused
    assert taken == "taken"
