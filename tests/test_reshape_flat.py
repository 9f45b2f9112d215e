"""Flat shards of FSDP1 in another number of ranks: what FSDP1 itself gathers is the same bits, or nothing is loaded."""

from pathlib import Path

import pytest
from launchers import run_trainers

pytestmark = pytest.mark.jobs

RANKS = Path(__file__).with_name("flat_ranks.py")


@pytest.mark.parametrize("pairs", [["2,3", "3,1"], ["4,2", "1,4"]], ids="-".join)
def test_shards_of_fsdp1_are_what_it_gathers(tmp_path: Path, pairs: list[str]) -> None:
    sizes = [size for pair in pairs for size in pair.split(",")]
    said = run_trainers([str(RANKS), str(tmp_path), *pairs], int(max(sizes))).splitlines()
    assert len([line for line in said if line.startswith("same ")]) == 6 * sum(map(int, sizes[1::2]))
