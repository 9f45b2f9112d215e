"""Training loops of frameworks, killed at seeded moments, end with the same bits as undisturbed ones."""

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cluster import EXAMPLE, Cluster, wait_until

from resilient_run.ckpt.errors import StateError

pytestmark = pytest.mark.jobs

KILLED = Path(__file__).parent / "frameworks" / "killed.py"
TORCHRUN = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
STEPS = {"accelerate": 60, "transformers": 39, "trl": 48, "lightning": 60}
"""How many steps of the optimizer an example makes in one process: 3 epochs, each with an evaluation at its end."""
RANKS = [pytest.param(1, id="alone"), pytest.param(2, id="ddp", marks=pytest.mark.nightly)]
ENVIRON = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

FSDP_CONFIGURATION = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: {version}
  {strategy}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_sync_module_states: false
mixed_precision: {precision}
num_machines: 1
num_processes: 2
use_cpu: false
"""


def moments(steps: int, ranks: int, seed: int) -> list[tuple[str, int, int]]:
    """Draw a moment in a step, which comes twice, one in the evaluation that follows, and one right after a step."""
    draw = random.Random(seed)
    epoch = steps // 3
    twice = ("train", draw.randrange(2, epoch - 1), draw.randrange(ranks))
    return [
        twice,
        twice,
        ("evaluate", epoch, draw.randrange(ranks)),
        ("after", draw.randrange(epoch + 2, 2 * epoch), draw.randrange(ranks)),
    ]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("library", STEPS)
def test_killed_run_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, library: str, ranks: int) -> None:
    ends_alike(cluster, tmp_path, library, [str(EXAMPLE.with_name(f"with_{library}.py"))], ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("start", ["warm", pytest.param("no-warm", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_killed_script_that_does_not_know_us_ends_like_one_that_was_not(
    cluster: Cluster, tmp_path: Path, library: str, ranks: int, start: str
) -> None:
    script = KILLED.with_name(f"plain_{library}.py")
    assert "resilient" not in script.read_text()
    output = ends_alike(cluster, tmp_path, library, [str(script)], ranks, "--rr-auto", f"--rr-{start}-workers")
    assert f"--rr-auto protects {library}.Trainer: every step" in output
    assert "--rr-auto protects nothing" not in output


def test_killed_run_of_lightning_with_fsdp2_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path) -> None:
    ends_alike(cluster, tmp_path, "lightning", [str(KILLED.with_name("sharded_lightning.py"))], 2)


@pytest.mark.parametrize("version", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_killed_run_of_accelerates_configuration_with_fsdp_ends_like_one_that_was_not(
    cluster: Cluster, tmp_path: Path, version: int
) -> None:
    """What `accelerate config` writes, given to `accelerate launch` in its place behind resilient-run."""
    configuration = tmp_path / "accelerate.yaml"
    strategy, precision = {
        1: ("fsdp_sharding_strategy: SHARD_GRAD_OP", "bf16"),
        2: ("fsdp_reshard_after_forward: true", '"no"'),  # it leaves the buffers of BatchNorm as they are
    }[version]
    configuration.write_text(FSDP_CONFIGURATION.format(version=version, strategy=strategy, precision=precision))
    module = ("-m", "resilient_run.integrations.accelerate_launch")
    script = [*module, "--config_file", str(configuration), str(KILLED.with_name("sharded_accelerate.py"))]
    output = ends_alike(cluster, tmp_path, "accelerate", script, 2)
    assert "RuntimeWarning" not in output


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_killed_run_of_trainer_with_fsdp_ends_like_one_that_was_not(
    cluster: Cluster, tmp_path: Path, version: int
) -> None:
    script = [str(KILLED.with_name("sharded_transformers.py")), str(version)]
    ends_alike(cluster, tmp_path, "transformers", script, 2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_killed_run_of_a_trainer_of_its_own_ends_like_one_that_was_not(
    cluster: Cluster, tmp_path: Path, kind: str, ranks: int
) -> None:
    ends_alike(cluster, tmp_path, "trl", [str(KILLED.with_name("own_trl.py")), kind], ranks)


def test_lightning_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed (extra zoo)")
    command = [sys.executable, *TORCHRUN, "2", str(KILLED.with_name("sharded_lightning.py"))]
    environ = {**os.environ, **ENVIRON, "TENSOR_PARALLEL": "2"}
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert refused.returncode != 0
    assert "tensor_parallel_size=2: only FSDP2 is supported" in refused.stderr


@pytest.mark.filterwarnings("ignore:The `srun` command")  # Lightning's, where Slurm is installed
def test_fsdp1_of_lightning_needs_a_gpu_and_is_refused() -> None:
    lightning, strategies = pytest.importorskip("lightning"), pytest.importorskip("lightning.pytorch.strategies")
    from resilient_run.ckpt.integrations.lightning import refuse

    with pytest.raises(ValueError, match="requires a GPU accelerator"):
        lightning.Trainer(accelerator="cpu", strategy="fsdp")
    with pytest.raises(StateError, match=r"FSDPStrategy is not supported.* FSDP2 by ModelParallelStrategy"):
        refuse(SimpleNamespace(strategy=strategies.FSDPStrategy()))


def ends_alike(cluster: Cluster, tmp_path: Path, library: str, script: list[str], ranks: int, *options: str) -> str:
    """Kill a script at four moments; it must end like one that nobody disturbed. Return what it printed."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra zoo)")
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    command = [sys.executable, *TORCHRUN, str(ranks), *script] if ranks > 1 else [sys.executable, "-P", *script]
    reference = subprocess.run(
        [*command, whole], env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert reference.returncode == 0, reference.stderr
    (undisturbed,) = [line for line in reference.stdout.splitlines() if line.startswith("parameters ")]
    kills = moments(STEPS[library] // ranks, ranks, seed=ranks)
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host = cluster.host("solo")
    host.forked = False
    host.launch(
        [*options, "--standalone", "--nproc-per-node", str(ranks)],
        [str(KILLED), str(tmp_path), *script, killed],
        **ENVIRON,
    )
    assert host.wait(250) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert len(restored) >= 4
    assert min(restored[1:]) > 0, "it began at the beginning"
    assert undisturbed in host.output
    return host.output


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_restarted_worker_finds_its_framework_imported(cluster: Cluster, tmp_path: Path, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra zoo)")
    example = str(EXAMPLE.with_name(f"with_{library}.py"))
    reference = subprocess.run(
        [sys.executable, "-P", example], env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=250
    )
    (undisturbed,) = [line for line in reference.stdout.splitlines() if line.startswith("parameters ")]
    (tmp_path / "kills.json").write_text(json.dumps([("after", 5, 0)]))
    (tmp_path / "wait").touch()
    host = cluster.host("solo")
    host.forked = False
    host.launch(
        ["--standalone", "--rr-preload=learn"], [str(KILLED), str(tmp_path), example], LOGLEVEL="INFO", **ENVIRON
    )
    wait_until(lambda: _imports_beforehand(host.launcher), timeout_s=200, what="imports beforehand", host=host)
    (tmp_path / "wait").unlink()
    assert host.wait(250) == 0, host.output
    assert re.search(rf"a worker starts with .*\b{library}\b", host.output)
    assert "recovered in" in host.output
    assert undisturbed in host.output


def _imports_beforehand(launcher: "subprocess.Popen[str] | None") -> bool:
    """Tell whether a zygote of a rank, the only process here whose parent is a zygote, has imported what it is to."""
    assert launcher is not None
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            for zygote in child.children():
                before_s = zygote.cpu_times().user
                time.sleep(2)
                if zygote.cmdline()[1:2] == ["-u"] and zygote.cpu_times().user == before_s > 0.2:
                    return True
    return False
