"""Kill every loop of the zoo again and again, and report whether what was restored is what `step(n)` saw.

    python tests/zoo --kills 2000 --seed 1 --out zoo.json

A job is one loop under `resilient-run` with some kills; jobs go round the loops until enough kills struck. With an
`--out` that exists the command goes on where it stopped. Needs the extra `zoo`.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaign import Zoo, cells, run_job, summary, table
from registry import LOOPS

from resilient_run.launcher.etcd_server import EmbeddedEtcd

PACES_MS = (0, 20)
"""Without a pause most steps are shorter than a commit; with one few are."""


class Report:
    """What was found so far, in the file of `--out`."""

    def __init__(self, path: Path, *, seed: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.seed = seed
        if path.exists():
            report = json.loads(path.read_text())
            if report["seed"] != seed:
                raise SystemExit(f"{path} was made with --seed {report['seed']}: choose another file, or that seed")
            self.jobs = {job["id"]: job for job in report["jobs"]}

    def add(self, job: dict[str, Any]) -> None:
        with self._lock:
            self.jobs[job["id"]] = job
            self.write()

    @property
    def kills(self) -> int:
        return sum(len(job["kills"]) for job in list(self.jobs.values()))

    def write(self) -> None:
        """Put all of it into the file at once."""
        jobs = [self.jobs[name] for name in sorted(self.jobs)]
        header = {"seed": self.seed, "summary": summary(jobs), "loops": table(jobs)}
        lines = ",\n".join(json.dumps(job, separators=(",", ":")) for job in jobs)
        text = json.dumps(header, indent=1)[:-2] + f',\n "jobs": [\n{lines}\n]}}\n'
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.path)


def write_docs(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put a row per loop into the table of `path`, in place of those that are there."""
    about = {loop.name: loop.about for loop in LOOPS}
    kept = [line for line in path.read_text().splitlines() if not line.startswith("| `")]
    at = kept.index("| loop | what it does | kills |") + 2
    kept[at:at] = [f"| {loop} | {about[row['name']]} | {kills} |" for row in rows for loop, kills in [cells(row)]]
    path.write_text("\n".join(kept) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time")
    parser.add_argument("--loops", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--kinds", nargs="*", metavar="KIND", default=(), help="only in these parts of a step")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="docs/internals/loops.md, to write the table of")
    parser.add_argument("--kills-per-job", type=int, help="instead of what each loop has")
    options = parser.parse_args()
    names = {loop.name for loop in LOOPS}
    if unknown := set(options.loops or ()) - names:
        parser.error(f"no loop {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    loops = [loop for loop in LOOPS if not options.loops or loop.name in options.loops]
    report = Report(options.out, seed=options.seed)
    with EmbeddedEtcd() as etcd, tempfile.TemporaryDirectory(prefix="zoo-", dir="/tmp") as root:
        zoo = Zoo(Path(root), etcd.endpoint)

        def work(number: int, index: int) -> None:
            loop = loops[index]
            name = f"{loop.name}/{number}"
            if name in report.jobs or report.kills >= options.kills:
                return
            pace_ms = PACES_MS[number % len(PACES_MS)]
            count, kinds = options.kills_per_job, options.kinds
            job = run_job(zoo, loop, name, seed=options.seed, pace_ms=pace_ms, count=count, kinds=kinds)
            report.add(job)
            wrong = sum(not kill["equal"] for kill in job["kills"])
            verdict = job["refused"] or ("" if job["same_end"] else f"; {job['problems'][0]}")
            print(f"{report.kills} kills; {name}: {len(job['kills'])}, {wrong} wrong{verdict}", flush=True)

        number = 0
        while report.kills < options.kills:
            before, jobs_before = report.kills, len(report.jobs)
            with ThreadPoolExecutor(options.parallel) as pool:
                try:
                    list(pool.map(work, [number] * len(loops), range(len(loops))))
                except KeyboardInterrupt:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            number += 1
            if report.kills == before and len(report.jobs) > jobs_before:
                break  # every loop is refused
    report.write()
    jobs = list(report.jobs.values())
    if options.docs is not None:
        write_docs(options.docs, table(jobs))
    for row in table(jobs):
        print(
            f"{row['name']:24} {row['library']:14} {row['version']:8} {row['kills']:5} {row['wrong']:5} {row['result']}"
        )
    print(json.dumps(summary(jobs)))
    return 1 if any(row["result"] not in ("bit-identical", "refused", "not run") for row in table(jobs)) else 0


if __name__ == "__main__":
    sys.exit(main())
