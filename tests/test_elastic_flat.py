"""Runs with FSDP1, ZeRO and Megatron go on without a lost host as a run that begins with the same step in its size."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_elastic import Elastic, Run, run

__all__ = ["run"]

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent / "frameworks" / "elastic_flat.py"
QUIET = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore::FutureWarning", "OMP_NUM_THREADS": "1"}
LAST = 8


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return {path: tree}
    return {key: leaf for name, item in items for key, leaf in flat(item, f"{path}.{name}").items()}


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp1",
        "megatron",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fsdp1-orig", "zero1", "zero2", "zero3")),
    ],
)
@pytest.mark.parametrize("ranks", [2])
def test_run_without_a_lost_host_ends_as_one_that_begins_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    package = "deepspeed" if kind.startswith("zero") else kind if kind == "megatron" else "torch"
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (extra engines)")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    elastic = Elastic(run, steps=LAST)
    elastic._script = [str(SCRIPT), kind, str(run.root / "gate"), str(tmp_path / "made")]
    names = "abc"[: ranks + 1]
    hosts = elastic.launch(names, f"1:{len(names)}", forked=package == "torch")
    elastic.train(4, hosts, ranks + 1)
    begun = torch.load(tmp_path / "made.4")
    hosts.pop().lose()
    elastic.train(LAST, hosts, ranks)
    for host in hosts:
        assert host.wait(200) == 0, host.output
    ended = torch.load(tmp_path / f"made.{LAST}")
    torch.save(begun, tmp_path / "fresh.4")
    fresh = run.cluster.host("fresh")
    script = [*elastic._script[:-1], str(tmp_path / "fresh"), "4"]
    fresh.forked = hosts[0].forked
    fresh.launch(["--standalone", "--nproc-per-node", str(ranks)], script)
    assert fresh.wait(200) == 0, fresh.output
    found, expected = flat(ended), flat(torch.load(tmp_path / f"fresh.{LAST}"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key
    (event,) = hosts[0].recoveries()
    assert (event["resized"], event["steps_lost"]) == ([ranks + 1, ranks], 0)
