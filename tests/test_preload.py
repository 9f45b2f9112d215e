"""What is imported beforehand for the next worker of a rank: what it cannot tell from an import of its own."""

import json
import logging
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from cluster import wait_until

from resilient_run.launcher.workers.warm import WorkerStarter

pytestmark = pytest.mark.jobs

GOOD = {
    "good": "import good.inner\nVALUE = 1",
    "reads_rank": "import os\nRANK = os.environ['RANK'], int(os.getenv('LOCAL_RANK', '7'))",
    "walks_environment": "import os\nFOUND = [name for name in os.environ if name.startswith('DEMO_')]",
    "sets_variable": "import os\nos.environ.setdefault('DEMO_DEFAULT', 'from the import')",
    "reads_arguments": "import sys\nARGUMENTS = list(sys.argv)",
    "draws": "import random\nDRAWN = random.random() is not None",
}
BAD = {
    "starts_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
        "it started a thread",
    ),
    "opens_file": ("import os\nFILE = open(os.devnull)", "it left a file or a socket open"),
    "changes_directory": ("import os\nos.chdir(os.sep)", "it changed the working directory"),
    "sets_rank": ("import os\nos.environ['GROUP_RANK'] = '9'", "it sets GROUP_RANK"),
    "reads_port": ("import os\nPORT = os.environ.get('MASTER_PORT')", "it reads MASTER_PORT"),
    "catches": (
        "import os\ntry:\n    PORT = os.environ['MASTER_PORT']\nexcept BaseException:\n    PORT = None",
        "it reads MASTER_PORT",
    ),
    "keeps_arguments": ("from sys import argv", "it keeps sys.argv"),
    "copies_environment": ("import os\nCOPY = os.environ.copy()", "it keeps a copy of the environment"),
    "needs_script": ("import builtins\nbuiltins.began", "importing it failed: AttributeError"),
}
"""Source, and why it must not be imported beforehand."""
LATE = {
    "late_reader": ("import os\nSETTING = os.environ.get('DEMO_SETTING')", "reads DEMO_SETTING, which the script sets"),
    "late_walker": (
        "import os\nFOUND = sorted(name for name in os.environ if name.startswith('DEMO_SE'))",
        "goes through the environment, which the script changes first",
    ),
    "late_arguments": ("import sys\nLAST = sys.argv[-1]", "reads sys.argv, which the script changes first"),
    "late_draws": ("import random\nDRAWN = random.random()", "draws random numbers, and the script did so first"),
}
"""Imported once the script has changed what they go by."""
HARMLESS = {"late_harmless": "VALUE = 2"}
NEVER = {"after_path": "VALUE = 3"}
"""Imported once nothing can be told any more."""

SCRIPT = f"""
    import builtins, json, os, sys  # and torch, in a package
    names = {[*GOOD, *BAD, *LATE, *HARMLESS, *NEVER, "own"]}
    beforehand = [name for name in names if name in sys.modules]
    builtins.began = True
    import {", ".join(GOOD)}
    import own
    for name in {list(BAD)}:
        __import__(name)
    os.environ["DEMO_SETTING"] = "from the script"
    sys.argv.append("from the script")
    import random
    random.seed(3)
    import {", ".join(LATE)}, {", ".join(HARMLESS)}
    sys.path.append("/nowhere")
    import {", ".join(NEVER)}
    modules = sys.modules
    facts = {{
        name: {{key: repr(value) for key, value in vars(modules[name]).items() if key.isupper() and key != "COPY"}}
        for name in names if name not in ("opens_file", "reads_port", "catches")
    }}
    facts["port"] = [modules["reads_port"].PORT, modules["catches"].PORT]
    facts["copy"] = modules["copies_environment"].COPY["MASTER_PORT"]
    print(json.dumps([beforehand, facts, random.random(), os.environ["DEMO_DEFAULT"], os.environ["GROUP_RANK"]]))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with packages of its own beside ours, and a directory with a script that imports them."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    # With what installs resilient-run there, also if that is a .pth file itself.
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    sources = {**GOOD, **HARMLESS, **NEVER, **{name: source for name, (source, _) in {**BAD, **LATE}.items()}}
    for name, source in sources.items():
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(source)
    (packages / "good" / "inner.py").write_text("import torch")
    Path("own.py").write_text("VALUE = 'a module beside the script'")
    Path("script.py").write_text(textwrap.dedent(SCRIPT))
    return packages


class Job:
    """Starts workers of two ranks, one after the other."""

    def __init__(self, preload: list[str] | None = None) -> None:
        self.starter = WorkerStarter(warm=True, preload=preload)
        self.generation = 0
        self.cold: dict[int, tuple[str, str]] = {}
        """Rank → the port of its cold worker, and what that printed."""

    def run(self, rank: int) -> Any:
        """Return what a worker prints."""
        self.generation += 1
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        env["MASTER_PORT"] = str(29500 + self.generation)
        command = (sys.executable, "-u", "script.py", "argument")
        with open("out", "w") as out:
            process = self.starter.start(command, env, out, None)
            assert process.wait(100) == 0
        if rank not in self.cold:
            cold = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            self.cold[rank] = env["MASTER_PORT"], cold.stdout
        beforehand, *facts = json.loads(Path("out").read_text())
        port, printed = self.cold[rank]
        assert facts == json.loads(printed.replace(port, env["MASTER_PORT"]))[1:], "a cold worker finds something else"
        return beforehand


def test_next_worker_has_imported_what_can_be_told_from_nothing(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    try:
        with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
            assert job.run(0) == job.run(1) == []
            for rank in (0, 1):
                wait_until(
                    lambda rank=rank: set(job.run(rank)) == {*GOOD, *HARMLESS} or time.sleep(3),
                    timeout_s=200,
                    what=f"imports for rank {rank}",
                )
        for name, (_, reason) in {**BAD, **LATE}.items():
            assert any(name in line and reason in line for line in caplog.messages), (name, caplog.messages)
    finally:
        job.starter.close()


def test_named_modules_are_there_for_the_first_worker(site: Path) -> None:
    job = Job(["good", "late_harmless"])
    try:
        assert job.run(0) == job.run(1) == ["good", "late_harmless"]
    finally:
        job.starter.close()


def test_named_modules_that_cannot_be_there_are_told(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(["good", "reads_rank", "no_such_module", "own", "starts_thread", "walks_environment"])
    try:
        wait_until(
            lambda: job.run(0) == ["good", "reads_rank", "walks_environment"] or time.sleep(1),
            timeout_s=100,
            what="imports that go by the rank",
        )
        for reason in ("reads_rank: it reads RANK", "starts_thread: it started a thread"):
            assert f"not imported beforehand: {reason}" in caplog.text
        for name in ("no_such_module", "own"):
            assert f"not imported beforehand: {name}: no installed package has it" in caplog.text
    finally:
        job.starter.close()


def test_package_that_ends_the_process_ends_only_the_zygote_of_its_rank(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "good" / "__init__.py").write_text("import builtins, os\ngetattr(builtins, 'began', None) or os._exit(3)")
    job = Job(["good"])
    try:
        assert job.run(0) == []
        assert "good: the process that imported them ended" in caplog.text
    finally:
        job.starter.close()


def test_nothing_is_learned_when_told_so(site: Path) -> None:
    job = Job([])
    try:
        assert job.run(0) == []
        time.sleep(3)
        assert job.run(0) == []
    finally:
        job.starter.close()
