"""The reference has every public name, and the guide imports what there is."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference").glob("*.md")


def exported(path: Path) -> list[str]:
    """Return `__all__` of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def test_everything_public_is_in_the_reference() -> None:
    listed = {name for page in REFERENCE for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    facade = ROOT / "launcher" / "facade"
    public = {f"resilient_run.{name}" for name in exported(facade / "__init__.py") if not name.startswith("_")}
    for module in (facade / "integrations").glob("[!_]*.py"):
        # A module that is run, not imported, exports `main`.
        public |= {f"resilient_run.integrations.{module.stem}.{name}" for name in exported(module) if name != "main"}
    assert len(public) > 10
    assert public <= listed
