"""Training loops of all kinds go on from exactly what `step(n)` saw when they are killed; docs/internals/loops.md."""

import dataclasses
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from campaign import Job as ZooJob
from campaign import Kill, Run, Zoo, cells, draw, judge, run_job, table
from registry import LOOPS, Loop

ROOT = Path(__file__).parent.parent.parent
IN_CI = [loop for loop in LOOPS if loop.in_ci]
STEPS = 12
KILLS = 2


@pytest.fixture(scope="module")
def jobs(etcd_endpoint: str) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The job of each loop by its name, two at a time."""
    with tempfile.TemporaryDirectory(prefix="zoo-", dir="/tmp") as root, ThreadPoolExecutor(2) as pool:
        zoo = Zoo(Path(root), etcd_endpoint, forked=True)
        started = {
            loop.name: pool.submit(
                run_job, zoo, loop, f"{loop.name}/ci", seed="ci", pace_ms=20, count=KILLS, steps=STEPS
            )
            for loop in IN_CI
        }
        yield started
        for job in started.values():
            job.cancel()


@pytest.mark.jobs
@pytest.mark.parametrize("loop", IN_CI, ids=lambda loop: loop.name)
def test_what_is_restored_is_what_the_step_saw(jobs: dict[str, Future[dict[str, Any]]], loop: Loop) -> None:
    job = jobs[loop.name].result()
    assert not job["refused"], job["refused"]
    assert job["kills"], f"no kill struck, though {KILLS} were drawn: {job}"
    assert [kill for kill in job["kills"] if not kill["equal"]] == []
    assert job["same_end"], job["problems"]


def journal(*, restored: str, generation: int = 1) -> list[dict[str, Any]]:
    """Return what a rank writes down that saw two steps, was killed in the third and restored leaves of `restored`."""
    saw = [
        {"generation": 1, "t": float(n), "saw": n, "loss": "0x0p0", "leaves": {"model.weight": f"bytes of {n}"}}
        for n in (1, 2)
    ]
    later = {"generation": 2, "t": 5.0}
    return [
        {"generation": 1, "t": 0.0, "restored": 0, "of": None, "leaves": {}},
        *saw,
        {"generation": 1, "t": 3.0, "armed": 0, "kind": "forward", "step": 3},
        {**later, "restored": 2, "of": generation, "leaves": {"model.weight": restored}},
        {**later, "finished": True},
    ]


@pytest.mark.parametrize(
    ("restored", "generation", "equal"),
    [("bytes of 2", 1, True), ("bytes of 1", 1, False), ("averages", 1, False), ("bytes of 2", 7, False)],
)
def test_a_wrong_restore_is_counted(restored: str, generation: int, equal: bool) -> None:
    """The judge itself: neither another step's state nor one that no generation saw passes."""
    kill = Kill(id=0, kind="forward", step=3, occurrence=0, delay_us=0, victim=0)
    run = Run(exit_code=0, seconds=9.0, journals=[journal(restored=restored, generation=generation)], output="")
    reference = dataclasses.replace(run, journals=[journal(restored="bytes of 2")])
    job = judge(
        ZooJob(id="x/0", loop="gan", pace_ms=0, seconds=9.0, exit_code=0, version="2"), IN_CI[0], run, reference, [kill]
    )
    (outcome,) = job.kills
    assert (outcome.equal, outcome.restored, outcome.lost) == (equal, 2, 0)
    rows = {row["name"]: row["result"] for row in table([dataclasses.asdict(job)])}
    assert rows["gan"] == ("bit-identical" if equal else "wrong restores")


def test_moments_are_drawn_from_the_seed() -> None:
    entries = [
        {"generation": 1, "t": 0.01 * (5 * step + place), "at": kind, "step": step, "occurrence": 0}
        for step in range(1, 20)
        for place, kind in enumerate(["data", "forward", "backward", "optimizer", "step"])
    ]
    run = Run(exit_code=0, seconds=1.0, journals=[entries], output="")
    loop = IN_CI[0]
    drawn = draw(loop, run, count=10, seed="a")
    assert drawn == draw(loop, run, count=10, seed="a") != draw(loop, run, count=10, seed="b")
    assert [kill.step for kill in drawn] == sorted({kill.step for kill in drawn}), "each at a later step"
    assert len({kill.kind for kill in drawn}) >= 3
    assert all(kill.delay_us <= 12_001 or kill.kind == "restore" for kill in drawn)


def test_what_few_steps_have_is_struck_as_often() -> None:
    entries = [
        {"generation": 1, "t": 0.01 * (3 * step + place), "at": kind, "step": step, "occurrence": 0}
        for step in range(1, 400)
        for place, kind in enumerate(["forward", "evaluation"] if step % 8 == 0 else ["forward"])
    ]
    run = Run(exit_code=0, seconds=1.0, journals=[entries], output="")
    found = Counter(kill.kind for kill in draw(IN_CI[0], run, count=60, seed="a"))
    assert found.keys() == {"evaluation", "forward", "restore"}
    assert min(found.values()) >= 10
    only = draw(IN_CI[0], run, count=60, seed="a", kinds=["evaluation"])
    assert len(only) >= 30
    assert all(kill.kind == "evaluation" and kill.step % 8 == 0 for kill in only)
    assert draw(IN_CI[0], run, count=60, seed="a", kinds=["sleep"]) == []


def test_the_table_of_loops_is_that_of_the_report() -> None:
    """Every loop has its row in docs/internals/loops.md, which says what the newest committed report found."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*-zoo*.json"))
    found = {row["name"]: row for file in files for row in json.loads(file.read_text())["loops"] if row["kills"]}
    text = (ROOT / "docs/internals/loops.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| `", line)
    ]
    (torch,) = {row["version"] for row in found.values() if row["library"] == "torch"}
    assert f"means torch {torch}." in text
    names = [row[0].split("`")[1] for row in rows]
    assert names == [loop.name for loop in LOOPS]
    assert [[row[0], *row[2:]] for row in rows] == [cells(found[name]) for name in names]
