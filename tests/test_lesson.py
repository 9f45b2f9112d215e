"""What counts as corrupted: leaves that changed alike on all ranks, or never, and then differ; nothing else."""

import numpy as np
import pytest

from resilient_run.daemon.comparison.lesson import ALIKE, STILL, Lesson, RankDifference


def rows(*ranks: list[int]) -> dict[int, np.ndarray]:
    return {rank: np.array(values, dtype=np.uint64) for rank, values in enumerate(ranks)}


def taught(count: int, *, ranks: int = 2, looks: int = ALIKE + 1) -> Lesson:
    """Return a lesson after `looks` at which all leaves changed alike."""
    lesson = Lesson(count)
    for look in range(looks):
        assert lesson.study(rows(*[[look] * count] * ranks)) is None
    return lesson


def test_replicas_are_learned_by_their_changes() -> None:
    assert taught(2, looks=ALIKE).mask.tolist() == [False, False]
    assert taught(2).mask.tolist() == [True, True]


def test_what_differs_at_once_is_never_compared() -> None:
    """Buffers, residuals and random states of a rank: also not when they are equal by chance later."""
    lesson = Lesson(2)
    for look in range(2 * STILL):
        assert lesson.study(rows([look, look], [look, 2 * look + 1])) is None
        assert lesson.study(rows([look, 0], [look, 0])) is None
    assert lesson.mask.tolist() == [True, False]
    assert lesson.study(rows([99, 1], [99, 2])) is None


def test_what_is_equal_by_chance_and_then_differs_is_no_corruption() -> None:
    """Zeros that stand still for a while prove nothing, nor do one or two steps in common."""
    lesson = Lesson(2)
    for look in (0, 0, 1, 2):
        assert lesson.study(rows([0, look], [0, look])) is None
    assert lesson.study(rows([5, 8], [6, 9])) is None
    assert lesson.mask.tolist() == [False, False]


def test_a_changed_replica_is_found_and_the_majority_names_it() -> None:
    lesson = taught(3, ranks=3)
    found = lesson.study(rows([9, 9, 9], [9, 4, 9], [9, 9, 9]))
    assert found == RankDifference(leaves=(1,), parties=((0, 2), (1,)))
    assert found.culprits == (1,)
    assert found.describe(["w"]) == "rank 1 differs from ranks 0, 2 in w, which they had in common"
    lesson.drop(found)
    assert lesson.study(rows([10, 9, 10], [10, 4, 10], [10, 9, 10])) is None
    assert lesson.study(rows([11, 9, 3], [11, 4, 11], [11, 9, 11])) == RankDifference(
        leaves=(2,), parties=((1, 2), (0,))
    )


def test_two_ranks_have_no_majority() -> None:
    found = taught(7).study(rows([5] * 7, [6] * 7))
    assert found is not None
    assert found.culprits == ()
    assert found.describe(["a", "b"]).startswith(
        "rank 0 and rank 1 differ, and no majority says which is right, in a, b"
    )
    assert "and 5 more" in found.describe(["a", "b"])


def test_a_frozen_leaf_is_compared_and_may_be_thawed() -> None:
    """A bit that flips in it on one rank is corruption; that it begins to change everywhere is not."""
    for thawed, corrupted in (([7], [8]), ([7], [0])):
        lesson = Lesson(1)
        for _ in range(STILL + 1):
            assert lesson.study(rows([0], [0])) is None
        assert lesson.mask.tolist() == [True]
        found = lesson.study(rows(thawed, corrupted))
        assert (found is None) is (corrupted == [8])
        assert lesson.mask.tolist() == [corrupted == [0]]
    lesson = Lesson(1)
    for look in [0] * (STILL + 1) + [1, 2, 3, 4]:
        assert lesson.study(rows([look], [look])) is None
    assert lesson.mask.tolist() == [True]


def test_replicas_are_known_in_the_next_generation_and_constants_are_not() -> None:
    """Leaves: a replica, one that differs, and one that never changes."""
    lesson = Lesson(3)
    for look in range(12):
        digests = {rank: np.array([look, look + rank, 7], dtype=np.uint64) for rank in range(2)}
        assert lesson.study(digests) is None
    assert lesson.mask.tolist() == [True, False, True]
    assert lesson.replicated.tolist() == [True, False, False]


@pytest.mark.parametrize("mask", [[True, False]])
def test_a_new_root_goes_on_with_what_is_learned(mask: list[bool]) -> None:
    lesson = Lesson(2, np.array(mask))
    assert lesson.mask.tolist() == mask
    assert lesson.study(rows([1, 1], [2, 2])) == RankDifference(leaves=(0,), parties=((0,), (1,)))
