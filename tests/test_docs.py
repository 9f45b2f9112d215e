"""Documents: links and anchors lead somewhere, the navigation has every page, quoted messages are real
ones, generated pages and plots are of today, and the page of papers has all of them and names what is there."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from resilient_run.comm.compress.compressors import NAMES
from resilient_run.comm.schemes import SCHEMES
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.run.faults import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FOLDERS = ("launcher", "daemon", "ckpt", "comm", "tests", "examples", "benchmarks", "systemd")

FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return the page without its blocks of code, in which nothing is a link or a heading."""
    return FENCE.sub("", page.read_text())


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    found, seen = set(), Counter[str]()
    for heading in HEADING.findall(prose(page)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(page: Path) -> Iterator[str]:
    """Yield the targets of the links of a page that lead to a file, a folder or a heading of this repository."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", prose(page))
    yield from (target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target))


def broken(page: Path, target: str) -> str | None:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return f"{target}: no such file"
    if anchor and (file.suffix != ".md" or anchor not in anchors(file)):
        return f"{target}: no such heading in {shown(file)}"
    return None


def test_a_heading_has_the_anchor_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c/d (TLS 1.3)\n```sh\n# no heading\n```\n## Same\n## Same\n")
    assert anchors(page) == {"a-b-cd-tls-13", "same", "same-1"}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    assert [wrong for target in links(page) if (wrong := broken(page, target))] == []


LONGEST = {
    ("comm.md", "comm/schemes.md", "comm/planning.md"): 4850,
    ("comm/measured.md",): 1810,
    ("internals/architecture.md",): 1550,
    ("internals/protocol.md",): 3700,
    ("internals/papers.md",): 2500,
    ("internals/comm-code.md", "internals/engines.md", "internals/loops.md"): 2600,
    ("internals/versions.md", "internals/netlab.md"): 750,
    ("failure-model.md",): 2300,
    ("troubleshooting.md",): 2350,
    ("security.md",): 1500,
    ("doctor.md",): 600,
    ("injection.md",): 750,
    ("operations.md", *(f"operations/{page.name}" for page in sorted(DOCS.glob("operations/*.md")))): 8000,
    ("../README.md",): 710,
    ("index.md", "quickstart.md", "concepts.md", "migration.md"): 3100,
    ("api.md",): 2250,
    tuple(f"reference/{page.name}" for page in sorted(DOCS.glob("reference/*.md"))): 320,
    ("logging.md",): 500,
    ("debugging.md",): 500,
    ("worth-it.md",): 500,
    ("frameworks.md",): 1050,
    tuple(f"frameworks/{page.name}" for page in sorted(DOCS.glob("frameworks/*.md"))): 3450,
    ("comparison.md",): 1400,
    ("measurements.md",): 1800,
    ("glossary.md",): 900,
    ("commands.md",): 3050,
    tuple(str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md")) if page.name != "messages.md"): 50000,
}
"""How many words pages have together at most. The page of messages is not read but searched, and quotes the source."""


@pytest.mark.parametrize("names", LONGEST, ids=lambda names: "all" if len(names) > 20 else names[-1])
def test_pages_are_short(names: tuple[str, ...]) -> None:
    """Pages, cells (25 words) and paragraphs (80 words) stay short enough to be read."""
    texts = [(DOCS / name).read_text() for name in names]
    assert sum(len(text.split()) for text in texts) <= LONGEST[names]
    plain = [LINK.sub("]", FENCE.sub("", text)) for text in texts]
    cells = [cell for text in plain for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    # A paragraph ends where another begins: after an empty line, at an item, a heading or a row.
    paragraphs = [paragraph for text in plain for paragraph in re.split(r"\n(?=\s*(?:\n|[-*#|>]|\d+\. ))", text)]
    paragraphs = [paragraph for paragraph in paragraphs if not paragraph.lstrip().startswith("|")]
    assert [cell for cell in cells if len(cell.split()) > 25] == []
    assert [paragraph for paragraph in paragraphs if len(paragraph.split()) > 80] == []


def test_source_names_documents_that_exist() -> None:
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {
        (path, name) for path in sources for name in re.findall(r"\bdocs/[\w/-]+\.\w+(?:#[\w-]+)?", path.read_text())
    }
    assert len(named) > 20
    assert {(shown(path), wrong) for path, name in named if (wrong := broken(ROOT / "README.md", name))} == set()


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert {page.relative_to(DOCS).with_suffix("").name for page in DOCS.glob("*.md")} <= {
        page.name.removesuffix(".html") for page in tmp_path.iterdir()
    }
    lost = set()
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^":#?/][^":#?]*)["#?]', page.read_text()):
            path = (page.parent / unquote(target)).resolve()
            if not path.is_relative_to(tmp_path) or not path.exists():
                lost.add(f"{page.relative_to(tmp_path)}: {target}")
    assert lost == set()


def test_every_error_of_the_log_says_what_to_do(script: Callable[[str], Any]) -> None:
    """In a second part of the message, on the page of messages, or in troubleshooting."""
    catalogue = script("message_catalogue")
    parts = [part for _, quote in catalogue.quoted(catalogue.TROUBLE) for part in catalogue.fixed_parts(quote)]
    errors = [message.text for message in catalogue.messages() if message.kind == "error"]
    assert len(errors) > 20
    unsaid = [text for text in errors if not re.search(r"[:;] [a-z]", text) and text not in catalogue.EXPLAINED]
    assert [text for text in unsaid if not any(part in text for part in parts)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("An etcd that is never told: let it forget old changes.", ["let it forget"]),
        ("| `x` is no file of this format | ok |", ["is no file"]),
        ("It is no longer there. There is no file.\n```sh\nwhoever\n```\n`whoever` [a](whoever.md)", []),
        ("Here " + "and there " * 16 + "it is", ["35 words"]),
        ("Here " + "and there; " * 16 + "it is", []),
    ],
)
def test_what_the_check_of_the_english_finds(script: Callable[[str], Any], text: str, wrong: list[str]) -> None:
    prose = script("prose")
    found = [told for _, sentence in prose.sentences(text) for told in prose.wrong("here", sentence)]
    assert len(found) == len(wrong)
    assert all(part in told for part, told in zip(wrong, found, strict=True))


def test_documents_and_messages_are_plain_english(script: Callable[[str], Any]) -> None:
    assert list(script("prose").findings()) == []


def test_navigation_has_every_page_once() -> None:
    (nav,) = re.findall(r"^nav:\n(.*?)(?=^\S|\Z)", (ROOT / "mkdocs.yml").read_text(), re.M | re.S)
    listed = re.findall(r": (\S+\.(?:md|ipynb))$", nav, re.M)
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in pages)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a script below `docs/`."""
    monkeypatch.syspath_prepend(DOCS)
    return import_module


@pytest.mark.parametrize("name", ["command_reference", "message_catalogue"])
def test_a_generated_page_is_of_today(script: Callable[[str], Any], name: str) -> None:
    made = script(name)
    assert made.PAGE.read_text() == made.page(), f"write it anew: python -P docs/{name}.py"


def test_troubleshooting_quotes_what_is_printed(script: Callable[[str], Any]) -> None:
    catalogue = script("message_catalogue")
    printed = "\n".join(message.text for message in catalogue.messages()).replace("`", "")
    parts = {(quote, part) for _, quote in catalogue.quoted(catalogue.TROUBLE) for part in catalogue.fixed_parts(quote)}
    assert len(parts) > 60
    assert {(quote, part) for quote, part in parts if part not in printed} == set()


UNITS = {"_mbit_s": "Mbit/s", "_s": "s", "_percent": "%", "_bytes": "bytes", "_celsius": "°C", "_steps": "steps"}
"""How the name of a setting ends that has a unit."""


def values_of(name: str, item: Field[Any]) -> str:
    """Return which values a setting may have, and in which unit, as the page of settings says it."""
    limits = item.metadata.get("limits")
    if limits and limits.choices:
        return ", ".join(f'`"{choice}"`' for choice in limits.choices)
    if item.type in (str, str | None):
        return "text"
    low, high = (limits.low or 0, limits.high) if limits else (0, None)
    unit = next((f" {unit}" for ending, unit in UNITS.items() if name.endswith(ending)), "")
    bounds = f"≥ {low:g}" if high is None else f"{low:g} to {high:.10g}"
    return bounds + unit


def settings() -> list[tuple[str, str, str]]:
    """Return name, default and values of each setting, as the page of settings says them."""
    found = []
    for section in fields(Policy):
        for item in fields(section.type):
            default = f"`{json.dumps(item.default)}`" if isinstance(item.default, str) else f"{item.default or 0:.10g}"
            default = "none" if item.default is None else default
            found.append((f"`{section.name}.{item.name}`", default, values_of(item.name, item)))
    return found


def test_settings_are_those_of_the_configuration() -> None:
    told = []
    for row in (line for line in (DOCS / "operations/configuration.md").read_text().splitlines() if "| `" in line):
        names, defaults, values, meaning = row.removeprefix("| ").removesuffix(" |").split(" | ", 3)
        assert " | " not in meaning, row
        names_and_defaults = zip(names.split(", "), defaults.split(", "), strict=True)
        told += [(name, default, values) for name, default in names_and_defaults]
    assert sorted(told) == sorted(settings())


def test_pages_of_frameworks_show_what_their_examples_print(script: Callable[[str], Any]) -> None:
    """By its commands and the example's present lines; the worker that was killed is the one that came back."""
    runs = script("killed_runs")
    assert runs.EXAMPLES.keys() == {path.stem for path in runs.FOLDER.glob("*.md")} - {"data"}
    for name, example in runs.EXAMPLES.items():
        found = runs.recorded(name)
        assert found is not None, name
        shown = runs.block(name, found["struck"], found["printed"])
        assert found[0] == shown, f"record it again: python docs/killed_runs.py {name}"
        (worker,) = re.findall(r"SIGKILL to (rank 1 \(pid \d+\))$", found["struck"])
        recovered = rf"recovered in [\d.]+ s \({re.escape(worker)} on host \S+ was killed by SIGKILL\): step \d+ from"
        assert re.search(recovered, found["printed"]), name
        assert re.search(example.ends, found["printed"]), name


def test_plots_show_the_committed_results(script: Callable[[str], Any]) -> None:
    pictures = script("result_pictures")
    drawn = {name: draw() for name, draw in pictures.PLOTS.items()}
    there = {path.name: path.read_text() for path in pictures.FOLDER.iterdir()}
    assert there == drawn, "draw them anew: python docs/result_pictures.py"
    unseen = {name for name in there if not any(f"plots/{name})" in page.read_text() for page in PAGES)}
    assert not unseen


PAPERS = DOCS / "internals/papers.md"
KIND = r"§|(?:Fig\.|Table|Alg\.|Def\.|Thm|Lemma|Cor\.|Eq\.|Problem) "
CONTENTS = {
    "Thesis, chapters 1, 2, 7 and 8": (
        "§1.1 to 1.2, §2.1 to 2.4, §7.1 to 7.3, §8.1 to 8.2, Fig. 1.1, Fig. 2.1 to 2.4, Table 2.1"
    ),
    "Thesis, chapter 3: Zen": (
        "§3.1, §3.2.1 to 3.2.5, §3.3.1 to 3.3.4, §3.4.1 to 3.4.3, "
        "Fig. 3.1 to 3.18, Table 3.1 to 3.2, Alg. 3.1 to 3.3, Def. 3.1 to 3.6, Thm 3.1 to 3.3, "
        "Lemma 3.1 to 3.5, Problem 3.1"
    ),
    "ZEN, OSDI 2025": (
        "§1, §2.1 to 2.4, §3.1 to 3.3, §4, §5.1 to 5.3, §6, §7, §A, §B.1 to B.2, "
        "Fig. 1 to 18, Table 1 to 4, Alg. 1 to 3, Def. 1 to 8, Thm 1 to 2, Lemma 1 to 2, Eq. 1 to 2, "
        "Problem 1"
    ),
    "Thesis, chapter 4: Espresso": (
        "§4.1, §4.2.1 to 4.2.2, §4.3.1 to 4.3.2, §4.4, §4.5.1 to 4.5.2, §4.6, §4.7.1 to 4.7.3, §4.8.1 to 4.8.7, "
        "Fig. 4.1 to 4.16, Table 4.1 to 4.6, Alg. 4.1 to 4.2, Thm 4.1, Lemma 4.1, Problem 4.1"
    ),
    "Espresso, EuroSys 2023": (
        "§1, §2.1 to 2.3, §3.1 to 3.2, §4.1, §4.2.1 to 4.2.2, §4.3, §4.4.1 to 4.4.3, "
        "§5.1, §5.2.1 to 5.2.4, §5.3 to 5.4, §6, §7, "
        "Fig. 1 to 16, Table 1 to 6, Alg. 1 to 2, Thm 1, Lemma 1"
    ),
    "Thesis, chapter 5: Cupcake": (
        "§5.1, §5.2.1 to 5.2.4, §5.3.1 to 5.3.2, §5.4.1 to 5.4.3, "
        "Fig. 5.1 to 5.9, Table 5.1, Alg. 5.1, Thm 5.1, Eq. 5.1 to 5.5"
    ),
    "Thesis, chapter 6: Gemini": (
        "§6.1, §6.2.1 to 6.2.3, §6.3.1 to 6.3.2, §6.4, §6.5.1 to 6.5.4, §6.6.1 to 6.6.2, §6.7.1 to 6.7.4, "
        "Fig. 6.1 to 6.16, Table 6.1 to 6.2, Alg. 6.1 to 6.2, Thm 6.1, Cor. 6.1, Eq. 6.1 to 6.6, Problem 6.1"
    ),
    "SparDL": (
        "§1, §2, §3.1 to 3.3, §4.1, §4.1.1 to 4.1.3, §5, §6, "
        "Fig. 1 to 8, Table 1 to 3, Alg. 1 to 2, Thm 3.1, Eq. 1 to 7"
    ),
}
"""Sections of the page of papers, and what the papers have."""


def contents(names: str) -> Iterator[str]:
    """Yield each section, figure, … of a list that may have ranges and small words."""
    for item in (item for item in names.split(", ") if not item[0].islower()):
        found = re.fullmatch(rf"({KIND})([\w.]+)(?: to ([\w.]+))?", item)
        assert found, f"no section, figure, table, …: {item}"
        kind, first, last = found.groups()
        before, dot, number = first.rpartition(".")
        numbers = range(int(number), int(last.rpartition(".")[2]) + 1) if last else [number]
        yield from (f"{kind}{before}{dot}{each}" for each in numbers)


def rows(heading: str) -> list[str]:
    """Return the items of the list below a heading of the page of papers."""
    below = PAPERS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line for line in below.splitlines() if line.startswith("- **")]


def listed(row: str) -> Iterator[str]:
    """Yield what an item of the page of papers is about."""
    return contents(row.split("**")[1])


@pytest.mark.parametrize("heading", CONTENTS)
def test_papers_are_complete(heading: str) -> None:
    assert {item for row in rows(heading) for item in listed(row)} == set(contents(CONTENTS[heading]))


@cache
def defined(path: Path) -> set[str]:
    """Return the names at the top level of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                names.add(name)
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                names.add(name)
    return names


def exists(named: str) -> bool:
    """Tell whether there is what the page of papers says: `file::name`, `test_module::test_name`, or a path."""
    file, _, name = named.partition("::")
    files = (ROOT / "tests").rglob(f"{file}.py") if file.startswith("test_") else [ROOT / file]
    return any(path.exists() and (not name or name in defined(path)) for path in files)


def test_papers_name_what_exists() -> None:
    text = "\n".join(row for heading in CONTENTS for row in rows(heading))
    named = [name for name in re.findall(r"`([^`]+)`", text) if "/" in name or name.startswith("test_")]
    assert len(named) > 200
    assert [each for each in named if not exists(each)] == []


def test_the_page_of_engines_has_every_case() -> None:
    listed = set(re.findall(r"`([^`]+)`", (DOCS / "internals/engines.md").read_text()))
    for file, name in (("deepspeed", "CASES"), ("megatron", "CASES"), ("training_stacks", "LAYOUTS")):
        text = (ROOT / "tests" / f"test_{file}.py").read_text()
        (cases,) = re.findall(rf"^{name}\b.*?^}}", text, re.M | re.S)
        assert set(re.findall(r'^    "([^"]+)":', cases, re.M)) <= listed
    fsdp1 = (ROOT / "tests" / "test_fsdp1.py").read_text()
    ways = re.search(r'parametrize\(\n    "way",(.*?)^\)', fsdp1, re.M | re.S)
    assert ways is not None
    assert set(re.findall(r'"([^"]+)"', ways[1])) <= listed


@pytest.mark.parametrize(("page", "names"), [("injection.md", [*KINDS]), ("comm.md", sorted({*SCHEMES, *NAMES}))])
def test_every_fault_scheme_and_compressor_has_a_row(page: str, names: list[str]) -> None:
    rows = "\n".join(line for line in (DOCS / page).read_text().splitlines() if line.startswith("|"))
    missing = [name for name in names if f"`{name}`" not in rows]
    assert not missing, f"add a row to a table of docs/{page} for {missing}"
