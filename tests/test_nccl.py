"""Several ranks on one GPU, over NCCL: the same sums as over Gloo on the CPU, and the same training after a kill."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import assert_killed_goes_on
from every_scheme import LOSSLESS, others
from launchers import run_trainers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HERE = Path(__file__).parent
HOOK, LOCAL, RANKS = (str(HERE / name) for name in ("hook_trainer.py", "local_trainer.py", "nccl_ranks.py"))
LIKE_NONE = (*LOSSLESS, "zen+sparse", "zen+hosts", "none+hsdp", "dense+hsdp", "zen+hsdp")
SWITCHED = ("fp8+hosts", "int8", "int8+hsdp", "topk+hsdp", "topk+sparse")
SUMMED_IN_HALF = {"bf16": 1e-2, "fp16": 1e-3}
"""Each addition rounds, and the libraries add in orders of their own."""


def lines_of(arguments: list[str], ranks: int) -> list[dict[str, Any]]:
    printed = run_trainers(arguments, ranks)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def cases(kind: str, ranks: int) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for line in lines_of([RANKS, kind], ranks):
        found[line["case"]].append(line)
    assert found
    assert all(len(each) == ranks for each in found.values())
    return found


@pytest.mark.parametrize(("kind", "ranks"), [("schemes", 4), ("options", 4)])
def test_sums_are_those_of_the_cpu(kind: str, ranks: int) -> None:
    wrong = {}
    for case, told in cases(kind, ranks).items():
        failed = [each["failed"] for each in told if "failed" in each]
        most = SUMMED_IN_HALF.get(case, 1e-5)
        if failed or len({each["digest"] for each in told}) > 1 or max(each["error"] for each in told) > most:
            wrong[case] = failed or told
    assert not wrong, json.dumps(wrong, indent=1)


def test_more_ranks_wait_no_more_often() -> None:
    few, many = (
        {case: max(each.get("waits", 0) for each in told) for case, told in cases("schemes", size).items()}
        for size in (3, 4)
    )
    assert {case: (few[case], waits) for case, waits in many.items() if waits > few[case]} == {}, few


def test_training_is_that_of_plain_ddp() -> None:
    losses: dict[str, dict[Any, float]] = defaultdict(dict)
    for line in lines_of([HOOK, "--cuda", "none", *LIKE_NONE], 4):
        for variant, loss in line.get("loss", {}).items():
            losses[variant][line["rank"], line["step"]] = loss
    for variant in LIKE_NONE:
        assert losses[variant] == pytest.approx(losses["none"], rel=1e-5), variant


@pytest.mark.parametrize(
    "script",
    [(HOOK, *SWITCHED, *others(SWITCHED)), (LOCAL, "int8"), (LOCAL, "topk", "--fragments", "2", "--delay", "2")],
    ids=["hook", "local", "streaming"],
)
def test_killed_worker_goes_on_bit_by_bit(script: tuple[str, ...], tmp_path: Path) -> None:
    assert_killed_goes_on(tmp_path, 4, [*script, "--cuda", "--steps", "12"], ["--kill-at", "7"])
