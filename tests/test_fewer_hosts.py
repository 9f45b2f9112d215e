"""`benchmarks/fewer_hosts.py` in its smallest size."""

import fewer_hosts
import pytest

pytestmark = pytest.mark.jobs


def test_run_goes_on_in_one_rank_and_loses_at_most_what_was_not_committed() -> None:
    found = fewer_hosts.measure(fewer_hosts.CONTENDERS["resilient-run"], hosts=2, state_mb=1, kill_after=3)
    assert found["seconds"] > 0
    assert found["steps_lost"] <= 5
