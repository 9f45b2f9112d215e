"""`resilient-run --rr-auto` says in one line what it protects or why it does not, and runs the script all the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from tiers import nightly_but

pytestmark = pytest.mark.jobs

OWN_LOOP = """
import os
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# Workers share the launcher's output, and print writes a line in pieces.
os.write(1, f"ended {model.weight.sum().item().hex()}\\n".encode())
"""
OWN_CHECKPOINTER = OWN_LOOP.replace(
    "for _ in range(3):",
    "from resilient_run import Checkpointer\nckpt = Checkpointer(model=model)\nfor _ in range(ckpt.restore(), 3):",
)
FRAMEWORK = """
class Trainer:
    def train(self, word):
        "Trains."
        return f"ended {word}"
"""
USES_FRAMEWORK = """
import inspect, sys
from transformers import trainer
train = trainer.Trainer.train
print(trainer.Trainer().train(word=sys.argv[1]), inspect.signature(train), train.__doc__)
print(type(trainer.__loader__).__name__, trainer.__spec__.loader is trainer.__loader__, inspect.getsource(trainer)[:6])
"""
FORKS = """
import os
from transformers.trainer import Trainer
child = os.fork()
if not child:
    Trainer().train("child")
    os._exit(0)
os.waitpid(child, 0)
print("ended")
"""
NOTHING = "--rr-auto protects nothing here: "
LOOP = (
    f"{NOTHING}the loop is the script's own, and nothing tells it which of its steps were restored; "
    "add a Checkpointer, restore() and step(n): "
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    made = Cluster(tmp_path)
    yield made
    made.close()


def ran(cluster: Cluster, script: str, *options: str, argument: str = "word") -> tuple[list[str], list[str]]:
    """Return what the launcher and the workers have printed: lines of ours about this, and those of the script."""
    Path("script.py").write_text(script)
    Path("transformers").mkdir(exist_ok=True)
    Path("transformers", "__init__.py").touch()
    Path("transformers", "trainer.py").write_text(FRAMEWORK)
    host = cluster.host("solo")
    host.text.clear()
    program = ["-m", "script"] if "-m" in options else ["script.py"]
    host.launch([*[each for each in options if each != "-m"], *program], [argument])
    assert host.wait() == 0, host.output
    lines = host.output.splitlines()
    return [line for line in lines if "--rr-auto" in line], [line for line in lines if line.startswith("ended")]


@pytest.mark.parametrize("start", nightly_but(["--rr-warm-workers"], ["--rr-warm-workers", "--rr-no-warm-workers"]))
def test_loop_of_the_script_runs_alone(cluster: Cluster, start: str) -> None:
    said, plain = ran(cluster, OWN_LOOP, "--standalone", "--nproc-per-node=2")
    assert said == []
    said, printed = ran(cluster, OWN_LOOP, "--standalone", "--nproc-per-node=2", "--rr-auto", start)
    assert said == [LOOP + "docs/quickstart.md"], "rank 0 says it once"
    assert printed == plain
    assert len(printed) == 2


def test_module_is_looked_into(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESILIENT_AUTO", "1")
    assert ran(cluster, OWN_LOOP, "--standalone", "-m")[0] == [LOOP + "docs/quickstart.md"]


def test_script_with_a_checkpointer_is_left_alone(cluster: Cluster) -> None:
    assert ran(cluster, OWN_CHECKPOINTER, "--standalone", "--rr-auto")[0] == [
        "--rr-auto leaves this script alone: it protects itself"
    ]


def test_script_that_trains_nothing_is_told_at_its_end(cluster: Cluster) -> None:
    said, _ = ran(cluster, "print('ended')", "--standalone", "--rr-auto")
    assert said == [f"{NOTHING}nothing was trained"]


@pytest.mark.parametrize("start", ["--rr-warm-workers", "--rr-no-warm-workers"])
def test_framework_of_another_version_trains_alone(cluster: Cluster, start: str) -> None:
    said, printed = ran(cluster, USES_FRAMEWORK, "--standalone", "--rr-auto", start)
    assert len(said) == 1
    assert said[0].startswith(f"{NOTHING}transformers.Trainer: the Trainer of this transformers has no ")
    assert said[0].endswith("pip install 'transformers>=5.23'")
    assert printed == ["ended word (self, word) Trains."]
    assert "SourceFileLoader True \nclass" in cluster.host("solo").output


def test_fork_of_a_worker_is_left_alone(cluster: Cluster) -> None:
    said, printed = ran(cluster, FORKS, "--standalone", "--rr-auto")
    assert said == [f"{NOTHING}nothing was trained"]
    assert printed == ["ended"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--standalone", "--rr-off"), "--rr-auto protects nothing here: --rr-off keeps no checkpoints"),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), "keeps no checkpoints in memory, and --rr-auto"),
    ],
)
def test_run_that_keeps_nothing_protects_nothing(cluster: Cluster, options: tuple[str, ...], reason: str) -> None:
    said, printed = ran(cluster, OWN_LOOP, *options, "--rr-auto")
    assert len(said) == 1
    assert reason in said[0]
    assert len(printed) == 1


def test_program_that_is_no_script_is_refused(cluster: Cluster) -> None:
    host = cluster.host("solo")
    host.launch(["--standalone", "--rr-auto", "--no-python"], ["/bin/true"])
    assert host.wait() == 2
    assert "--rr-auto needs a Python script, and --no-python runs none" in host.output
