"""How kernels are compiled and called, apart from what they calculate."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from resilient_run.comm.ops import kernels, op, spread
from resilient_run.comm.ops.coo import coo_encode
from resilient_run.comm.ops.kernels import CudaKernel, bits, cpu_kernel, in_slices, magnitude_mask
from resilient_run.comm.ops.quantize import dequantize, quantize
from resilient_run.comm.ops.topk import sampled_topk, topk
from resilient_run.comm.zen import hash as op_hash

IMPORT_ALL = """
import pkgutil
from importlib import import_module
from numba.core.dispatcher import Dispatcher
from resilient_run.comm import ops, zen

kernels = 0
for info in [*pkgutil.iter_modules(ops.__path__, "ops."), *pkgutil.iter_modules(zen.__path__, "zen.")]:
    for value in vars(import_module(f"resilient_run.comm.{info.name}")).values():
        if isinstance(value, Dispatcher):
            assert not value.signatures, value
            kernels += 1
assert kernels > 10
"""


def test_import_compiles_nothing() -> None:
    subprocess.run([sys.executable, "-P", "-c", IMPORT_ALL], check=True)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three slices, also of small tensors."""
    monkeypatch.setattr(kernels, "_LEAST_SLICE", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def again(dense: Tensor) -> Tensor:
    codes, scales = quantize.cpu(dense, "int8", block=32, seed=3)
    return dequantize.cpu(codes, scales, dense.numel(), block=32)


SLICED: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "few": lambda dense: topk.cpu(dense, 40),
    "many": lambda dense: topk.cpu(dense, 30_000),
    "sampled": lambda dense: sampled_topk.cpu(dense, 4000, seed=1),
    "non-zeros": lambda dense: coo_encode.cpu(dense),
    "int8": lambda dense: quantize.cpu(dense, "int8", block=96),
    "fp8, drawn": lambda dense: [each.view(torch.uint8) for each in quantize.cpu(dense, "fp8", block=32, seed=5)],
    "one block": lambda dense: quantize.cpu(dense, "int8", block=1 << 20),
    "and back": lambda dense: [again(dense)],
}


@pytest.mark.parametrize("what", SLICED)
def test_threads_change_no_result(what: str, request: pytest.FixtureRequest) -> None:
    dense = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    dense[: 1 << 15] *= 3
    dense[[7, 50_000]] = 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = SLICED[what](dense)
    torch.set_num_threads(before)
    request.getfixturevalue("three_threads")
    for one, other in zip(alone, SLICED[what](dense), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("three_threads")
def test_slices_are_whole_units_on_threads_of_their_own() -> None:
    met = threading.Barrier(3)

    def work(start: int, end: int) -> tuple[int, int, int]:
        met.wait(10)
        return start, end, threading.get_ident()

    found = in_slices(100, work, unit=8)
    assert [each[:2] for each in found] == [(0, 32), (32, 64), (64, 100)]
    assert len({thread for _, _, thread in found}) == 3


FORKS = """
import atexit
import os
import threading
import time

import torch
from resilient_run.comm.ops import kernels
from resilient_run.comm.ops.topk import topk

kernels._LEAST_SLICE = 1
torch.set_num_threads(3)
dense = torch.randn(100_000)
expected = topk.cpu(dense, 100)


def again():
    assert torch.equal(topk.cpu(dense, 100).indices, expected.indices)


def late():
    time.sleep(0.3)
    again()
    os.write(1, b"late ")


child = os.fork()
if not child:
    again()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
atexit.register(again)
threading.Thread(target=late).start()
os.write(1, b"main ")
"""


def test_slices_go_on_in_forks_and_at_the_end_of_the_interpreter() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", FORKS], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stdout, found.stderr) == (0, "main late ", "")


@pytest.mark.usefixtures("three_threads")
def test_slices_within_slices() -> None:
    found = in_slices(9, lambda start, end: in_slices(end - start, lambda start, end: end - start))
    assert found == [[1, 1, 1]] * 3


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_slice_is_raised() -> None:
    def work(start: int, _: int) -> None:
        if start:
            raise KeyError(start)

    with pytest.raises(KeyError):
        in_slices(9, work)


def test_works_where_no_machine_code_can_be_kept() -> None:
    # Numba finds no directory for a function that is in no file.
    namespace: dict[str, Any] = {}
    exec(compile("def double(x):\n    return 2 * x\n", "/nowhere/at_all.py", "exec"), namespace)
    kernel = cpu_kernel(namespace["double"])
    assert kernel(21) == 42
    assert kernel(2.5) == 5.0


def test_a_gpu_without_a_compiler_takes_the_reference_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([torch.OutOfMemoryError("full"), AttributeError("module 'numpy' has no attribute 'row_stack'")])

    def missing(_: torch.device) -> None:
        raise next(errors)

    monkeypatch.setattr(op, "try_cuda", missing)
    op._on_gpu.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        op.backend_of(torch.device("cuda", 1))
    assert [op.backend_of(torch.device("cuda", 1)) for _ in range(2)] == ["reference"] * 2
    assert op.backend_of(torch.device("cpu")) == "cpu"
    op._on_gpu.cache_clear()
    (message,) = caplog.messages
    assert "row_stack" in message
    assert "cuda:1" in message
    assert "pip install 'resilient-run[cuda]'" in message


def test_code_that_depends_on_other_files_is_not_kept() -> None:
    for kernel, kept in ((spread.count_owners, True), (op_hash._extract, True), (op_hash._fill, False)):
        assert isinstance(kernel.py_func, FunctionType)  # type: ignore[attr-defined]
        assert (type(kernel._cache).__name__ != "NullCache") == kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_is_zero_bits_without_the_sign(dtype: torch.dtype) -> None:
    tensor = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, torch.inf, torch.nan, torch.finfo(dtype).smallest_normal / 4], dtype=dtype
    )
    assert ((bits(tensor) & magnitude_mask(tensor)) != 0).tolist() == [False, False, True, True, True, True, True]


def test_no_threads_are_no_launch() -> None:
    def explode(*_: object) -> None:
        raise AssertionError

    CudaKernel(explode).launch(0, torch.empty(0))
