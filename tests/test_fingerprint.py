"""Fingerprints of memory: equal on every backend, and no two contents share one but by the chance that is promised."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from resilient_run.ckpt.capture import fingerprint
from resilient_run.ckpt.capture.fingerprint import (
    FRAGMENT_BYTES,
    fingerprint_cpu,
    fingerprint_cuda,
    weights,
)

# Numbers of the simulator are numpy's, which warn when they wrap around; on hardware that is what they are for.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def reference(words: Tensor, starts: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
    """The specification of the kernels, in plain torch."""
    found = torch.empty(len(starts), 2, dtype=torch.int64, device=words.device)
    for row, start, size in zip(found, starts.tolist(), sizes.tolist(), strict=True):
        count = -(-size // 4)
        fragment = words[start : start + count].long() & 0xFFFF_FFFF
        if size % 4:
            fragment[-1] &= (1 << 8 * (size % 4)) - 1
        for lane in range(2):
            row[lane] = size + (weights[lane : count + lane] * fragment).sum()
    return found


@dataclass(frozen=True, kw_only=True)
class Backend:
    run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    device: str = "cpu"
    slow: bool = False

    def __call__(self, words: Tensor, starts: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
        """Run with tensors of the CPU, and return one."""
        return self.run(*(tensor.to(self.device) for tensor in (words, starts, sizes, weights))).cpu()


# With a GPU numba has no simulator, and nothing to simulate.
KERNELS = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Backend(run=fingerprint_cpu), id="cpu"),
        pytest.param(Backend(run=fingerprint_cuda, device="cuda"), id="gpu", marks=pytest.mark.gpu)
        if torch.cuda.is_available()
        else pytest.param(Backend(run=fingerprint_cuda, slow=True), id="simulator"),
    ],
)
EACH = pytest.mark.parametrize("run", [Backend(run=reference), *(p.values[0] for p in KERNELS.args[1])])


def words_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data + bytes(-len(data) % 4 + 4)), dtype=torch.int32)


def cut(nbytes: int, *, fragment_bytes: int = FRAGMENT_BYTES) -> tuple[Tensor, Tensor]:
    """Return starts and sizes of fragments that cover `nbytes`."""
    starts = torch.arange(0, nbytes, fragment_bytes)
    return starts // 4, (nbytes - starts).clamp(max=fragment_bytes)


def of(run: Callable[..., Tensor], data: bytes) -> list[list[int]]:
    found: list[list[int]] = run(words_of(data), *cut(len(data)), weights()).tolist()
    return found


def by_hand(data: bytes) -> list[int]:
    """Return the definition, with numbers of any length."""
    keys = [key % 2**64 for key in weights().tolist()]
    lanes = []
    for lane in range(2):
        total = len(data)
        for i in range(0, len(data), 4):
            total += keys[i // 4 + lane] * int.from_bytes(data[i : i + 4], "little")
        lanes.append((total % 2**64 ^ 2**63) - 2**63)
    return lanes


@EACH
@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 5, 7, 8, 127, 128, 129, 131, 4093, 4094, 4095, 4096, 4097, 9001])
def test_the_definition(run: Backend, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    parts = [data[i : i + FRAGMENT_BYTES] for i in range(0, nbytes, FRAGMENT_BYTES)]
    assert of(run, data) == [by_hand(part) for part in parts]


@KERNELS
@pytest.mark.parametrize("nbytes", [0, 3, 33 * 1024 + 2, 3 << 20, (3 << 20) + 1])
def test_kernels_equal_the_reference(run: Backend, nbytes: int) -> None:
    if run.slow and nbytes > 1 << 20:
        pytest.skip("the simulator takes minutes for this")
    data = random.Random(nbytes).randbytes(nbytes)
    assert of(run, data) == of(reference, data)


@KERNELS
@given(data=st.binary(max_size=400), cuts=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 90)), max_size=9))
@settings(max_examples=40, deadline=None)
def test_fragments_lie_anywhere_and_may_overlap(run: Backend, data: bytes, cuts: list[tuple[int, int]]) -> None:
    words = words_of(data + bytes(400 - len(data)))
    starts = torch.tensor([start for start, _ in cuts], dtype=torch.int64)
    sizes = torch.tensor([min(size, 4 * len(words) - 4 * start) for start, size in cuts], dtype=torch.int64)
    assert torch.equal(run(words, starts, sizes, weights()), reference(words, starts, sizes, weights()))


@EACH
def test_what_lies_behind_the_last_byte_does_not_matter(run: Backend) -> None:
    for size in (1, 2, 3, 5, 4095):
        data = random.Random(size).randbytes(size)
        padded = words_of(data + b"\xff" * (4 - size % 4))
        starts, sizes = cut(size)
        assert torch.equal(run(padded, starts, sizes, weights()), run(words_of(data), starts, sizes, weights()))


def change(data: bytes, kind: str, at: random.Random) -> bytes:
    words = [data[i : i + 4] for i in range(0, len(data), 4)]
    i, j = at.sample(range(len(words)), 2)
    if kind == "bit":
        bit = at.randrange(8 * len(data))
        return (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")
    if kind == "top bit":
        words[i] = (int.from_bytes(words[i], "little") ^ 2**31).to_bytes(4, "little")
    elif kind == "two top bits":
        for k in (i, j):
            words[k] = (int.from_bytes(words[k], "little") ^ 2**31).to_bytes(4, "little")
    elif kind == "swap":
        words[i], words[j] = words[j], words[i]
    elif kind == "zeros":
        words = [bytes(4)] * len(words)
    else:  # one more here, one less there: a plain sum would not see it
        words[i] = ((int.from_bytes(words[i], "little") + 1) % 2**32).to_bytes(4, "little")
        words[j] = ((int.from_bytes(words[j], "little") - 1) % 2**32).to_bytes(4, "little")
    return b"".join(words)


CHANGES = ["bit", "top bit", "two top bits", "swap", "zeros", "balanced"]


@EACH
@pytest.mark.parametrize("kind", CHANGES)
def test_whatever_changes_changes_the_fingerprint(run: Backend, kind: str) -> None:
    at = random.Random(1)
    for _ in range(10):
        data = at.randbytes(4 * at.randrange(2, 200))
        changed = change(data, kind, at)
        assert changed != data
        ours, theirs = of(run, data)[0], of(run, changed)[0]
        assert ours[0] != theirs[0]
        assert ours[1] != theirs[1]


@EACH
def test_zeros_of_each_length_differ(run: Backend) -> None:
    assert len({str(of(run, bytes(size))) for size in range(1, 70)}) == 69


@pytest.mark.parametrize("kind", CHANGES)
def test_collisions_of_a_reduced_width_are_as_rare_as_promised(kind: str) -> None:
    """With bits 31 to 36 of each lane a collision has the chance 2^-6 in one and 2^-12 in both: both in 60,000 keys.

    Lower bits are worth nothing where only the top bit of a word differs: the bound counts them out.
    """
    at = random.Random(2)
    keys = 60_000
    ours = random.Random(3).randbytes(32)
    theirs = change(ours, kind, at)
    words = torch.stack([torch.frombuffer(bytearray(data), dtype=torch.int32).long() for data in (ours, theirs)])
    delta = (words[0] & 0xFFFF_FFFF) - (words[1] & 0xFFFF_FFFF)
    drawn = torch.randint(-(2**63), 2**63 - 1, (keys, 9), generator=torch.Generator().manual_seed(4))
    lanes = torch.stack([(drawn[:, lane : lane + 8] * delta).sum(1) for lane in range(2)])
    # The sums above are what the real function finds, for a sample of the keys.
    for key in range(0, keys, 6000):
        full = torch.nn.functional.pad(drawn[key], (0, len(weights()) - 9))
        found = [fingerprint_cpu(words_of(data), *cut(32), full)[0] for data in (ours, theirs)]
        assert torch.equal(found[0] - found[1], lanes[:, key])
    equal = (lanes >> 31 & 63) == 0
    for chance, seen in ((2**-6, equal[0]), (2**-6, equal[1]), (2**-12, equal[0] & equal[1])):
        expected = chance * keys
        assert abs(int(seen.sum()) - expected) < 5 * expected**0.5, f"{int(seen.sum())} collisions, not {expected:.0f}"


def test_weights_are_drawn_anew_by_each_process() -> None:
    ours = weights()
    assert weights() is ours
    assert len(ours) == FRAGMENT_BYTES // 4 + 1
    assert len(set(ours.tolist())) == len(ours)
    fingerprint.weights.cache_clear()
    try:
        assert not torch.equal(weights(), ours)
    finally:
        fingerprint.weights.cache_clear()
