"""`benchmarks/reproduce.py`: its table is that of the scripts, documents and results, and what is stale is found."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reproduce
from catalogue import BENCHMARKS, KEPT, RESULTS, ROOT, Benchmark, Result, digests, entries, latest, name_of
from reproduce import PAGE, changed, lacking, list_of_results, outdated, pages, select
from test_docs import CONTENTS, listed, rows

ENTRIES = [result for _, result in entries()]
COMM = "comm"  # with names of files that are only in a test


def test_the_table_names_what_exists() -> None:
    for benchmark in BENCHMARKS:
        assert [each for each in benchmark.also if not (ROOT / each).exists()] == []
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
    def file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    file("benchmarks/script.py", "import other\nWORKER = 'worker.py'\n")
    file("benchmarks/other.py", "import json\n")
    file("benchmarks/worker.py", "def main():\n    from resilient_run.comm.zen import zen\n")
    file("comm/zen/__init__.py", "from resilient_run.daemon.doctor import host")
    file("comm/zen/zen.py", "from ..net import *\nLAZY = 'resilient_run.comm.late:Late'\n")
    file(f"{COMM}/net.py", "x = 1")
    file(f"{COMM}/late.py", "import re")
    file(f"{COMM}/json.py", "not imported: a module of the package is not found beside it")
    file("daemon/doctor/host.py", "apart")
    file("data/model.txt", "1")
    benchmark = Benchmark(script="benchmarks/script.py", also=("data",), results=())
    result = write(tmp_path, "result.json", {"code": digests(benchmark, tmp_path)})
    assert list(digests(benchmark, tmp_path)) == [
        "benchmarks/other.py",
        "benchmarks/script.py",
        "benchmarks/worker.py",
        f"{COMM}/late.py",
        f"{COMM}/net.py",
        "comm/zen/__init__.py",
        "comm/zen/zen.py",
        "data/model.txt",
    ]
    file("data/__pycache__/a.pyc", "made by python")
    file(f"{COMM}/net.py", '"""What it is."""\nx  =  1  # one\n"""What x is."""\n')
    assert changed(benchmark, result, root=tmp_path) == []
    file(f"{COMM}/net.py", "x = 2")
    file("data/model.txt", "2")
    assert changed(benchmark, result, root=tmp_path) == [f"{COMM}/net.py", "data/model.txt"]
    file("benchmarks/worker.py", "import new")
    file("benchmarks/new.py", "")
    assert changed(benchmark, result, root=tmp_path) == [
        "benchmarks/new.py (new)",
        "benchmarks/worker.py",
        f"{COMM}/late.py (gone)",
        f"{COMM}/net.py (gone)",
        "comm/zen/__init__.py (gone)",
        "comm/zen/zen.py (gone)",
        "data/model.txt",
    ]
    (tmp_path / "benchmarks" / "other.py").rename(tmp_path / "benchmarks" / "moved.py")
    file("benchmarks/script.py", "import moved\nWORKER = 'worker.py'\n")
    assert [each for each in changed(benchmark, result, root=tmp_path) if "other" in each or "moved" in each] == []
    nothing = write(tmp_path, "old.json", {"results": {}})
    assert len(changed(benchmark, nothing, root=tmp_path)) == len(digests(benchmark, tmp_path))


def test_every_result_says_what_it_was_made_with() -> None:
    for benchmark, result in entries():
        if path := latest(result.name):
            code = json.loads(path.read_text())["code"]
            assert any(each == benchmark.script or each.startswith(f"{benchmark.script}/") for each in code), path


@pytest.mark.nightly
@pytest.mark.parametrize(
    "entry",
    [(benchmark, result) for benchmark, result in entries() if result.deterministic],
    ids=lambda entry: entry[1].name,
)
def test_a_deterministic_result_is_the_same_to_the_last_digit(entry: tuple[Benchmark, Result], tmp_path: Path) -> None:
    benchmark, result = entry
    newest = latest(result.name)
    assert newest is not None
    again = tmp_path / "result.json"
    arguments = shlex.split(result.arguments.replace("benchmarks/results", str(tmp_path)))
    subprocess.run([sys.executable, benchmark.script, *arguments, "--json", str(again)], cwd=ROOT, check=True)
    assert json.loads(again.read_text())["results"] == json.loads(newest.read_text())["results"]


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
    greedy = Benchmark(script="a.py", results=(result,), root=True, gpu=True, cores=100_000)
    told = list(lacking(greedy, result))
    for line, begin in zip(
        told, ("root", "100000 cores", "a GPU", "absent/bin/python:", "no_such_package:"), strict=True
    ):
        assert line.startswith(begin)
    plain = Benchmark(script="a.py", results=(), cores=1)
    assert list(lacking(plain, Result(name="a", minutes=1))) == []


def test_a_result_is_replaced_only_by_a_run_that_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "digests", lambda benchmark: digests(benchmark, tmp_path))
    (tmp_path / "results").mkdir()
    script = tmp_path / "script.py"
    writes = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write(sys.argv[1])\n"
    benchmark = Benchmark(script=script.name, results=())
    one = "'{\"results\": 1}'"
    for text, said, problem in (
        (writes, one, None),
        (writes + "sys.exit(3)", "two", "ended with status 3"),
        ("", "three", "ended without a result"),
        (writes + f"open({str(script)!r}, 'a').write('\\n2')", "four", "changed meanwhile"),
    ):
        script.write_text(text)
        found = reproduce.run(benchmark, Result(name="some", arguments=said, minutes=1))
        assert (found is None) == (problem is None)
        assert problem is None or problem in str(found)
        (file,) = (tmp_path / "results").iterdir()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-some\.json", file.name)
        made = json.loads(file.read_text())
        assert (made["code"].keys(), made["results"]) == ({"script.py"}, 1)
