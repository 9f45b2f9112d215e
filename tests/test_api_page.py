"""The page of the API has the parameters, defaults and names of the code."""

import ast
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from resilient_run import Checkpointer

pytestmark = pytest.mark.fast

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
MODULES = ("resilient_run", "resilient_run.ckpt.errors")
"""Where a name is looked for that the page does not import."""


def cells() -> Iterator[list[str]]:
    """Yield the code in the first cell of each row."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            yield re.findall(r"`([^`]+)`", line.split(" | ")[0])


def imported() -> dict[str, Any]:
    """Return what the blocks of code of the page import."""
    names: dict[str, Any] = {}
    for line in re.findall(r"^from resilient_run.*$", PAGE.read_text(), re.M):
        exec(line, names)
    return names


class Reader:
    """Finds what each piece of code stands for: a method of the class before it, or a name where one was found."""

    def __init__(self) -> None:
        self._names = imported()
        self._modules = [import_module(name) for name in MODULES]
        self._class: type | None = None

    def find(self, name: str) -> tuple[type | None, Any]:
        """Return the class that `name` belongs to, if any, and what it is there, None for an instance's attribute."""
        first, *rest = name.split(".")
        if first:
            owner, found = self._first(first, is_owner=bool(rest))
        else:
            owner, found = self._class, self._class
        for part in rest:
            if inspect.ismodule(found) and not hasattr(found, part):
                import_module(f"{found.__name__}.{part}")
            owner = found if inspect.isclass(found) else None
            found = _attribute(found, part)
        if inspect.isclass(found):
            self._class = found
        elif owner is not None:
            self._class = owner
        if not inspect.ismodule(found) and (module := inspect.getmodule(found)) is not None:
            self._modules.insert(0, module)
        return owner, found

    def _first(self, name: str, *, is_owner: bool) -> tuple[type | None, Any]:
        if name == "resilient_run":
            return None, import_module(name)
        if name in self._names:
            return None, self._names[name]
        if self._class is Checkpointer and hasattr(Checkpointer, name):
            return Checkpointer, getattr(Checkpointer, name)
        for module in self._modules:
            # A module may have a function of its own name.
            if (found := getattr(module, name, None)) is not None and (inspect.isclass(found) or not is_owner):
                return None, found
        return None, import_module(f"resilient_run.comm.{name}")


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute, None if `__init__` makes it."""
    if inspect.isclass(owner) and not hasattr(owner, name):
        assert any(f"self.{name}" in inspect.getsource(base) for base in owner.__mro__[:-1]), f"{owner} has no {name}"
        return None
    return getattr(owner, name)


def shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in signature.parameters.values()]


def documented(code: str) -> tuple[str, inspect.Signature | None, str | None]:
    """Return the name, the signature if it is a call, and what the call returns if the page says so."""
    name, bracket, rest = code.partition("(")
    if not bracket:
        return name, None, None
    arguments, _, returned = rest.partition(" -> ")
    scope: dict[str, Any] = {}
    exec(f"def call({arguments}: ...", scope)
    return name, inspect.signature(scope["call"]), returned or None


@pytest.mark.parametrize("row", range(len(list(cells()))), ids=[row[0].partition("(")[0] for row in cells()])
def test_signatures_are_those_of_the_code(row: int) -> None:
    reader = Reader()
    *before, codes = list(cells())[: row + 1]
    for code in (code for earlier in before for code in earlier):
        # That row has a test of its own.
        with suppress(AssertionError, AttributeError, ImportError):
            reader.find(code.partition("(")[0])
    for code in codes:
        name, wanted, returned = documented(code)
        try:
            owner, found = reader.find(name)
        except ImportError as error:
            if ".integrations." not in name:
                raise
            pytest.skip(str(error))
        if wanted is None:
            continue
        actual = inspect.signature(found)
        if owner is not None:
            actual = actual.replace(parameters=list(actual.parameters.values())[1:])
        assert shape(wanted) == shape(actual), f"{code}: {name}{actual}"
        if returned is not None:
            annotation = actual.return_annotation
            assert returned == (annotation if isinstance(annotation, str) else annotation.__name__), code


def test_everything_public_of_a_checkpointer_is_told() -> None:
    tree = ast.parse(inspect.getsource(Checkpointer))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    public = {node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    told = {re.split(r"\W", code)[0] for row in cells() for code in row}
    assert public
    assert public <= told
