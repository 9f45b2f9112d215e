"""Which cases of a test run each time, and which only in the nightly tier."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases; those that are not kept are nightly.

    Raises:
        ValueError: What is to be kept is no case.
    """
    values = list(cases)
    if unknown := [each for each in kept if each not in values]:
        raise ValueError(f"{unknown} are no cases")
    return [each if each in kept else pytest.param(each, marks=pytest.mark.nightly) for each in values]
