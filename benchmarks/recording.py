"""How long a scheme takes on one gradient, and how long its messages alone would."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport, Turn

_GREATEST_BATCH = 200
_SHARED, _OWN = 0.5, 1.0
_KEY = "gradient"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one scheme did on one rank, or on the rank with the greatest number.

    Attributes:
        step_s: Seconds of each step, computing included; of the slowest rank.
        received_bytes: In the last step; of the rank that received most.
        header_bytes: Sizes announced in the last step; likewise.
        rounds: Exchanges in the last step that had to follow each other; likewise.
        messages_s: Seconds of the last step's messages when nothing is computed between them; of the slowest rank.
    """

    step_s: list[float]
    received_bytes: int
    header_bytes: int
    rounds: int
    messages_s: list[float]


def example_gradient(numel: int, rank: int, step: int) -> Tensor:
    """Return heavy-tailed values, in part at the same places on all ranks and in consecutive steps; seeded."""

    def normal(seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    return (_SHARED * normal(0) + _OWN * normal(1 + 1000 * rank + step)) ** 3


class RecordingTransport(Transport):
    """A transport that can repeat the messages of its last step, with other bytes of the same sizes.

    Ranks that share processors wait for each other's computing; a repetition shows what the network takes.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | str = "cpu") -> None:
        super().__init__(group, device)
        self._calls: list[Callable[[], object]] = []
        self._recording = True

    def forget(self) -> None:
        """Begin a new step."""
        self._calls.clear()

    def repeat(self, times: int = 1) -> None:
        """Make the calls of the last step again."""
        with self.paused():
            for _ in range(times):
                for call in self._calls:
                    call()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """As of `Transport`; nor is it recorded."""
        with self.paused(), super().uncounted():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in the block."""
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recording

    def announce(self, outgoing: Mapping[int, Tensor], senders: Collection[int]) -> dict[int, int]:
        """As of `Transport`."""
        sources = list(senders)
        if self._recording:
            again = {rank: torch.empty_like(message) for rank, message in outgoing.items()}
            self._calls.append(lambda: self.announce(again, sources))
        return super().announce(outgoing, sources)

    def relay(self, turns: Sequence[Turn]) -> None:
        """As of `Transport`."""
        if not self._recording:
            super().relay(turns)
            return
        made: dict[int, dict[int, Tensor]] = {}

        def make(index: int) -> Mapping[int, Tensor]:
            outgoing = turns[index].outgoing()
            made[index] = {rank: torch.empty_like(message) for rank, message in outgoing.items()}
            return outgoing

        super().relay([replace(turn, outgoing=partial(make, index)) for index, turn in enumerate(turns)])
        again = [replace(turn, outgoing=partial(made.__getitem__, index), take=id) for index, turn in enumerate(turns)]
        self._calls.append(lambda: self.relay(again))

    def all_reduce(self, tensor: Tensor) -> None:
        """As of `Transport`."""
        if self._recording:
            again = torch.zeros_like(tensor)
            self._calls.append(lambda: self.all_reduce(again))
        super().all_reduce(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """As of `Transport`."""
        if self._recording:
            again = torch.zeros_like(tensor)
            self._calls.append(lambda: self.reduce_scatter(again))
        return super().reduce_scatter(tensor)

    def all_gather_dense(self, share: Tensor) -> Tensor:
        """As of `Transport`."""
        if self._recording:
            again = torch.zeros_like(share)
            self._calls.append(lambda: self.all_gather_dense(again))
        return super().all_gather_dense(share)


def measure(
    scheme: Scheme,
    transport: RecordingTransport,
    gradients: Iterable[Tensor],
    *,
    repeats: int,
    warm_up: int = 1,
    sample_s: float = 0.1,
    at_most_s: float = 10.0,
) -> Measurement:
    """Reduce gradients, one in each step, and repeat the messages of the last step; all ranks get the same.

    Args:
        scheme: On `transport`.
        transport: The ranks.
        gradients: At least one.
        warm_up: First steps that are not measured where others follow, because they allocate memory or plan.
        repeats: Samples of the messages' time, at least 1. Each is the mean of a batch.
        sample_s: Length of a batch, about; long enough that what the network's buffers take in at once does not count.
        at_most_s: For all samples together, about; one is taken anyway.
    """

    step_s: list[float] = []
    for gradient in gradients:
        transport.forget()
        transport.traffic.reset()
        began_s = _started_together(transport)
        scheme.reduce(_KEY, gradient)
        step_s.append(_seconds_since(began_s, transport))
    traffic = transport.traffic
    step_s = _greatest(transport, step_s)
    counts = [traffic.received_bytes, traffic.header_bytes, traffic.rounds]
    received_bytes, header_bytes, rounds = map(round, _greatest(transport, counts))
    return Measurement(
        step_s=step_s[warm_up:] or step_s,
        received_bytes=received_bytes,
        header_bytes=header_bytes,
        rounds=rounds,
        messages_s=seconds_of_messages(transport, repeats=repeats, sample_s=sample_s, at_most_s=at_most_s),
    )


def seconds_of_messages(
    transport: RecordingTransport, *, repeats: int, sample_s: float, at_most_s: float = 10.0
) -> list[float]:
    """Repeat the messages of the last step, with arguments as of `measure`; all ranks get the same."""

    def repeated_s(times: int) -> float:
        began_s = _started_together(transport)
        transport.repeat(times)
        return _greatest(transport, [_seconds_since(began_s, transport) / times])[0]

    with transport.uncounted():
        once_s = repeated_s(1)
        batch = max(1, min(_GREATEST_BATCH, round(sample_s / max(once_s, sample_s / _GREATEST_BATCH))))
        samples = max(1, min(repeats, round(at_most_s / (batch * once_s))))
        return [repeated_s(batch) for _ in range(samples)]


def _started_together(transport: Transport) -> float:
    """Return the time at which all ranks have come here."""
    _greatest(transport, [0.0])
    return time.monotonic()


def _seconds_since(began_s: float, transport: Transport) -> float:
    """Return how long ago that was, once this rank's GPU has done its work."""
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
    return time.monotonic() - began_s


def _greatest(transport: Transport, numbers: Sequence[float]) -> list[float]:
    """Return the greatest of each number over all ranks, which is not counted as traffic."""
    with transport.uncounted():
        found: list[float] = transport.gather_numbers(torch.tensor(numbers, dtype=torch.float64)).amax(0).tolist()
    return found
