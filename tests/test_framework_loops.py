"""Loops of frameworks as people write them, ended after a committed step, go on in the same way or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_parts import Net, Numbers, Stream, content
from torch import nn
from torch.utils.data import DataLoader

from resilient_run.ckpt.errors import StateError

pytestmark = [pytest.mark.jobs, pytest.mark.filterwarnings("ignore")]


def accelerated(tmp_path: Path, loop: Callable[..., None], *loaders: DataLoader[Any]) -> Any:
    accelerate = pytest.importorskip("accelerate")
    from resilient_run.integrations.accelerate import AcceleratorCheckpointer

    project = accelerate.utils.ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = Net()
    prepared, optimizer, *loaders = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), *loaders)
    ckpt = AcceleratorCheckpointer(accelerator)
    ckpt.restore()

    def train(*batches: Any) -> None:
        accelerator.backward(sum(prepared(**batch)["loss"] for batch in batches))
        optimizer.step()
        optimizer.zero_grad()

    loop(accelerator, ckpt, train, *loaders)
    ckpt.close()
    return content(model)


def shuffled(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size, shuffle=True)


@pytest.mark.parametrize("ends", [(1, 5), (4,)], ids=["within", "behind"])
def test_accelerate_goes_on_in_several_loaders_at_once(attempt: Any, tmp_path: Path, ends: tuple[int, ...]) -> None:
    def loop(_accelerator: Any, ckpt: Any, train: Any, one: Any, other: Any) -> None:
        for _ in ckpt.epochs(2):
            for batches in zip(one, other, strict=False):
                train(*batches)
                ckpt.step()

    def run() -> Any:
        return accelerated(tmp_path, loop, shuffled(4), shuffled(3))

    assert attempt(run, *ends) == attempt(run)


def test_accelerate_goes_on_in_the_second_of_two_loops_over_epochs(attempt: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def loop(_accelerator: Any, ckpt: Any, train: Any, loader: Any) -> None:
        for count in (1, 3):
            for epoch in ckpt.epochs(count):
                for batch in loader:
                    train(batch)
                    seen.append((count, epoch))
                    ckpt.step()

    def run() -> Any:
        return accelerated(tmp_path, loop, shuffled())

    undisturbed = attempt(run)
    assert seen == [(1, 0)] * 4 + [(3, 1)] * 4 + [(3, 2)] * 4
    seen.clear()
    assert attempt(run, 6) == undisturbed
    assert seen == [(1, 0)] * 4 + [(3, 1)] * 4 + [(3, 2)] * 4


def test_accelerate_numbers_what_it_saves_as_before(attempt: Any, tmp_path: Path) -> None:
    def loop(accelerator: Any, ckpt: Any, train: Any, loader: Any) -> None:
        for _ in ckpt.epochs(2):
            for batch in loader:
                train(batch)
                ckpt.step()
                accelerator.save_state()

    attempt(lambda: accelerated(tmp_path, loop, shuffled()), 3)
    assert len(list((tmp_path / "project" / "checkpoints").iterdir())) == 7, "one came after the step that was its last"


@pytest.mark.parametrize("how", ["unprepared", "skipped"])
def test_accelerate_refuses_an_epoch_whose_place_nothing_knows(attempt: Any, tmp_path: Path, how: str) -> None:
    def loop(accelerator: Any, ckpt: Any, train: Any, loader: Any) -> None:
        for _ in ckpt.epochs(2):
            for batch in shuffled() if how == "unprepared" else accelerator.skip_first_batches(loader, 1):
                train(batch)
                ckpt.step()

    with pytest.raises(StateError, match="epoch 0 makes steps, and no prepared loader is iterated"):
        attempt(lambda: accelerated(tmp_path, loop, shuffled()), 3)


def test_accelerate_refuses_steps_after_epochs_that_were_left(attempt: Any, tmp_path: Path) -> None:
    def loop(_accelerator: Any, ckpt: Any, train: Any, loader: Any) -> None:
        for _ in ckpt.epochs():
            break
        ckpt.step()

    with pytest.raises(StateError, match="outside of epochs"):
        attempt(lambda: accelerated(tmp_path, loop, shuffled()), 3)


def trained(directory: Path, data: Any, *callbacks: Any, resume: str | None = None, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    from resilient_run.integrations.transformers import protect

    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "max_steps": 8}
    settings = transformers.TrainingArguments(
        output_dir=str(directory), report_to=[], disable_tqdm=True, use_cpu=True, **(usual | arguments)
    )
    trainer = transformers.Trainer(model=Net(), args=settings, train_dataset=data, callbacks=list(callbacks))
    protect(trainer).train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("dispatch", [True, False])
def test_trainer_goes_on_from_its_own_checkpoint_in_a_stream(attempt: Any, tmp_path: Path, dispatch: bool) -> None:
    config = {"dispatch_batches": dispatch}
    first = tmp_path / "first"

    def save() -> Any:
        return content(trained(first, Stream(), accelerator_config=config, save_strategy="steps", save_steps=3).model)

    def run() -> Any:
        resumed = trained(tmp_path / "second", Stream(), accelerator_config=config, resume=str(first / "checkpoint-3"))
        return content(resumed.model)

    whole = attempt(save)
    assert attempt(run) == whole, "the batches that it had are skipped"
    assert attempt(run, 4, 7) == whole


def test_trainer_logs_a_stream_that_was_at_its_end(attempt: Any, tmp_path: Path) -> None:
    def run() -> Any:
        log = trained(tmp_path, Stream(), logging_strategy="epoch").state.log_history
        return [(entry["step"], entry.get("grad_norm"), entry.get("learning_rate")) for entry in log]

    assert attempt(run, 6) == attempt(run)


def test_trainer_puts_back_what_callbacks_begin_again(attempt: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Average(transformers.TrainerCallback):
        """Begins anew when a training begins, and halves the weight decay in each epoch."""

        def __init__(self) -> None:
            self.average: list[torch.Tensor] = []

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.average = [tensor.detach().clone() for tensor in model.parameters()]

        def on_epoch_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.5 * group["weight_decay"] + 0.1

        def on_step_end(self, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
            for mean, tensor in zip(self.average, model.parameters(), strict=True):
                mean.lerp_(tensor.detach(), 0.1)
            if state.global_step == 3:
                args.max_grad_norm, state.max_steps = 0.1, 7

        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.average = state["average"]

    class Diary(transformers.trainer_callback.ExportableState, transformers.TrainerCallback):
        def __init__(self) -> None:
            self.written: list[int] = []

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"written": self.written}}

        def on_epoch_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self.written.append(state.global_step)

    def run() -> Any:
        average, diary = Average(), Diary()
        trainer = trained(tmp_path, Numbers(), average, diary)
        means = [mean.tolist() for mean in average.average]
        return trainer.state.global_step, content(trainer.model), means, diary.written

    assert attempt(run, 2, 5) == attempt(run)


def fit(data: DataLoader[Any], *callbacks: Any, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")
    from resilient_run.integrations.lightning import ResilientCallback

    torchmetrics = pytest.importorskip("torchmetrics")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.error, self.lr = Net(), torchmetrics.MeanMetric(), 1e-2

        @property
        def backbone(self) -> nn.Module:
            return self.inner

        def on_train_epoch_start(self) -> None:
            self.error.reset()
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.inner(**batch)["loss"]
            self.error.update(loss.detach())
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("error", self.error.compute())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[ResilientCallback(), *callbacks],
        **(quiet | {"max_epochs": 2} | options),
    )
    trainer.fit(module, data)
    return trainer, content(module), trainer.callback_metrics["error"].item()


def test_lightning_goes_on_in_a_limited_stream(attempt: Any) -> None:
    def run() -> Any:
        return fit(DataLoader(Stream(), 4), limit_train_batches=4)[1:]

    assert attempt(run, 2, 6) == attempt(run)


def test_lightning_puts_back_what_hooks_begin_again(attempt: Any) -> None:
    def run() -> Any:
        return fit(shuffled())[1:]

    assert attempt(run, 2, 6) == attempt(run)


def test_lightning_keeps_what_a_checkpoint_callback_knows(attempt: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    def run() -> Any:
        kept = lightning.pytorch.callbacks.ModelCheckpoint(monitor="error", save_top_k=2)
        logger = lightning.pytorch.loggers.CSVLogger(str(tmp_path / "logs"))
        fit(shuffled(), kept, logger=logger, enable_checkpointing=True, max_epochs=3)
        return sorted(value.item() for value in kept.best_k_models.values())

    assert attempt(run, 5, 9) == attempt(run)


def test_lightning_tells_of_callbacks_whose_state_it_cannot_know(attempt: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Counting(lightning.Callback):
        count = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

    counting = Counting()
    counting.count = 1
    with pytest.warns(RuntimeWarning, match="what .*Counting has in its attributes is in no checkpoint"):
        attempt(lambda: fit(shuffled(), counting))


def test_lightning_fits_twice(attempt: Any) -> None:
    trainer = attempt(lambda: fit(shuffled())[0])
    loop = trainer.fit_loop.epoch_loop
    assert loop.on_advance_end.__func__ is type(loop).on_advance_end, "it has its methods back"


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "BackboneFinetuning", "LearningRateFinder"])
def test_lightning_refuses_what_changes_the_optimizer_on_the_way(attempt: Any, name: str) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    callback = callbacks.StochasticWeightAveraging(1e-2) if name[0] == "S" else getattr(callbacks, name)()
    with pytest.raises(StateError, match=f"{name} makes other optimizers, schedules or steps"):
        attempt(lambda: fit(shuffled(), callback), 3)


def test_lightning_refuses_parameters_that_a_hook_changes_again(attempt: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Noise(lightning.Callback):
        def on_train_epoch_start(self, _trainer: Any, module: Any) -> None:
            nn.init.normal_(module.inner.net[0].bias)

    with pytest.raises(StateError, match=r"inner\.net\.0\.bias is not what was restored"):
        attempt(lambda: fit(shuffled(), Noise()), 3)
