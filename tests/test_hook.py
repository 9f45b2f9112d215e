"""The communication hook: the same training as plain DDP, in real processes, also after a kill."""

import copy
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import assert_killed_goes_on
from every_scheme import LOSSLESS, others
from launchers import run_trainers, start_python
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import GradientHook, register, synchronize
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime import lanes
from resilient_run.comm.zen.zen import Zen

pytestmark = pytest.mark.jobs

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "lstm_lm.py")
TRAINER = str(Path(__file__).parent / "hook_trainer.py")
LIKE_NONE = (*LOSSLESS, "zen+sparse", "zen+hosts", "zen+hosts+sparse")
SWITCHED = (
    "dgc", "dgc+hsdp+tensor", "efsignsgd+hsdp", "fp8+hosts", "int8", "int8+hsdp", "powersgd", "powersgd+hosts",
    "randomk+hosts", "spardl", "spardl+bruck", "topk+hsdp", "topk+sparse",
)  # fmt: skip
HSDP = ("", "+accumulate", "+hold")


@dataclass(frozen=True)
class Trainings:
    """What the variants of `hook_trainer.py` came to.

    Attributes:
        losses: Variant → (rank, step) → loss.
        ends: Variant → rank → its last line.
    """

    losses: dict[str, dict[tuple[int, int], float]]
    ends: dict[str, dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def trainings() -> Trainings:
    """One run of four ranks for all variants, because starting it takes longer than they do."""
    variants = ["none", *LIKE_NONE, "none+accumulate", "zen+accumulate", "zen+nan", "none+nan"]
    variants += [f"{scheme}+hsdp{switch}" for scheme in ("none", "dense", "zen") for switch in HSDP]
    variants += [f"{scheme}+{switch}" for scheme in ("none", "zen") for switch in ("columns", "hsdp+tensor")]
    return trained(variants, ranks=4)


def trained(variants: list[str], *, ranks: int) -> Trainings:
    printed = run_trainers([TRAINER, *variants], ranks)
    found = Trainings({}, {})
    for line in map(json.loads, filter(lambda text: text.startswith("{"), printed.splitlines())):
        if "loss" in line:
            for variant, loss in line["loss"].items():
                found.losses.setdefault(variant, {})[line["rank"], line["step"]] = loss
        elif "digest" in line:
            found.ends.setdefault(line["variant"], {})[line["rank"]] = line
    assert found.ends.keys() == set(variants)
    assert all(len(ends) == ranks for ends in found.ends.values())
    return found


def test_training_is_that_of_plain_ddp(trainings: Trainings) -> None:
    losses, ends = trainings.losses, trainings.ends
    for variant in LIKE_NONE:
        assert losses[variant] == pytest.approx(losses["none"], rel=1e-6), variant
    assert losses["zen+accumulate"] == pytest.approx(losses["none+accumulate"], rel=1e-6)
    assert losses["zen+accumulate"] != losses["none"]
    for variant, ranks in ends.items():
        apart = {"nan", "hsdp", "columns"} & set(variant.split("+"))
        same = bool(apart) or len({end["digest"] for end in ranks.values()}) == 1
        assert same, f"{variant}: ranks differ"
    assert ends["zen+nan"][0]["nans"] == ends["none+nan"][0]["nans"] > 0
    assert ends["dense"][0]["digest"] == ends["none"][0]["digest"]
    assert ends["zen"][0]["keys"] == ["hidden.weight", "table.weight"], "small gradients go together"


@pytest.mark.parametrize("switch", ["columns", "hsdp+tensor"])
def test_parts_of_a_model_are_summed_over_the_ranks_that_hold_them(trainings: Trainings, switch: str) -> None:
    """Ranks 0 and 2 hold one part, ranks 1 and 3 another: of tensor parallelism, or models of their own."""
    plain, zen = (trainings.ends[f"{scheme}+{switch}"] for scheme in ("none", "zen"))
    assert [zen[rank]["digest"] for rank in range(4)] == [plain[rank]["digest"] for rank in range(4)]
    assert plain[0]["digest"] == plain[2]["digest"] != plain[1]["digest"] == plain[3]["digest"]
    assert {"hidden.weight", "table.weight"} <= set(zen[0]["keys"])


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ("dist.new_group([0], use_local_synchronization=True)", "Transport.among([0, 1])"),
        ("Transport.among([0])", "Transport(dist.new_group([0, 1]))"),
    ],
    ids=["ours", "torch's"],
)
def test_groups_are_made_after_one_that_only_one_rank_is_in(tmp_path: Path, alone: str, together: str) -> None:
    """The store of a file has not the calls that torchrun's store has."""
    script = (
        "import os, sys, torch, torch.distributed as dist\n"
        "from resilient_run.comm.net.transport import Transport\n"
        "rank, place = int(sys.argv[1]), sys.argv[2]\n"
        "dist.init_process_group('gloo', init_method=place, rank=rank, world_size=2)\n"
        f"if rank == 0: {alone}\n"
        "ones = torch.ones(3)\n"
        f"{together}.all_reduce(ones)\n"
        "assert ones.tolist() == [2, 2, 2]\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"  # Torch's own threads may end the process in an error otherwise (docs/api.md).
    )
    place = f"file://{tmp_path / 'store'}"
    ranks = [start_python(["-c", script, str(rank), place], dict(os.environ)) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("switch", HSDP)
def test_training_is_that_of_hybrid_sharding(trainings: Trainings, switch: str) -> None:
    """Two replicas of two shards: the sum of two has one order only, so all is equal bit for bit."""
    losses, ends = trainings.losses, trainings.ends
    plain = f"none+hsdp{switch}"
    for scheme in ("dense", "zen"):
        variant = f"{scheme}+hsdp{switch}"
        assert losses[variant] == losses[plain]
        for rank in range(4):
            assert ends[variant][rank]["digest"] == ends[plain][rank]["digest"]
            assert ends[variant][rank]["rounds"] == ends[f"{scheme}+hsdp"][rank]["rounds"], "one sum a step"
    assert ends[plain][0]["digest"] == ends[plain][2]["digest"] != ends[plain][1]["digest"]
    assert ends[f"dense+hsdp{switch}"][0]["rounds"] == 3 * 7, (
        "one of each parameter group, and one backward pass before"
    )
    assert ends[f"zen+hsdp{switch}"][0]["keys"] == ["hidden.weight", "out.weight", "table.weight"]


def test_three_replicas_are_summed_as_by_hybrid_sharding() -> None:
    """Sums of three may differ in the last bit, but not from replica to replica."""
    plain, *variants = (f"{scheme}+hsdp+three" for scheme in ("none", "dense", "zen"))
    found = trained([plain, *variants], ranks=3)
    for variant in variants:
        assert found.losses[variant] == pytest.approx(found.losses[plain], rel=1e-6), variant
        assert len({end["digest"] for end in found.ends[variant].values()}) == 1, f"{variant}: replicas differ"
        assert found.ends[variant][0]["rounds"] > 0, "the scheme sums"
    assert found.ends["dense+hsdp+three"][0]["digest"] == found.ends[plain][0]["digest"], "the same all-reduce"


def test_killed_worker_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Every scheme that remembers something, on four ranks: SparDL's two teams have two members each."""
    assert_killed_goes_on(tmp_path, 4, [TRAINER, *SWITCHED, *others(SWITCHED), "--steps", "9"], ["--kill-at", "6"])


def test_example_has_the_losses_of_ddp() -> None:
    """Word-level LSTM on real text: its tables are sparse by nature, and summed by rows."""
    small = ["--steps", "4", "--words", "2000", "--width", "32", "--hidden", "32", "--json", "--sparse"]

    def losses(scheme: str) -> dict[tuple[int, int], float]:
        lines = [json.loads(line) for line in run_trainers([EXAMPLE, "--scheme", scheme, *small], 2).splitlines()]
        return {(line["rank"], line["step"]): line["loss"] for line in lines if "loss" in line}

    expected = losses("ddp")
    assert len(expected) == 8
    assert losses("zen") == pytest.approx(expected, rel=1e-6)


class Broken(Scheme):
    """Fails."""

    name = "broken"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        raise CommError(f"cannot sum {key}")


@pytest.mark.usefixtures("alone")
def test_errors_of_a_scheme_are_raised_by_backward() -> None:
    model = DistributedDataParallel(nn.Linear(300, 100))
    hook = GradientHook(model, scheme=Broken(Transport(dist.group.WORLD)), world=Transport(dist.group.WORLD))
    model.register_comm_hook(hook, synchronize)
    with pytest.raises(CommError, match=r"^cannot sum weight$"):
        model(torch.ones(1, 300)).sum().backward()
    hook.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.timeout(60)
def test_errors_before_a_sum_are_raised_by_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has failed: the thread cannot follow the event that comes first."""
    model = DistributedDataParallel(nn.Linear(300, 100))
    hook = register(model, "topk")
    monkeypatch.setattr(lanes, "recorded", lambda device: object())
    with pytest.raises(AttributeError, match="wait_event"):
        model(torch.ones(1, 300)).sum().backward()
    hook.close()


@pytest.mark.usefixtures("alone")
def test_a_model_with_a_hook_is_not_copied_but_the_module_in_it() -> None:
    """DDP's copy would sum without the hook, and take no other one."""
    model = DistributedDataParallel(nn.Linear(300, 100), find_unused_parameters=True)
    hook = register(model, "topk")
    model(torch.ones(1, 300)).sum().backward()
    with pytest.raises(CommError, match=r"copy or save model\.module"):
        copy.deepcopy(model)
    assert torch.equal(copy.deepcopy(model.module).weight, model.module.weight)
    hook.close()


class Late(Scheme):
    """Takes a while."""

    name = "late"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        time.sleep(0.1)
        return gradient


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_ddp_sums_what_it_sums_itself_after_all_else(on_gpu: bool) -> None:
    """On a GPU it goes on, to the parameters that were used, once the hook has returned from its last bucket."""
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(300, 300) for _ in range(3))), find_unused_parameters=True, bucket_cap_mb=0.2
    )
    world = Transport(dist.group.WORLD)
    hook = GradientHook(model, scheme=Late(world), world=world)
    hook._precedes_ddp |= on_gpu
    done: list[tuple[bool, bool]] = []

    def synchronize_and_note(state: GradientHook, bucket: GradBucket) -> Future[Tensor]:
        future = synchronize(state, bucket)
        done.append((bucket.is_last(), future.done()))
        return future

    model.register_comm_hook(hook, synchronize_and_note)
    for _ in range(2):
        model(torch.ones(1, 300)).sum().backward()
    hook.close()
    assert [is_done for is_last, is_done in done if is_last] == [on_gpu, on_gpu]
    assert not all(is_done for _, is_done in done)


@pytest.mark.usefixtures("alone")
def test_state_is_that_of_the_scheme() -> None:
    model = DistributedDataParallel(nn.Linear(300, 100))
    hook = register(model, "zen", profile_steps=3, seed=5)
    model(torch.ones(1, 300)).sum().backward()
    assert isinstance(hook.scheme, Zen)
    assert hook.state_dict() == hook.scheme.state_dict()
    hook.load_state_dict({"scheme": "zen", "seed": 7, "keys": {}})
    assert hook.state_dict()["seed"] == 7
    with pytest.raises(CommError, match="name the same"):
        hook.load_state_dict({"scheme": "spardl"})
    hook.close()


HOSTS = {
    "two hosts": ([(2, 0), (2, 1), (2, 0), (2, 1)], 2),
    "one host": ([(4, 0), (4, 1), (4, 2), (4, 3)], 1),
    "hosts that differ": ([(1, 0), (3, 0), (3, 1), (3, 2)], 1),
    "another order": ([(2, 0), (2, 0), (2, 1), (2, 1)], 1),
    "one rank a host": ([(1, 0)] * 4, 1),
    "no torchrun": ([(None, None)] * 4, 1),
    "one that is told nothing": ([(2, 0), (2, 1), (2, 0), (None, None)], 1),
}
"""Of each rank LOCAL_WORLD_SIZE and LOCAL_RANK; and how many ranks are summed dense first."""


def test_ranks_of_a_host_are_summed_first_where_torchrun_says_who_they_are() -> None:
    told = json.dumps({name: ranks for name, (ranks, _) in HOSTS.items()})
    script = str(Path(__file__).with_name("told_trainer.py"))
    found = [json.loads(line) for line in run_trainers([script, told], 4).splitlines()]
    assert found == [{name: expected for name, (_, expected) in HOSTS.items()}] * 4


@pytest.mark.usefixtures("alone")
def test_ranks_that_fill_no_host_are_refused() -> None:
    with pytest.raises(CommError, match="not a multiple of 2 per host"):
        register(DistributedDataParallel(nn.Linear(2, 2)), ranks_per_host=2)
