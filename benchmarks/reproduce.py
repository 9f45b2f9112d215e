"""Makes the committed results again, says what each needs, and finds those that are stale.

    python benchmarks/reproduce.py --list          # all results: needs, minutes, when they were made, how they stand
    python benchmarks/reproduce.py --check         # those that are stale, and why; exit status 1 if there are any
    python benchmarks/reproduce.py --figure 6.16   # makes what a figure of a paper has beside it
    python benchmarks/reproduce.py goodput zen-rows # makes results by name; without any, all of them
    python benchmarks/reproduce.py --page          # writes benchmarks/README.md, the list of all results, anew

A result goes to benchmarks/results/ with today's date, and replaces one of the same name and day. When all are made,
the plots of the documents are drawn anew, the list of results is written anew, and the documents that still cite an
older result are named. What needs more
than this machine has is not begun: a line says what is missing, the rest is made, and the exit status is 1.

A result is *stale* if a file that it depends on (`sources.py`, `catalogue.py`) has changed since, by more than comments
and docstrings, or if a constant that it took from another result is no longer what the newest result of that name says.
That does not mean that its figures are wrong. The code of results that did not record it is that of the commit that
added them ("code_from").
"""

import argparse
import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from catalogue import BENCHMARKS, KEPT, RESULTS, ROOT, Benchmark, Result, digests, entries, latest, name_of
from report import Constant, table

Entry = tuple[Benchmark, Result]

PAGE = ROOT / "benchmarks" / "README.md"


def main() -> int:
    """Select, then list, check or run; return the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="NAME", help="of results, as --list has them (all)")
    arguments.add_argument("--figure", nargs="+", default=[], metavar="FIGURE", help='such as 6.16, "SparDL 8"')
    what = arguments.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="what there is, and what it needs")
    what.add_argument("--check", action="store_true", help="what is stale, and why; exit status 1")
    what.add_argument("--page", action="store_true", help="write the list of results, benchmarks/README.md")
    options = arguments.parse_args()
    if options.page:
        PAGE.write_text(list_of_results())
        return 0
    try:
        chosen = select(options.names, options.figure)
    except LookupError as error:
        arguments.error(str(error))
    if options.list:
        show(chosen)
        return 0
    if options.check:
        return check(chosen)
    return make(chosen)


def select(names: Sequence[str], figures: Sequence[str]) -> list[Entry]:
    """Return the entries with these names or figures, in the order of the table; all if none are given.

    Raises:
        LookupError: There is no such name or figure; the text says which there are.
    """
    table_of = list(entries())
    for kind, asked, there in (
        ("result", names, [result.name for _, result in table_of]),
        ("figure", figures, sorted({figure for _, result in table_of for figure in result.figures}, key=_order)),
    ):
        if unknown := [each for each in asked if each.casefold() not in map(str.casefold, there)]:
            why = (
                "; docs/internals/papers.md says of every other one why it is not measured here"
                if kind == "figure"
                else ""
            )
            raise LookupError(f"no {kind} {', '.join(unknown)}: there are {', '.join(there)}{why}")
    wanted = {each.casefold() for each in (*names, *figures)}
    return [
        (benchmark, result)
        for benchmark, result in table_of
        if not wanted or wanted & {each.casefold() for each in (result.name, *result.figures)}
    ]


def lacking(benchmark: Benchmark, result: Result) -> Iterator[str]:
    """Yield what this machine lacks for a result, with the remedy."""
    if benchmark.root and os.geteuid() != 0:
        yield "root, for network namespaces: run it with sudo"
    if (cores := len(os.sched_getaffinity(0))) < benchmark.cores:
        yield f"{benchmark.cores} cores, and there are {cores}"
    if benchmark.gpu and not _has_gpu():
        yield "a GPU, and torch finds none: nvidia-smi says whether there is one"
    if rivals := [need for need in result.needs if "/" in need and not (ROOT / need).exists()]:
        yield f"{', '.join(rivals)}: make them in the root of the repository, as benchmarks/peers/README.md says"
    if packages := [need for need in result.needs if "/" not in need and importlib.util.find_spec(need) is None]:
        yield f"{', '.join(packages)}: pip install -c constraints.txt -e '.[engines,zoo]'"


def outdated(path: Path) -> Iterator[str]:
    """Yield each constant of a result that is not what the newest result beside it, of the name it is from, says."""
    for name, recorded in (json.loads(path.read_text()).get("constants") or {}).items():
        taken = Constant(value=recorded["value"], result=recorded["result"], at=tuple(recorded["at"]))
        try:
            current = taken.now(path.parent)
        except KeyError:
            current = None
        if current is None:
            yield f"{name} is from {taken.result}, and no newest result of that name has it"
        elif current.value != taken.value:
            yield f"{name} is {taken.value:.3g} here, and {current.value:.3g} in {current.result}"


def changed(benchmark: Benchmark, path: Path, *, root: Path = ROOT) -> list[str]:
    """Return which files below `root` differ from when a result was made, with what is new or gone and not moved."""
    then, now = json.loads(path.read_text()).get("code", {}), digests(benchmark, root)
    how = {
        **{file: " (gone)" for file in then.keys() - now.keys() if then[file] not in now.values()},
        **{file: " (new)" for file in now.keys() - then.keys() if now[file] not in then.values()},
        **{file: "" for file in then.keys() & now.keys() if then[file] != now[file]},
    }
    return [file + what for file, what in sorted(how.items())]


def state(benchmark: Benchmark, result: Result) -> tuple[str, list[str]]:
    """Return "current", "stale" or "not made" for the newest result of an entry, and the reasons."""
    path = latest(result.name)
    if path is None:
        return "not made", []
    reasons = list(outdated(path))
    if files := changed(benchmark, path):
        since = "the commit that added it" if "code_from" in json.loads(path.read_text()) else "then"
        reasons.append(f"{len(files)} changed since {since}: {', '.join(files)}")
    return "stale" if reasons else "current", reasons


def show(chosen: Sequence[Entry]) -> None:
    """Print what there is, in the order in which it would be made."""
    rows = []
    for benchmark, result in chosen:
        needs = [name for name in ("root", "gpu") if getattr(benchmark, name)]
        path = latest(result.name)
        rows.append(
            [
                result.name,
                f"{result.minutes:.0f}",
                path.name[:10] if path else "",
                state(benchmark, result)[0],
                ", ".join([f"{benchmark.cores} cores", *needs, *result.needs]),
                ", ".join(result.figures),
            ]
        )
    title = f"{len(chosen)} results, about {_minutes(chosen)} minutes"
    table(title, ["result", "minutes", "made", "state", "needs", "figures"], rows)


def check(chosen: Sequence[Entry]) -> int:
    """Print which results are stale, and why, in full if only one is asked for; return 1 if any is stale."""
    found = [(result.name, *state(benchmark, result)) for benchmark, result in chosen]
    stale = [(name, reasons) for name, how, reasons in found if how == "stale"]
    print(f"{len(stale)} of {len(found)} are stale{':' if stale else ''}")
    for name, reasons in stale:
        for reason in reasons:
            print(f"  {name}: {reason if len(chosen) == 1 else textwrap.shorten(reason, 200, placeholder=' …')}")
    return 1 if stale else 0


def make(chosen: Sequence[Entry]) -> int:
    """Run what this machine can, draw the plots and name the documents to change; return 1 if anything is not made."""
    possible = []
    for benchmark, result in chosen:
        if missing := list(lacking(benchmark, result)):
            print(f"{result.name} is not made: it needs {'; and '.join(missing)}")
        else:
            possible.append((benchmark, result))
    print(f"{len(possible)} of {len(chosen)} results, about {_minutes(possible)} minutes", flush=True)
    made = []
    for benchmark, result in possible:
        started_s = time.monotonic()
        problem = run(benchmark, result)
        print(f"{result.name}: {problem or f'{(time.monotonic() - started_s) / 60:.1f} minutes'}", flush=True)
        if problem is None:
            made.append(result)
    if made:
        subprocess.run([sys.executable, str(ROOT / "docs" / "result_pictures.py")], check=True)
        PAGE.write_text(list_of_results())
    for result in made:
        for page, cited in older(result):
            print(f"{page} cites {cited}: put today's figures there, and remove that file or list it in KEPT")
    print(f"{len(made)} of {len(chosen)} results are made")
    return 0 if len(made) == len(chosen) else 1


def run(benchmark: Benchmark, result: Result) -> str | None:
    """Make one result; return what went wrong, and leave the folder of results as it was then."""
    with tempfile.TemporaryDirectory(prefix="reproduce-") as directory:
        fresh = Path(directory) / "result.json"
        command = [benchmark.script, *shlex.split(result.arguments), benchmark.output, str(fresh)]
        print(f"python {shlex.join(command[:-1])} FILE", flush=True)
        before = digests(benchmark)
        status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        if status != 0:
            return f"{benchmark.script} ended with status {status}"
        if not fresh.exists():
            return f"{benchmark.script} ended without a result"
        if digests(benchmark) != before:
            return "the code that it depends on changed meanwhile: run it again"
        text = fresh.read_text()
        if "code" not in json.loads(text):  # as of the campaigns in tests/
            fresh.write_text(text.replace("{", f'{{"code": {json.dumps(before)},\n', 1))
        shutil.move(fresh, RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-{result.name}.json")
    return None


def older(result: Result) -> Iterator[tuple[str, str]]:
    """Yield each document that cites a result of this name which is not the newest, and that file."""
    newest = latest(result.name)
    files = {path.name for path in RESULTS.glob(f"????-??-??-{result.name}.json")} - {newest and newest.name}
    for page in pages():
        text = page.read_text()
        yield from ((page.relative_to(ROOT).as_posix(), file) for file in sorted(files) if file in text)


def list_of_results() -> str:
    """Return the list of all results: what each answers, which script makes it, and its plots."""
    lines = [
        "# Benchmarks and their results",
        "",
        "Written by `python benchmarks/reproduce.py --page`; do not edit. Each result is the committed output of a",
        "script, whose docstring says more. `python benchmarks/reproduce.py NAME` makes a result again. Figures are",
        "those of [the papers](../docs/internals/papers.md) beside which a result stands.",
    ]
    for benchmark in BENCHMARKS:
        path = ROOT / benchmark.script
        text = (path / "__main__.py" if path.is_dir() else path).read_text()
        head = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        lines += ["", f"## {benchmark.script}", "", head, "", "| result | plot | figures |", "|---|---|---|"]
        for result in benchmark.results:
            newest = latest(result.name)
            made = f"[{result.name}](results/{newest.name})" if newest else f"{result.name} (not made)"
            plots = [Path(each).name for each in result.arguments.split() if Path(each).parent.name == "results"]
            shown = ", ".join(f"[{plot}](results/{plot})" for plot in plots)
            lines.append(f"| {made} | {shown} | {', '.join(result.figures)} |")
    lines += ["", "## Older results", "", "| result | why it is kept |", "|---|---|"]
    lines += [f"| [{name_of(file)}](results/{file}) | {why} |" for file, why in KEPT.items()]
    return "\n".join(lines) + "\n"


def pages() -> list[Path]:
    """Return the documents."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def _order(figure: str) -> tuple[str, list[int]]:
    """Return by what figures are sorted: those of a paper together, by their numbers."""
    return re.sub(r"[\d.]", "", figure), [int(number) for number in re.findall(r"\d+", figure)]


def _minutes(chosen: Sequence[Entry]) -> int:
    return round(sum(result.minutes for _, result in chosen))


def _has_gpu() -> bool:
    import torch  # seconds, which only a benchmark of a GPU is worth

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
