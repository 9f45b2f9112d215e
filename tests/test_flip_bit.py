"""`flip-bit` in the trainer: exactly one bit of a live tensor, the one that is asked for, and nothing else."""

import random

import pytest
import torch

from resilient_run.ckpt.capture.injected import Injected
from resilient_run.ckpt.errors import InjectedFault
from resilient_run.ckpt.state.state import TrainingState


def made() -> tuple[TrainingState, dict[str, torch.Tensor]]:
    """Return a state, and its live tensors by path."""
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    live = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        live |= {f"optimizer.state.{number}.{name}": tensor for name, tensor in state.items()}
    return TrainingState({"model": model, "optimizer": optimizer, "other": torch.ones(5)}, rng=True), live


def flipped(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return how many bits differ, by path of what differs."""
    found = {}
    for path, tensor in after.items():
        pairs = zip(before[path].numpy().tobytes(), tensor.detach().numpy().tobytes(), strict=True)
        if bits := sum((one ^ other).bit_count() for one, other in pairs):
            found[path] = bits
    return found


@pytest.mark.parametrize("leaf", ["", "model.weight", "optimizer.state.1.step", "optimizer.state.0.exp_avg_sq"])
def test_one_bit_is_flipped(leaf: str) -> None:
    state, live = made()
    before = {path: tensor.detach().clone() for path, tensor in live.items()}
    rng, python = torch.get_rng_state(), random.getstate()
    injected = Injected()
    injected.order({"kind": "flip-bit", "leaf": leaf, "seed": 3})
    injected.strike(state)
    (struck,) = flipped(before, live).items()
    assert struck == (leaf or struck[0], 1)
    injected.strike(state)
    assert flipped(before, live) == dict([struck])
    assert (torch.equal(torch.get_rng_state(), rng), random.getstate()) == (True, python)


def test_the_seed_draws_what_is_struck() -> None:
    struck = set()
    for seed in range(40):
        state, live = made()
        before = {path: tensor.detach().clone() for path, tensor in live.items()}
        injected = Injected()
        injected.order({"kind": "flip-bit", "leaf": "", "seed": seed})
        injected.strike(state)
        struck |= flipped(before, live).keys()
    assert struck == live.keys()


def test_an_unknown_tensor_is_named() -> None:
    state, _ = made()
    injected = Injected()
    injected.order({"kind": "flip-bit", "leaf": "model.wait", "seed": 3})
    with pytest.raises(InjectedFault, match=r"'model\.wait' .* model\.weight"):
        injected.strike(state)
