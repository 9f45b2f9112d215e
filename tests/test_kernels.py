"""How kernels are compiled and called, apart from what they calculate."""

import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest
import torch

from resilient_run.comm.ops import op, random, spread
from resilient_run.comm.ops.kernels import CudaKernel, bits, cpu_kernel, magnitude_mask

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
    assert "pip install 'numba-cuda>=0.20' 'numpy<2.5'" in message


def test_code_that_depends_on_other_files_is_not_kept() -> None:
    for kernel, kept in ((spread.count_owners, True), (random._draw, False)):
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
