"""Hooks of mkdocs: what the site has beyond the pages below docs/.

The reference reads the source under the names of its packages, links to files outside docs/ work as in the repository,
and a notebook is a page.
"""

import json
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

LINKED = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks", "examples", "noxfile.py", "tests")


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: Any) -> None:
    """Show mkdocstrings the packages in the tree that an installation makes of their folders."""
    root = Path(config.config_file_path).parent
    tree = tempfile.TemporaryDirectory()
    config.extra["tree"] = tree  # which lives as long as the configuration
    (package, facade), *rooms = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].items()
    (Path(tree.name) / package).mkdir()
    for path in (root / facade).iterdir():
        (Path(tree.name) / package / path.name).symlink_to(path)
    for name, folder in rooms:
        Path(tree.name, *name.split(".")).symlink_to(root / folder)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [tree.name]


class Notebook(File):
    """A notebook, which is a page."""

    def is_documentation_page(self) -> bool:
        """Return True, so that links to it lead to the page."""
        return True


def on_files(files: Files, *, config: Any) -> None:
    """Make pages of notebooks."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))


def on_page_read_source(*, page: Any, config: Any) -> str | None:
    """Return the Markdown of a notebook: text, code, and what it has printed."""
    if not page.file.src_uri.endswith(".ipynb"):
        return None
    parts = []
    for cell in json.loads(Path(page.file.abs_src_path).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
        if printed:
            parts.append(f"```\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Let the home page, which is not a folder deeper than its source, link to what `on_post_build` copies."""
    return html.replace('href="../', 'href="') if page.is_homepage else html


def on_post_build(*, config: Any) -> None:
    """Copy the linked files and folders into the site, whose pages are as deep as their sources and a folder more."""
    root, site = Path(config.config_file_path).parent, Path(config.site_dir)
    for name in LINKED:
        if (root / name).is_dir():
            shutil.copytree(root / name, site / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            for folder in (site / name, *filter(Path.is_dir, (site / name).rglob("*"))):
                _write_index(folder)
        else:
            shutil.copy(root / name, site / name)


def _write_index(folder: Path) -> None:
    """Let a link to a folder show what is in it, as GitHub does."""
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    items = "\n".join(f'<li><a href="{name}">{name}</a></li>' for name in names if name != "index.html")
    (folder / "index.html").write_text(f"<!doctype html>\n<title>{folder.name}</title>\n<ul>\n{items}\n</ul>\n")
