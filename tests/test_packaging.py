"""The wheel is complete, its folders depend on each other in one direction only, and the tree passes its linters."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("launcher", "daemon", "ckpt", "comm")
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "facade": set(FOLDERS),
    "launcher": {"facade", "daemon", "ckpt", "comm"},
    "daemon": {"facade", "ckpt"},
    "ckpt": set(),
    "comm": set(),
}
# The interpreter loads it by path as `sitecustomize`, so it has no package to import relative to.
OUTSIDE_THE_PACKAGE = "launcher/zygote.py"
TORCH_FREE_CKPT = ("wire", "errors", "slot", "manifest", "import_manifest", "placement", "idle", "schedule", "survival")
TORCH_FREE_COMM = ("tree", "constraints", "cli", "cli_plan", "cli_tree", "cupcake", "plan", "picture")


def run(*command: str, **env: str) -> str:
    """Run a command at the repository root and return its output, which is the failure message as well."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the unpacked wheel, built from a copy of the sources."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(source))
    (archive,) = work.glob("*.whl")
    with zipfile.ZipFile(archive) as unpacked:
        unpacked.extractall(work / "unpacked")
    return work / "unpacked"


@pytest.fixture(scope="module")
def distribution(wheel: Path) -> Distribution:
    (info,) = wheel.glob("*.dist-info")
    return Distribution.at(info)


def imports_of(source: Path) -> list[tuple[int, str]]:
    """Return (relative level, dotted name) of every import in a module, wherever it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, f"{node.module or ''}.{alias.name}".strip(".")) for alias in node.names]
    return found


def folder_of(dotted: str) -> str:
    """Return the folder that `resilient_run.x.y` lives in."""
    name = dotted.split(".")[1] if "." in dotted else ""
    return name if name in FOLDERS else "facade"


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    expected = {
        PurePosixPath("resilient_run", path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    facade = PurePosixPath("resilient_run/launcher/facade")
    expected = {
        PurePosixPath("resilient_run") / path.relative_to(facade) if path.is_relative_to(facade) else path
        for path in expected
    }
    packed = {PurePosixPath(path.relative_to(wheel)) for path in wheel.rglob("*.py")}
    assert packed == expected, "add the missing folder to `packages` in pyproject.toml"


def test_wheel_declares_types_and_license(wheel: Path, distribution: Distribution) -> None:
    assert (wheel / "resilient_run" / "py.typed").exists()
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    license_text = distribution.read_text("licenses/LICENSE")
    assert license_text is not None
    assert "Apache License" in license_text


def test_entry_points_resolve(wheel: Path, distribution: Distribution) -> None:
    values = {point.name: point.value for point in distribution.entry_points}
    assert values.keys() == {
        "resilient-run",
        "resilientd",
        "resilientctl",
        "resilient-inject",
        "resilient-comm",
        "etcd-v3",
    }
    check = "import operator, sys; from importlib import import_module\nfor value in sys.argv[1:]:\n"
    check += (
        "    module, name = value.split(':'); assert callable(operator.attrgetter(name)(import_module(module))), value"
    )
    run(sys.executable, "-P", "-c", check, *values.values(), PYTHONPATH=str(wheel))


def test_folders_import_in_one_direction(wheel: Path) -> None:
    wrong = []
    for source in sorted((wheel / "resilient_run").rglob("*.py")):
        parts = source.relative_to(wheel / "resilient_run").parts
        folder = parts[0] if len(parts) > 1 else "facade"
        allowed = ALLOWED_IMPORTS[folder] | ({folder} if "/".join(parts) == OUTSIDE_THE_PACKAGE else set())
        for level, name in imports_of(source):
            if level >= len(parts):
                wrong.append(f"{'/'.join(parts)}: {'.' * level}{name} leaves the folder: import it absolutely")
            elif level == 0 and name.split(".")[0] == "resilient_run" and folder_of(name) not in allowed:
                wrong.append(f"{'/'.join(parts)}: {folder} must not import {name} absolutely")
    assert not wrong, "\n".join(wrong)


def test_daemon_and_formats_leave_torch_out(wheel: Path) -> None:
    daemon = sorted(path.stem for path in (wheel / "resilient_run" / "daemon").glob("*.py"))
    names = [f"resilient_run.daemon.{name}" for name in daemon if name not in ("__init__", "__main__")]
    names += [f"resilient_run.ckpt.{name}" for name in TORCH_FREE_CKPT]
    names += [f"resilient_run.comm.{name}" for name in TORCH_FREE_COMM]
    check = "import sys; from importlib import import_module\nfor name in sys.argv[1:]:\n"
    check += "    import_module(name); assert 'torch' not in sys.modules, f'{name} imports torch'"
    run(sys.executable, "-P", "-c", check, *names, PYTHONPATH=str(wheel))


def test_tests_use_the_installed_package() -> None:
    folder_on_path = [entry for entry in sys.path if Path(entry or ".").resolve() == ROOT]
    assert not folder_on_path, "run `python -P -m pytest`: otherwise `import comm` finds this repository's folder"


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 600}
    assert not too_long


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_content(command: str) -> None:
    run(sys.executable, "-P", "-m", "ruff", *command.split(), str(ROOT))


@pytest.mark.slow
def test_types_are_strict(wheel: Path, tmp_path: Path) -> None:
    config = ("--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path))
    run(sys.executable, "-P", "-m", "mypy", *config, "-p", "resilient_run", MYPYPATH=str(wheel))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = (ROOT / "systemd" / "resilientd.service").read_text()
    here = re.sub(r"(?m)^(Exec\w+=[-@:+!]*)/\S*/", rf"\g<1>{Path(sys.executable).parent}/", unit)
    (tmp_path / "resilientd.service").write_text(here)
    run("systemd-analyze", "verify", "--man=no", str(tmp_path / "resilientd.service"))


def test_ci_runs_the_commands_of_the_readme() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if ".venv/bin/" in line]
    readme = (ROOT / "README.md").read_text()
    assert commands
    assert [command for command in commands if command not in readme] == []
