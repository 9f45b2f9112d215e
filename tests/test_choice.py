"""What ranks that sum together must be given alike is compared, and what may differ is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.compress.feedback import ErrorFeedback, MomentumCorrection
from resilient_run.comm.compress.quantized import EightBits
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.alike import check_alike
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.plan import DENSE, FLAT, PlanGroup
from resilient_run.comm.schemes import SCHEMES
from resilient_run.comm.schemes import named as scheme_named
from resilient_run.comm.spardl.spardl import SparDL
from resilient_run.comm.zen.zen import Zen


class Own:
    """A user's own, in which ranks may differ."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def group(option: str) -> tuple[PlanGroup, ...]:
    return (PlanGroup(tensors=("weight",), option=option),)


def used_by_a_root(rank: int) -> ErrorFeedback:
    memory = ErrorFeedback(named("topk"))
    if rank == 0:
        memory.compress("weight", torch.ones(100))
    return memory


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([named("fp16"), named("bf16")], "x.dtype is torch.float16 on rank 0 and torch.bfloat16 on rank 2"),
        ([EightBits("int8"), EightBits("fp8")], "x._kind is 'int8' on rank 0 and 'fp8' on rank 2"),
        ([ErrorFeedback(named(name)) for name in ("topk", "dgc")], "x.compressor is TopK on rank 0 and SampledTopK"),
        (
            [MomentumCorrection(named("topk"), ranks=3, momentum=m) for m in (0.9, 0.8)],
            "momentum is 0.9 on rank 0 and 0.8",
        ),
        ([group(DENSE), group(FLAT)], "x[0].option is 'dense' on rank 0 and 'comp:gpu"),
        ([partial(SparDL, density=0.1), partial(Zen)], "x.func is resilient_run.comm.spardl.spardl.SparDL on rank 0"),
        ([range(1, 5), range(1, 9)], "x is range(1, 5) on rank 0 and range(1, 9) on rank 2"),
        ([np.int64(1), np.int64(2)], "x is 1 on rank 0 and 2 on rank 2"),
        ([np.float32(0.5), 0.25], "x is 0.5 on rank 0 and 0.25 on rank 2"),
        ([{"a": [1]}, {"a": [1, 2]}], "x['a'] is 1 items on rank 0 and 2 items on rank 2"),
        ([{1, 2}, {1, 3}], "on rank 2"),
    ],
)
def test_what_differs_is_refused_on_all_ranks(given: list[Any], said: str) -> None:
    def work(transport: Transport) -> str:
        transport.traffic.reset()
        with pytest.raises(CommError, match="give all ranks the same") as refused:
            check_alike(transport, x=given[transport.rank // 2], same=1)
        assert transport.traffic.sent_bytes == 0, "it belongs to no step"
        return str(refused.value)

    (text,) = set(run_ranks(3, work))
    assert said in text


@pytest.mark.parametrize(
    "given",
    [
        lambda rank: Own(rank),
        lambda rank: EightBits("int8", rounding="stochastic", rank=rank),
        used_by_a_root,
        lambda rank: (1, 1.0, True)[rank],
        lambda rank: (np.float64(0.1), 0.1, np.float64(0.1))[rank],
        lambda rank: ([1, 2], (1, 2), [1, 2])[rank],
        lambda rank: ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2})[rank],
        lambda rank: float("nan"),
        lambda rank: lambda ranks: Zen(ranks),
    ],
)
def test_what_is_the_same_or_a_rank_s_own_is_accepted(given: Callable[[int], object]) -> None:
    run_ranks(3, lambda transport: check_alike(transport, x=given(transport.rank)))


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_ranks_of_one_scheme_are_alike(name: str) -> None:
    run_ranks(4, lambda transport: check_alike(transport, scheme=scheme_named(name, transport)))
