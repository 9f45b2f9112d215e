"""The code lives in rooms: who may import whom is one table, rooms are small, and public names stay where they are."""

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("launcher", "daemon", "ckpt", "comm")
MOST_LINES = 600

EDGES = {
    "ckpt.errors": "",
    "ckpt.format": "ckpt.errors",
    "ckpt.link": "ckpt.errors ckpt.format",
    "ckpt.state": "ckpt.errors ckpt.format",
    "ckpt.capture": "ckpt.errors ckpt.format ckpt.link ckpt.state",
    "ckpt.transport": "ckpt.errors ckpt.format ckpt.link ckpt.capture",
    "ckpt.convert": "ckpt.errors ckpt.format ckpt.state",
    "ckpt": "ckpt.*",
    "ckpt.integrations": "ckpt ckpt.state ckpt.errors ckpt.format",
    "daemon.trust": "ckpt.errors ckpt.format",
    "daemon.etcd": "daemon.trust ckpt.errors ckpt.format",
    "daemon.base": "daemon.trust daemon.etcd ckpt.errors ckpt.format",
    "daemon.run": "daemon.base daemon.etcd ckpt.errors ckpt.format",
    "daemon.slots": "daemon.trust daemon.run daemon.base ckpt.errors ckpt.format",
    "daemon.tier": "daemon.trust daemon.slots daemon.run daemon.base daemon.etcd ckpt.convert ckpt.errors ckpt.format",
    "daemon.peers": "daemon.trust daemon.tier daemon.slots daemon.run daemon.base ckpt.errors ckpt.format",
    "daemon.trainers": "daemon.peers daemon.slots daemon.run daemon.base ckpt.errors ckpt.format",
    "daemon.comparison": "daemon.peers daemon.slots daemon.run daemon.base daemon.etcd ckpt.errors ckpt.format",
    "daemon.root": "daemon.comparison daemon.peers daemon.run daemon.base daemon.etcd ckpt.errors ckpt.format",
    "daemon.health": "daemon.peers daemon.run daemon.base",
    "daemon.inject": "daemon.trainers daemon.slots daemon.run daemon.base daemon.etcd ckpt.errors ckpt.format",
    "daemon": "daemon.* ckpt.errors ckpt.format",
    "daemon.doctor": "daemon.trust daemon.slots daemon.base daemon.etcd ckpt.errors ckpt.format",
    "daemon.exporter": "ckpt.errors",
    "daemon.ctl": "daemon daemon.doctor daemon.exporter daemon.trust daemon.tier daemon.slots daemon.run daemon.base"
    " daemon.etcd ckpt.convert ckpt.errors ckpt.format",
    "launcher.rendezvous": "daemon.trust daemon.run daemon.base daemon.etcd ckpt.errors ckpt.format",
    "launcher.workers": "",
    "launcher.inject": "daemon.run daemon.base daemon.etcd ckpt.errors ckpt.format",
    "launcher": "launcher.rendezvous launcher.workers daemon.trust daemon.run daemon.base daemon.tier"
    " ckpt ckpt.link ckpt.errors ckpt.format",
    "comm.errors": "",
    "comm.ops": "comm.errors",
    "comm.plan": "comm.errors",
    "comm.net": "comm.ops comm.plan comm.errors",
    "comm.schemes": "comm.net comm.errors",
    "comm.zen": "comm.net comm.ops comm.errors",
    "comm.spardl": "comm.net comm.ops comm.errors",
    "comm.compress": "comm.net comm.ops comm.errors",
    "comm.cupcake": "comm.plan",
    "comm.espresso": "comm.cupcake comm.plan comm.errors",
    "comm.runtime": "comm.schemes comm.compress comm.net comm.plan comm.errors",
    "comm.measure": "comm.runtime comm.compress comm.net comm.plan",
    "comm.trial": "comm.runtime comm.net comm.errors",
    "comm": "comm.*",
    "comm.cli": "comm comm.*",
}
"""Room → the rooms that it may import, for types too; what is not here is forbidden.

A room is a folder without the rooms below it: "daemon" is `daemon/*.py`. Three modules at the top are rooms by
themselves: the two `errors`, and `schemes`, which users import and other rooms too. "daemon.*" is every
room below that folder but those in `ABOVE`. What a reader may not expect:

- `daemon.base` reads messages (`ckpt.format`): it has the socket that strangers knock at.
- `daemon.run` has what is known of hangs: the view of a job says so, and the root and the trainers' sessions read it.
- `daemon.comparison` fetches digests from peers. It is apart from `daemon.root`, which otherwise needs no peers.
- `ckpt.link` (the way to the daemon, also of launchers) and `ckpt.state` (the registered objects as a tree) are apart
  from `ckpt.capture`: `ckpt.convert` needs the tree, and no capture.
- `comm.schemes` names classes of other rooms as text; they are imported when a scheme is asked for.
- `resilient_run` itself (`launcher/facade`) has no line: it imports lazily what users ask it for. Only `launcher` may
  import it.
"""
ABOVE = ("daemon.ctl", "comm.cli", "ckpt.integrations")
"""Rooms that import the folder which they are in."""
# The interpreter loads it by path as `sitecustomize`, so it has no package to import relative to.
OUTSIDE_THE_PACKAGE = "launcher.workers.zygote"


def modules() -> dict[str, Path]:
    """Return the modules of all folders by their dotted names below `resilient_run`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "facade" not in path.parts
    }


MODULES = modules()


def room_of(name: str) -> str:
    """Return the room that a dotted name below `resilient_run` is in: a module, or something in one."""
    room = name
    while room not in EDGES:
        room = room.rpartition(".")[0]
        assert room, f"{name} is in no room"
    return room


def imports_of(module: str) -> list[tuple[int, str]]:
    """Return (relative level, dotted name below `resilient_run`, "" for itself) of every import of ours in a module."""
    found: list[tuple[int, str]] = []
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names if alias.name.split(".")[0] == "resilient_run"]
        elif isinstance(node, ast.ImportFrom):
            above = ["resilient_run", *package.split(".")]
            above = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*above, node.module]))
            if base.split(".")[0] == "resilient_run":
                found += [(node.level, f"{base}.{alias.name}") for alias in node.names]
    return [(level, name.partition(".")[2]) for level, name in found]


def allowed(room: str) -> set[str]:
    """Return the rooms that `room` may import, stars written out."""
    rooms = set()
    for name in EDGES[room].split():
        if name.endswith(".*"):
            below = {other for other in EDGES if other.startswith(name[:-1])}
            rooms |= below - set(ABOVE)
        else:
            rooms.add(name)
    return rooms


def is_facade(path: Path) -> bool:
    """Tell whether a module only has names of another one."""
    kinds = {type(node) for node in ast.parse(path.read_text()).body}
    return kinds <= {ast.Expr, ast.ImportFrom, ast.Assign} and "__all__" in path.read_text()


def test_table_has_no_cycle() -> None:
    order = list(TopologicalSorter({room: allowed(room) for room in EDGES}).static_order())
    assert set(order) == EDGES.keys(), "the table names a room that it has no line for"


def test_every_folder_is_in_the_table() -> None:
    folders = {module.rpartition(".")[0] for module in MODULES if "." in module}
    assert not folders - EDGES.keys()
    assert not EDGES.keys() - MODULES.keys()


def test_rooms_import_what_the_table_says() -> None:
    wrong = []
    for module in MODULES:
        room, folder = room_of(module), module.split(".")[0]
        for level, name in imports_of(module):
            if level == 0 and name.split(".")[0] == folder and module != OUTSIDE_THE_PACKAGE:
                wrong.append(f"{module} imports {name} of its own folder absolutely")
            elif level and name.split(".")[0] != folder:
                wrong.append(f"{module} leaves its folder: import {name} absolutely")
            elif name.split(".")[0] not in FOLDERS:
                if folder != "launcher":
                    wrong.append(f"{module} imports resilient_run itself")
            elif room_of(name) != room and room_of(name) not in allowed(room):
                wrong.append(f"{module} imports {name}: {room} may not import {room_of(name)}")
    assert not wrong, "\n".join(wrong)


def test_table_says_no_more_than_is_used() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        used[room_of(module)] |= {room_of(name) for _, name in imports_of(module) if name.split(".")[0] in FOLDERS}
    unused = {
        room: sorted(rest)
        for room, line in EDGES.items()
        if (rest := {name for name in line.split() if not name.endswith(".*")} - used[room])
    }
    assert not unused


def test_files_stay_short() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: lines for module, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_room_says_what_is_in_it() -> None:
    silent = [module for module, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def is_missing(name: str) -> bool:
    """Tell whether a name is that of an integration whose framework is not installed (extra `zoo`)."""
    parts = name.split(".")
    return parts[1:2] == ["integrations"] and len(parts) > 2 and find_spec(parts[2]) is None


def resolved(name: str) -> Any:
    """Return what a dotted name stands for, importing as much of it as is a module."""
    found = import_module("resilient_run")
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def public_names() -> set[str]:
    """Return every name of ours that documents and examples say, in full; in `ticks` without `resilient_run` too."""
    names = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")):
        text = path.read_text()
        for module, listed in re.findall(r"from (resilient_run[\w.]*) import ([\w, ]+)", text):
            names |= {f"{module}.{name.strip()}" for name in listed.split(",")}
        names |= set(re.findall(r"\bresilient_run(?:\.\w+)+", text))
        short = re.findall(rf"`((?:{'|'.join(FOLDERS)})(?:\.\w+){{2,}})`", text)
        names |= {f"resilient_run.{name}" for name in short if path.suffix == ".md"}
    api = (ROOT / "docs" / "api.md").read_text()
    for module, name in re.findall(r"`(\w+)\.(\w+)[`(]", api):
        if f"comm.{module}" in MODULES:
            names.add(f"resilient_run.comm.{module}.{name}")
    return names


@pytest.mark.filterwarnings("ignore")
def test_documented_names_exist() -> None:
    names = public_names()
    assert len(names) > 30
    for name in sorted(name for name in names if not is_missing(name)):
        assert resolved(name) is not None, name


def test_documented_files_exist() -> None:
    texts = [*(ROOT / "docs").rglob("*.md"), *MODULES.values(), *(ROOT / "tests").glob("*.py")]
    named = {
        (str(text.relative_to(ROOT)), name)
        for text in texts
        for name in re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/]+\.py\b", text.read_text())
    }
    assert len(named) > 10
    assert {(text, name) for text, name in named if not (ROOT / name).is_file()} == set()


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not twice, f"a class name is used once in the whole product; rename the new one of {twice}"
