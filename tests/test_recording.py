"""What benchmarks measure of a scheme's messages."""

import pytest
import torch
from ranks import run_ranks
from recording import RecordingTransport, measure

from resilient_run.comm.net.transport import Traffic, Transport
from resilient_run.comm.runtime.choice import scheme_of


@pytest.mark.parametrize("name", ["topk-a", "topk"])
def test_repeated_messages_are_those_of_the_last_step(name: str) -> None:
    def work(transport: Transport) -> tuple[Traffic, Traffic]:
        recording = RecordingTransport(transport._group)
        scheme = scheme_of(name, recording, density=0.1)
        dense = torch.randn(500, generator=torch.Generator().manual_seed(transport.rank))
        found = measure(scheme, recording, [dense.clone() for _ in range(3)], repeats=2)
        assert len(found.step_s) == 2
        assert len(found.messages_s) == 2
        recording.forget()
        recording.traffic.reset()
        scheme.reduce("gradient", dense)
        step = Traffic(**{name: getattr(recording.traffic, name) for name in Traffic.__slots__})
        recording.traffic.reset()
        recording.repeat()
        return step, recording.traffic

    for step, repeated in run_ranks(3, work):
        assert step == repeated
        assert step.received_bytes > 0
