"""Hosts of an elastic run come and go at random: it never stops, and trains every sample of every epoch once."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import elastic_worker
import pytest
import torch
from elastic_audit import Line, Log, audit
from elastic_growth import growth
from netlab import unavailable

CHAOS = Path(__file__).parent.parent / "benchmarks" / "elastic_chaos.py"
SIZES = (3, 2, 4, 3, 5, 2, 6, 4)
"""In how many ranks the generations of `history` make their steps."""
EACH = 40
"""Steps of a generation."""
BATCHES = -(-len(elastic_worker.SHARED) // elastic_worker.SHARED_BATCH)


def dealt(skipped: int, ranks: int) -> list[list[int]]:
    """Return what ranks get next of an order of which so much is gone, filled up as a sampler does."""
    order = torch.randperm(len(elastic_worker.DEALT), generator=torch.Generator().manual_seed(0)).tolist()
    left = order[skipped:]
    left += order[: -len(left) % ranks]
    return [left[rank::ranks][: elastic_worker.DEALT_BATCH] for rank in range(ranks)]


def history() -> list[Line]:
    """Return the lines of a right run: each generation makes its last step in vain, and the next one repeats it."""
    lines: list[Line] = []
    model, optimizer = elastic_worker.begin()
    step = gone = epoch = 0
    for generation, of in enumerate(SIZES, 1):
        who = [{"generation": generation, "rank": rank, "of": of} for rank in range(of)]
        begun = {"restored": step, "digest": elastic_worker.digest_of(model)}
        lines += [{**each, "host": f"h{each['rank']}", **begun} for each in who]
        for last in [*[False] * EACH, True]:
            if not any(parts := dealt(gone, of)):
                gone, epoch = 0, epoch + 1
                parts = dealt(gone, of)
            shared = list(elastic_worker.SHARED)[step % BATCHES * elastic_worker.SHARED_BATCH :]
            shared = shared[: elastic_worker.SHARED_BATCH]
            if not last:
                samples = [*(sample for part in parts for sample in part), *shared]
                elastic_worker.learn(model, optimizer, elastic_worker.gradients(model, samples))
            lines += [
                {
                    **each,
                    "step": step + 1,
                    "digest": "of a step in vain" if last else elastic_worker.digest_of(model),
                    "dealt": [epoch, part],
                    "shared": [step // BATCHES, shared[each["rank"] :: of]],
                    "committed": [generation, step],
                }
                for each, part in zip(who, parts, strict=True)
            ]
            if not last:
                step, gone = step + 1, gone + elastic_worker.DEALT_BATCH * of
    # The last one is made after all.
    lines = lines[: -SIZES[-1]]
    return lines + [{**each, "ended": step, "digest": elastic_worker.digest_of(model)} for each in who]


def found(tmp_path: Path, lines: list[Line]) -> tuple[Log, list[str]]:
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = Log(path)
    log.read()
    log.close()
    return log, list(audit(log))


def test_a_right_history_is_right(tmp_path: Path) -> None:
    log, problems = found(tmp_path, history())
    assert problems == []
    assert (log.repeated, sorted(log.worlds.elements())) == (len(SIZES) - 1, sorted(SIZES))
    assert len(log.made) == EACH * len(SIZES)
    assert max(log.made[max(log.made)][0][name][0] for name in ("dealt", "shared")) > 1, "it has whole epochs"


def at(lines: list[Line], step: int, rank: int = 0) -> Line:
    """Return the line of a step that counts."""
    return [line for line in lines if line.get("step") == step and line["rank"] == rank][-1]


def _twice(lines: list[Line]) -> None:
    at(lines, 9)["dealt"][1][0] = at(lines, 8)["dealt"][1][0]


def _shared_twice(lines: list[Line]) -> None:
    at(lines, 9)["shared"][1][0] = at(lines, 8)["shared"][1][0]


def _left_out(lines: list[Line]) -> None:
    at(lines, 9)["shared"][1].pop()


def _epoch_begun_anew(lines: list[Line]) -> None:
    for line in lines:
        if "step" in line and line["step"] > EACH:
            line["dealt"][0] += 1


def _behind(lines: list[Line]) -> None:
    for line in lines:
        if line["generation"] == 3 and "restored" in line:
            line["restored"] -= 1


def _other_parameters(lines: list[Line]) -> None:
    at(lines, 50, rank=1)["digest"] = "0"


def _restored_otherwise(lines: list[Line]) -> None:
    next(line for line in lines if line["generation"] == 4)["digest"] = "0"


def _a_rank_is_missing(lines: list[Line]) -> None:
    lines.remove(at(lines, 50))


def _a_step_is_missing(lines: list[Line]) -> None:
    lines[:] = [line for line in lines if line.get("step") != 50]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_twice, "1 samples of dealt were trained twice"),
        (_shared_twice, "1 samples of shared were trained twice"),
        (_left_out, "epoch 0 of shared ended before step 85 without"),
        (_epoch_begun_anew, "epoch 0 of dealt ended before step 41 without"),
        (_behind, "generation 3 began after step 79, committed: (2, 80)"),
        (_other_parameters, "step 50 of generation 2: ranks [1] had other parameters"),
        (_restored_otherwise, "generation 4, rank 0 had other parameters after step 120"),
        (_a_rank_is_missing, "step 50 of 2 ranks was made by [1]"),
        (_a_step_is_missing, "some are missing"),
    ],
)
def test_a_wrong_history_is_found(tmp_path: Path, wrong: Callable[[list[Line]], None], said: str) -> None:
    lines = history()
    wrong(lines)
    _, problems = found(tmp_path, lines)
    assert any(said in problem for problem in problems), problems


def test_growth_is_found() -> None:
    steady = {"daemon, threads": 20.0, "etcd, memory, MiB": 10.0}
    samples = [{"pids": 1, "serves": 0, **steady, "daemon, descriptors": 30.0 + number} for number in range(40)]
    samples[20:20] = [{**sample, "serves": 1, "daemon, threads": 99.0} for sample in samples[:20]]
    assert [name for name, each in growth(samples).items() if each["grew"]] == ["daemon, descriptors"]


@pytest.mark.nightly
@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_hosts_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [sys.executable, str(CHAOS), "--hosts", "4", "--faults", "12", "--sample-s", "2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr[-20000:]
    results = json.loads(file.read_text())["results"]
    assert (results["stopped"], results["problems"]) == (None, []), done.stderr[-20000:]
    assert set(results["exit_codes"].values()) == {0}
    assert results["measurements"] > 0
    assert len(results["ranks_of_generations"]) > 1
