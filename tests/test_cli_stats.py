"""`benchmarks/gradient_stats.py` on the gradients that a recorder kept."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from gradient_stats import GradientRecorder, read_gradients
from gradient_stats import stats as command
from sparse_gradients import gradients
from torch import nn

from resilient_run.comm.errors import FileError


def stats(*arguments: str | Path) -> str:
    done = CliRunner().invoke(command, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: str | Path) -> str:
    done = CliRunner().invoke(command, [*map(str, arguments)])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize("sparse", [False, True])
def test_recorded_job(tmp_path: Path, sparse: bool) -> None:
    """Two ranks whose tables are touched in 10 rows of 1000, 5 of them in common."""
    for rank in range(2):
        model = nn.Sequential(nn.Embedding(1000, 64, sparse=sparse), nn.Linear(64, 2))
        recorder = GradientRecorder(model, tmp_path, steps=2, rank=rank)
        for _ in range(4):
            model.zero_grad()
            model(torch.arange(5 * rank, 5 * rank + 10)).sum().backward()
            recorder.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{r}-step{n}.pt" for r in (0, 1) for n in (1, 2)]
    found = json.loads(stats(tmp_path, "--json"))
    assert list(found) == ["0.weight"], "the other gradients are small"
    assert list(found["0.weight"]) == ["1", "2"]
    table = found["0.weight"]["1"]
    assert (table["elements"], table["ranks"]) == (64_000, 2)
    assert table["density"] == pytest.approx(0.01)
    assert table["row_density"] == pytest.approx(0.01)
    assert table["overlap"] == 0.5
    assert table["densification"] == pytest.approx(1.5)
    assert table["skewness"] == 2.0
    assert table["push_imbalance"] < 1.1
    assert table["plan"]["width"] == 64
    assert table["dense_bytes"] == 4 * 64_000
    text = stats(tmp_path, "--least-elements", "1", "--servers", "4")
    assert "1.weight" in text
    assert "0.weight" in text


def test_one_file_for_each_rank(tmp_path: Path) -> None:
    for rank, gradient in enumerate(gradients(3, (200, 100), density=0.1)):
        torch.save(gradient, tmp_path / f"{rank}.pt")
    found = json.loads(stats(*sorted(tmp_path.iterdir()), "--json"))
    assert found["gradient"]["0"]["ranks"] == 3


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    assert "no gradients in" in refused(tmp_path)
    (tmp_path / "rank0-step1.pt").write_bytes(b"nothing")
    assert "cannot be read" in refused(tmp_path)
    torch.save({"weight": torch.ones(30_000)}, tmp_path / "rank0-step1.pt")
    torch.save({"weight": torch.ones(30_000)}, tmp_path / "rank1-step2.pt")
    assert "not every step has the same ranks" in refused(tmp_path)
    torch.save({"weight": torch.ones(30_001)}, tmp_path / "rank1-step1.pt")
    (tmp_path / "rank1-step2.pt").unlink()
    assert "with shape [30000]" in refused(tmp_path)
    assert "lower --least-elements" in refused(tmp_path / "rank0-step1.pt", "--least-elements", "40000")


@pytest.mark.parametrize("content", [[1.0], {"a": "text"}, {"a": torch.ones(3, dtype=torch.int64)}, {}])
def test_files_of_something_else_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(FileError, match="save a dict of"):
        read_gradients(tmp_path / "file.pt")


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)

    (tmp_path / "file.pt").write_bytes(pickle.dumps(Evil(), 2))
    with pytest.raises(FileError, match="cannot be read as tensors"):
        read_gradients(tmp_path / "file.pt")
    assert not (tmp_path / "ran").exists()
