"""A training function that begins again in its process finds modules as a new process would make them."""

from collections.abc import Iterator

import pytest
import torch
from solo_daemon import SoloDaemon

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.reentry import begin_again
from resilient_run.ckpt.state.state import reentered


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    yield
    reentered.clear()


def made() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """Return a model whose first layer is frozen, and an optimizer of the second."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model[1].parameters(), lr=0.1)


def required(model: torch.nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


@pytest.mark.usefixtures("daemon")
def test_layers_that_were_unfrozen_are_frozen_again() -> None:
    """Also after `replace()`, which comes with the new optimizer."""
    model, optimizer = made()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        model.requires_grad_(True).eval()
        ckpt.replace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    begin_again()
    assert required(model) == [False, False, True, True]
    assert all(inner.training for inner in model.modules())


@pytest.mark.usefixtures("daemon")
def test_quantized_parameters_stay_as_they_are() -> None:
    model, optimizer = made()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
    model[1].weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    model[1].requires_grad_(False)
    begin_again()
    assert required(model) == [False, False, False, True]


def test_replace_leaves_the_gradients_of_a_step_that_is_under_way(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step that failed are gone by then, with the first `restore()` of the process that goes on."""
    model, optimizer = made()
    for generation in (1, 2):
        daemon.enter(monkeypatch, generation=generation)
        with Checkpointer(model=model, optimizer=optimizer) as ckpt:
            ckpt.restore()
            assert model[1].weight.grad is None
            model(torch.ones(1, 2)).sum().backward()
            before = model[1].weight.grad.clone()
            ckpt.replace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            assert torch.equal(model[1].weight.grad, before)
        begin_again()
