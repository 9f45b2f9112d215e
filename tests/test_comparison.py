"""What hosts claim of their digests: counted report by report as if all were counted anew."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from resilient_run.daemon.comparison import ClaimTally
from resilient_run.daemon.digests import Claim, EqualLeaves, parse_claims

MASKS = {"s": "new"}
claims = st.builds(
    Claim, structure=st.sampled_from("st"), mask=st.sampled_from(["", "old", "new"]), digest=st.sampled_from("ab")
)
pairs = st.tuples(st.just(1), st.integers(1, 3))


@given(reports=st.lists(st.tuples(st.integers(0, 2), st.dictionaries(pairs, st.lists(claims, min_size=2, max_size=2)))))
def test_a_tally_is_what_the_newest_reports_say(
    reports: list[tuple[int, dict[tuple[int, int], list[Claim]]]],
) -> None:
    """Of the ranks of a structure: all have the same digest of the newest mask, or a pair is not agreed on."""
    tally, newest = ClaimTally(), dict[int, dict[tuple[int, int], dict[int, Claim]]]()
    for host, report in reports:
        newest[host] = {pair: {2 * host: rows[0], 2 * host + 1: rows[1]} for pair, rows in report.items()}
        tally.see(f"host{host}", newest[host])
    known: defaultdict[tuple[int, int], list[Claim]] = defaultdict(list)
    for found in newest.values():
        for pair, rows in found.items():
            known[pair] += [claim for claim in rows.values() if claim.structure == "s"]
    for pair, found in known.items():
        one = len(set(found)) == 1 and found[0].mask == "new"
        assert tally.agrees(pair, MASKS) is (one or len(found) < 2), (pair, found)
        assert len(tally.ranks.get(pair, {}).get("s", {})) == len(found)
    differing = [
        (pair, "s")
        for pair, found in sorted(known.items())
        if len({claim.digest for claim in found if claim.mask == "new"}) > 1
    ]
    assert tally.differing(MASKS) == differing
    assert tally.agrees((9, 9), MASKS)
    for host in newest:
        tally.see(f"host{host}", {})
    assert not tally.ranks


def test_what_a_host_reports_is_read_back() -> None:
    row = [1, 4, "00ff", "aa", "bb"]
    assert parse_claims({"held": {}, "digests": {"3": [row]}}) == {
        (1, 4): {3: Claim(structure="00ff", mask="aa", digest="bb")}
    }
    assert parse_claims({"held": {}}) == {}


@given(bits=st.lists(st.booleans(), max_size=70))
def test_masks_are_read_back(bits: list[bool]) -> None:
    import numpy as np

    equal = EqualLeaves.of(4, np.array(bits, dtype=np.bool_))
    read = EqualLeaves.parse("ckpt/equal/s", equal.to_value())
    assert (read.generation, read.name, read.mask.tolist()) == (4, equal.name, bits)
