"""How long a scheme takes on one gradient, and how long its messages alone would."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from resilient_run.comm.measure import timing
from resilient_run.comm.measure.timing import greatest, seconds_since, started_together
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport, Turn

_GREATEST_BATCH = 200


@dataclass(frozen=True, kw_only=True)
class Measurement(timing.Measurement):
    """What one scheme did on one rank, or on the rank with the greatest number.

    Attributes:
        messages_s: Seconds of the last step's messages when nothing is computed between them; of the slowest rank.
    """

    messages_s: list[float]


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
        with self._paused():
            for _ in range(times):
                for call in self._calls:
                    call()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """As of `Transport`; nor is it recorded."""
        with self._paused(), super().uncounted():
            yield

    @contextmanager
    def _paused(self) -> Iterator[None]:
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recording

    def announce(self, outgoing: Mapping[int, Tensor], senders: Iterable[int]) -> dict[int, int]:
        """As of `Transport`."""
        sources = list(senders)
        if self._recording:
            again = {rank: torch.empty_like(message) for rank, message in outgoing.items()}
            self._calls.append(lambda: self.announce(again, sources))
        return super().announce(outgoing, sources)

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        sources: Iterable[int],
        *,
        sizes_bytes: Mapping[int, int] | None = None,
    ) -> dict[int, Tensor]:
        """As of `Transport`."""
        senders = list(sources)
        # What is announced is a call of its own.
        received = super().exchange(outgoing, senders, sizes_bytes=sizes_bytes)
        if self._recording:
            again = {rank: torch.empty_like(message) for rank, message in outgoing.items()}
            known = {rank: message.numel() for rank, message in received.items()}
            self._calls.append(lambda: self.exchange(again, senders, sizes_bytes=known))
        return received

    def relay(self, turns: Sequence[Turn]) -> None:
        """As of `Transport`."""
        if not self._recording:
            super().relay(turns)
            return
        made: dict[int, Tensor] = {}

        def make(index: int) -> Tensor:
            message = turns[index].message()
            made[index] = torch.empty_like(message)
            return message

        super().relay([replace(turn, message=partial(make, index)) for index, turn in enumerate(turns)])
        again = [replace(turn, message=partial(made.__getitem__, index), take=id) for index, turn in enumerate(turns)]
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
    """Do what `timing.measure` does, and repeat the messages of the last step.

    Args:
        scheme: On `transport`.
        transport: The ranks.
        gradients: At least one.
        warm_up: First steps that are not measured where others follow, because they allocate memory or plan.
        repeats: Samples of the messages' time, at least 1. Each is the mean of a batch.
        sample_s: Length of a batch, about; long enough that what the network's buffers take in at once does not count.
        at_most_s: For all samples together, about; one is taken anyway.
    """

    def recorded() -> Iterator[Tensor]:
        for gradient in gradients:
            transport.forget()
            yield gradient

    def repeated_s(times: int) -> float:
        began_s = started_together(transport)
        transport.repeat(times)
        return greatest(transport, [seconds_since(began_s, transport) / times])[0]

    found = timing.measure(scheme, transport, recorded(), warm_up=warm_up)
    with transport.uncounted():
        once_s = repeated_s(1)
        batch = max(1, min(_GREATEST_BATCH, round(sample_s / max(once_s, sample_s / _GREATEST_BATCH))))
        samples = max(1, min(repeats, round(at_most_s / (batch * once_s))))
        messages_s = [repeated_s(batch) for _ in range(samples)]
    return Measurement(
        step_s=found.step_s,
        received_bytes=found.received_bytes,
        header_bytes=found.header_bytes,
        rounds=found.rounds,
        messages_s=messages_s,
    )
