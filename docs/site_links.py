"""A hook of mkdocs: files that documents link to outside docs/ get the same place in the site, so the links work."""

import shutil
from pathlib import Path
from typing import Any

LINKED = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks", "examples", "noxfile.py", "tests")


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
