"""`benchmarks/reproduce.py`: its table is that of the scripts, documents and results, and what is stale is found."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import catalogue
import pytest
import reproduce
from catalogue import BENCHMARKS, KEPT, RESULTS, ROOT, Benchmark, Result, digests, entries, latest, name_of
from reproduce import PAGE, changed, lacking, list_of_results, outdated, pages, select
from test_docs import CONTENTS, listed, rows

ENTRIES = [result for _, result in entries()]
HARNESS = {"catalogue", "jobs", "lab_job", "report"}
"""Modules of benchmarks/ that start, shape and print; what they import does not tell what figures depend on."""


def test_the_table_names_what_exists() -> None:
    for benchmark in BENCHMARKS:
        assert [each for each, digest in digests(benchmark).items() if digest == "absent"] == []
        script = ROOT / benchmark.script
        text = (script / "__main__.py" if script.is_dir() else script).read_text() + Path(
            reproduce.__file__
        ).read_text()
        for result in benchmark.results:
            for option in re.findall(r"(?<!\S)--[a-z-]+", f"{result.arguments} {benchmark.output}"):
                assert f'"{option}"' in text or option == "--json", f"{benchmark.script} has no {option}"
    names = [result.name for result in ENTRIES]
    assert len(names) == len(set(names)) > 40


def test_every_script_that_writes_a_result_is_in_the_table() -> None:
    writers = {path for path in (ROOT / "benchmarks").glob("*.py") if "write_json(" in path.read_text()}
    listed = {ROOT / benchmark.script for benchmark in BENCHMARKS}
    assert len(writers) > 25
    assert writers - listed == {ROOT / "benchmarks" / "report.py"}


def imported(path: Path) -> Iterator[str]:
    """Yield what a benchmark imports of the package and of its own folder, as paths from the root."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            inside = module.removeprefix("resilient_run.").replace(".", "/")
            found = f"{inside}.py" if module.startswith("resilient_run.") else f"benchmarks/{inside}.py"
            if (ROOT / found).is_file() and module not in HARNESS:
                yield found


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.script)
def test_what_a_benchmark_imports_is_what_its_figures_depend_on(benchmark: Benchmark) -> None:
    own = (benchmark.script, *benchmark.depends)
    files = [ROOT / each for each in own if each.startswith("benchmarks/") and each.endswith(".py")]
    needed = {each for path in files if path.stem not in HARNESS for each in imported(path)}
    assert {each for each in needed if not any(each == path or each.startswith(f"{path}/") for path in own)} == set()


def test_the_list_of_results_is_of_today() -> None:
    assert PAGE.read_text() == list_of_results(), "write it anew: python benchmarks/reproduce.py --page"


def test_every_result_is_the_newest_of_the_table_or_kept_and_listed() -> None:
    newest = {path.name for result in ENTRIES if (path := latest(result.name))}
    there = {path.name for path in RESULTS.iterdir()}
    pictures = {
        file.name for result in ENTRIES for file in map(Path, result.arguments.split()) if file.parent.name == "results"
    }
    text = "\n".join(page.read_text() for page in pages())
    cited = set(re.findall(r"\d{4}-\d\d-\d\d-[\w-]+\.json", text))
    assert cited <= newest | KEPT.keys(), "older or unknown: cite the newest, or list it in KEPT of catalogue.py"
    assert there == newest | KEPT.keys() | pictures, "neither in the table nor in KEPT"
    assert {name for name in there if f"results/{name})" not in text} == set(), "not in the list of results"
    assert not newest & KEPT.keys()


PAPERS = {"ZEN, OSDI 2025": "ZEN ", "SparDL": "SparDL "}


def test_figures_are_those_that_the_page_of_papers_has_results_for() -> None:
    """An item of the page of papers that shows a result has its figures and tables in the entry of that result."""
    shown = set()
    for heading in CONTENTS:
        for row in rows(heading):
            figures = [item for item in listed(row) if item.startswith(("Fig. ", "Table "))]
            files = re.findall(r"results/(\d{4}-\d\d-\d\d-[\w-]+\.json)", row)
            names = {PAPERS.get(heading, "") + item.removeprefix("Fig. ") for item in figures}
            shown |= {(name_of(file), name) for file in files if file not in KEPT for name in names}
    assert shown == {(result.name, figure) for result in ENTRIES for figure in result.figures}


def test_constants_of_committed_results_are_those_of_the_newest() -> None:
    results = [path for result in ENTRIES if (path := latest(result.name))]
    assert {path.name: reasons for path in results if (reasons := list(outdated(path)))} == {}
    goodput = latest("goodput")
    assert goodput is not None
    assert len(json.loads(goodput.read_text())["constants"]) == 8


def write(folder: Path, file: str, document: dict[str, Any]) -> Path:
    path = folder / file
    path.write_text(json.dumps(document))
    return path


def test_a_constant_that_is_not_that_of_today_is_found(tmp_path: Path) -> None:
    """The real script, with results of a recovery; then another recovery is measured."""
    for name in ("recovery-time", "capture-stall-1024"):
        newest = latest(name)
        assert newest is not None
        (tmp_path / newest.name).write_bytes(newest.read_bytes())
    result = tmp_path / "2026-01-01-goodput.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "goodput.py"),
        "--results",
        str(tmp_path),
        "--json",
        str(result),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert list(outdated(result)) == []
    (benchmark,) = [benchmark for benchmark, each in entries() if each.name == "goodput"]
    assert changed(benchmark, result) == []

    document = json.loads(result.read_text())
    document["constants"]["recovery_s"]["value"] = 0.466
    write(tmp_path, result.name, document)
    seconds = {
        "resilient-run": {"median": 0.31},
        "torchrun": {"median": document["constants"]["torchrun_recovery_s"]["value"]},
    }
    later = write(tmp_path, "2099-01-01-recovery-time.json", {"results": {"seconds": seconds}})
    assert list(outdated(result)) == ["recovery_s is 0.466 here, and 0.31 in 2099-01-01-recovery-time.json"]

    write(tmp_path, later.name, {"results": {}})
    assert len(list(outdated(result))) == 2, "both constants of a result that has none of them"


def test_code_that_is_not_that_of_today_is_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    script, file = tmp_path / "script.py", tmp_path / "room" / "a.py"
    script.write_text("1")
    file.write_text("2")
    benchmark = Benchmark(script="script.py", depends=("room",), results=())
    result = write(tmp_path, "result.json", {"code": digests(benchmark, tmp_path)})
    assert changed(benchmark, result, root=tmp_path) == []
    (tmp_path / "room" / "__pycache__").mkdir()
    (tmp_path / "room" / "__pycache__" / "a.pyc").write_text("made by python")
    assert changed(benchmark, result, root=tmp_path) == []
    file.write_text("3")
    assert changed(benchmark, result, root=tmp_path) == ["room"]
    file.rename(file.with_name("b.py"))
    script.write_text("4")
    assert changed(benchmark, result, root=tmp_path) == ["script.py", "room"]
    more = Benchmark(script="script.py", depends=("room", "new"), results=())
    assert changed(more, result, root=tmp_path) == ["script.py", "room", "new"]
    assert changed(benchmark, write(tmp_path, "old.json", {"results": {}}), root=tmp_path) is None


def test_a_result_without_digests_is_of_unknown_age() -> None:
    (entry,) = [(benchmark, result) for benchmark, result in entries() if result.name == "fuzz"]
    word, (reason,) = reproduce.state(*entry)
    assert word == "of unknown age"
    assert re.match(r"committed \d{4}-\d\d-\d\d, |git has no commit of it", reason)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--figure", "9.99"], "no figure 9.99: there are 3.1, "), (["zem"], "no result zem: there are recovery-time, ")],
)
def test_what_is_not_in_the_table_is_refused_in_one_line(arguments: list[str], told: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "reproduce.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert told in line
    assert "Traceback" not in done.stderr


def test_figures_and_names_select() -> None:
    assert [result.name for _, result in select([], ["6.16"])] == [
        "interleaving",
        "interleaving-fsdp2",
        "interleaving-50",
        "interleaving-200-b",
    ]
    assert [result.name for _, result in select(["goodput", "zen"], ["spardl 8"])] == [
        "zen",
        "spardl-convergence",
        "goodput",
    ]
    assert len(select([], [])) == len(ENTRIES)


def test_what_a_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(reproduce, "_has_gpu", lambda: False)
    result = Result(name="a", minutes=1, needs=("absent/bin/python", "no_such_package", "json"))
    greedy = Benchmark(script="a.py", depends=(), results=(result,), root=True, gpu=True, cores=100_000)
    told = list(lacking(greedy, result))
    for line, begin in zip(
        told, ("root", "100000 cores", "a GPU", "absent/bin/python:", "no_such_package:"), strict=True
    ):
        assert line.startswith(begin)
    plain = Benchmark(script="a.py", depends=(), results=(), cores=1)
    assert list(lacking(plain, Result(name="a", minutes=1))) == []


def test_a_result_is_replaced_only_by_a_run_that_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    script = tmp_path / "script.py"
    writes = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write(sys.argv[1])\n"
    benchmark = Benchmark(script=str(script), depends=(), results=())
    for text, said, problem in (
        (writes, "one", None),
        (writes + "sys.exit(3)", "two", "ended with status 3"),
        ("", "three", "ended without a result"),
        (writes + f"open({str(script)!r}, 'a').write('#')", "four", "changed meanwhile"),
    ):
        script.write_text(text)
        found = reproduce.run(benchmark, Result(name="some", arguments=said, minutes=1))
        assert (found is None) == (problem is None)
        assert problem is None or problem in str(found)
        (file,) = (tmp_path / "results").iterdir()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-some\.json", file.name)
        assert file.read_text() == "one"
