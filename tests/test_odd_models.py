"""Models and calls that DDP allows and few examples have: no gradient is lost, no rank waits for ever."""

import json
from pathlib import Path
from typing import Any

import pytest
from launchers import run_trainers

pytestmark = pytest.mark.jobs

SCRIPT = str(Path(__file__).parent / "odd_models.py")
MISTAKES = {
    "misspelt": "spardl has no option densty; it has density, teams, gather",
    "of another": "topk has no option k; it has density",
    "a text": "topk: density must be a number, got '0.01'",
    "no integer": "powersgd: rank must be an integer, got 2.5",
    "inner": "zen has no option rowss; it has rows,",
    "no density": "int8 has no option density; it has block, rounding",
    "no scheme": "there is no scheme and no compressor 'zenn'; known are",
    "no longer": "'ok-topk' is not a scheme of this package, only of its benchmarks: use \"spardl\"",
    "neither": "a scheme is a name or what makes one, got 5",
    "bare": "register() takes a model of DistributedDataParallel, got Linear: wrap it first, or use",
    "teams": "2 ranks cannot form 7 equal teams; choose one of [1, 2]",
    "no rank": "rank 0 is below 1",
    "no more": "zen has no option pool; it has rows,",
    "least": "least_elements must be an integer, got '1'",
    "hosts": "2 ranks are not a multiple of 3 per host",
    "twice": "this model has a communication hook already",
    "closed": "backward() after hook.close(): close the hook after the last backward pass",
}


def found(*arguments: str) -> list[dict[str, Any]]:
    lines = run_trainers([SCRIPT, *arguments], 2).splitlines()
    return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda line: line["rank"])


@pytest.mark.parametrize(("scheme", "most"), [("zen", 1e-6), ("fp16", 2e-3), ("int8", 2e-2)])
def test_both_halves_of_complex_gradients_are_summed(scheme: str, most: float) -> None:
    ranks = found("complex", scheme)
    assert ranks[0]["total"] == ranks[1]["total"]
    assert all(apart <= most for apart in ranks[0]["apart"].values()), ranks[0]


@pytest.mark.parametrize(
    ("scheme", "model"),
    [(scheme, "branches") for scheme in ("topk", "spardl", "powersgd", "onebit")] + [("topk", "outputs")],
)
def test_a_branch_that_is_seldom_used_loses_nothing_of_its_gradients(scheme: str, model: str) -> None:
    """DDP drops the sum of a parameter that no rank used, and the scheme must not have sent anything of it."""
    for rank in found("branches", scheme, model):
        assert rank["kept"] == 1
        assert rank["lost"] < 1e-5


def test_a_rank_waits_as_long_as_the_script_says(tmp_path: Path) -> None:
    assert "imed out" in found("timeout", "zen", str(tmp_path / "told"))[0]["error"]


def test_mistakes_are_refused_when_they_are_made() -> None:
    for rank in found("mistakes", ""):
        for name, text in MISTAKES.items():
            assert rank["told"][name].startswith(text), name
        assert not rank["leaked"]
