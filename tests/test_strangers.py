"""`benchmarks/strangers.py` in its smallest size: the whole course, and the judgement of what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netlab import unavailable
from strangers import judged, promised

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "strangers.py"


@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=f"needs network namespaces: {unavailable()}")
def test_a_training_is_advised_chosen_for_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    size = ["--trainings", "experts", "--rates", "1000mbit", "--seconds", "1", "--steps", "1", "--rounds", "1"]
    done = subprocess.run([sys.executable, str(SCRIPT), *size, "--json", str(out)], timeout=280, check=False)
    assert done.returncode in (0, 1), "1: on a busy machine a choice was slower in the only turn"
    (row,) = json.loads(out.read_text())["results"]["trainings"]
    assert [trial["trial"] for trial in row["trials"]][:2] == ["auto", "auto, lossy"]
    assert row["nothing_advised"] == ("as advised" not in row["contenders"])
    assert {"DDP", "torch's fp16_compress_hook", "torch's powerSGD_hook"} < row["contenders"].keys()
    losses = {name: each["loss_at_end"] for name, each in row["contenders"].items()}
    assert losses["auto"] == pytest.approx(losses["DDP"], rel=1e-3)
    assert all(each["step_s"]["median"] > 0 for each in row["contenders"].values())


@pytest.mark.fast
def test_a_choice_is_slower_beyond_the_spread_only() -> None:
    losses = [float(step) for step in range(100, 0, -1)]
    found = judged(
        {
            "DDP": {"seconds": [1.0, 1.1, 1.2], "losses": losses},
            "auto": {"seconds": [1.0, 1.15, 1.3], "losses": losses},
            "as advised": {"seconds": [2.0, 2.2, 2.4], "losses": losses},
            "fast": {"seconds": [0.5, 0.55, 0.6], "losses": losses},
        }
    )
    assert {name: each["is_slower"] for name, each in found.items()} == {
        "DDP": False,
        "auto": False,
        "as advised": True,
        "fast": False,
    }
    assert found["fast"]["gain"] == pytest.approx(2)
    assert found["fast"]["loss_by_the_clock"] == found["fast"]["loss_at_end"] == 5.5
    # In the time of the fastest, DDP has trained half of the steps, and what was advised a quarter.
    assert found["DDP"]["loss_by_the_clock"] == 55.5
    assert found["as advised"]["loss_by_the_clock"] == 80.5


@pytest.mark.fast
def test_a_trial_without_turns_promises_nothing() -> None:
    assert promised({"base_s": None, "promised_s": None}) == 1
    assert promised({"base_s": 3.0, "promised_s": 2.0}) == 1.5
