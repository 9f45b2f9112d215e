"""Model, cluster and plan files: what is read, and what is refused with the place, the value and the remedy."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilient_run.comm.errors import FileError
from resilient_run.comm.espresso.fusion_cluster import cluster_plan
from resilient_run.comm.plan.cluster import read_cluster
from resilient_run.comm.plan.curve import Table
from resilient_run.comm.plan.model import Model, Tensor, read_model
from resilient_run.comm.plan.plan import Plan

MODEL: dict[str, Any] = {
    "tensors": [
        {"name": "fc.bias", "numel": 10, "backward_s": 0.0},
        {"name": "fc.weight", "numel": 1000, "backward_s": 0.001},
    ]
}
COST = {"alpha_s": 0.001, "beta_s_per_byte": 1e-9}
CODER = {"compress": COST, "decompress": COST}
SYSTEM: dict[str, Any] = {
    "hosts": 2,
    "gpus_per_host": 1,
    "forward_s": 0.01,
    "bytes_per_element": 4,
    "intra": COST,
    "inter": {"alpha_s": 1.0, "beta_s_per_byte": 1e-6},
    "compressors": {"topk": {"ratio": 0.1, "gpu": CODER}},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[object], Path]:
    def write_json(value: object) -> Path:
        path = tmp_path / "input.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write_json


Write = Callable[[object], Path]


def changed(value: dict[str, Any], path: str, new: object) -> dict[str, Any]:
    """Return a copy with another value at a dotted path; `...` removes the key."""
    copy: dict[str, Any] = json.loads(json.dumps(value))
    at: Any = copy
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part]
    if new is ...:
        del at[last]
    else:
        at[last] = new
    return copy


def test_the_simplest_files_are_read(write: Write) -> None:
    model = read_model(write(MODEL))
    assert model.name == "input"
    assert model.tensors[1] == Tensor(name="fc.weight", numel=1000, backward_s=0.001)
    assert (model.numel, model.backward_s) == (1010, 0.001)
    assert read_cluster(write(SYSTEM)).forward_s == 0.01


def test_tables_are_constant_then_lines() -> None:
    table = Table(sizes_bytes=(0.0, 1000.0, 3000.0), seconds=(1.0, 1.0, 2.0))
    sizes = [0.0, 500.0, 1000.0, 2000.0, 3000.0, 5000.0]
    assert list(map(table, sizes)) == table(np.array(sizes)).tolist() == [1.0, 1.0, 1.0, 1.5, 2.0, 3.0]


def test_tables_never_fall_above_their_last_point() -> None:
    table = Table(sizes_bytes=(10.0, 20.0), seconds=(2.0, 1.0))
    assert [table(0.0), table(15.0), table(30.0)] == [2.0, 1.5, 1.0]
    assert Table(sizes_bytes=(10.0,), seconds=(2.0,))(99.0) == 2.0
    falling = Table(sizes_bytes=(10.0, 20.0, 30.0), seconds=(3.0, 2.0, 1.0))
    assert falling(np.array([30.0, 3e9])).tolist() == [1.0, 1.0]
    for far in (1e9, 3e9):
        steep = Table(sizes_bytes=(1e6, 1e6 + 3e3), seconds=(1.0, 1.0 + 1e-9))
        assert steep(np.array([far])).item() == pytest.approx(steep(far), rel=1e-15)


@pytest.mark.parametrize("last_s", [2.0, 1.9])
def test_tables_do_not_take_a_slow_measurement_for_a_law(last_s: float) -> None:
    """Else a tensor far above the last point would cost no more than that one."""
    table = Table(sizes_bytes=(10.0, 20.0, 30.0), seconds=(1.0, 2.0, last_s))
    slope = (last_s - 1.0) / 20
    assert table(30.0) == last_s
    assert table(1030.0) == pytest.approx(last_s + 1000 * slope)
    assert table(np.array([1030.0])).item() == pytest.approx(table(1030.0))


def test_operations_become_seconds_at_a_rate(write: Write) -> None:
    trace = {
        "model": "net",
        "num_tensors": 1,
        "note": "tied",
        "tensors": [{"name": "w", "numel": 4, "bwd_flop": 3000000, "tied_to": "v"}],
    }
    model = read_model(write(trace), flops_per_s=1e9)
    assert model == Model(name="net", tensors=(Tensor(name="w", numel=4, backward_s=0.003),))
    with pytest.raises(FileError, match="--flops-per-s"):
        read_model(write(trace))
    with pytest.raises(FileError, match="leave out --flops-per-s"):
        read_model(write(MODEL), flops_per_s=1e9)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("tensors", [], "tensors = []: write a list of at least one"),
        ("tensors", {}, "tensors = {}"),
        ("tensors", ..., "tensors is missing"),
        ("tensors.0", 3, "tensors[0] is 3"),
        ("tensors.0.numel", -1, "tensors[0].numel = -1"),
        ("tensors.0.numel", 1.5, "tensors[0].numel = 1.5"),
        ("tensors.0.numel", True, "tensors[0].numel = true"),
        ("tensors.0.numel", 10**30, "tensors[0].numel = 1000"),
        ("tensors.0.name", "", 'tensors[0].name = ""'),
        ("tensors.0.name", 7, "tensors[0].name = 7"),
        ("tensors.0.name", "half \ud800", "tensors[0].name = "),
        ("model", "\udfff", "model = "),
        ("tensors.0.name", "fc.weight", 'the name "fc.weight" again'),
        ("tensors.1.backward_s", ..., "tensors[1].backward_s is missing"),
        ("tensors.1.backward_s", -1e-9, "tensors[1].backward_s = -1e-09"),
        ("tensors.1.backward_s", float("nan"), "tensors[1].backward_s = NaN"),
        ("tensors.1.backward_s", float("inf"), "tensors[1].backward_s = Infinity"),
        ("tensors.1.backward_s", 10**400, "tensors[1].backward_s = 1000"),
        ("tensors.1.backward_s", "1", 'tensors[1].backward_s = "1"'),
        ("tensors.1.colour", "red", 'tensors[1].colour = "red": no such key'),
        ("color", "red", 'color = "red": no such key'),
        ("version", 2, "version = 2: this release reads version 1"),
        ("version", True, "version = true: this release reads version 1"),
        ("forward_s", "1", 'forward_s = "1"'),
    ],
)
def test_wrong_model_files_are_refused(write: Write, path: str, new: object, message: str) -> None:
    with pytest.raises(FileError) as caught:
        read_model(write(changed(MODEL, path, new)))
    assert f"input.json: {message}" in str(caught.value) or message in str(caught.value)
    assert "input.json" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("forward_s", -1, "forward_s = -1"),
        ("forward_s", ..., "forward_s is missing"),
        ("bytes_per_element", 0, "bytes_per_element = 0"),
        ("bytes_per_element", None, "bytes_per_element = null"),
        ("@gpu.compress", 3, "@gpu.compress = 3"),
        ("inter", ..., "inter is missing"),
        ("@gpu.compress.alpha_s", float("nan"), "@gpu.compress.alpha_s = NaN"),
        (
            "@gpu.compress.beta_s_per_byte",
            -1e-9,
            "@gpu.compress.beta_s_per_byte = -1e-09",
        ),
        (
            "@gpu.compress.gamma",
            1,
            "@gpu.compress.gamma = 1: no such key here, remove it; known are alpha_s, beta_s_per_byte",
        ),
        (
            "@gpu.compress",
            {"sizes_bytes": [1, 2], "seconds": [1]},
            "@gpu.compress.seconds = [1]: write as many",
        ),
        (
            "@gpu.compress",
            {"sizes_bytes": [2, 1], "seconds": [1, 1]},
            "@gpu.compress.sizes_bytes = [2, 1]: write the sizes",
        ),
        (
            "@gpu.compress",
            {"sizes_bytes": [], "seconds": []},
            "@gpu.compress.sizes_bytes = []",
        ),
        (
            "@gpu.compress",
            {"sizes_bytes": [0, 5e-324], "seconds": [0, 1]},
            "@gpu.compress.sizes_bytes = [0, 5e-324]: write sizes",
        ),
        (
            "@gpu.compress",
            {"sizes_bytes": [1], "seconds": ["a"]},
            '@gpu.compress.seconds = ["a"]',
        ),
        ("compress", COST, "compress = "),
    ],
)
def test_wrong_cluster_files_are_refused(write: Write, path: str, new: object, message: str) -> None:
    path, message = (each.replace("@", "compressors.topk.") for each in (path, message))
    with pytest.raises(FileError) as caught:
        read_cluster(write(changed(SYSTEM, path, new)))
    assert f"input.json: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "the file is []"),
        ('{"forward_s": 1, "forward_s": 2}', '"forward_s" stands twice'),
        ("\udcff", "not JSON"),
    ],
)
def test_files_that_are_no_objects_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "input.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileError, match=r"input\.json") as caught:
        read_cluster(path)
    assert message in str(caught.value)


def test_a_file_name_that_is_no_text_names_a_model_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"net\xff.json")
    path.write_text(json.dumps(MODEL))
    assert read_model(path).name == "net?"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_model(tmp_path / "none.json")


def test_plan_files_come_back_as_they_were(write: Write, tmp_path: Path) -> None:
    plan = cluster_plan(read_model(write(MODEL)), read_cluster(write(SYSTEM)))
    path = tmp_path / "plan.json"
    plan.write(path)
    assert Plan.read(path) == plan
    assert plan.compress


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("version", ..., "version is missing"),
        ("version", 9, "version = 9"),
        ("groups", [["fc.bias"], ["fc.bias"]], "options = "),
        ("groups", [["fc.bias", "fc.bias"]], '"fc.bias" is there twice'),
        ("groups", [[]], "groups = [[]]"),
        ("groups", [["\ud800"]], "groups = "),
        ("groups", [], "groups = []"),
        ("options", ["compressed", "dense"], "options = "),
        ("compress", "yes", 'compress = "yes"'),
        ("compress", False, "compress = false"),
        ("options.0", "reduce_scatter@intra1 > bogus", "'reduce_scatter@intra1 > bogus' is not an option of the tree"),
        ("compressor", 5, "compressor = 5"),
        ("extra", 1, "extra = 1"),
    ],
)
def test_wrong_plan_files_are_refused(write: Write, path: str, new: object, message: str) -> None:
    model = Model(name="net", tensors=(Tensor(name="fc.bias", numel=1, backward_s=1.0),))
    document = cluster_plan(model, read_cluster(write(SYSTEM))).document()
    with pytest.raises(FileError) as caught:
        Plan.read(write(changed(document, path, new)))
    assert message in str(caught.value)
