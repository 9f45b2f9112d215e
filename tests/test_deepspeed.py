"""DeepSpeed's engines, killed at seeded moments, end with the same bits as undisturbed ones.

DeepSpeed is in the extra `engines`, and not in CI. How to run these: CONTRIBUTING.md.
"""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster import EXAMPLE, Cluster, wait_until

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (extra engines)"),
]

FRAMEWORKS = Path(__file__).parent / "frameworks"
KILLED, TRAIN = FRAMEWORKS / "killed.py", FRAMEWORKS / "deepspeed_train.py"
TORCHRUN = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
QUIET = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of torch, at each collective
ENVIRON = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", **QUIET}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PERSISTENT = {"stage3_param_persistence_threshold": 100}
CASES: dict[str, dict[str, Any]] = {
    "0-fp32": {"stage": 0, "dtype": "fp32", "accumulate": 2},
    "0-bf16": {"stage": 0, "dtype": "bf16"},
    "0-fp16": {"stage": 0, "dtype": "fp16"},
    "0-fp32-moe": {"stage": 0, "dtype": "fp32", "moe": True},
    "0-fp32-pipeline": {"stage": 0, "dtype": "fp32", "accumulate": 2, "pipeline": True},
    "1-fp32": {"stage": 1, "dtype": "fp32"},
    "1-bf16": {"stage": 1, "dtype": "bf16", "accumulate": 2, "freeze": 6},
    "1-fp16": {"stage": 1, "dtype": "fp16"},
    "1-fp32-pipeline": {"stage": 1, "dtype": "fp32", "accumulate": 2, "pipeline": True},
    "2-fp32": {"stage": 2, "dtype": "fp32"},
    "2-bf16": {"stage": 2, "dtype": "bf16"},
    "2-bf16-moe": {"stage": 2, "dtype": "bf16", "moe": True},
    "2-fp16": {"stage": 2, "dtype": "fp16", "accumulate": 2},
    "2-bf16-offload": {"stage": 2, "dtype": "bf16", "accumulate": 2, "zero": OFFLOAD},
    "2-fp32-offload-cpu-adam": {"stage": 2, "dtype": "fp32", "zero": OFFLOAD, "adam": True},
    "3-fp32": {"stage": 3, "dtype": "fp32"},
    "3-bf16": {"stage": 3, "dtype": "bf16", "accumulate": 2},
    "3-fp16": {"stage": 3, "dtype": "fp16"},
    "3-fp32-persistent": {"stage": 3, "dtype": "fp32", "zero": PERSISTENT},
    "3-bf16-persistent-frozen": {"stage": 3, "dtype": "bf16", "zero": PERSISTENT, "frozen": True},
    "3-bf16-offload": {"stage": 3, "dtype": "bf16", "zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}},
    "3-fp32-offload-cpu-adam": {"stage": 3, "dtype": "fp32", "zero": OFFLOAD, "adam": True},
    "3-fp32-sub-groups-sgd": {
        "stage": 3,
        "dtype": "fp32",
        "zero": {"sub_group_size": 200},
        "optimizer": "SGD",
    },
}


def moments(case: str) -> list[tuple[str, int, int]]:
    """Draw a moment in a step, which comes twice, one in the evaluation that follows, and one right after a step."""
    draw = random.Random(case)
    twice = ("train", draw.randrange(1, 3), draw.randrange(2))
    return [
        twice,
        twice,
        ("evaluate", 3, draw.randrange(2)),
        ("after", draw.randrange(5, 11), draw.randrange(2)),
    ]


def ends(lines: list[str]) -> dict[str, Any]:
    """Return the digests by rank."""
    told = [line[line.index("digest ") :].split(" ", 2) for line in lines if "digest " in line]
    return {rank: json.loads(found) for _, rank, found in told}


@pytest.mark.parametrize("name", CASES)
def test_killed_engine_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, name: str) -> None:
    if CASES[name]["dtype"] == "fp16":
        accelerator = pytest.importorskip("deepspeed.accelerator").get_accelerator()
        if not accelerator.is_fp16_supported():
            pytest.skip("DeepSpeed has no fp16 on this CPU (avx512_fp16)")
    ends_alike(cluster, tmp_path, moments(name), str(TRAIN), json.dumps(CASES[name]))


@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_killed_engine_of_a_framework_ends_like_one_that_was_not(
    cluster: Cluster, tmp_path: Path, library: str, stage: str
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra zoo)")
    kills = [("train", 2, 0), ("train", 2, 0), ("evaluate", 5, 1), ("after", 7, 0)]
    ends_alike(cluster, tmp_path, kills, str(FRAMEWORKS / "deepspeed_through.py"), library, stage)


def ends_alike(cluster: Cluster, tmp_path: Path, kills: list[tuple[str, int, int]], *script: str) -> None:
    """Kill a script at some moments; it must end with the same digests as one that nobody disturbed."""
    undisturbed = ends(run(tmp_path, "2", *script))
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host = cluster.host("solo")
    host.forked = False
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(KILLED), str(tmp_path), *script], **ENVIRON)
    assert host.wait(280) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert len(restored) >= 4  # of the two in a row, the second may come before the other rank has restored
    assert min(restored[1:]) > 0, "it began at the beginning"
    assert len(undisturbed) == 2
    alike(ends(host.output.splitlines()), undisturbed)


def run(tmp_path: Path, ranks: str, *script: str) -> list[str]:
    """Return what a script prints that nobody disturbs."""
    command = [sys.executable, *TORCHRUN, ranks, *script]
    environ = {**os.environ, **ENVIRON}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def alike(killed: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert killed.keys() == undisturbed.keys()
    different = [
        (rank, name) for rank in killed for name in killed[rank] if killed[rank][name] != undisturbed[rank][name]
    ]
    assert different == []


def test_lost_host_is_replaced(cluster: Cluster, tmp_path: Path, etcd_endpoint: str) -> None:
    script = [str(TRAIN), json.dumps({"stage": 3, "dtype": "bf16", "steps": 100})]
    undisturbed = ends(run(tmp_path, "4", *script))
    launcher = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd_endpoint}"]
    launcher += [f"--rdzv-id={cluster.name}", "--local-addr=127.0.0.1", "--rdzv-conf=lease_ttl=3"]
    (tmp_path / "kills.json").write_text("[]")
    first, second, standby = (cluster.host(name) for name in "abc")
    for host in (first, second, standby):
        host.forked = False
    for host in (first, second):
        host.launch(launcher, [str(KILLED), str(tmp_path), *script], **ENVIRON)
    wait_until(lambda: first.starts() == second.starts() == 2, timeout_s=100, what="the start", host=first)
    standby.launch(launcher, [str(KILLED), str(tmp_path), *script], **ENVIRON)
    wait_until(lambda: second.committed_step() > 10, timeout_s=100, what="step 10", host=second)
    assert not standby.starts(), "the standby trains though nobody was lost"
    second.lose()
    for host in (first, standby):
        assert host.wait(250) == 0, host.output
    assert any("from peer memory" in line for line in standby.text), standby.output
    assert len(undisturbed) == 4
    alike(ends([*first.output.splitlines(), *standby.output.splitlines()]), undisturbed)


def test_killed_example_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path) -> None:
    example = str(EXAMPLE.with_name("with_deepspeed.py"))
    (undisturbed,) = [line for line in run(tmp_path, "2", example) if line.startswith("parameters ")]
    (tmp_path / "kills.json").write_text(json.dumps([("train", 13, 1), ("after", 31, 0)]))
    host = cluster.host("solo")
    host.forked = False
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(KILLED), str(tmp_path), example], **ENVIRON)
    assert host.wait(250) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == 2
    assert undisturbed in host.output


def test_checkpointer_made_before_the_engine_is_refused_once(cluster: Cluster) -> None:
    host = cluster.host("solo")
    host.forked = False
    command = [str(FRAMEWORKS / "deepspeed_late.py")]
    host.launch(["--standalone", "--nproc-per-node", "2"], command, **ENVIRON)
    assert host.wait(250) != 0
    assert host.output.count("Register it: Checkpointer(engine=EngineState(engine)), after deepspeed.init") == 1
    assert host.output.count("begun") == 2, "each rank once"


def test_step_between_micro_batches_is_refused() -> None:
    code = (
        "import json, sys; sys.argv[1:] = [json.dumps({'stage': 2, 'dtype': 'bf16', 'accumulate': 2})]\n"
        f"source = open({str(TRAIN)!r}).read().partition('engine = build()')[0]\n"
        "exec(source)\n"
        "engine = build(); state = EngineState(engine); state.state_dict()\n"
        "engine.backward(engine(torch.randn(4, 8).bfloat16()).float().mean()); engine.step()\n"
        "try: state.state_dict()\n"
        "except Exception as error: print('told', type(error).__name__, error, flush=True)\n"
        "os._exit(0)"
    )
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **ENVIRON, **one},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "told StateError the engine has accumulated gradients of 1 of 2 micro-batches" in told.stdout, told.stderr


def test_accumulation_that_the_script_changes_goes_on_as_undisturbed(tmp_path: Path) -> None:
    """The configuration says three micro-batches, `set_train_batch_size()` two, before a restore or after it."""
    said = run(tmp_path, "1", str(FRAMEWORKS / "deepspeed_rounds.py"), str(tmp_path))
    found = [line for line in said if line.startswith("update ")]
    whens = ("undisturbed", "before", "after")
    assert found == [f"update {stage} {when} 2 True" for stage in range(4) for when in whens]


@pytest.mark.parametrize("sizes", ["423", "314"])
def test_another_number_of_ranks_has_what_deepspeed_gathers(tmp_path: Path, sizes: str) -> None:
    """In every stage, with groups of weights that are others in each number of ranks."""
    script = str(FRAMEWORKS / "deepspeed_ranks.py")
    for before, ranks in zip("0" + sizes, sizes, strict=False):
        said = run(tmp_path, ranks, script, str(tmp_path), before)
        same = [line for line in said if line.startswith("same ")]
        assert len(same) == (7 * int(ranks) if before != "0" else 0), said
