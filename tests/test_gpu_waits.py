"""How often a sum of a gradient makes the CPU wait for a GPU: no more often the more ranks there are.

No GPU is needed: CUDA kernels run in numba's simulator on memory of the CPU, which is said to be a GPU's, and whatever
would wait for a GPU is counted by its name.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import pytest
import torch
from numba import config
from ranks import run_hosts, run_ranks
from tiers import nightly_but
from torch import Tensor
from torch.overrides import TorchFunctionMode

from resilient_run.comm.compress.compressors import named as compressor_named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import MessageError, OpError
from resilient_run.comm.net.entries import add_to, from_message, to_message
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.rounds import Rounds, carry_out, swap
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops import kernels
from resilient_run.comm.ops.bitmap import bitmap_indices
from resilient_run.comm.ops.block import block_decode
from resilient_run.comm.ops.coo import Coo, coo_decode
from resilient_run.comm.ops.kernels import CudaKernel, checked_together
from resilient_run.comm.ops.op import Op
from resilient_run.comm.ops.scatter import scatter_add
from resilient_run.comm.ops.spread import Spread
from resilient_run.comm.ops.topk import topk
from resilient_run.comm.plan.tree import parse
from resilient_run.comm.runtime.choice import scheme_of
from resilient_run.comm.runtime.execute import OptionScheme
from resilient_run.comm.zen import sparse
from resilient_run.comm.zen.formats import Format, decode, encode
from resilient_run.comm.zen.hash_bitmap import hash_bitmap_encode
from resilient_run.comm.zen.sparse import compress

NUMEL = 96
# What reads numbers of a GPU, or a length that a kernel found.
READS = {"item", "tolist", "__bool__", "__float__", "__index__", "cpu", "equal"}
READS |= {"nonzero", "unique", "bincount", "unique_consecutive", "masked_select"}

pytestmark = pytest.mark.skipif(not config.ENABLE_CUDASIM, reason="counts in the simulator of GPUs")


class Waits(TorchFunctionMode):
    """Counts by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        # A tensor of numbers is copied to its device; without one it stays on the CPU.
        if name == "tensor":
            counts = options.get("device") is not None
        elif name == "__int__":
            counts = args[0].dtype is not torch.int64  # seeds are drawn on the CPU
        else:
            counts = name in READS
        if counts:
            self.names.append(name)
        return func(*args, **options)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, launch = Lock(), CudaKernel.launch

    def one_by_one(*arguments: Any, **options: Any) -> None:
        with lock:  # the simulator runs one kernel at a time
            launch(*arguments, **options)

    monkeypatch.setattr(CudaKernel, "launch", one_by_one)
    for module in (kernels, sparse):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    on = Op.on
    monkeypatch.setattr(Op, "on", lambda self, _: on(self, "cuda"))


def gradient(rank: int) -> Tensor:
    """Make numbers of which one in eight is not zero."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=random) * (torch.rand(NUMEL, generator=random) < 1 / 8)


def waits_of(scheme: Callable[[Transport], Scheme], ranks: int) -> list[list[str]]:
    """Return what each rank waits for in the second step."""

    def work(transport: Transport) -> list[str]:
        made = scheme(transport)
        made.reduce("w", gradient(transport.rank))
        with Waits() as waits:
            made.reduce("w", gradient(transport.rank))
        return waits.names

    return run_ranks(ranks, work)


SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("fp8", {"block": 8}),
    "int8": ("int8", {"block": 8}),
    "onebit": ("onebit", {}),
    "powersgd": ("powersgd", {}),
    "topk": ("topk", {"density": 0.1}),
    "topk-a": ("topk-a", {"density": 0.1}),
    "zen": ("zen", {"route": "parallel", "rows": ()}),
    "zen, rows": ("zen", {"route": "parallel", "rows": (4,)}),
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("label", nightly_but([*SCHEMES.keys() - {"fp8", "onebit", "zen"}], SCHEMES))
def test_more_ranks_wait_no_more_often(label: str) -> None:
    """Three and four ranks have as many rounds."""
    name, options = SCHEMES[label]
    few, many = (waits_of(lambda ranks: scheme_of(name, ranks, **options), size) for size in (3, 4))
    assert max(map(len, many)) <= max(map(len, few)), (few, many)
    assert max(map(len, few)) <= 18


# Scheme, its options, and how often a bucket makes the CPU wait.
BUCKETS: dict[str, tuple[str, dict[str, Any], int]] = {
    "spardl": ("spardl", {"density": 0.1, "teams": 1}, 2),
    "spardl, two teams": ("spardl", {"density": 0.1, "teams": 2}, 3),
    "spardl, bruck": ("spardl", {"density": 0.1, "teams": 2, "gather": "bruck"}, 6),
    "topk": ("topk", {"density": 0.1}, 1),
    "topk-a": ("topk-a", {"density": 0.1}, 2),
    "zen": ("zen", {"route": "parallel", "rows": ()}, 10),
    "zen, rows": ("zen", {"route": "parallel", "rows": (4,)}, 10),
    "zen, gathered": ("zen", {"route": "gather", "rows": (4,)}, 6),
    "zen, doubled": ("zen", {"route": "hierarchical", "rows": ()}, 10),
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("label", nightly_but([*BUCKETS.keys() - {"spardl", "spardl, bruck", "topk-a"}], BUCKETS))
def test_more_gradients_of_a_bucket_wait_no_more_often(label: str) -> None:
    name, options, most = BUCKETS[label]

    def waits(count: int) -> list[str]:
        def work(transport: Transport) -> list[str]:
            scheme = scheme_of(name, transport, **options)
            bucket = {f"w{place}": gradient(transport.rank + 10 * place) for place in range(count)}
            scheme.reduce_together([(key, each.clone()) for key, each in bucket.items()])
            with Waits() as waits:
                scheme.reduce_together([(key, each.clone()) for key, each in bucket.items()])
            return [each for each in waits.names if each != "__bool__"]  # of the CPU's residuals

        return max(run_ranks(4, work), key=len)

    few, many = waits(2), waits(4)
    assert len(many) == len(few) <= most, (few, many)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("k", [1, 40])
def test_top_k_waits_for_nothing(k: int) -> None:
    for numbers in (gradient(0), gradient(0).round()):
        with Waits() as waits:
            found = topk(numbers, k)
        assert waits.names == []
        assert torch.equal(found.indices, topk.cpu(numbers, k).indices)


OPTIONS = {
    "gathered": "comp:gpu > all_gather@flat > decomp:gpu",
    "two steps": "comp:gpu > all_to_all@flat > decomp:gpu > comp:gpu > all_gather@flat > decomp:gpu",
}


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("name", "option"), [("int8", "gathered"), ("int8", "two steps"), ("topk", "gathered")])
def test_more_ranks_wait_no_more_often_for_a_plan(name: str, option: str) -> None:
    def work(fabric: Fabric) -> list[str]:
        memory = ErrorFeedback(compressor_named(name, density=0.25))
        made = OptionScheme(fabric, memory, {"w": parse(OPTIONS[option])})
        made.reduce("w", gradient(fabric.flat.rank))
        with Waits() as waits:
            made.reduce("w", gradient(fabric.flat.rank))
        return [each for each in waits.names if each != "__bool__"]  # of the CPU's residuals

    few, many = (run_hosts(1, size, work) for size in (3, 4))
    assert max(map(len, many)) <= max(map(len, few)) <= 8, (few, many)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_checked_together_is_refused_at_the_end(dtype: torch.dtype) -> None:
    """Until then what does not fit is left out."""
    whole = torch.zeros(6, dtype=dtype)
    middle, ones = whole[2:4], torch.ones(3, dtype=dtype)
    for wrong in (-1, 2, 1 << 20):
        indices = torch.tensor([0, wrong, 1], dtype=torch.int32)
        with pytest.raises(OpError, match=f"indices from {min(wrong, 0)} to {max(wrong, 1)} do not fit 2 elements"):
            scatter_add(middle.clone(), indices, ones)
        for act in (
            lambda indices=indices: scatter_add(middle, indices, ones),
            lambda indices=indices: coo_decode(indices, ones, 2),
            lambda indices=indices: block_decode(indices, ones[:, None], 2),
        ):
            ended = []
            with pytest.raises(OpError, match="do not fit"), checked_together(), checked_together():
                ended.append(act())
            assert ended
    assert whole[[0, 1, 4, 5]].tolist() == [0, 0, 0, 0]
    with checked_together():
        scatter_add(middle.zero_(), torch.tensor([0, 1, 0], dtype=torch.int32), ones)
    assert middle.tolist() == [2, 1]


@pytest.mark.usefixtures("simulated")
def test_lists_that_fit_nothing_are_refused_at_once() -> None:
    ended = []
    with pytest.raises(OpError, match="do not fit 0 elements"), checked_together():
        ended.append(scatter_add(torch.empty(0), torch.zeros(1, dtype=torch.int32), torch.ones(1)))
    assert not ended


@pytest.mark.usefixtures("simulated")
def test_an_error_of_the_block_goes_first_and_leaves_nothing_behind() -> None:
    def fail() -> None:
        scatter_add(torch.zeros(1), torch.ones(1, dtype=torch.int32), torch.ones(1))
        raise KeyError

    with pytest.raises(KeyError), checked_together():
        fail()
    scatter_add(torch.zeros(2), torch.ones(1, dtype=torch.int32), torch.ones(1))


@pytest.mark.usefixtures("simulated")
def test_bitmaps_are_checked_together() -> None:
    bitmap = hash_bitmap_encode(gradient(0).nonzero().view(-1).int(), Spread(numel=NUMEL, parts=1), 0)
    count = int(gradient(0).count_nonzero())
    for wrong in (count - 1, count + 1):
        with pytest.raises(OpError, match=f"{count} bits are set, of {wrong}"), checked_together():
            assert bitmap_indices(bitmap, NUMEL, wrong).numel() == wrong
    spread = Spread(numel=NUMEL, parts=3)
    with pytest.raises(OpError, match="not all indices are of part 1"), checked_together():
        hash_bitmap_encode(torch.arange(NUMEL, dtype=torch.int32), spread, 1)


@pytest.mark.parametrize("where", ["cpu", "simulated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lists_of_others_are_not_trusted(where: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Not a negative index either, which torch would count from the end."""
    if where == "simulated":
        request.getfixturevalue("simulated")
    values = torch.tensor([1, 2], dtype=dtype)
    message = to_message(Coo(indices=torch.tensor([4, 7], dtype=torch.int32), values=values))
    found = from_message(message, dtype, start=4, end=8)
    assert (found.indices.tolist(), found.values.tolist()) == ([4, 7], [1, 2])
    for start, end in ((5, 8), (4, 7), (8, 12), (0, 4)):
        seen = []
        with pytest.raises(MessageError, match=f"from 4 to 7, where {start} to {end - 1} were"), checked_together():
            seen.append(from_message(message, dtype, start=start, end=end).indices)
        assert len(seen) == (where == "simulated")
        assert all(start <= index < end for indices in seen for index in indices.tolist())
    with pytest.raises(MessageError), checked_together():
        from_message(message, dtype, start=4, end=4)


@pytest.mark.parametrize("where", ["cpu", "simulated"])
def test_what_does_not_fit_is_refused_at_the_end_of_a_bucket(where: str, request: pytest.FixtureRequest) -> None:
    if where == "simulated":
        request.getfixturevalue("simulated")
    wrong = to_message(Coo(indices=torch.tensor([NUMEL], dtype=torch.int32), values=torch.ones(1)))

    def rounds(message: Tensor, partner: int) -> Rounds[Tensor]:
        received = yield from swap(message, to=partner, source=partner)
        whole = torch.zeros(NUMEL)
        add_to(whole, from_message(received, torch.float32, end=NUMEL))
        return whole

    def work(transport: Transport) -> str:
        right = to_message(Coo(indices=torch.tensor([1], dtype=torch.int32), values=torch.ones(1)))
        messages = [right, wrong if transport.rank else right]
        try:
            carry_out(transport, [rounds(message, 1 - transport.rank) for message in messages])
        except MessageError as error:
            return str(error)
        return ""

    refused, taken = run_ranks(2, work)
    assert f"indices from {NUMEL} to {NUMEL}" in refused
    assert not taken


def test_what_a_rank_does_wrong_itself_is_not_put_down_to_others() -> None:
    def work(transport: Transport) -> str:
        with pytest.raises(OpError) as error:
            scheme_of("zen", transport, route="gather").reduce("w", torch.ones(10, dtype=torch.int32))
        return str(error.value)

    assert all(found.startswith("coo_encode: a gradient is floating point") for found in run_ranks(2, work))


@pytest.mark.parametrize("where", ["cpu", "simulated"])
@pytest.mark.parametrize("form", Format)
def test_matrices_of_others_are_not_trusted(where: str, form: Format, request: pytest.FixtureRequest) -> None:
    if where == "simulated":
        request.getfixturevalue("simulated")
    matrices = [compress(gradient(rank)) for rank in range(2)]
    messages = encode(matrices, (form,))
    found = decode(messages, [NUMEL, NUMEL], width=1, dtype=torch.float32)
    for mine, theirs in zip(matrices, found, strict=True):
        dense = [coo_decode(each.indices, each.values.view(-1), NUMEL) for each in (mine, theirs)]
        assert torch.equal(*dense)
    broken = messages[1].clone()
    broken[-1] = 7
    with pytest.raises(MessageError, match="format 7"):
        decode([messages[0], broken], [NUMEL, NUMEL], width=1, dtype=torch.float32)
    with pytest.raises(MessageError):
        decode([messages[0], messages[1]], [NUMEL, NUMEL // 2], width=1, dtype=torch.float32)
    with pytest.raises(MessageError):
        decode([messages[0][3:]], [NUMEL], width=1, dtype=torch.float32)
    if form is Format.BITMAP:
        more = messages[0].clone()
        more[matrices[0].count * 4] ^= 0xFF
        with pytest.raises(MessageError, match=r"no matrix: bitmap: .* bits are set"), checked_together():
            decode([more], [NUMEL], width=1, dtype=torch.float32)
