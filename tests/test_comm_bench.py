"""`resilient-comm bench` over loopback and in a torchrun job, and what it measures."""

import json
import os
import sys

import pytest
import torch
from click.testing import CliRunner, Result
from launchers import run_python
from ranks import run_ranks
from recording import RecordingTransport, measure

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.measure.timing import inputs_for, scheme_at
from resilient_run.comm.net.transport import Traffic, Transport
from resilient_run.comm.runtime.choice import scheme_of
from resilient_run.comm.schemes import SCHEMES

pytestmark = pytest.mark.jobs


def bench(*options: str) -> Result:
    return CliRunner().invoke(resilient_comm, ["bench", "--steps", "2", *options])


def test_every_scheme_is_measured_and_its_bytes_are_those_of_its_formula() -> None:
    result = bench("--size", "20K", "--density", "0.01", "--workers", "4", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["scheme"]: row for row in json.loads(result.stdout)["measured"]}
    assert rows.keys() == SCHEMES.keys()
    assert all(row["step_s"] > 0 for row in rows.values())
    assert rows["spardl"]["received_bytes"] == 4 * 4 * 200 * 3 // 4
    assert rows["topk-a"]["received_bytes"] == 4 * 2 * 200 * 3
    assert rows["dense"]["received_bytes"] == 4 * 2 * 20000 * 3 // 4


def test_times_are_printed_as_a_table() -> None:
    result = bench("--scheme", "spardl", "--size", "1000", "--workers", "3")
    assert result.exit_code == 0, result.output
    assert "3 workers, 1000 elements, density 0.01" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", "0"), "is not a number of elements"),
        (("--size", "xM"), "'xM' is not a number of elements"),
        (("--size", "3G"), "below 2^31"),
        (("--density", "0"), "not in the range"),
        (("--scheme", "best"), "is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(options: tuple[str, ...], message: str) -> None:
    result = bench(*options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["topk-a", "topk"])
def test_repeated_messages_are_those_of_the_last_step(name: str) -> None:
    def work(transport: Transport) -> tuple[Traffic, Traffic]:
        recording = RecordingTransport(transport._group)
        scheme = scheme_of(name, recording) if name == "topk" else scheme_at(name, recording, 0.1)
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


def test_schemes_that_do_not_sparsify_get_sparse_gradients() -> None:
    def work(transport: Transport) -> None:
        gradients = [torch.randn(500), torch.randn(500)]
        for name in ("dense", "spardl"):
            inputs = list(inputs_for(scheme_at(name, transport, 0.1), gradients, 0.1))
            assert all(map(torch.equal, inputs, gradients))
        first, second = inputs_for(scheme_at("zen", transport, 0.1), gradients, 0.1)
        assert torch.equal(first, second)
        assert int(first.count_nonzero()) == 50

    run_ranks(1, work)


def test_the_ranks_of_a_torchrun_job_are_measured() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    program = "from resilient_run.comm.cli.main import resilient_comm; resilient_comm()"
    command += [sys.executable, "-P", "-c", program, "bench", "--scheme", "spardl", "--size", "10K"]
    done = run_python([*command, "--json"], {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["measured"]
    assert (row["workers"], row["received_bytes"]) == (2, 4 * 4 * 100 // 2)
