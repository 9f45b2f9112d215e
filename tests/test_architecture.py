"""The walks in docs/internals/architecture.md name what is there, and its picture is what its source draws."""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("launcher", "daemon", "ckpt", "comm")
DOCUMENT = (ROOT / "docs/internals/architecture.md").read_text()
WALKS = {"step": "### A step, function by function", "gradient": "## The path of a gradient"}
LEAST_STEPS, MOST_STEPS = 8, 16

STEP = re.compile(r"(\d+)\. `([\w.]+)` \(`([\w/]+\.py)`\) [^A-Z].*\.")
"""Number, name and file of a function, and what it does."""

HEADING = re.compile(r"\*(.+):\*")
"""Of a block: which process, or which thread; and after "in" the function from which the block begins."""

CLASS_OR_METHOD = re.compile(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)?)`")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Step:
    number: int
    name: str
    file: str
    line: str


@dataclass(frozen=True)
class Block:
    heading: str
    steps: list[Step] = field(default_factory=list)


def section(heading: str) -> list[str]:
    """Return the lines of a section of the document, up to the next heading."""
    lines = DOCUMENT.splitlines()
    start = lines.index(heading) + 1
    end = next(n for n in range(start, len(lines) + 1) if n == len(lines) or lines[n].startswith("#"))
    return lines[start:end]


def walk(name: str) -> list[Block]:
    """Return the blocks of a walk; every line that has a number must have the form of a step."""
    blocks: list[Block] = []
    for line in section(WALKS[name]):
        if heading := HEADING.fullmatch(line):
            blocks.append(Block(heading[1]))
        elif re.match(r"\s*\d+\.", line):
            step = STEP.fullmatch(line)
            assert step, f"no step of a walk, which is 1. `Class.method` (`path/file.py`) does something. : {line}"
            assert blocks, f"no heading says where this runs: {line}"
            blocks[-1].steps.append(Step(int(step[1]), step[2], step[3], line))
    return blocks


@cache
def functions(file: str) -> dict[str, Function]:
    """Return what a file has as `function` and `Class.method`: nothing, if it is not there."""
    found: dict[str, Function] = {}
    path = ROOT / file
    for node in ast.parse(path.read_text()).body if path.is_file() else []:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, Function)}
    return found


@cache
def classes() -> dict[str, set[str]]:
    """Return the files of each class."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(ROOT)))
    return found


def places(name: str) -> Iterator[tuple[str, str]]:
    """Yield file and name of each method `Class.method` of the code."""
    yield from ((file, name) for file in classes().get(name.partition(".")[0], ()) if name in functions(file))


def reached(file: str, name: str) -> set[str]:
    """Return the names that a function and its helpers mention: methods of its class, and functions of its file."""
    known, owner = functions(file), name.rpartition(".")[0]
    seen, waiting, mentioned = set[str](), [name] if name in known else [], set[str]()
    while waiting:
        seen.add(at := waiting.pop())
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(known[at])
            if isinstance(node, ast.Attribute | ast.Name)
        }
        mentioned |= names
        helpers = {helper for each in names for helper in (each, f"{owner}.{each}") if helper in known}
        waiting += helpers - seen
    return mentioned


@pytest.mark.parametrize("name", WALKS)
def test_walk_has_its_steps(name: str) -> None:
    numbers = [step.number for block in walk(name) for step in block.steps]
    assert LEAST_STEPS <= len(numbers) <= MOST_STEPS
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(block.steps for block in walk(name))


@pytest.mark.parametrize("name", WALKS)
def test_what_walks_name_exists(name: str) -> None:
    steps = [step for block in walk(name) for step in block.steps]
    gone = [f"{step.file} has no {step.name}" for step in steps if step.name not in functions(step.file)]
    assert not gone, "the walks in docs/internals/architecture.md have to follow the code"
    said = {each for line in section(WALKS[name]) for each in CLASS_OR_METHOD.findall(line)}
    assert {each for each in said if not (list(places(each)) if "." in each else classes().get(each))} == set()


@pytest.mark.parametrize("name", WALKS)
def test_functions_of_a_block_are_reached_from_above(name: str) -> None:
    unlinked = []
    for block in walk(name):
        above = [reached(*place) for each in CLASS_OR_METHOD.findall(block.heading) for place in places(each)]
        for step in block.steps:
            if above and not any(step.name.rpartition(".")[2] in names for names in above):
                unlinked.append(f"nothing above mentions it: {step.line}")
            above.append(reached(step.file, step.name))
    assert not unlinked


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("step_picture")


def test_picture_is_what_its_source_draws(picture: ModuleType) -> None:
    assert picture.PICTURE.read_text() == picture.draw(), "draw it anew: python docs/step_picture.py"
    assert f"](../{picture.PICTURE.name})" in DOCUMENT


def test_the_terminal_of_readme_shows_the_run_that_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    recording = import_module("recorded_run")
    recorded = json.loads(recording.RECORD.read_text())
    assert recording.PICTURE.read_text() == recording.draw(recorded), "draw it anew: python docs/recorded_run.py"
    readme = (ROOT / "README.md").read_text()
    assert f"](docs/{recording.PICTURE.name})" in readme
    (recovered,) = (line for _, line in recorded["lines"] if "recovered in" in line)
    assert f"{recovered.split()[3]} s later training goes on" in readme


def test_pictures_of_the_concepts_are_what_their_source_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    pictures, page = import_module("concept_pictures").PICTURES, (ROOT / "docs" / "concepts.md").read_text()
    for path, draw in pictures.items():
        assert path.read_text() == draw(), "draw it anew: python docs/concept_pictures.py"
        assert f"]({path.name})" in page


def test_picture_has_the_numbers_of_the_walk(picture: ModuleType) -> None:
    drawn = {int(number) for number in re.findall(r'class="number">(\d+)<', picture.draw())}
    assert drawn == {step.number for block in walk("step") for step in block.steps}
