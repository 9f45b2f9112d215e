"""Some conversations of the fuzzer with a real daemon: `python tests/fuzz_live.py` has more."""

import pytest
from fuzz_live import run

pytestmark = pytest.mark.jobs


def test_changed_conversations_leave_a_daemon_at_work() -> None:
    found = run(inputs=600, seed="ci")
    assert found["failures"] == []
    assert all(sum(row.values()) > 50 for row in found["speakers"].values())
    assert all(found["speakers"][name]["answered"] for name in ("guests at the socket", "launchers", "trainers"))
    assert found["commits"] == 5
