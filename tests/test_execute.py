"""Options of Espresso's tree on real ranks: each path ends with the sum, equal on all; nothing is lost on the way."""

import random
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from baselines.timeline import Place, places
from ranks import run_hosts
from tiers import nightly_but
from torch import Tensor

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import CommError, MessageError
from resilient_run.comm.espresso.cost import Costs
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.transport import from_bytes
from resilient_run.comm.plan.cluster import Cluster, Coder, CompressorCost, LinkCost
from resilient_run.comm.plan.constraints import rootless
from resilient_run.comm.plan.curve import Affine
from resilient_run.comm.plan.tree import Device, Option, all_options
from resilient_run.comm.runtime.execute import OptionScheme, options_of

pytestmark = pytest.mark.jobs

DENSE = [option for option in all_options() if not option.compressions]
COMPRESSED = [option for option in all_options() if option.compressions]


def gradient(rank: int, numel: int = 103) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def kept_count(scheme: OptionScheme, key: str) -> dict[str, list[Tensor]]:
    return {name: kept for name, kept in scheme.state_dict()["memory"]["kept"].items() if name.startswith(f"{key}/")}


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (3, 2), (2, 3), (1, 2), (2, 1)])
def test_every_path_gives_the_sum(hosts: int, per_host: int) -> None:
    chosen = [*DENSE, *random.Random(10 * hosts + per_host).sample(COMPRESSED, 40)]

    def work(fabric: Fabric) -> list[Tensor]:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=1)), {str(o): o for o in chosen})
        return [scheme.reduce(str(option), gradient(fabric.flat.rank)) for option in chosen]

    ranks = run_hosts(hosts, per_host, work)
    total = sum(gradient(rank) for rank in range(hosts * per_host))
    for index, option in enumerate(chosen):
        for found in ranks:
            torch.testing.assert_close(found[index], total, rtol=1e-5, atol=1e-5, msg=str(option))
            assert torch.equal(found[index], ranks[0][index]), option


def test_no_rank_is_the_root_of_all_where_replicas_have_no_hosts() -> None:
    """As under FSDP2, which sums within hosts itself."""
    option = next(option for option in COMPRESSED if option.flat and not rootless(option))

    def work(fabric: Fabric) -> list[int]:
        ranks = fabric.flat
        scheme = OptionScheme(
            Fabric(flat=ranks, intra=ranks, inter=ranks),
            ErrorFeedback(named("topk", density=0.1)),
            {str(key): option for key in range(20)},
        )
        sent = []
        for key in range(20):
            ranks.traffic.reset()
            scheme.reduce(str(key), gradient(ranks.rank))
            sent.append(ranks.traffic.sent_bytes)
        return sent

    shares = set(zip(*run_hosts(1, 3, work), strict=True))
    assert len(shares) == 3, "of each rank that is a root"
    assert all(sum(share) == sum(next(iter(shares))) for share in shares)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (1, 2), (2, 1)])
def test_stages_are_those_of_the_timeline(hosts: int, per_host: int) -> None:
    """A collective of one rank costs nothing, and does not keep the device's work from where predictions have it."""
    chosen = random.Random(7).sample([option for option in COMPRESSED if rootless(option)], 80)
    free = Affine(alpha_s=0, beta_s_per_byte=0)
    coder = Coder(compress=free, decompress=free, accumulate=free)
    cluster = Cluster(
        hosts=hosts,
        gpus_per_host=per_host,
        intra=LinkCost(cost=free),
        inter=LinkCost(cost=free),
        compressor=CompressorCost(name="fp16", ratio=0.5, coders=dict.fromkeys(Device, coder)),
    )

    def work(fabric: Fabric) -> list[tuple[bool, int]]:
        scheme = OptionScheme(fabric, ErrorFeedback(named("fp16")), {str(o): o for o in chosen})
        found = []
        for option in chosen:
            reduction = scheme.begin(str(option), gradient(fabric.flat.rank))
            compresses = bool(kept_count(scheme, str(option)))
            reduction.prepare()
            reduction.communicate()
            reduction.settle()
            with patch.object(reduction, "_decompress", wraps=reduction._decompress) as decompress:
                reduction.total()
            found.append((compresses, decompress.call_count))
        return found

    expected = {}
    for option, steps in Costs(cluster, [412.0]).options(chosen):
        stands = places([step.resource for step in steps])
        where = [(step.resource, step.kind, place) for step, place in zip(steps, stands, strict=True)]
        early, last = (Resource.GPU, "compress", Place.EARLY), (Resource.GPU, "decompress", Place.LAST)
        expected[option] = early in where, where.count(last)
    for found in run_hosts(hosts, per_host, work):
        assert dict(zip(chosen, found, strict=True)) == expected


@pytest.mark.parametrize("name", nightly_but(["dgc", "bf16"], ["topk", "dgc", "randomk", "efsignsgd", "bf16"]))
def test_what_compression_leaves_out_comes_later(name: str) -> None:
    """Of the same gradient again and again the average of the results is the sum, for one and for many compressions."""
    chosen: list[Option] = random.Random(3).sample(COMPRESSED, 4)
    chosen += [max(COMPRESSED, key=lambda option: option.compressions)]
    steps = 40

    def work(fabric: Fabric) -> list[list[Tensor]]:
        scheme = OptionScheme(fabric, ErrorFeedback(named(name, density=0.5)), {str(o): o for o in chosen})
        return [[scheme.reduce(str(o), gradient(fabric.flat.rank)) for o in chosen] for _ in range(steps)]

    ranks = run_hosts(2, 2, work)
    total = sum(gradient(rank) for rank in range(4))
    for index, option in enumerate(chosen):
        for found in ranks[1:]:
            assert all(torch.equal(found[step][index], ranks[0][step][index]) for step in range(steps)), option
        average = torch.stack([step[index] for step in ranks[0]]).mean(0)
        assert (average - total).norm() < 0.2 * total.norm(), option


@pytest.mark.parametrize("name", ["topk", "randomk", "efsignsgd", "fp16"])
def test_no_rank_remembers_a_step_that_overflowed_on_one(name: str) -> None:
    """Also where each rank compresses another part of the tensor, or one goes on for its host."""
    chosen = [*random.Random(5).sample(COMPRESSED, 40), max(COMPRESSED, key=lambda option: option.compressions)]
    keys = [str(option) for option in chosen]

    def work(fabric: Fabric) -> list[str]:
        rank, wrong = fabric.flat.rank, []
        scheme = OptionScheme(fabric, ErrorFeedback(named(name, density=0.2)), dict(zip(keys, chosen, strict=True)))
        for key in keys:
            scheme.reduce(key, gradient(rank))
            before = {name: [tensor.clone() for tensor in kept] for name, kept in kept_count(scheme, key).items()}
            poisoned = gradient(4 + rank)
            poisoned[-1] = torch.inf if rank == 2 else 0.0
            assert not scheme.reduce(key, poisoned).isfinite().all()
            after = kept_count(scheme, key)
            if not all(torch.equal(after[name][0], kept[0]) for name, kept in before.items()):
                wrong.append(key)
        return wrong

    assert run_hosts(2, 2, work) == [[]] * 4


def test_restored_scheme_goes_on_bit_for_bit() -> None:
    option = max(COMPRESSED, key=lambda option: option.compressions)

    def work(fabric: Fabric) -> tuple[list[Tensor], list[Tensor]]:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), {"w": option})
        scheme.reduce("w", gradient(fabric.flat.rank))
        saved = scheme.state_dict()
        expected = [scheme.reduce("w", gradient(10 * step + fabric.flat.rank)) for step in (1, 2)]
        other = OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), {"w": option})
        other.load_state_dict(saved)
        return expected, [other.reduce("w", gradient(10 * step + fabric.flat.rank)) for step in (1, 2)]

    for expected, found in run_hosts(2, 2, work):
        assert all(map(torch.equal, expected, found))


def test_what_is_remembered_of_parts_that_are_no_more_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Of three groups one is treated in another way, one is gone, and one goes on bit for bit."""
    whole, divided = options_of({"w": "compressed"})["w"], max(COMPRESSED, key=lambda option: option.compressions)

    def work(fabric: Fabric) -> bool:
        def make(options: dict[str, Option]) -> OptionScheme:
            return OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), options)

        before = make({"same": whole, "other": divided, "gone": whole})
        for key in ("same", "other", "gone"):
            before.reduce(key, gradient(fabric.flat.rank))
        scheme = make({"same": whole, "other": whole, "new": divided})
        scheme.load_state_dict(deepcopy(before.state_dict()))
        assert scheme.state_dict()["memory"]["kept"].keys() == {"same/0/0"}
        assert scheme.state_dict()["memory"]["steps"].keys() == {"same/0/0"}
        found = [scheme.reduce(key, gradient(9 + fabric.flat.rank)) for key in ("same", "other", "new")]
        anew = make({"other": whole, "new": divided})
        expected = [before.reduce("same", gradient(9 + fabric.flat.rank))]
        expected += [anew.reduce(key, gradient(9 + fabric.flat.rank)) for key in ("other", "new")]
        return all(map(torch.equal, found, expected))

    assert run_hosts(2, 2, work) == [True] * 4
    assert len(caplog.messages) == 4
    assert set(caplog.messages) == {
        "what compression left out of 2 of 3 groups of gradients is lost: 1 are not groups of this plan, 1 are treated "
        "in another way"
    }


def test_state_of_other_hosts_is_forgotten_and_of_another_scheme_refused(caplog: pytest.LogCaptureFixture) -> None:
    options = options_of({"w": "compressed"})

    def work(fabric: Fabric) -> dict[str, object]:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), options)
        scheme.reduce("w", gradient(fabric.flat.rank))
        return scheme.state_dict()

    def load(fabric: Fabric) -> None:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), options)
        scheme.load_state_dict(saved)
        assert scheme.state_dict()["memory"]["kept"] == {}
        with pytest.raises(CommError, match="not a state of planned gradients"):
            scheme.load_state_dict({"scheme": "zen"})

    saved = run_hosts(2, 1, work)[0]
    run_hosts(1, 2, load)
    assert caplog.messages[0].startswith("what compression left out of 1 of 1 groups")


def test_what_a_plan_says_of_a_group() -> None:
    found = options_of({"a": "dense", "b": "compressed", "c": str(COMPRESSED[-1])})
    assert found == {"b": options_of({"b": str(found["b"])})["b"], "c": COMPRESSED[-1]}
    assert found["b"].flat
    with pytest.raises(CommError, match="'zip' is not an option of the tree"):
        options_of({"a": "zip"})


def test_bytes_that_are_no_pieces_are_refused() -> None:
    """As ranks would get them that run different plans."""
    # A compressor whose sizes vary, so that they are announced.

    def work(fabric: Fabric) -> str:
        if fabric.flat.rank == 0:
            fabric.flat.send_to_all(torch.arange(50, dtype=torch.uint8))
            return ""
        scheme = OptionScheme(fabric, ErrorFeedback(named("dgc")), options_of({"w": "compressed"}))
        with pytest.raises(MessageError) as error:
            scheme.reduce("w", gradient(1))
        return str(error.value)

    assert "is not made of pieces" in run_hosts(1, 2, work)[1]
    with pytest.raises(MessageError):
        from_bytes(torch.zeros(3, dtype=torch.uint8), (torch.float32, 1))
