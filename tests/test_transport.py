"""Messages between ranks over real Gloo connections: who gets what, what it costs, what is refused."""

import time
from collections.abc import Callable

import pytest
import torch
from ranks import run_hosts, run_ranks
from torch import Tensor

from resilient_run.comm.errors import MessageError, OpError
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.scheme import Dense
from resilient_run.comm.net.transport import Transport, from_bytes, to_bytes
from resilient_run.comm.ops.op import Op

pytestmark = pytest.mark.jobs


def message(sender: int, receiver: int, unit_bytes: int = 1) -> Tensor:
    """Make a message whose size depends on the pair; some are empty."""
    return torch.full((sender * receiver * unit_bytes,), 10 * sender + receiver, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("unit_bytes", [1, 20_000])
def test_all_to_all_brings_each_message_to_its_rank(size: int, unit_bytes: int) -> None:
    """With the larger unit some ranks get so much that their messages follow each other, and others do not."""

    def work(transport: Transport) -> tuple[list[Tensor], int, int, int]:
        received = transport.all_to_all([message(transport.rank, to, unit_bytes) for to in range(size)])
        traffic = transport.traffic
        return received, traffic.sent_bytes, traffic.received_bytes, traffic.header_bytes

    for rank, (received, sent_bytes, received_bytes, header_bytes) in enumerate(run_ranks(size, work)):
        assert all(torch.equal(found, message(sender, rank, unit_bytes)) for sender, found in enumerate(received))
        assert sent_bytes == received_bytes == sum(rank * o * unit_bytes for o in range(size) if o != rank)
        assert header_bytes == 8 * (size - 1)


def test_sizes_that_are_known_are_not_announced() -> None:
    def work(transport: Transport) -> tuple[list[Tensor], int, int]:
        sizes = [sender * transport.rank for sender in range(4)]
        received = transport.all_to_all([message(transport.rank, to) for to in range(4)], sizes_bytes=sizes)
        return received, transport.traffic.header_bytes, transport.traffic.rounds

    for rank, (received, header_bytes, rounds) in enumerate(run_ranks(4, work)):
        assert all(torch.equal(found, message(sender, rank)) for sender, found in enumerate(received))
        assert (header_bytes, rounds) == (0, 1)


def test_all_gather() -> None:
    def work(transport: Transport) -> list[Tensor]:
        return transport.send_to_all(torch.arange(transport.rank, dtype=torch.uint8))

    for gathered in run_ranks(3, work):
        assert [found.tolist() for found in gathered] == [[], [0], [0, 1]]


def test_parts_come_back_as_they_were_sent() -> None:
    values, indices = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.tensor([7], dtype=torch.int32)
    for first, second in [(values, indices), (indices, values)]:
        sent = to_bytes(torch.zeros(1, dtype=torch.uint8), first, second)
        parts = from_bytes(sent, (torch.uint8, 1), (first.dtype, first.numel()), (second.dtype, second.numel()))
        assert torch.equal(parts[1], first.flatten())
        assert torch.equal(parts[2], second.flatten())
    with pytest.raises(MessageError, match="9 bytes came where 8 were expected"):
        from_bytes(sent, (torch.int64, 1))


def test_operation_runs_where_its_first_argument_lives() -> None:
    def named(name: str) -> Callable[[Tensor], str]:
        return lambda tensor: name

    def checked(tensor: Tensor) -> tuple[Tensor]:
        return (tensor,)

    op = Op(name="where", check=checked, reference=named("reference"), cpu=named("cpu"), cuda=named("cuda"))
    assert op(torch.zeros(1)) == "cpu"
    assert op(torch.zeros(1, device="meta")) == "reference"
    assert op.on("cuda")(torch.zeros(1)) == "cuda"
    with pytest.raises(OpError, match="where: the first argument is a int"):
        op(3)  # type: ignore[arg-type]


def test_collectives_of_the_library_count_the_bytes_of_a_ring() -> None:
    """GPUs use them; Gloo has them, too."""

    def work(transport: Transport) -> tuple[Tensor, Tensor, Tensor, int]:
        summed = Dense(transport).reduce("w", torch.full((6, 2), float(transport.rank)))
        share = transport.reduce_scatter(torch.arange(12.0))
        return summed, share, transport.all_gather_dense(share), transport.traffic.sent_bytes

    for rank, (summed, share, whole, sent_bytes) in enumerate(run_ranks(3, work)):
        assert torch.equal(summed, torch.full((6, 2), 3.0))
        assert torch.equal(share, 3 * torch.arange(4 * rank, 4 * rank + 4.0))
        assert torch.equal(whole, 3 * torch.arange(12.0))
        assert sent_bytes == 2 * 2 * 48 / 3 + 2 * 16 + 2 * 16


@pytest.mark.parametrize("size_bytes", [-1, 1 << 62])
def test_sizes_that_cannot_be_are_refused(size_bytes: int) -> None:
    class Announced(Tensor):
        """A message of another size than it has."""

        def numel(self) -> int:
            return size_bytes

    def work(transport: Transport) -> None:
        message = torch.zeros(1, dtype=torch.uint8)
        outgoing = {1 - transport.rank: message.as_subclass(Announced) if transport.rank else message}
        if transport.rank:
            transport.announce(outgoing, [0])
        else:
            with pytest.raises(MessageError, match=f"rank 1 announces a message of {size_bytes} bytes"):
                transport.announce(outgoing, [1])

    run_ranks(2, work)


def test_what_a_gpu_does_together_with_others_follows_what_was_begun_before() -> None:
    """Also in another group: on GPUs each group has a stream of its own."""

    def work(fabric: Fabric) -> bool:
        summed = torch.ones(4)
        if fabric.flat.rank == 1:
            time.sleep(0.3)
            fabric.flat.all_reduce(summed)
            return True
        # Calls are those of a GPU, over Gloo.
        fabric.flat.device = fabric.intra.device = torch.device("cuda")
        begun = fabric.flat.begin_all_reduce(summed)
        assert not begun.is_completed()
        fabric.intra.all_gather_dense(torch.ones(1))
        return begun.is_completed()

    assert run_hosts(2, 1, work) == [True, True]
