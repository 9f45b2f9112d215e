"""Espresso's decision tree: as many options as the paper says, all of them well formed, and what constraints leave."""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from baselines import planners
from click.testing import CliRunner

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.plan import constraints, tree
from resilient_run.comm.plan.tree import Comm, Comp, Decomp, Meeting, Option, Phase, Role, Routine, Steps


def counts(paths: Iterable[Steps]) -> tuple[int, int]:
    """Return the numbers of options with both devices and with GPUs only."""
    options = [Option(steps) for steps in paths]
    return len(options), sum(map(constraints.gpu_only, options))


def test_the_tree_has_as_many_options_as_the_paper_says() -> None:
    options = tree.all_options()
    gpu_only = [option for option in options if constraints.gpu_only(option)]
    assert len(options) == len({str(option) for option in options}) == 4341
    assert len(gpu_only) == 174
    assert sum(map(constraints.compressed, gpu_only)) == 165


@pytest.mark.parametrize("rooted", [False, True])
def test_each_subtree_has_its_number_of_options(rooted: bool) -> None:
    """T1 to T5 of the thesis; from dense data on, a way begins with a compression or not."""

    def ways(schemes: Iterable[list[Meeting]], *, compressed: bool) -> tuple[int, int]:
        return counts(steps for scheme in schemes for steps in tree.walk(scheme, compressed=compressed))

    last = Meeting(Phase.INTRA2, Role.SECOND, rooted)
    between = [[*scheme, last] for scheme in tree.in_one_phase(Phase.INTER)]
    t1, t2 = (5, 2), (12, 3)
    assert ways([[last]], compressed=False) == t1
    assert ways([[last]], compressed=True) == t2
    second = Meeting(Phase.INTER, Role.SECOND, rooted)
    assert ways([[second, last]], compressed=False) == (29, 5)
    (t3, t3_gpu), (t4, t4_gpu) = (63, 12), (152, 19)
    from_dense = t3 + 2 * t4, t3_gpu + t4_gpu
    assert ways(between, compressed=False) == from_dense
    assert ways(between, compressed=True) == (t4 + 2 * from_dense[0], t4_gpu + from_dense[1])
    assert ways(tree.in_one_phase(Phase.FLAT), compressed=False) == (63, 12)
    hierarchical = [scheme for each in tree.in_one_phase(Phase.INTER) for scheme in tree.around(each)]
    assert ways(hierarchical, compressed=False) == (4278, 162)


@pytest.mark.parametrize("part", range(10))
def test_every_option_is_well_formed(part: int) -> None:
    for option in tree.all_options()[part::10]:
        compressed = False
        for step in option.steps:
            if isinstance(step, Comm):
                assert step.compressed == compressed, option
            else:
                assert isinstance(step, Decomp) == compressed, option
                compressed = isinstance(step, Comp)
        assert not compressed, option
        phases = [comm.phase for comm in option.comms]
        order = (Phase.FLAT,) if option.flat else (Phase.INTRA1, Phase.INTER, Phase.INTRA2)
        assert list(dict.fromkeys(phases)) == list(order), option
        for first, second in pairs(option):
            assert second.routine is (Routine.BROADCAST if first.routine.rooted else Routine.ALL_GATHER), option


def pairs(option: Option) -> list[tuple[Comm, Comm]]:
    """Return the first and second steps that belong together: between hosts, or around what lies between hosts."""
    in_host = [comm for comm in option.comms if comm.phase is not Phase.INTER and comm.role is not Role.WHOLE]
    between = [comm for comm in option.comms if comm.phase is Phase.INTER and comm.role is not Role.WHOLE]
    for comms in (in_host, between):
        assert [comm.role for comm in comms] in ([], [Role.FIRST, Role.SECOND]), option
    return [pair for comms in (in_host, between) for pair in pairwise(comms)]


def test_options_are_read_as_they_are_written() -> None:
    assert all(tree.parse(str(option)) is option for option in tree.all_options())
    with pytest.raises(ValueError, match=r"'all_reduce@moon' is not an option"):
        tree.parse("all_reduce@moon")


@pytest.mark.parametrize(
    ("names", "options", "gpu_only"),
    [
        ([], 4341, 174),
        (["uncompressed"], 9, 9),
        (["compressed"], 4332, 165),
        (["gpu-only"], 174, 174),
        (["flat"], 63, 12),
        (["hierarchical"], 4278, 162),
        (["hierarchical", "compressed", "gpu-only"], 156, 156),
        (["rootless", "gpu-only"], 54, 54),
        (["compress-once", "gpu-only"], 68, 68),
        (["uncompressed", "rootless"], 4, 4),
    ],
)
def test_constraints_prune_the_tree(names: list[str], options: int, gpu_only: int) -> None:
    left = constraints.allowed(names)
    assert (len(left), sum(map(constraints.gpu_only, left))) == (options, gpu_only)


def test_contradicting_and_unknown_constraints_are_refused() -> None:
    with pytest.raises(ValueError, match="no option meets flat, hierarchical together"):
        constraints.allowed(["flat", "hierarchical"])
    with pytest.raises(ValueError, match="no constraint 'gpu'; there are uncompressed"):
        constraints.allowed(["gpu"])


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (
            planners.inter_all_gather,
            "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:gpu > all_gather@intra2",
        ),
        (
            planners.inter_all_to_all,
            "reduce_scatter@intra1 > comp:gpu > all_to_all@inter > decomp:gpu > comp:gpu > all_gather@inter"
            " > decomp:gpu > all_gather@intra2",
        ),
        (
            planners.all_to_all_twice,
            "comp:gpu > all_to_all@intra1 > decomp:gpu > comp:gpu > all_to_all@inter > decomp:gpu > comp:gpu"
            " > all_gather@inter > all_gather@intra2 > decomp:gpu",
        ),
    ],
)
def test_the_schemes_of_the_paper_are_one_path_each(scheme: constraints.Constraint, expected: str) -> None:
    found = [str(option) for option in tree.all_options() if scheme(option) and constraints.gpu_only(option)]
    assert found == [expected]


def test_the_command_lists() -> None:
    everything = CliRunner().invoke(resilient_comm, ["tree", "--json"])
    assert len(json.loads(everything.output)) == 4341
    listed = CliRunner().invoke(resilient_comm, ["tree", "--constraint", "uncompressed", "--constraint", "flat"]).output
    assert listed.splitlines() == [
        "all_reduce@flat",
        "reduce_scatter@flat > all_gather@flat",
        "reduce@flat > broadcast@flat",
    ]
    refused = CliRunner().invoke(resilient_comm, ["tree", "--constraint", "flat", "--constraint", "hierarchical"])
    assert refused.exit_code == 1
    assert "leave one out" in refused.output
