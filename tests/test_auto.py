"""`--rr-auto` in one process: loops that do not know us go on after a committed step in the same way, or alone."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from framework_parts import Attempts, Ended, Net, Numbers, Opaque, Stream, content, weighing
from torch.utils.data import DataLoader, IterableDataset

from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.integrations import auto
from resilient_run.ckpt.integrations.position import excuses
from resilient_run.launcher.workers.import_hook import ImportHook

pytestmark = [pytest.mark.jobs, pytest.mark.filterwarnings("ignore")]

PROTECTS = "--rr-auto protects "
NOTHING = "--rr-auto protects nothing here: "


class Watch:
    """Looks into loops as a worker's hook does, in each generation anew.

    Attributes:
        said: What it has said, in all generations.
    """

    def __init__(self, attempt: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self._attempt = attempt
        self._monkeypatch = monkeypatch

    def __call__(self, loop: Callable[[], Any], module: ModuleType, method: str) -> Callable[[], Any]:
        """Return the loop, looked into."""
        original = getattr(module.Trainer, method)

        def watched() -> Any:
            hook = ImportHook(restores=self._attempt.daemon.plan is not None)
            self._monkeypatch.setattr(hook, "say", lambda text: text in self.said or self.said.append(text))
            self._monkeypatch.setattr(excuses, "hear", None)
            auto.watch(module, hook)
            try:
                return loop()
            finally:
                setattr(module.Trainer, method, original)

        return watched


@pytest.fixture
def watch(attempt: Attempts, monkeypatch: pytest.MonkeyPatch, only_script: Callable[..., None]) -> Watch:
    only_script(__name__, "framework_parts")
    return Watch(attempt, monkeypatch)


# transformers


def train(directory: Path, data: Any = None, kind: Any = None, callbacks: Any = (), **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "max_steps": 8}
    settings = transformers.TrainingArguments(
        output_dir=str(directory), report_to=[], disable_tqdm=True, use_cpu=True, **(usual | arguments)
    )
    trainer = (kind or transformers.Trainer)(
        model=Net(), args=settings, train_dataset=Numbers() if data is None else data, callbacks=list(callbacks)
    )
    made = type(trainer)
    trainer.train()
    assert type(trainer) is made
    return content(trainer.model)


def looked_into(watch: Watch, loop: Callable[[], Any]) -> Callable[[], Any]:
    return watch(loop, pytest.importorskip("transformers.trainer"), "train")


def test_trainer_goes_on(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    def loop() -> Any:
        return train(tmp_path)

    assert attempt(looked_into(watch, loop), 3, 6) == attempt(loop)
    assert len(watch.said) == 1
    assert watch.said[0].startswith(f"{PROTECTS}transformers.Trainer: every step")


def test_trainer_goes_on_with_what_its_class_holds(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    def loop() -> Any:
        return train(tmp_path, kind=weighing(pytest.importorskip("transformers").Trainer))

    assert attempt(looked_into(watch, loop), 3, 6) == attempt(loop)
    assert len(watch.said) == 1


class Drawing(IterableDataset[Any]):
    """Draws from the generator that training uses, at last."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for number in range(40):
            x = torch.rand(4, generator=generator if number < self.first else None)
            yield {"x": x, "labels": x.sum()[None]}


def opaque() -> Any:
    return weighing(pytest.importorskip("transformers").Trainer, Opaque)


def looping() -> Any:
    transformers = pytest.importorskip("transformers")

    class Looping(transformers.Trainer):
        def _run_epoch(self, **arguments: Any) -> None:
            super()._run_epoch(**arguments)

    return Looping


def counting_callback() -> Any:
    transformers = pytest.importorskip("transformers")

    class Schedule(transformers.TrainerCallback):
        steps = 0

        def on_step_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
            self.steps = self.steps + 1
            self.made = iter([self.steps])
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.01 * self.steps

    return Schedule()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda: {"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
        (lambda: {"kind": looping()}, r"Looping has a _run_epoch\(\) of its own"),
        (lambda: {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "persistent_workers=True"),
        (lambda: {"kind": opaque()}, "Weighing.made changes in training, and no checkpoint can have it"),
        (lambda: {"callbacks": [counting_callback()]}, "Schedule.made changes in training"),
        (lambda: {"data": Drawing()}, "Drawing draws from the random generators"),
    ],
    ids=["option", "loop", "loader", "attribute", "callback", "stream"],
)
def test_trainer_that_cannot_be_protected_trains_on(
    attempt: Attempts, watch: Watch, tmp_path: Path, options: Any, reason: str
) -> None:
    def loop() -> Any:
        return train(tmp_path, **options())

    # A step that never comes to be committed: the loop ends by itself, in a generation that may keep something.
    assert attempt(looked_into(watch, loop), 99) == attempt(loop)
    told = [text for text in watch.said if not text.startswith(f"{PROTECTS}transformers")]
    assert len(told) == 1
    assert re.search(reason, told[0])


def test_trainer_that_cannot_be_brought_back_any_more_is_not(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    def loop() -> Any:
        return train(tmp_path, Drawing(16))

    with pytest.raises(StateError, match="start a new run id: Drawing draws from the random generators"):
        attempt(looked_into(watch, loop), 6)
    assert watch.said[-1].startswith("--rr-auto does not protect transformers.Trainer any more: Drawing draws")


def test_hyperparameter_search_is_left_alone(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    transformers = pytest.importorskip("transformers")

    def loop() -> Any:
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", max_steps=3
        )
        trainer = transformers.Trainer(
            args=settings, train_dataset=Numbers(), eval_dataset=Numbers(), model_init=lambda: Net()
        )
        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
            n_trials=2,
            backend="optuna",
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        return best.hyperparameters, best.objective

    assert attempt(looked_into(watch, loop), 99) == attempt(loop)
    assert len(watch.said) == 1
    assert watch.said[0].startswith(f"{NOTHING}transformers.Trainer: hyperparameter_search() is not supported")


def dies(number: int) -> Any:
    """Return a callback that ends the process in the training of that number, in the first generation."""
    transformers = pytest.importorskip("transformers")

    class Dies(transformers.TrainerCallback):
        trainings = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            type(self).trainings += 1

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if type(self).trainings == number and state.global_step == 3:
                type(self).trainings += 1
                raise Ended

    return Dies()


def test_second_training_is_left_alone_and_the_first_is_not_taken_for_it(
    attempt: Attempts, watch: Watch, tmp_path: Path
) -> None:
    finished: list[Any] = []

    def loop(*callbacks: Any) -> Any:
        # As in a cross-validation that passes over what it has finished.
        for _ in range(len(finished), 2):
            finished.append(train(tmp_path, callbacks=callbacks))
        return finished.copy()

    callback = dies(2)
    whole = attempt(loop)
    finished.clear()
    # It dies in the second training, which begins alone in the second generation.
    assert attempt(looked_into(watch, lambda: loop(callback)), 99)[0] == whole[0]
    torch.manual_seed(0)
    assert finished[1] == train(tmp_path)
    assert any("only the first training" in text for text in watch.said)
    assert watch.said[-1].startswith(f"{NOTHING}transformers.Trainer: the run was restarted after its training had ret")


def test_training_with_another_setting_is_not_taken_for_the_first(
    attempt: Attempts, watch: Watch, tmp_path: Path
) -> None:
    rates = [1e-2, 2e-2]
    with pytest.raises(StateError, match=r"another training begins .* learning_rate was 0\.01 and is 0\.02"):
        attempt(looked_into(watch, lambda: train(tmp_path, learning_rate=rates.pop(0))), 3)


def test_training_that_is_left_by_an_exception_makes_place(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    def loop() -> Any:
        class Full(Numbers):
            def __getitem__(self, index: int) -> Any:
                raise MemoryError

        with pytest.raises(MemoryError):
            train(tmp_path, Full())
        return train(tmp_path)

    assert attempt(looked_into(watch, loop), 99) == attempt(loop)


def test_script_that_protects_itself_is_left_alone(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from resilient_run.integrations.transformers import ResilientMixin

    class Own(ResilientMixin, transformers.Trainer):
        pass

    def loop() -> Any:
        return train(tmp_path, kind=Own)

    assert attempt(looked_into(watch, loop), 3) == attempt(loop)
    assert watch.said == ["--rr-auto leaves this script alone: it protects itself"]


def test_trainer_without_a_daemon_trains(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    def loop() -> Any:
        return train(tmp_path)

    assert attempt(looked_into(watch, loop)) == attempt(loop)
    assert watch.said[0].startswith(f"{NOTHING}transformers.Trainer: no checkpoints are kept")


def test_only_train_is_looked_into(attempt: Attempts, watch: Watch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def loop() -> Any:
        settings = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
        trainer = transformers.Trainer(model=Net(), args=settings, eval_dataset=Numbers())
        assert type(trainer) is transformers.Trainer
        return trainer.evaluate()["eval_loss"], trainer.predict(Numbers()).metrics["test_loss"]

    assert attempt(looked_into(watch, loop), 99) == attempt(loop)
    assert watch.said == []


def test_error_of_a_step_ends_protection_and_not_the_training(
    attempt: Attempts, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop() -> Any:
        return train(tmp_path)

    expected = attempt(loop)

    def outside(self: Any) -> Any:
        if self._step_now() >= 4:
            raise StateError("it holds a socket")
        return original(self)

    from resilient_run.ckpt.integrations.transformers import Run

    original = Run.state_dict
    monkeypatch.setattr(Run, "_step_now", lambda self: self._completed, raising=False)
    monkeypatch.setattr(Run, "state_dict", outside)
    assert attempt(looked_into(watch, loop), 99) == expected
    assert watch.said[-1] == "--rr-auto does not protect transformers.Trainer any more: it holds a socket"


# Lightning


def fit(data: Any = None, *, kind: Any = None, times: int = 1, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen = 0

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = (kind or (lambda base: base))(Module)()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    loader = DataLoader(Numbers(), 4, shuffle=True) if data is None else data
    for _ in range(times):
        trainer = lightning.Trainer(**quiet, **({"max_epochs": 2} | options))
        trainer.fit(module, loader)
        assert not any("Unasked" in type(each).__name__ for each in trainer.callbacks)
    return content(module)


def lit(watch: Watch, loop: Callable[[], Any]) -> Callable[[], Any]:
    return watch(loop, pytest.importorskip("lightning.pytorch.trainer.trainer"), "fit")


def test_lightning_goes_on(attempt: Attempts, watch: Watch) -> None:
    assert attempt(lit(watch, fit), 3, 6) == attempt(fit)
    assert len(watch.said) == 1
    assert watch.said[0].startswith(f"{PROTECTS}lightning.Trainer: every step")


def test_lightning_goes_on_in_a_stream(attempt: Attempts, watch: Watch) -> None:
    def loop() -> Any:
        return fit(DataLoader(Stream(), 4))

    assert attempt(lit(watch, loop), 3, 8) == attempt(loop)


def counts(base: Any) -> Any:
    class Counts(base):
        def training_step(self, batch: Any, index: int) -> Any:
            self.seen += 1
            return super().training_step(batch, index) * self.seen

    return Counts


def makes(base: Any) -> Any:
    class Makes(base):
        def training_step(self, batch: Any, index: int) -> Any:
            self.made = iter([index])
            return super().training_step(batch, index)

    return Makes


def test_lightning_goes_on_with_what_a_module_holds(attempt: Attempts, watch: Watch) -> None:
    def loop() -> Any:
        return fit(kind=counts)

    assert attempt(lit(watch, loop), 3, 6) == attempt(loop)
    assert len(watch.said) == 1


def saves(base: Any) -> Any:
    class Saves(base):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["seen"] = self.seen

    return Saves


def workers() -> DataLoader[Any]:
    return DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda: {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        (lambda: {"data": workers()}, "persistent_workers=True"),
        (lambda: {"kind": makes}, r"Makes\.made changes in training"),
        (lambda: {"kind": saves}, r"checkpoints here lack what the module's on_save_checkpoint\(\) adds"),
        (lambda: {"data": DataLoader(Drawing(), 4)}, "Drawing draws from the random generators"),
    ],
    ids=["option", "loader", "attribute", "file", "stream"],
)
def test_lightning_that_cannot_be_protected_trains_on(
    attempt: Attempts, watch: Watch, options: Any, reason: str
) -> None:
    def loop() -> Any:
        return fit(**options())

    assert attempt(lit(watch, loop), 99) == attempt(loop)
    told = [text for text in watch.said if not text.startswith(f"{PROTECTS}lightning")]
    assert len(told) == 1
    assert re.search(reason, told[0])


def test_second_fit_is_left_alone(attempt: Attempts, watch: Watch) -> None:
    def loop() -> Any:
        return fit(times=2)

    assert attempt(lit(watch, loop), 3) == attempt(loop)
    assert watch.said[-1].startswith("--rr-auto protects only the first training")


def test_end_of_a_fit_is_not_taken_for_another(attempt: Attempts, watch: Watch) -> None:
    lightning = pytest.importorskip("lightning")

    class Dies(lightning.Callback):
        lives = 1

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1 and Dies.lives == 1:
                Dies.lives = 0
                raise Ended

    finished: list[Any] = []

    def loop(*callbacks: Any) -> Any:
        if not finished:
            finished.append(fit())
        torch.manual_seed(5)
        return fit(callbacks=list(callbacks))

    assert attempt(lit(watch, lambda: loop(Dies())), 99) == loop()
    assert watch.said[-1].startswith(f"{NOTHING}lightning.Trainer: the run was restarted after its training had return")


def test_fit_that_has_a_callback_of_ours_is_left_alone(attempt: Attempts, watch: Watch) -> None:
    pytest.importorskip("lightning")
    from resilient_run.integrations.lightning import ResilientCallback

    def loop() -> Any:
        return fit(callbacks=[ResilientCallback()])

    assert attempt(lit(watch, loop), 3) == attempt(loop)
    assert watch.said == ["--rr-auto leaves this script alone: it protects itself"]


def test_pytorch_lightning_is_named(attempt: Attempts, watch: Watch) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2)

    def loop() -> Any:
        module = Module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        lightning.Trainer(max_epochs=1, devices=1, **quiet).fit(module, DataLoader(Numbers(), 4))
        return content(module)

    module = pytest.importorskip("pytorch_lightning.trainer.trainer")
    assert attempt(watch(loop, module, "fit"), 99) == attempt(loop)
    assert watch.said == [f"{NOTHING}pytorch_lightning is not supported: import lightning.pytorch in its place"]
