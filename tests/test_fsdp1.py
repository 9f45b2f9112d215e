"""FSDP1: killed at seeded moments, a run ends with the same bits as an undisturbed one; what cannot work is refused."""

import json
import random
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import EXAMPLE, Cluster
from fake_ranks import capture
from launchers import run_apart, run_trainers
from saved import save
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import gather
from resilient_run.ckpt.convert.import_loader import _TakingOver
from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.state.state import TrainingState

pytestmark = pytest.mark.jobs

FRAMEWORKS = Path(__file__).parent / "frameworks"
ENVIRON = {"OMP_NUM_THREADS": "1"}
STEPS = 14


@pytest.mark.parametrize(
    "way",
    [
        "example",
        "SHARD_GRAD_OP,scaler,early",
        "FULL_SHARD,orig,bf16,again",
        *(
            pytest.param(way, marks=pytest.mark.nightly)
            for way in ("FULL_SHARD,again", "NO_SHARD,orig", "SHARD_GRAD_OP,orig,early", "HYBRID_SHARD,bf16")
        ),
    ],
)
def test_killed_run_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, way: str) -> None:
    ranks = "4" if "HYBRID" in way else "2"
    script = [str(FRAMEWORKS / "sharded_fsdp1.py"), way, str(STEPS)]
    if way == "example":
        script = [str(EXAMPLE.with_name("with_fsdp1.py"))]
    ends = r"rank \d ends with loss [\d.]+, parameters \w{64}"
    undisturbed = sorted(re.findall(ends, run_trainers(script, int(ranks))))
    assert len(undisturbed) == int(ranks)
    draw = random.Random(way)
    twice, *others = [
        (where, draw.randrange(first, first + 3), draw.randrange(int(ranks)))
        for where, first in (("train", 2), ("evaluate", 6), ("after", 10))
    ]
    kills = [twice, twice, *others]  # the second in the step that is done again
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host = cluster.host("solo")
    host.launch(
        ["--standalone", "--nproc-per-node", ranks], [str(FRAMEWORKS / "killed.py"), str(tmp_path), *script], **ENVIRON
    )
    assert host.wait(120) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert len(restored) >= len(kills)  # of two in a row, the second may come before rank 0 has restored
    assert min(restored[1:]) > 0, "it began at the beginning"
    assert sorted(re.findall(ends, host.output)) == undisturbed
    assert "RuntimeWarning" not in host.output


def test_what_cannot_work_is_refused() -> None:
    run_apart(refuses_what_cannot_work)


def refuses_what_cannot_work() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank is NO_SHARD, which torch discourages
        model = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    before = save(model=model)
    with (
        FullyShardedDataParallel.summon_full_params(model),
        pytest.raises(StateError, match=r"gathered, by summon_full_params\(\).* call step\(\) after it"),
    ):
        save(model=model)
    with pytest.raises(StateError, match="model is sharded by FSDP1, which takes no whole tensors"):
        _TakingOver(TrainingState({"model": model}, rng=False), {"model": {}}, 0, 1).tree()
    with tempfile.TemporaryDirectory() as directory:
        slot = capture(Path(directory, "slot"), TrainingState({"model": model}, rng=False), rank=0, world_size=1)
    assert gather(of_slots([slot]))["model"].keys() == {"weight", "bias"}
    before.load(model=model)
    shards = model._flat_param._shard_param_infos
    model._flat_param._shard_param_infos = (shards[0]._replace(intra_param_start_idx=1), *shards[1:])
    with pytest.raises(StateError, match=r"not restored exactly.*model\._resilient_flat"):
        before.load(model=model)


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
