"""`register(model, "auto")`: it trains as DDP does while it measures, takes what pays, and goes on with that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launchers import run_on_hosts, run_trainers
from netlab import NetLab
from test_advise import tried
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import GradientHook, register
from resilient_run.comm.net.scheme import Dense
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime.gradient_hook import synchronize
from resilient_run.comm.trial.advice import BASE, LEAST_TURNS, Method, choice, methods
from resilient_run.comm.trial.trial import Trial
from resilient_run.comm.trial.tried import AutoHook, TriedHook
from resilient_run.comm.zen.zen import Zen

SCRIPT = str(Path(__file__).with_name("auto_trainer.py"))
CROSSED = str(Path(__file__).with_name("crossed_trainer.py"))


def on_a_slow_network(netlab: Callable[..., NetLab], rate: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Return what both ranks found, and what they wrote to stderr."""
    ended = run_on_hosts(netlab(2, rate=rate), [SCRIPT, *arguments])
    return [json.loads(out) for out, _ in ended], "".join(err for _, err in ended)


@pytest.mark.lab
def test_sparse_gradients_on_a_slow_network_are_summed_by_zen(netlab: Callable[..., NetLab]) -> None:
    # All-reduce takes 0.4 s of a step, longer than a busy machine keeps zen waiting.
    found, said = on_a_slow_network(netlab, "10mbit", "8000")
    for each in found:
        assert each["chosen"] == each["scheme"] == each["chosen_again"] == each["scheme_again"] == "zen"
        # Sums of two do not depend on the order, so what loses nothing trains the same bits.
        assert each["same_until_then"]
        assert each["same_after"]
        assert each["same_again"]
    assert found[0]["steps"] == found[1]["steps"]
    assert said.count("resilient-run: gradients are summed by zen: ") == 1


@pytest.mark.lab
def test_lossy_schemes_change_nothing_while_they_are_tried(netlab: Callable[..., NetLab]) -> None:
    found, _ = on_a_slow_network(netlab, "100mbit", "8000", "--lossy")
    first, second = found
    # Which one is the fastest depends on how busy the machine is.
    assert first["chosen"] == second["chosen"] == first["chosen_again"]
    for each in found:
        assert each["same_until_then"], "it trains as DDP does while it measures"
        # What rounds may have been chosen for too few steps to show.
        assert (each["same_after"] and each["same_again"]) or each["chosen"] not in ("zen", BASE)


@pytest.mark.jobs
def test_a_job_without_sparse_gradients_is_left_to_all_reduce_at_once() -> None:
    (found,) = set(run_trainers([SCRIPT, "64"], 2).splitlines())
    each = json.loads(found)
    assert each["chosen"] == each["chosen_again"] == BASE
    assert each["scheme"] == "dense"
    assert each["steps"] == 7, "six steps show what gradients are like, and the next one begins with the choice"
    assert each["same_until_then"]
    assert each["same_again"]


@pytest.mark.jobs
def test_sparse_gradients_stay_sparse_where_ddp_sums_them() -> None:
    rows, steps = 8000, 3
    (found,) = set(run_trainers([SCRIPT, str(rows), "--sparse", "--steps", str(steps)], 2).splitlines())
    each = json.loads(found)
    assert (each["chosen"], each["scheme"]) == (None, "dense")
    assert each["same_until_then"]
    assert each["same_after"]
    # Of 16 elements in each row, with 32 rows in a step; a dense sum of one step would be all rows.
    assert 0 < each["received_bytes"] < rows * 16 * 4


@pytest.mark.jobs
def test_ranks_may_reach_several_models_in_any_order() -> None:
    """As with DDP alone, whose sums of a backward pass are all on their way before it waits for one."""
    (found,) = set(run_trainers([CROSSED], 2).splitlines())
    each = json.loads(found)
    assert each["same"]
    assert None not in each["chosen"], each
    assert each["steps"] > 2 + 2 * LEAST_TURNS, "each has tried zen beside all-reduce"


class Failing(Dense):
    """Fails while it is told to."""

    fails = True

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        if self.fails:
            raise CommError(f"cannot sum {key}")
        return super().reduce(key, gradient)

    def is_all_reduced(self, key: str) -> bool:
        return False


@pytest.mark.usefixtures("alone")
def test_a_sum_that_fails_in_a_trial_leaves_the_next_step_as_it_is() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 300)), bucket_cap_mb=0.05)
    world = Transport(dist.group.WORLD)
    failing = Failing(world)
    trial = Trial([Method(name="failing", write="", exact=True, scheme="dense")], seconds=1)
    trial.method = "failing"
    hook = TriedHook(model, trial, {"failing": failing}, world=world, least_elements=1)
    model.register_comm_hook(hook, synchronize)
    with pytest.raises(CommError, match=r"^cannot sum [01]\.(weight|bias)$"):
        model(torch.ones(1, 300)).sum().backward()
    failing.fails = False
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        assert torch.equal(model.module[1].bias.grad, torch.ones(300))
    hook.close()


def test_the_fastest_is_measured_once_more() -> None:
    trial = Trial(methods(None), seconds=1)
    steps = tried(trial, lambda method, turns: {"bf16": 0.5}.get(method, 1.0))
    assert trial.recommended == "bf16"
    assert set(steps[-14:]) == {"bf16", BASE}
    line = choice(trial.taken, trial.known, trial.left_out)
    assert line.startswith("gradients are summed by bf16: 2.00 times as many steps (500 ms")


def test_where_nothing_pays_it_says_what_was_measured() -> None:
    trial = Trial(methods(None), seconds=1)
    tried(trial, lambda method, turns: 1.0 if method == BASE else 1.1)
    assert trial.recommended is None
    line = choice(trial.taken, trial.known, trial.left_out)
    assert line.startswith("gradients stay with all-reduce, no other sum makes a step shorter beyond the spread (all-")
    assert "zen left out: no large gradient has fewer than a quarter of its elements" in line


@pytest.fixture
def model(alone: None) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.1}, "auto has no option density; it has lossy, seconds"),
        ({"lossy": 1}, "auto: lossy must be True or False, got 1"),
        ({"seconds": "10"}, "auto: seconds must be a number, got '10'"),
        ({"seconds": 0}, "auto: seconds must be more than 0, got 0"),
    ],
)
def test_a_wrong_option_is_refused(model: DistributedDataParallel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommError) as refused:
        register(model, "auto", **options)
    assert str(refused.value) == message
    register(model, "auto").close()  # nothing was left behind


def test_a_lossy_scheme_that_was_chosen_goes_on_only_where_that_is_allowed(model: DistributedDataParallel) -> None:
    state = {"scheme": "auto", "chosen": "onebit", "memory": register_other("onebit").state_dict()}
    hook = register(model, "auto", lossy=True)
    hook.load_state_dict(state)
    assert isinstance(hook, AutoHook)
    assert (hook.chosen, hook.scheme.name) == ("onebit", "compressed")
    hook.close()


def register_other(scheme: str) -> GradientHook:
    hook = register(DistributedDataParallel(nn.Linear(3, 1)), scheme)
    hook.close()
    return hook


def test_a_state_of_another_hook_is_refused(model: DistributedDataParallel) -> None:
    hook = register(model, "auto")
    with pytest.raises(CommError, match="auto cannot go on from the state of 'powersgd'"):
        hook.load_state_dict({"scheme": "powersgd", "kept": {}})
    with pytest.raises(CommError, match=r"auto chose .onebit. for this job; give register\(\) the same lossy= as then"):
        hook.load_state_dict({"scheme": "auto", "chosen": "onebit", "memory": {}})
    undecided = hook.state_dict()
    assert undecided == {"scheme": "auto", "chosen": None, "memory": {}}
    hook.load_state_dict(undecided)
    with pytest.raises(CommError, match="zen cannot go on from the state of 'auto'"):
        Zen(hook.world).load_state_dict(undecided)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    assert torch.equal(model.module.weight.grad, torch.full((1, 3), 2.0))
    hook.load_state_dict({"scheme": "auto", "chosen": "zen", "memory": Zen(hook.world).state_dict()})
    with pytest.raises(CommError, match=r"auto has chosen 'zen' since this state; load it after register\(\)"):
        hook.load_state_dict({"scheme": "auto", "chosen": "all-reduce", "memory": {}})
    hook.load_state_dict(undecided)
    assert hook.state_dict()["chosen"] == "zen", "a pass that is thrown away does not throw the choice away"
    hook.close()
