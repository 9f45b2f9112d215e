"""A short run of the fuzzer: `python tests/fuzz.py` is the long one."""

import pytest
from fuzz import run

pytestmark = pytest.mark.fast


def test_changed_documents_are_read_or_refused() -> None:
    found = run(20_000, "ci")
    assert found["failures"] == []
    assert all(row["read"] and row["refused"] for row in found["readers"].values())
