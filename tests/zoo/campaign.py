"""Jobs of the zoo: a loop under `resilient-run`, left alone or killed as planned, and what that showed."""

import itertools
import json
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from cluster import Cluster
from registry import LOOPS, Loop

HERE = Path(__file__).parent
JOB_TIMEOUT_S = 400.0

CONFIG = """
[root]
# Kills are meant, each at a later step; a loop that fails by itself shall end soon.
stalled_recoveries = 12
crash_loop_failures = 8
quarantine_failures = 100000
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One planned SIGKILL of one rank or all, `delay_us` after `kind` begins in `step` for the `occurrence`-th time."""

    id: int
    kind: str
    step: int
    occurrence: int
    delay_us: int
    victim: int | str


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One kill that struck, and what was restored after it; see `judge`."""

    loop: str
    pace_ms: int
    kind: str
    step: int
    delay_us: int
    victim: int | str
    struck_after_step: int | None
    restored: int
    lost: int
    equal: bool
    seconds: float
    leaves: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Job:
    """What a job showed.

    Attributes:
        refused: What the first call of `step()`, or an earlier one of the checkpointer, said against this loop.
        version: That of the loop's library.
        kills: Those that struck and were followed by a restore.
        same_end: Whether each step that was trained, and the end, had the bytes and losses of the undisturbed run.
        problems: Everything that speaks against the run, in words.
    """

    id: str
    loop: str
    pace_ms: int
    seconds: float
    exit_code: int
    version: str
    refused: str | None = None
    kills: list[Outcome] = field(default_factory=list)
    same_end: bool = True
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The journals of one finished job, by rank, with its output."""

    exit_code: int
    seconds: float
    journals: list[list[dict[str, Any]]]
    output: str


class Zoo:
    """Runs jobs below one directory, against one etcd.

    Args:
        root: An empty directory with a short path, for sockets lie below it.
        etcd_endpoint: The etcd.
        forked: Whether launchers are forked, as in other tests; else they are started as by a user.
    """

    def __init__(self, root: Path, etcd_endpoint: str, *, forked: bool = False) -> None:
        """Prepare."""
        self._root = root
        self._forked = forked
        self._etcd_endpoint = etcd_endpoint
        (root / "zoo.toml").write_text(CONFIG)
        self._references: dict[tuple[str, int], Run] = {}
        self._lock = threading.Lock()

    def reference(self, loop: Loop, steps: int) -> Run:
        """Return the undisturbed run of so many steps, made at the first call."""
        with self._lock:
            known = self._references.get((loop.name, steps))
        if known is None:
            known = self.run(loop, f"{loop.name}.straight", steps=steps, pace_ms=0, reference=True)
            with self._lock:
                self._references[loop.name, steps] = known
        return known

    def run(
        self, loop: Loop, name: str, *, steps: int, pace_ms: int, kills: Sequence[Kill] = (), reference: bool = False
    ) -> Run:
        """Run `loop` to its end, killed as planned; `reference` makes it write down every moment."""
        directory = self._root / name
        directory.mkdir()
        (directory / "job.json").write_text(
            json.dumps({"reference": reference, "kills": [asdict(kill) for kill in kills]})
        )
        cluster = Cluster(directory)
        host = cluster.host("h")
        host.forked = self._forked
        arguments = ["--nnodes", "1", "--nproc-per-node", str(loop.ranks), "--rdzv-backend", "etcd-v3"]
        arguments += ["--rdzv-endpoint", self._etcd_endpoint, "--rdzv-id", f"{self._root.name}-{name}"]
        arguments += ["--local-addr", "127.0.0.1", f"--rr-config={self._root / 'zoo.toml'}"]
        started_s = time.monotonic()
        try:
            host.launch(
                arguments,
                [str(HERE / "loops" / f"{loop.script}.py"), *loop.arguments],
                ZOO_DIR=str(directory),
                ZOO_STEPS=str(steps),
                ZOO_PACE_MS=str(pace_ms),
                **loop.environ,
            )
            try:
                exit_code = host.wait(JOB_TIMEOUT_S)
                output = host.output
            except AssertionError as error:
                exit_code, output = -1, str(error)
        finally:
            cluster.close()
        files = [directory / f"rank{rank}.jsonl" for rank in range(loop.ranks)]
        run = Run(
            exit_code=exit_code,
            seconds=time.monotonic() - started_s,
            journals=[_read(file) if file.exists() else [] for file in files],
            output=output,
        )
        shutil.rmtree(directory)
        return run


def draw(loop: Loop, reference: Run, *, count: int, seed: str, kinds: Sequence[str] = ()) -> list[Kill]:
    """Draw `count` moments at rising steps: every kind as often, and a delay within what that part of the step took.

    With `kinds` only those. There are fewer moments where the loop has fewer steps with what was drawn.
    """
    chance = random.Random(seed)
    marks = [entry for entry in reference.journals[0] if "at" in entry]
    last = max(mark["step"] for mark in marks)
    spans: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for mark, following in itertools.pairwise(marks):
        if 2 <= mark["step"] < last:
            of_kind = spans.setdefault(mark["at"], {})
            of_kind.setdefault(mark["step"], []).append((mark["occurrence"], following["t"] - mark["t"]))
    # The restore that follows the kill before: it is not in the undisturbed run.
    spans["restore"] = {step: [(0, 0.02)] for of_kind in spans.values() for step in of_kind}
    known = sorted(kind for kind in spans if not kinds or kind in kinds)
    if not known:
        return []
    chosen: dict[int, str] = {}
    for _ in range(count):
        kind = chance.choice(known)
        if free := sorted(spans[kind].keys() - chosen):
            chosen[chance.choice(free)] = kind
    kills: list[Kill] = []
    for step, kind in sorted(chosen.items()):
        if kind == "restore" and not kills:
            continue
        occurrence, span_s = chance.choice(spans[kind][step])
        delay_us = chance.choice([0, int(1e6 * chance.uniform(0, span_s)), int(1e6 * chance.uniform(0, 1.2 * span_s))])
        victim = chance.choice([*range(loop.ranks), "all"]) if loop.ranks > 1 else 0
        kills.append(Kill(id=len(kills), kind=kind, step=step, occurrence=occurrence, delay_us=delay_us, victim=victim))
    return kills


def judge(job: Job, loop: Loop, run: Run, reference: Run, kills: Sequence[Kill]) -> Job:
    """Fill in `job` from what `run` wrote down.

    A restore is right when the state after it is, on each rank and in each leaf, what the step that was restored had
    seen in the generation that captured it. It needs no undisturbed run for that.
    """
    planned = {kill.id: kill for kill in kills}
    ranks = [_Rank(journal) for journal in run.journals]
    armed = {entry["armed"]: entry for rank in ranks for entry in rank.armed}
    for kill_id, entry in sorted(armed.items()):
        generation = entry["generation"]
        restores = [rank.restored.get(generation + 1) for rank in ranks]
        if any(restore is None for restore in restores):
            continue  # it came after the end, or another kill before the restore
        job.kills.append(_outcome(loop, job.pace_ms, planned[kill_id], entry, ranks, restores))
    job.problems += [
        f"rank {number}, step {step}: {_some(_differing(leaves, expected)) or 'its loss'} not as undisturbed"
        for number, (rank, straight) in enumerate(zip(ranks, map(_Rank, reference.journals), strict=True))
        for (generation, step), (leaves, loss) in rank.saw.items()
        if (expected := straight.of_step(step)[0]) != leaves or straight.of_step(step)[1] != loss
    ][:3]
    job.same_end = not job.problems
    if run.exit_code or not all(rank.finished for rank in ranks):
        job.same_end = False
        errors = [line for line in run.output.splitlines() if "Error: " in line]
        cause = errors[-1] if errors else "\n".join(run.output.splitlines()[-12:])
        job.problems.append(
            f"exit code {run.exit_code}, finished ranks {[rank.finished for rank in ranks]}: {cause[-1500:]}"
        )
    return job


class _Rank:
    """What one rank wrote down, sorted."""

    def __init__(self, journal: Sequence[dict[str, Any]]) -> None:
        self.saw = {(e["generation"], e["saw"]): (e["leaves"], e["loss"]) for e in journal if "saw" in e}
        self.restored = {e["generation"]: e for e in journal if "restored" in e}
        self.armed = [e for e in journal if "armed" in e]
        self.finished = any("finished" in e for e in journal)

    def of_step(self, step: int) -> tuple[dict[str, str] | None, str | None]:
        """Return what any generation saw at `step`, for a run of one generation."""
        return next((seen for (_, n), seen in self.saw.items() if n == step), (None, None))

    def last_step(self, generation: int) -> int | None:
        """Return the newest step that a generation completed, if it completed one."""
        return max((step for made, step in self.saw if made == generation), default=None)


def _outcome(
    loop: Loop,
    pace_ms: int,
    kill: Kill,
    entry: dict[str, Any],
    ranks: Sequence[_Rank],
    restores: Sequence[dict[str, Any] | None],
) -> Outcome:
    wrong = []
    for number, (rank, restore) in enumerate(zip(ranks, restores, strict=True)):
        assert restore is not None
        if restore["restored"] == 0:
            continue  # from the beginning: nothing was restored
        made = restore["of"]
        seen = [leaves for (g, n), (leaves, _) in rank.saw.items() if n == restore["restored"] and made in (None, g)]
        if restore["leaves"] not in seen:
            differing = _differing(restore["leaves"], seen[-1]) if seen else ["never seen"]
            wrong += [f"rank {number}: {leaf}" for leaf in differing]
    generation = entry["generation"]
    steps = [rank.last_step(generation) for rank in ranks]
    restored = [restore["restored"] for restore in restores if restore is not None]
    # A generation without a completed step lost none but those of the one before, which are counted there.
    begun = [rank.restored[generation]["restored"] if generation in rank.restored else 0 for rank in ranks]
    completed = min(begin if step is None else step for step, begin in zip(steps, begun, strict=True))
    if len(set(restored)) > 1:
        wrong.append(f"ranks restored different steps {restored}")
    return Outcome(
        loop=loop.name,
        pace_ms=pace_ms,
        kind=kill.kind,
        step=entry["step"],
        delay_us=kill.delay_us,
        victim=kill.victim,
        struck_after_step=completed,
        restored=min(restored),
        lost=max(completed - min(restored), 0),
        equal=not wrong,
        seconds=round(max(r["t"] for r in restores if r is not None) - entry["t"] - kill.delay_us / 1e6, 3),
        leaves=wrong[:5],
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _differing(one: dict[str, str], other: dict[str, str] | None) -> list[str]:
    other = other or {}
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue  # the end of a line that SIGKILL cut
    return entries


def run_job(
    zoo: Zoo,
    loop: Loop,
    name: str,
    *,
    seed: str,
    pace_ms: int,
    count: int | None = None,
    steps: int | None = None,
    kinds: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one job against the loop's undisturbed run, which is made once, and return what it showed, as JSON."""
    steps = steps or loop.steps
    reference = zoo.reference(loop, steps)
    job = Job(
        id=name,
        loop=loop.name,
        pace_ms=pace_ms,
        seconds=reference.seconds,
        exit_code=reference.exit_code,
        version=loop.version,
    )
    if reference.exit_code:
        saw = any("saw" in entry for journal in reference.journals for entry in journal)
        errors = [line for line in reference.output.splitlines() if "Error: " in line]
        ours = [line.split("]: ")[-1] for line in errors if "resilient_run" in line]
        if ours and not saw:
            job.refused = ours[0]
        else:
            job.same_end = False
            job.problems = ["undisturbed: " + (errors[0] if errors else reference.output[-2000:])]
        return asdict(job)
    kills = draw(loop, reference, count=count or loop.kills, seed=f"{seed}/{name}", kinds=kinds)
    run = zoo.run(loop, name.replace("/", "."), steps=steps, pace_ms=pace_ms, kills=kills)
    job.seconds, job.exit_code = round(run.seconds, 1), run.exit_code
    return asdict(judge(job, loop, run, reference, kills))


def table(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per loop, in the order of the registry."""
    rows = []
    for loop in LOOPS:
        mine = [job for job in jobs if job["loop"] == loop.name]
        kills = [kill for job in mine for kill in job["kills"]]
        wrong = sum(not kill["equal"] for kill in kills)
        refused = next((job["refused"] for job in mine if job["refused"]), None)
        ends = all(job["exit_code"] == 0 for job in mine)
        if not mine:
            result = "not run"
        elif refused:
            result = "refused"
        elif wrong:
            result = "wrong restores"
        elif not ends:
            result = "does not end"
        else:
            result = "bit-identical" if all(job["same_end"] for job in mine) else "not reproduced"
        rows.append(
            {
                "name": loop.name,
                "library": loop.library,
                "version": mine[-1]["version"] if mine else "",
                "ranks": loop.ranks,
                "kills": len(kills),
                "wrong": wrong,
                "max_lost": max((kill["lost"] for kill in kills), default=0),
                "result": result,
                "message": refused or next((problem for job in mine for problem in job["problems"]), ""),
            }
        )
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row's first and last cell in docs/internals/loops.md: its loop, with the library, and its kills."""
    library = "" if row["library"] == "torch" else f" ({row['library']} {row['version']})"
    wrong = "" if row["result"] == "bit-identical" else f": {row['wrong']} wrong, {row['result']}"
    return [f"`{row['name']}`{library}", f"{row['kills']}{wrong}"]


def summary(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts over all jobs: kills, wrong restores, and steps lost, by the pause in each step."""
    made: dict[str, Any] = {}
    for pace_ms in sorted({job["pace_ms"] for job in jobs}):
        kills = [kill for job in jobs if job["pace_ms"] == pace_ms for kill in job["kills"]]
        lost = sorted(kill["lost"] for kill in kills)
        made[f"pause of {pace_ms} ms"] = {
            "kills": len(kills),
            "wrong": sum(not kill["equal"] for kill in kills),
            "steps_lost_median": statistics.median(lost) if lost else None,
            "steps_lost_p90": lost[int(0.9 * len(lost))] if lost else None,
            "steps_lost_worst": lost[-1] if lost else None,
            "seconds_median": round(statistics.median(kill["seconds"] for kill in kills), 2) if kills else None,
        }
    return made
