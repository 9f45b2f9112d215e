"""Compressors by name under DDP, in two real processes: the same as error feedback by hand, also after a restore."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import run_trainers
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import NAMES, OneBit, named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import register
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime.dgc import Dgc

pytestmark = pytest.mark.jobs

TRAINER = str(Path(__file__).parent / "feedback_trainer.py")
# To a hook int8 and fp8 are the schemes in two steps, which sum in 8 bits, too.
VARIANTS = (*(name for name in NAMES if name not in ("dgc", "int8", "fp8")), "topk+sparse", "onebit+sparse")
PARAMETERS = ["out.bias", "out.weight", "table.weight"]


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    printed = run_trainers([TRAINER, *VARIANTS], 2)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_that_of_error_feedback_by_hand(lines: list[dict[str, Any]], variant: str) -> None:
    found = [line for line in lines if line["variant"] == variant]
    assert sorted(line["rank"] for line in found) == [0, 1]
    for line in found:
        assert line["as_by_hand"]
        assert line["resumed"], "goes on bit by bit from its state"
        assert line["remembered"] == PARAMETERS
        assert sum(line["losses"][-4:]) < 0.8 * sum(line["losses"][:4]), "it learns"
        assert ("torch.sparse_coo" in line["layouts"]) == variant.endswith("+sparse")


@pytest.mark.parametrize("name", ["onebit", "topk"])
def test_sparse_gradients_stay_sparse(name: str) -> None:
    given = [torch.zeros(8, 4).index_fill_(0, torch.tensor([row]), 1.0 + row) for row in range(2)]

    def work(transport: Transport) -> Tensor:
        dense, sparse = (Compressed(transport, ErrorFeedback(named(name))) for _ in range(2))
        own = given[transport.rank]
        found = sparse.reduce("table", own.to_sparse(1))
        assert found.is_sparse
        assert found.sparse_dim() == 1
        assert torch.equal(found.to_dense(), dense.reduce("table", own.clone()))
        assert torch.equal(sparse.state_dict()["kept"]["table"][0], dense.state_dict()["kept"]["table"][0])
        return found.to_dense()

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert first.any()


@pytest.mark.usefixtures("alone")
def test_what_register_takes() -> None:
    def model() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(300, 100))

    by_name = register(model(), "randomk", density=0.25)
    assert isinstance(by_name.scheme, Compressed)
    assert by_name.scheme.memory.compressor.density == 0.25
    assert isinstance(by_name.scheme.memory, ErrorFeedback)
    made = register(model(), lambda ranks: Compressed(ranks, ErrorFeedback(OneBit())))
    assert isinstance(made.scheme, Compressed)
    named_dgc = register(model(), "dgc")
    assert isinstance(named_dgc.scheme, Dgc), "the scheme of that name, with momentum correction"
    for hook in (by_name, made, named_dgc):
        hook.close()
    with pytest.raises(CommError, match=r"there is no scheme and no compressor 'topkk'; known are .*topk, topk-a"):
        register(model(), "topkk")
    with pytest.raises(CommError, match="onebit has no option density; it has none"):
        register(model(), "onebit", density=0.1)
    with pytest.raises(CommError, match="density: give options to what makes the scheme"):
        register(model(), lambda ranks: Compressed(ranks, ErrorFeedback(OneBit())), density=0.1)
