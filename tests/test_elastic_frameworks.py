"""Loops of frameworks whose number of ranks changes twice in an epoch: each sample of it is trained once."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster, Host, wait_until

sys.path.append(str(Path(__file__).parent / "frameworks"))
import elastic

pytestmark = pytest.mark.jobs

SIZES = ((2, "ab"), (3, "a"), (100, "abc"))
"""Up to which step which hosts train, one rank each."""
LINEAR = (1, 9 / 10, 8 / 10, 8 / 12, 3 / 6, 2 / 6, 1 / 6)
"""The learning rate in each step, in hundredths: without a change two ranks take 10 steps, one 12, and three 6."""

SHARDED = {
    "accelerate": ("fsdp2", "fsdp1", "zero2", "zero3"),
    "transformers": ("fsdp2", "fsdp1", "zero2", "zero3"),
    "lightning": ("fsdp2",),
}


class Run:
    """A run with --rr-elastic."""

    def __init__(self, root: Path, endpoint: str, library: str, kind: str) -> None:
        self._cluster, self._gate = Cluster(root), root / "gate"
        self._script = [elastic.__file__, library, kind, str(self._gate), str(root / "made")]
        self._arguments = ["--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rr-elastic", "1"]
        self._arguments += ["--local-addr", "127.0.0.1", "--rdzv-endpoint", endpoint, "--rdzv-id", root.name]
        self.hosts: dict[str, Host] = {}
        self.lost: set[str] = set()
        self.open(0)

    def open(self, step: int) -> None:
        """Let every rank train up to `step`."""
        new = self._gate.with_suffix(".new")
        new.write_text(str(step))
        new.rename(self._gate)

    def launch(self, names: str) -> None:
        conf = f"lease_ttl=3,last_call_timeout={30 if len(names) > 1 else 0.1},join_timeout=100"
        for name in names:
            host = self.hosts.get(name) or self._cluster.host(name)
            self.hosts[name] = host
            host.shm_dir.mkdir(mode=0o700, exist_ok=True)
            host.launch([*self._arguments, "--rdzv-conf", conf], self._script, HF_HUB_OFFLINE="1")

    def output(self) -> str:
        return "\n".join(f"== {name}\n{host.output}" for name, host in self.hosts.items())

    def said(self, key: str) -> list[dict[str, Any]]:
        return [line for host in self.hosts.values() for line in list(host.lines) if key in line]

    def steps(self) -> dict[int, list[list[list[int]]]]:
        """Return the batches of each rank in each step."""
        found: dict[int, dict[int, list[list[int]]]] = {}
        for line in self.said("had"):
            assert line["rank"] not in found.setdefault(line["step"], {})
            found[line["step"]][line["rank"]] = line["had"]
        return {step: [of_ranks[rank] for rank in sorted(of_ranks)] for step, of_ranks in sorted(found.items())}

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true, or a launcher has ended."""

        def has_ended() -> bool:
            launchers = [host.launcher for name, host in self.hosts.items() if name not in self.lost]
            return any(launcher is not None and launcher.poll() is not None for launcher in launchers)

        wait_until(lambda: condition() or has_ended(), timeout_s=200, what=self.output)
        assert condition(), self.output()

    def close(self) -> None:
        self._cluster.close()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, etcd_endpoint: str) -> Iterator[Run]:
    library, kind = request.param
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra zoo)")
    run = Run(tmp_path, etcd_endpoint, library, kind)
    yield run
    run.close()


@pytest.mark.parametrize(
    "run",
    [
        ("accelerate", "ddp"),
        ("transformers", "ddp"),
        ("lightning", "ddp"),
        *(
            pytest.param((library, kind), marks=pytest.mark.nightly)
            for library, kinds in SHARDED.items()
            for kind in kinds
        ),
    ],
    indirect=True,
    ids="-".join,
)
def test_each_sample_of_an_epoch_is_trained_once(run: Run, request: pytest.FixtureRequest) -> None:
    """Two ranks, then one, then three: with accumulated gradients, in the middle of an epoch."""
    run.launch("ab")
    for until, names in SIZES[:-1]:
        run.open(until)
        run.wait(lambda until=until, names=names: len(run.steps().get(until, ())) == len(names))
        if names == "ab":
            run.lost.add("b")
            run.hosts["b"].lose()
    run.launch("bc")
    run.lost.clear()
    run.wait(lambda: len(run.said("restored")) >= 6)
    run.open(100)
    for host in run.hosts.values():
        assert host.wait(200) == 0, run.output()
    steps = run.steps()
    assert [len(ranks) for ranks in steps.values()] == [2, 2, 1, 3, 3, 3, 3]
    epochs = [list(steps.values())[begin:end] for begin, end in ((0, 4), (4, 7))]
    library, _, kind = request.node.callspec.id.partition("-")
    # Lightning fills up samples, Accelerate batches.
    for epoch, padding in zip(epochs, (1, 1) if library == "lightning" else (1, 4), strict=True):
        had = Counter(number for ranks in epoch for batches in ranks for batch in batches for number in batch)
        assert set(had) == set(range(elastic.SAMPLES))
        assert had.total() == elastic.SAMPLES + padding
        early = [number for ranks in epoch[:-1] for batches in ranks for batch in batches for number in batch]
        assert len(early) == len(set(early)), "only the last round is filled up"
    rates = {line["at"]: line["rate"] for line in run.said("rate")}
    if library == "transformers":
        # Its schedule falls with the samples that are left, to zero at the last step.
        assert [rates[at] for at in range(7)] == pytest.approx([rate / 100 for rate in LINEAR])
    expected = elastic.replayed(list(steps.values()), rates, divides_by_given=library == "transformers")
    rel, abs_ = (1e-4, 1e-6) if elastic.dtype_of(kind) == torch.float32 else (1e-9, 1e-12)
    for line in run.said("parameters"):
        assert line["parameters"] == pytest.approx(expected, rel=rel, abs=abs_)
    assert len(run.said("parameters")) == 3
