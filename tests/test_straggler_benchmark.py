"""`benchmarks/straggler.py` in its smallest size: a rank that is told to be slow is named, and no other one."""

import pytest
import straggler

pytestmark = pytest.mark.jobs


def test_a_rank_that_is_slow_is_named_and_is_not_any_more_afterwards() -> None:
    with straggler.Run(hosts=2, batch=64) as run:
        run.wait(20)
        found = straggler.inject(run, rank=1, factor=4.0, steps=100_000)
        assert found["named"], found
        assert found["others"] == []
        assert run.wait(100_000, quiet=True)[1] == {}
