"""What is restored is what was captured, bit by bit and as it lay in memory; what is not is refused by name."""

import copy
import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from launchers import run_apart
from saved import Saved, assert_same, save
from test_restore_optimizers import KINDS, Masters
from torch import nn

from resilient_run.ckpt.errors import SlotError, StateError
from resilient_run.ckpt.state.state import TrainingState


class Holder:
    """A stateful object around whatever it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = dict(state_dict)


def bits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of any bits, NaNs with payloads among them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    made = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, max(size, 1), dtype=np.uint8))[:size].clone()
    return made.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 2, 3)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def make(seed: int) -> dict[str, Any]:
        module = nn.Module()
        module.register_buffer("plain", bits(*shape, seed=seed, dtype=dtype))
        turned = bits(*shape, seed=seed + 1, dtype=dtype)
        module.register_buffer("turned", turned.permute(tuple(reversed(range(turned.dim())))))
        return {"model": module, "other": Holder(x=module.plain.clone(), y=module.turned.clone()), "value": 1}

    before, after = make(0), make(5)
    save(**before).load(**after)
    assert_same(before, after)
    if before["other"].held["y"].numel():
        assert after["other"].held["y"].stride() == before["other"].held["y"].stride()


class Tied(nn.Module):
    """Ties, views, buffers of all kinds, extra state and a parametrization."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.weird = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.register_buffer("whole", torch.randn(12))
        self.register_buffer("part", self.whole[3:7])
        self.register_buffer("sparse", self.whole[::2])
        self.register_buffer("passing", torch.randn(2), persistent=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.extra = {"seen": seed, "table": torch.randn(3)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_keeps_its_ties_and_views() -> None:
    before, after = Tied(1), Tied(2)
    passing = after.passing.clone()
    save(model=before, optimizer=torch.optim.SGD(before.parameters())).load(
        model=after, optimizer=torch.optim.SGD(after.parameters())
    )
    assert_same({"model": before}, {"model": after})
    assert after.head.weight is after.embed.weight
    after.whole.fill_(9)
    assert after.part.tolist() == [9] * 4
    assert after.sparse.tolist() == [9] * 6
    assert torch.equal(after.passing, passing), "what state_dict() leaves out stays as the script made it"


def test_views_in_other_objects_share_their_memory_again() -> None:
    def make(seed: int) -> Holder:
        whole = bits(64, seed=seed)
        return Holder(whole=whole, matrix=whole[8:32].view(4, 6), turned=whole[20:44].view(6, 4).t(), apart=bits(3))

    before, after = make(1), make(2)
    save(x=before).load(x=after)
    assert_same({"x": before}, {"x": after})
    for holder in (before, after):
        holder.held["whole"].copy_(torch.arange(64.0))
    assert_same({"x": before}, {"x": after})


def test_another_object_has_the_tensors_of_a_module_again() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        module = nn.Linear(3, 2)
        return {"holder": Holder(weight=module.weight.detach()), "model": module}

    before, after = make(1), make(2)
    save(**before).load(**after)
    assert_same(before, after)
    assert after["holder"].held["weight"].data_ptr() == after["model"].weight.data_ptr()


def test_what_could_not_come_back_is_refused_at_once() -> None:
    class Marked(torch.Tensor):
        pass

    whole = torch.zeros(8)
    expanded, module = nn.Module(), nn.Module()
    expanded.register_buffer("mask", torch.zeros(1).expand(5))
    module.register_buffer("whole", whole)
    for objects, text in (
        ({"x": Holder(weight=torch.zeros(2).as_subclass(Marked))}, r"x\.weight: tensors of type .*Marked are not"),
        ({"model": expanded}, r"model\.mask: several of its elements are one in memory"),
        ({"x": Holder(a=whole, b=whole[::2])}, r"x\.a and x\.b share a part of their memory, and not all of them are"),
        ({"model": module, "x": Holder(b=whole[:4])}, r"share a part of their memory, of a module and of another"),
        ({"x": Holder(a=torch.zeros(2).to_sparse())}, "sparse"),
    ):
        with pytest.raises(StateError, match=text):
            save(**objects)


# Checked.


def refused(text: str, saved: Saved, **registered: Any) -> str:
    with pytest.raises(StateError, match=text) as caught:
        saved.load(**registered)
    assert "the state is loaded in part, and the run ends here" in str(caught.value)
    return str(caught.value)


class Forgetful(nn.Linear):
    """Loads its weight transposed, or makes another parameter of it, or keeps what it was given."""

    how = "double"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        match self.how:
            case "double":
                super()._load_from_state_dict(state_dict, prefix, *others)
                self.bias = nn.Parameter(self.bias.detach().double())
            case "anew":
                super()._load_from_state_dict(state_dict, prefix, *others)
                self.weight = nn.Parameter(self.weight.detach().clone())
            case "keep":
                self.weight.data = state_dict[prefix + "weight"]
                self.bias.data = state_dict[prefix + "bias"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("double", r"model\.bias: float32 \[2\] in the checkpoint, float64 \[2\] now"),
        ("anew", r"model\.weight: load_state_dict\(\) made another parameter"),
    ],
)
def test_a_module_that_does_not_load_exactly_is_refused(how: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forgetful, "how", how)
    before, after = Forgetful(2, 2), Forgetful(2, 2)
    optimizers = [torch.optim.SGD(module.parameters()) for module in (before, after)]
    refused(text, save(model=before, optimizer=optimizers[0]), model=after, optimizer=optimizers[1])


def test_a_module_that_keeps_what_it_is_given_is_given_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchmetrics does so, with states that are lists."""
    monkeypatch.setattr(Forgetful, "how", "keep")
    before, after = Forgetful(2, 2), Forgetful(2, 2)
    save(model=before).load(model=after)
    assert_same({"model": before}, {"model": after})


def test_what_a_hook_made_of_a_module_is_put_right() -> None:
    before, after = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    before.num_batches_tracked.fill_(7)

    def reset(module: nn.Module, _: Any) -> None:
        module.num_batches_tracked.zero_()

    after.register_load_state_dict_post_hook(reset)
    save(model=before).load(model=after)
    assert after.num_batches_tracked.item() == 7


def test_optimizers_that_lose_something_are_refused() -> None:
    class Losing(Masters):
        def state_dict(self) -> Any:
            return copy.deepcopy(super().state_dict())

        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            for group in self.param_groups:
                group["lr"] = 1

    module = nn.Linear(2, 2)
    one, other = Losing(module.parameters()), Losing(module.parameters())
    refused(r"optimizer\.param_groups\.0\.lr: 0\.1 in the checkpoint, 1 now", save(optimizer=one), optimizer=other)
    module.bfloat16()
    module(torch.ones(1, 2).bfloat16()).sum().backward()
    one.step()
    text = r"optimizer\.state\.0\.master: float32 \[2, 2\] in the checkpoint, bfloat16 \[2, 2\] now"
    refused(text, save(optimizer=one), optimizer=other)


def test_other_objects_may_differ_in_plain_values_only() -> None:
    class Counting(Holder):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            self.held["loads"] += 1

    class Rounding(Holder):
        def load_state_dict(self, state: Any) -> None:
            self.held = {"x": state["x"].round()}

    class Dropping(Holder):
        def load_state_dict(self, state: Any) -> None:
            self.held = {}

    counted = save(object=Counting(loads=3, x=torch.ones(2)))
    assert counted.load(object=Counting(loads=0, x=None)) == ["object.loads: 3 in the checkpoint, 4 now"]
    arrays = save(object=Holder(x=torch.tensor([1.0, 0.25])))
    text = r"object\.x: 0\.25 \(bytes 0000803e\) at \[1\] in the checkpoint, 0\.0 \(bytes 00000000\) now"
    refused(text, arrays, object=Rounding())
    refused(r"object\.x: float32 \[2\] in the checkpoint, nothing now", arrays, object=Dropping())
    table = save(object=Holder(x=np.ones(2)))
    refused(r"object\.x: .*float64|<f8", table, object=Dropping())


def test_a_load_that_raises_ends_the_run_unless_a_restart_may_cure_it() -> None:
    class Failing(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise self.held["error"]

    saved = save(object=Holder(x=1))
    failing = Failing(x=1)
    failing.state_dict = lambda: {"x": 1}  # type: ignore[method-assign]
    failing.held = {"error": KeyError("gone")}
    refused(r"object: load_state_dict\(\) raised KeyError\('gone'\)", saved, object=failing)
    failing.held = {"error": RuntimeError("Connection closed by peer")}
    with pytest.raises(RuntimeError, match="closed by peer"):
        saved.load(object=failing)


def test_torchs_own_objects_come_back_exactly() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        schedulers = torch.optim.lr_scheduler
        return {
            "model": module,
            "optimizer": optimizer,
            "schedulers": [
                schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
                schedulers.OneCycleLR(optimizer, 0.1, total_steps=20),
                schedulers.ReduceLROnPlateau(optimizer),
                schedulers.CyclicLR(optimizer, 0.1, 0.2),
                schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
                schedulers.ChainedScheduler([schedulers.ExponentialLR(optimizer, 0.9)], optimizer=optimizer),
            ],
            "average": torch.optim.swa_utils.AveragedModel(module),
            "swa": torch.optim.swa_utils.SWALR(optimizer, 0.01),
            "scaler": torch.amp.GradScaler("cpu"),
        }

    before, after = make(1), make(2)
    for _ in range(4):
        before["optimizer"].zero_grad()
        before["scaler"].scale(before["model"](torch.ones(1, 2)).sum()).backward()
        before["scaler"].step(before["optimizer"])
        before["scaler"].update()
        for schedule in before["schedulers"]:
            schedule.step(*[1.0] * isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau))
        before["average"].update_parameters(before["model"])
        before["swa"].step()
    assert save(**before).load(**after) == []
    assert_same(before, after)


def stateful_loader_goes_on(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        return StatefulDataLoader(range(40), batch_size=4, shuffle=True, num_workers=workers)

    torch.manual_seed(3)
    before, after = make(), make()
    batches = iter(before)
    for _ in range(4):
        next(batches)
    assert save(loader=before).load(loader=after) == []
    assert [batch.tolist() for batch in after] == [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loaders(workers: int) -> None:
    pytest.importorskip("torchdata")
    run_apart(stateful_loader_goes_on, workers)


def test_metrics() -> None:
    metrics = pytest.importorskip("torchmetrics")

    def make() -> dict[str, Any]:
        both = {"mean": metrics.MeanMetric(), "cat": metrics.CatMetric()}
        for metric in both.values():
            metric.persistent(True)
        return both

    before, after = make(), make()
    for metric in before.values():
        metric.update(torch.tensor([1.0, 2.5]))
    # A list of tensors as long as the data has no place in a fresh module: torchmetrics takes what it is given.
    saved = save(**before)
    saved.load(**after)
    assert_same(before, after)
    assert torch.cat(after["cat"].value).tolist() == [1.0, 2.5]


# Containers.


def test_objects_in_lists_and_dicts() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        modules = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)}
        optimizers = [torch.optim.Adam(module.parameters()) for module in modules.values()]
        schedules = {"one": (torch.optim.lr_scheduler.StepLR(optimizers[0], 1), None)}
        return {"modules": modules, "optimizers": optimizers, "schedules": schedules, "epochs": [seed, [seed]]}

    before, after = make(1), make(2)
    state = TrainingState(before, rng=False)
    assert list(state.objects) == ["modules.g", "modules.d", "optimizers.0", "optimizers.1", "schedules.one.0"]
    assert list(state.values) == ["epochs"]
    assert state.optimizers == before["optimizers"]
    for optimizer, module in zip(before["optimizers"], before["modules"].values(), strict=True):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    save(**before).load(**after)
    assert_same({**before, "epochs": 0}, {**after, "epochs": 0})


def test_containers_that_mix_objects_and_values_are_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(
        StateError, match=r"all has objects with state_dict\(\) \(all\.model\) and plain .*\(all\.epoch\)"
    ):
        TrainingState({"all": {"model": module, "epoch": 3}}, rng=False)
    with pytest.raises(StateError, match=r"a\.0 is registered twice"):
        TrainingState({"a": [module], "a.0": module}, rng=False)


# Manifests that claim what cannot be.


def test_claims_about_memory_are_checked() -> None:
    saved = save(x=Holder(a=(whole := torch.arange(8.0)), b=whole[2:6], c=torch.zeros(3, 2).t()))
    tensors = json.loads(saved.manifest)["tensors"]
    assert [row.get("within") for row in tensors] == [[0, 0], [0, 8], None]
    assert tensors[2]["stride"] == [1, 2]
    for index, change in (
        (1, {"within": [0, 1 << 40]}),
        (1, {"within": [0, 2]}),
        (1, {"within": [0]}),
        (2, {"stride": [1 << 40, 1]}),
        (2, {"stride": [0, 0]}),
        (2, {"stride": [1]}),
    ):
        rows = [row | (change if at == index else {}) for at, row in enumerate(tensors)]
        with pytest.raises(SlotError):
            saved.altered(tensors=rows).load(x=Holder())


# Whatever people nest.


def tree(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(9 if depth < 3 else 6):
        case 0:
            shape = [rng.randrange(4) for _ in range(rng.randrange(3))]
            return bits(*shape, seed=rng.randrange(1000), dtype=rng.choice(DTYPES))
        case 1:
            return rng.choice([None, True, 1, 2**70, -0.0, float("nan"), "text", 1j, b"x" * rng.choice([1, 2000])])
        case 2:
            return bits(6, 4, seed=rng.randrange(1000)).t()
        case 3:
            return np.random.default_rng(rng.randrange(1000)).random(rng.randrange(4))
        case 4:
            return rng.choice([torch.float16, torch.device("cpu"), torch.Size([1, 2]), np.float32(0.1), {}])
        case 5:
            whole = bits(24, seed=rng.randrange(1000))
            return [whole, whole[4:12], whole.view(4, 6), whole]
        case 6:
            return [tree(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 7:
            return tuple(tree(rng, depth + 1) for _ in range(rng.randrange(3)))
    return {rng.choice(["a", 1, 2.5, (1, "b"), None]): tree(rng, depth + 1) for _ in range(rng.randrange(4))}


def network(rng: random.Random) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(rng.randrange(1, 4)):
        layers += [nn.Linear(4, 4, bias=rng.random() < 0.7)]
        match rng.randrange(4):
            case 0:
                layers += [nn.BatchNorm1d(4)]
            case 1 if len(layers) > 1 and isinstance(layers[0], nn.Linear):
                layers[-1].weight = layers[0].weight  # type: ignore[assignment]
            case 2:
                layers += [nn.LayerNorm(4)]
    return nn.Sequential(*layers).to(rng.choice([torch.float32, torch.bfloat16]))


def states(seed: int, *, other: int = 0) -> dict[str, Any]:
    """Return a random training, the same for a seed but for the numbers in it, which `other` changes."""
    rng = random.Random(seed)
    torch.manual_seed(seed + other)
    modules = [network(rng) for _ in range(rng.randrange(1, 3))]
    kinds = [kind for kind in KINDS if kind != "lbfgs"]
    optimizers = [KINDS[rng.choice(kinds)](module.parameters()) for module in modules]
    return {"modules": modules, "optimizers": optimizers, "tree": Holder(x=tree(rng)), "values": [tree(rng), 1]}


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
def test_random_trainings(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        before, after = states(seed), states(seed, other=10_000)
        after["tree"] = Holder()
        for _ in range(1 + seed % 2):
            for module, optimizer in zip(before["modules"], before["optimizers"], strict=True):
                optimizer.zero_grad()
                module(torch.randn(3, 4, dtype=next(module.parameters()).dtype)).square().mean().backward()
                optimizer.step()
        values = before.pop("values")
        after.pop("values")
        saved = save(**before, values=values)
        assert saved.load(**after, values=0) == []
        assert_same(before, after)


def test_a_module_whose_state_is_not_all_that_it_loads_is_refused() -> None:
    """A hook leaves out frozen weights, as where only adapters are to be saved."""

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state["0.weight"]

    def make() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model.register_state_dict_post_hook(leave_out)
        return {"model": model}

    with pytest.raises(StateError, match=r'model: load_state_dict\(\): .*Missing key\(s\) in state_dict: "0.weight"'):
        save(**make()).load(**make())


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
