"""`resilient-comm advise`: what pays by the turns, and real jobs that it advises, on slow links and on none."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launchers import run_on_hosts, run_python, run_trainers
from netlab import NetLab

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.trial.advice import BASE, LEAST_TURNS, NOTHING, OWN, Method, advice, methods, recommended
from resilient_run.comm.trial.trial import Trial

SCRIPT = str(Path(__file__).with_name("advised.py"))
PROGRAM = "from resilient_run.comm.cli.main import resilient_comm; resilient_comm()"
ADVISE = ("-c", PROGRAM, "advise", "--json", "--seconds", "1")

SAME = [Method(name=name, write="", exact=True) for name in (BASE, NOTHING, OWN)]
KNOWN = {method.name: method for method in (*SAME, *methods(None))}


def taken(**seconds: float) -> dict[str, list[float]]:
    """Return turns that spread by 2 % around each of `seconds`."""
    return {name.replace("_", " "): [s * f for f in (1.0, 0.98, 1.02)] for name, s in seconds.items()}


def named(**seconds: float) -> dict[str, list[float]]:
    base, least = seconds.pop("base"), seconds.pop("least")
    return {BASE: taken(x=base)["x"], NOTHING: taken(x=least)["x"], **taken(**seconds)}


def test_nothing_pays_within_the_spread() -> None:
    assert recommended(named(base=1.0, least=0.9, zen=0.97, onebit=1.2), KNOWN) is None
    assert recommended(named(base=1.0, least=0.99), KNOWN) is None
    # 4 % faster in the median, but one slow turn reaches all-reduce's.
    close = {**named(base=1.0, least=0.5), "zen": [0.96, 0.95, 0.99]}
    assert recommended(close, KNOWN) is None


def test_what_loses_nothing_is_preferred_to_what_is_as_fast() -> None:
    assert recommended(named(base=1.0, least=0.1, zen=0.5, onebit=0.49), KNOWN) == "zen"
    assert recommended(named(base=1.0, least=0.1, zen=0.5, onebit=0.3), KNOWN) == "onebit"


def test_a_slow_hook_of_the_script_is_measured_against() -> None:
    found = {**named(base=0.5, least=0.4), OWN: [1.0, 1.0, 1.01]}
    assert recommended(found, KNOWN) == BASE
    assert "leave the hook out" in advice(found, KNOWN)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"zen": 0.97}, ["Nothing pays.", "the sums cost 90 % of it", "Leave them to DDP."]),
        ({"zen": 0.5}, ["zen pays: 2.00 times as many steps", "loses nothing", 'hook = register(model, "zen")']),
        ({"zen": 0.5, "onebit": 0.25}, ["onebit pays: 4.00", "changes what is trained", "zen, which loses nothing"]),
        ({"powersgd": 0.5}, ["powersgd pays", "changes what is trained", 'register(model, "powersgd")']),
    ],
)
def test_advice_says_how_much_and_what_to_write(seconds: dict[str, float], said: list[str]) -> None:
    text = advice(named(base=1.0, least=0.1, **seconds), KNOWN)
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: there is no such file"),
        (["--seconds", "0", SCRIPT], "0 is not in the range"),
    ],
)
def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(resilient_comm, ["advise", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def tried(trial: Trial, took_s: Callable[[str, int], float]) -> list[str]:
    """Train until a trial is over; return whose steps they were. `took_s` takes a method, and how many turns it had."""
    steps: list[str] = []
    while not trial.is_over:
        steps.append(trial.method)
        trial.passed(took_s(trial.method, len(trial.taken.get(trial.method, [1]))))
        if trial.turn_is_over:
            trial.advance(trial.said())
    return steps


def test_a_pause_in_the_first_turn_leaves_nothing_out_that_the_advice_needs() -> None:
    trial = Trial([Method(name=NOTHING, write="", exact=True), *methods(None)], seconds=1)
    tried(trial, lambda method, turns: 9.0 if turns == 0 and method in (NOTHING, "bf16") else 1.0)
    assert trial.left_out.keys() == {"zen", "bf16"}
    assert trial.finished
    assert advice(trial.taken, trial.known).startswith("Nothing pays.")


def test_outside_of_a_job_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(resilient_comm, ["advise", SCRIPT])
    assert result.exit_code == 2
    assert "--no-python resilient-comm advise" in result.output


def answer(printed: str) -> dict[str, Any]:
    (line,) = (line for line in printed.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.jobs
def test_a_job_that_computes_is_told_to_leave_its_sums_alone() -> None:
    found = answer(run_trainers([*ADVISE, SCRIPT, "--sleep", "0.05"], 2))
    assert found["recommended"] is None
    assert found["advice"].startswith("Nothing pays.")
    assert set(found["left_out"]) >= {"zen"}, "its table has 64 rows, and a step has half of them"
    assert all(len(turns) >= LEAST_TURNS for turns in found["step_s"].values())


@pytest.mark.jobs
def test_the_script_s_own_hook_is_what_counts() -> None:
    found = answer(run_trainers([*ADVISE, SCRIPT, "--sleep", "0.05", "--hook"], 2))
    assert {OWN, BASE, NOTHING} <= found["step_s"].keys()
    assert OWN in found["advice"]
    assert found["recommended"] is None


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--bare", "--steps", "5"), 1, "no or few steps with DistributedDataParallel were trained"),
        (("--steps", "30"), 1, "the script ended"),
        (("--steps", "30", "--checkpoints"), 1, "the script ended"),
        (("--steps", "30", "--end", "sys"), 1, "the script ended"),
        (("--steps", "30", "--end", "os"), 1, "the script ended"),
        (("--fail",), 1, "ValueError: the script's own fault"),
    ],
)
def test_a_script_that_ends_is_no_advice(options: tuple[str, ...], code: int, message: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_python([*ADVISE, SCRIPT, *options], {**os.environ, **alone})
    assert done.returncode == code
    assert message in done.stderr
    assert "Warning" not in done.stderr, "that no checkpoints are kept is as it should be"
    assert not done.stdout


@pytest.mark.lab
def test_sparse_gradients_on_a_slow_network_are_told_to_be_sent_as_such(netlab: Callable[..., NetLab]) -> None:
    ended = run_on_hosts(netlab(2, rate="25mbit"), [*ADVISE, SCRIPT, "--rows", "8000"])
    found = answer(ended[0][0])
    assert not ended[1][0], "the first rank reports"
    # Which of them is the fastest depends on how busy the machine is; a dense sum of 8000 rows is not.
    assert found["recommended"] in {*found["step_s"]} - {BASE}, found
    scheme = found["recommended"].split()[0]  # its density follows, if it has one
    assert f'hook = register(model, "{scheme}"' in found["write"], found
    if "zen" not in found["step_s"]:
        assert "in the first round" in found["left_out"]["zen"], found
