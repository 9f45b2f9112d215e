"""What options cost: messages that travel on unsummed, shared adapters, rooted collectives, the compressor."""

import json
from pathlib import Path

import pytest
from espresso_instances import affine

from resilient_run.comm.errors import FileError
from resilient_run.comm.espresso.cost import Costs
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.plan.cluster import Cluster, Coder, CompressorCost, LinkCost, read_cluster
from resilient_run.comm.plan.curve import FREE, Table
from resilient_run.comm.plan.tree import Device, Routine, all_options, parse

SIZE_BYTES = 800.0


def costed(
    text: str,
    *,
    hosts: int,
    gpus: int,
    alpha_s: float = 0.0,
    call_s: float = 0.0,
    batched: bool = False,
    size_bytes: float = SIZE_BYTES,
) -> list[tuple[str, float]]:
    """Return resource and seconds of each step: one second for a byte in the host, ten between hosts."""
    coder = Coder(compress=affine(call_s, 100), decompress=affine(call_s, 1000), accumulate=affine(call_s, 10000))
    coders = {Device.GPU: coder, Device.CPU: coder}
    made = Cluster(
        hosts=hosts,
        gpus_per_host=gpus,
        intra=LinkCost(cost=affine(alpha_s, 1)),
        inter=LinkCost(cost=affine(10 * alpha_s, 10)),
        compressor=CompressorCost(name="half", ratio=0.5, coders=coders, batched=batched),
    )
    ((_, steps),) = Costs(made, [size_bytes]).options([parse(text)])
    return [(step.resource, step.seconds[0]) for step in steps]


def test_a_dense_hierarchical_sum_shares_the_adapter() -> None:
    steps = costed("reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2", hosts=2, gpus=4)
    # Each GPU holds 200 bytes between hosts, and four of them share the adapter.
    assert steps == [("intra", 600), ("inter", 10 * 4 * 200), ("intra", 600)]


def test_after_a_reduction_to_a_root_one_gpu_sends() -> None:
    steps = costed("reduce@intra1 > all_reduce@inter > broadcast@intra2", hosts=2, gpus=4)
    # Four GPUs of a host are a tree of two rounds.
    assert steps == [("intra", 2 * 800), ("inter", 10 * 800), ("intra", 2 * 800)]


def test_gathered_messages_are_decompressed_one_and_accumulated_the_others() -> None:
    steps = costed(
        "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:cpu > all_gather@intra2", hosts=4, gpus=2
    )
    # 400 dense bytes, 200 compressed ones; three other hosts send them to both GPUs; four messages to sum.
    assert steps == [
        ("intra", 400),
        ("gpu", 100 * 400),
        ("inter", 10 * 3 * 2 * 200),
        ("cpu", 1000 * 400 + 3 * 10000 * 400),
        ("intra", 400),
    ]


def test_messages_that_nobody_sums_multiply() -> None:
    steps = costed(
        "comp:gpu > all_to_all@intra1 > all_to_all@inter > all_gather@inter > all_gather@intra2 > decomp:gpu",
        hosts=4,
        gpus=2,
    )
    # 400 compressed bytes; then 2 messages of 200 bytes, then 8 of 50 bytes, gathered to 8 of 200 and 8 of 400 bytes.
    assert steps == [
        ("gpu", 100 * 800),
        ("intra", 200),
        ("inter", 10 * 2 * 0.75 * 400),
        ("inter", 10 * 2 * 3 * 400),
        ("intra", 8 * 200),
        ("gpu", 1000 * 800 + 7 * 10000 * 800),
    ]


@pytest.mark.parametrize(
    ("batched", "compressing", "decompressing"),
    [(False, 8 * 7 + 100 * 800, 8 * (7 + 7 * 7) + 1000 * 800 + 7 * 10000 * 800), (True, 7 + 80000, 14 + 56800000)],
)
def test_pieces_that_go_different_ways_are_compressed_one_by_one_or_in_a_batch(
    batched: bool, compressing: float, decompressing: float
) -> None:
    text = "comp:gpu > all_to_all@intra1 > all_to_all@inter > all_gather@inter > all_gather@intra2 > decomp:gpu"
    steps = costed(text, hosts=4, gpus=2, batched=batched, call_s=7)
    assert [steps[0], steps[-1]] == [("gpu", compressing), ("gpu", decompressing)]


def test_gathering_to_a_root_leaves_it_all_messages() -> None:
    steps = costed(
        "comp:gpu > gather@intra1 > decomp:gpu > comp:gpu > gather@inter > decomp:gpu > broadcast@inter"
        " > broadcast@intra2",
        hosts=3,
        gpus=2,
    )
    assert steps == [
        ("gpu", 80000),
        ("intra", 400),
        ("gpu", 800000 + 8000000),
        ("gpu", 80000),
        ("inter", 10 * 2 * 400),
        ("gpu", 800000 + 2 * 8000000),
        ("inter", 10 * 2 * 800),
        ("intra", 800),
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("all_reduce@flat", 10 * 2 * 3 / 4 * 800),
        # Two GPUs of a host exchange a quarter each with the other host.
        ("reduce_scatter@flat > all_gather@flat", 10 * 2 / 4 * 800),
        ("comp:gpu > all_gather@flat > decomp:gpu", 10 * 2 * 400),
        # Two GPUs of a host send half of what they hold to the other host.
        ("comp:gpu > all_to_all@flat > decomp:gpu > all_gather@flat", 10 * 2 * 0.5 * 400),
        ("comp:gpu > gather@flat > decomp:gpu > broadcast@flat", 10 * 2 * 400),
    ],
)
def test_flat_collectives_are_as_slow_as_the_adapter(text: str, seconds: float) -> None:
    assert next(taken for resource, taken in costed(text, hosts=2, gpus=2) if resource == "inter") == seconds


def test_flat_collectives_of_one_host_stay_in_it() -> None:
    assert costed("all_reduce@flat", hosts=1, gpus=4) == [("intra", 2 * 3 / 4 * 800)]


def test_latency_counts_rounds() -> None:
    bytes_s = 10 * 2 * 3 / 4 * 800
    assert costed("all_reduce@flat", hosts=4, gpus=1, alpha_s=1) == [("inter", 60 + bytes_s)]
    ((_, seconds), _) = costed("reduce@flat > broadcast@flat", hosts=5, gpus=1, alpha_s=1)
    assert seconds == 30 + 10 * 3 * 800


def test_what_has_to_be_announced_costs_one_message_more() -> None:
    text = "comp:gpu > gather@flat > decomp:gpu > comp:gpu > broadcast@flat > decomp:gpu"
    bytes_s = [10 * 3 * 400, 10 * 2 * 400]
    found = costed(text, hosts=4, gpus=1, alpha_s=1000)
    further_s = 2e-4
    assert [taken for resource, taken in found if resource == "inter"] == pytest.approx(
        [10000 + further_s + bytes_s[0], 30000 + further_s + bytes_s[1]], rel=1e-9
    )


@pytest.mark.parametrize(
    ("text", "kib", "received_kib", "startup_s", "startups"),
    [
        ("comp:gpu > all_to_all@flat > decomp:gpu > all_gather@flat", 682, 341 * 3 / 4, 1e6, 1),
        ("comp:gpu > all_to_all@flat > decomp:gpu > all_gather@flat", 684, 342 * 3 / 4, 1e6, 3),
        ("comp:gpu > gather@flat > decomp:gpu > broadcast@flat", 170, 85 * 3, 1e6, 1),
        ("comp:gpu > gather@flat > decomp:gpu > broadcast@flat", 172, 86 * 3, 1e6, 3),
        ("comp:gpu > gather@flat > decomp:gpu > broadcast@flat", 26, 13 * 3, 1e5, 1),
        ("comp:gpu > gather@flat > decomp:gpu > broadcast@flat", 28, 14 * 3, 1e5, 3),
    ],
)
def test_short_messages_start_together(
    text: str, kib: int, received_kib: float, startup_s: float, startups: int
) -> None:
    """Up to 256 KiB from three others, half of whose bytes are left after compression.

    And up to what a link passes in four start-ups, because those in turn wait for two more; a byte takes 10 s.
    """
    found = costed(text, hosts=4, gpus=1, alpha_s=startup_s / 10, size_bytes=kib << 10)
    sent_s = next(taken for resource, taken in found if resource == "inter")
    # Two further messages cost a quarter of a start-up each, and 0.1 ms at most.
    further_s = 2e-4 if startups == 1 else 0
    assert sent_s == pytest.approx(startups * startup_s + further_s + 10 * 1024 * received_kib, rel=1e-12)


def test_collectives_of_one_participant_are_no_steps() -> None:
    assert costed("reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2", hosts=2, gpus=1) == [("inter", 8000)]
    assert costed("reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2", hosts=1, gpus=1) == []


def test_nothing_is_communicated_of_an_empty_tensor() -> None:
    made = Cluster(
        hosts=2,
        gpus_per_host=2,
        intra=LinkCost(cost=affine(1, 1)),
        inter=LinkCost(cost=affine(1, 1)),
        compressor=CompressorCost(
            name="c", ratio=1, coders={Device.GPU: Coder(compress=affine(1, 1), decompress=FREE, accumulate=FREE)}
        ),
    )
    for _, steps in Costs(made, [0.0, 8.0]).options(all_options()):
        assert sum(step.seconds[0] for step in steps) == 0
        assert sum(step.seconds[1] for step in steps) > 0


def test_options_on_devices_without_costs_are_left_out() -> None:
    coder = Coder(compress=FREE, decompress=FREE, accumulate=FREE)
    made = Cluster(
        hosts=2,
        gpus_per_host=2,
        intra=LinkCost(cost=affine(0, 1)),
        inter=LinkCost(cost=affine(0, 1)),
        compressor=CompressorCost(name="c", ratio=1, coders={Device.GPU: coder}),
    )
    assert len(Costs(made, [8.0]).options(all_options())) == 174


FILE = {
    "version": 1,
    "hosts": 8,
    "gpus_per_host": 4,
    "forward_s": 0.01,
    "bytes_per_element": 4,
    "intra": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-10, "routines": {}},
    "inter": {
        "alpha_s": 3e-5,
        "beta_s_per_byte": 3e-10,
        "routines": {"all_gather": {"alpha_s": 4e-5, "beta_s_per_byte": 4e-10}},
    },
    "compressors": {
        "dgc": {
            "ratio": 0.02,
            "gpu": {
                "compress": {"sizes_bytes": [4e6, 8e6], "seconds": [2e-4, 4e-4]},
                "decompress": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-11},
            },
        },
        "efsignsgd": {
            "ratio": 0.03125,
            "cpu": {
                "compress": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-11},
                "decompress": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-11},
                "accumulate": {"alpha_s": 0, "beta_s_per_byte": 1e-12},
            },
        },
    },
}


def written(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**FILE, **changes}))
    return path


def test_cluster_files_are_read(tmp_path: Path) -> None:
    made = read_cluster(written(tmp_path / "c.json"), "dgc")
    assert (made.hosts, made.gpus_per_host, made.forward_s) == (8, 4, 0.01)
    assert made.inter.of(Routine.ALL_GATHER) == affine(4e-5, 4e-10)
    assert made.inter.of(Routine.BROADCAST) == affine(3e-5, 3e-10)
    coder = made.compressor.coders[Device.GPU]
    assert isinstance(coder.compress, Table)
    assert coder.accumulate == coder.decompress
    assert set(read_cluster(written(tmp_path / "c.json"), "efsignsgd").compressor.coders) == {Device.CPU}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, "hosts = 0: write the number of hosts, an integer of at least 1"),
        ({"hosts": 10**18}, "hosts = 1000000000000000000: describe no more than 100000 GPUs in all"),
        ({"hosts": 20_000, "gpus_per_host": 6}, "hosts = 20000: describe no more than 100000 GPUs in all"),
        ({"compressors": {}}, "there is no 'dgc' in it"),
        ({"compressors": {"dgc": {"ratio": 1}}}, "say what it costs on at least one device"),
        ({"inter": {"alpha_s": 0}}, "inter.beta_s_per_byte is missing"),
        (
            {"inter": {"alpha_s": 0, "beta_s_per_byte": 1, "routines": {"scatter": {}}}},
            "no collective 'scatter'; there are all_reduce",
        ),
        ({"speed": 1}, "speed = 1: no such key here"),
    ],
)
def test_wrong_cluster_files_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(FileError) as raised:
        read_cluster(written(tmp_path / "c.json", **changes), "dgc")
    assert message in str(raised.value)


def test_resources_of_steps_are_those_of_the_timeline() -> None:
    assert {str(device) for device in Device} <= {str(resource) for resource in Resource}


def test_measured_links_cost_what_was_measured() -> None:
    """Points are over what all hold that share the adapter; compressed data and flat collectives have their own."""

    def points(factor: float) -> Table:
        return Table(sizes_bytes=(0.0, 1000.0), seconds=(0.0, 1000 * factor))

    coder = Coder(compress=FREE, decompress=FREE, accumulate=FREE)
    made = Cluster(
        hosts=4,
        gpus_per_host=2,
        intra=LinkCost(cost=points(1)),
        inter=LinkCost(cost=points(10), compressed={Routine.ALL_GATHER: points(100)}),
        flat=LinkCost(cost=points(3)),
        compressor=CompressorCost(name="half", ratio=0.5, coders={Device.GPU: coder}),
    )

    def seconds(text: str) -> list[float]:
        ((_, steps),) = Costs(made, [SIZE_BYTES]).options([parse(text)])
        return [float(step.seconds[0]) for step in steps]

    assert seconds("all_reduce@flat") == [3 * 800]
    assert seconds("reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2") == [800, 10 * 2 * 400, 400]
    assert seconds("reduce@intra1 > all_reduce@inter > broadcast@intra2") == [800, 10 * 800, 800]
    compressed = "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:gpu > all_gather@intra2"
    assert seconds(compressed) == [800, 0, 100 * 2 * 200, 0, 400]


def test_points_of_links_need_those_of_all_gpus(tmp_path: Path) -> None:
    link = {"sizes_bytes": [1, 2], "seconds": [1, 2], "compressed": {"gather": {"alpha_s": 0, "beta_s_per_byte": 1}}}
    path = written(tmp_path / "c.json", intra=link, inter=link)
    with pytest.raises(FileError, match="say what collectives of all GPUs cost as well"):
        read_cluster(path, "dgc")
    path = written(tmp_path / "c.json", intra=link, inter=link, flat=link)
    found = read_cluster(path, "dgc")
    assert found.flat == found.inter
    assert found.inter.of(Routine.GATHER, compressed=True) == affine(0, 1)
    assert found.inter.of(Routine.GATHER) == Table(sizes_bytes=(1.0, 2.0), seconds=(1.0, 2.0))
