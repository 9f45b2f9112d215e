"""`benchmarks/zen_trained.py` in its smallest size, and what it says of gradients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from netlab import unavailable
from zen_trained import DENSITY, describe, settled
from zen_trained_models import TRAININGS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "zen_trained.py"


@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=f"needs network namespaces: {unavailable()}")
def test_a_model_is_trained_with_every_contender(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    size = ["--models", "DeepFM", "--hosts", "2", "--rate", "1000mbit", "--steps", "1", "--rounds", "1"]
    subprocess.run([sys.executable, str(SCRIPT), *size, "--settled", "1", "--json", str(out)], timeout=280, check=True)
    results = json.loads(out.read_text())["results"]
    assert results["gradients"].keys() == {"DeepFM, tables", "DeepFM, DGC"}
    found = {each["contender"]: each for each in results["trained"]}
    lossless = {"agsparse", "sparcml", "sparcml, rows", "sparse-ps", "omnireduce", "zen"}
    assert all(found[name]["bits_of_all_reduce"] for name in lossless)
    assert not found["dgc, zen"]["bits_of_all_reduce"]
    assert found["zen"]["received_bytes"] < found["omnireduce"]["received_bytes"]
    assert found["zen"]["over_dense"] < 0.1
    assert found["dgc, zen"]["over_dense"] < 0.15
    assert all(each["step_s"]["median"] > 0 for each in found.values())


@pytest.mark.parametrize("name", TRAININGS)
def test_gradients_of_trained_models_are_as_sparse_as_the_papers(name: str) -> None:
    torch.manual_seed(0)
    training = TRAININGS[name](4)
    tables = describe(*settled(training, 4, 1, selects=False))
    assert 0.0106 < tables["density"] < 0.04
    assert 1 < tables["densification"][2] < tables["densification"][4] < 4
    assert tables["imbalance"]["Zen"][4]["push"] < tables["imbalance"]["Sparse PS"][4]["push"]
    selected = describe(*settled(training, 4, 1, selects=True))
    assert tables["density"] < selected["density"] < 1.1 * DENSITY
    assert selected["elements"] > tables["elements"]
