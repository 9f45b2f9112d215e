"""The bytes that `benchmarks/zen_scaling.py` counts are those of the real schemes, its imbalances those of indices."""

import pytest
import sparsity
import torch
from baselines import AGsparse, IndexFree, RecursiveDoubling
from baselines.rows import Even
from ranks import run_ranks
from sparse_workload import WORKLOADS
from torch import Tensor
from zen_scaling import BALANCES, PARALLEL, SCHEMES, WIDTH, drawn, imbalance, phases

from resilient_run.comm.net.rounds import carry_out
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.zen.routes import push_and_pull
from resilient_run.comm.zen.sparse import compress

ROWS = 1000
CENTRALIZED = {"agsparse": AGsparse, "sparcml": RecursiveDoubling}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_counted_bytes_are_those_of_the_scheme(scheme: str, ranks: int) -> None:
    random = torch.Generator().manual_seed(ranks)
    falling = 0.9 / torch.arange(1, ROWS + 1).sqrt()
    touched = [(torch.rand(ROWS, generator=random) < falling).nonzero().view(-1) for _ in range(ranks)]

    def work(transport: Transport) -> tuple[int, int]:
        own: Tensor = torch.zeros(ROWS, WIDTH)
        own[touched[transport.rank]] = 1.0
        if scheme in CENTRALIZED:
            CENTRALIZED[scheme](transport).reduce("table", own)
        elif scheme == "balanced, no index":
            index_free = IndexFree(transport)
            index_free.reduce("table", own)  # exchanges indices
            transport.traffic.reset()
            index_free.reduce("table", own)
        else:
            kind, unit, formats = PARALLEL[scheme]
            sparse = compress(own, unit)
            cut = kind(length=sparse.length, servers=ranks)
            carry_out(transport, [push_and_pull(transport.rank, ranks, sparse, cut, formats=formats)])
        return transport.traffic.sent_bytes, transport.traffic.received_bytes

    counted = list(phases(scheme, touched, ROWS))
    tags = 2 * ranks  # a byte in each message tells its format
    for rank, real in enumerate(run_ranks(ranks, work)):
        for bytes_of, total in zip(("sent", "received"), real, strict=True):
            expected = sum(int(getattr(phase, bytes_of)[rank]) for phase in counted)
            assert 0 <= total - expected <= tags


@pytest.mark.parametrize("scheme", BALANCES.values())
def test_imbalance_is_that_of_the_indices(scheme: str) -> None:
    rows, touched = drawn(WORKLOADS["BERT"], 4, run=8)
    kind, unit, _ = PARALLEL[scheme]
    cut = kind(length=rows * WIDTH // unit, servers=4)
    units = [(each[:, None] * (WIDTH // unit) + torch.arange(WIDTH // unit)).view(-1) for each in touched]

    def servers_of(indices: Tensor) -> Tensor:
        if isinstance(cut, Even):
            ends = torch.tensor([cut.size(server) for server in range(4)]).cumsum(0)
            return torch.searchsorted(ends, indices, right=True)
        return cut.spread.owners(indices.int()).long()

    assert imbalance(scheme, touched, rows) == {
        "push": sparsity.push_imbalance(units, 4, servers_of),
        "pull": sparsity.pull_imbalance(units, 4, servers_of),
    }
