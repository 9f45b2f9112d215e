"""The bytes that `benchmarks/zen_scaling.py` counts are those that the real schemes send and receive."""

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from zen_scaling import PARALLEL, SCHEMES, WIDTH, phases

from resilient_run.comm.net.transport import Transport
from resilient_run.comm.zen.centralized import AGsparse, RecursiveDoubling
from resilient_run.comm.zen.parallel import IndexFree, push_and_pull
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
            push_and_pull(transport, sparse, kind(length=sparse.length, servers=ranks), formats=formats)
        return transport.traffic.sent_bytes, transport.traffic.received_bytes

    counted = list(phases(scheme, touched, ROWS))
    tags = 2 * ranks  # a byte in each message tells its format
    for rank, real in enumerate(run_ranks(ranks, work)):
        for bytes_of, total in zip(("sent", "received"), real, strict=True):
            expected = sum(int(getattr(phase, bytes_of)[rank]) for phase in counted)
            assert 0 <= total - expected <= tags
