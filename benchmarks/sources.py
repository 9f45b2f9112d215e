"""Which files the figures of a script depend on, and a digest of each that comments do not change."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "resilient_run"
ROOMS: Final = ("ckpt", "comm", "daemon", "launcher")
SCRIPTS: Final = ("benchmarks", "tests", "examples")
APART: Final = (
    "benchmarks/catalogue.py",
    "ckpt/integrations/",
    "daemon/doctor/",
    "daemon/exporter/",
    "daemon/inject/",
    "launcher/facade/",
    "launcher/inject/",
)
"""What can be imported in every job, and does not run in one that does not ask for it."""


def digests(paths: Iterable[str], root: Path) -> dict[str, str]:
    """Return a digest of each file that these files and folders below `root` consist of, import or name, by path.

    Imports are followed wherever they stand, and so are strings that are the path of a script or the name of a module
    of the package: workers are started by these. What is `APART` counts only if it is in `paths`. The digest of a
    Python file is of its syntax without strings that stand alone, such as docstrings; that of another, of its bytes.
    """
    found: dict[str, str] = {}
    waiting = [file for path in paths for file in _below(root / path)]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(root).as_posix()
        if name in found:
            continue
        content = file.read_bytes()
        if file.suffix != ".py":
            found[name] = _digest(content)
            continue
        found[name], named = _parsed(content)
        reached = {each for one in named for each in _files(one, file, root)}
        # Importing a module imports the packages that it is in.
        reached |= {folder / "__init__.py" for folder in file.parents if root in folder.parents}
        waiting += [
            each for each in reached if each.is_file() and not each.relative_to(root).as_posix().startswith(APART)
        ]
    return dict(sorted(found.items()))


def _below(path: Path) -> list[Path]:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return [file for file in files if "__pycache__" not in file.parts and file.suffix != ".md"]


def _files(name: str, by: Path, root: Path) -> Iterator[Path]:
    """Yield where a module or script that the file `by` imports or names may be."""
    parts = name.lstrip(".").split(".")
    of_scripts = [by.parent, root, *(root / folder for folder in SCRIPTS)]
    if name.endswith(".py"):
        yield from (folder / name for folder in of_scripts)
        return
    if dots := len(name) - len(name.lstrip(".")):
        modules = [by.parents[dots - 1].joinpath(*parts)]
    elif parts[0] == PACKAGE:
        modules = [(root if parts[1:] and parts[1] in ROOMS else root / "launcher" / "facade").joinpath(*parts[1:])]
    else:
        in_room = by.relative_to(root).parts[0] in ROOMS
        modules = [] if in_room else [folder.joinpath(*parts) for folder in of_scripts]
    for module in modules:
        yield from (module.with_name(f"{module.name}.py"), module / "__init__.py", module / "__main__.py")


@cache
def _parsed(source: bytes) -> tuple[str, frozenset[str]]:
    """Return the digest of a Python file, and what it imports or names, with the dots of relative imports."""
    tree = ast.parse(source)
    named: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                named |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                base = "." * level + (f"{module}." if module else "")
                named |= {base.rstrip(".") if module else base, *(base + alias.name for alias in aliases)}
            case ast.Constant(value=str(text)) if re.fullmatch(rf"[\w/-]+\.py|{PACKAGE}\.[\w.:]+", text):
                named.add(text.partition(":")[0])
    return _digest(repr(_syntax(tree)).encode()), frozenset(named)


def _syntax(node: Any) -> Any:
    """Return syntax as tuples, without what is empty, in which minor versions of Python differ."""
    if isinstance(node, ast.AST):
        fields = [(name, _syntax(value)) for name, value in ast.iter_fields(node)]
        return type(node).__name__, [field for field in fields if field[1] not in (None, [])]
    if isinstance(node, list):
        return [_syntax(each) for each in node if not _is_text(each)]
    return node


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
