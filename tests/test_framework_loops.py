"""Loops of frameworks as people write them, ended after a committed step, go on in the same way or are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_parts import Ended, Net, Numbers, Opaque, Remembers, Stream, content, weighing
from torch import nn
from torch.utils.data import DataLoader, Sampler

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


def test_an_unhealthy_micro_batch_makes_its_step_unhealthy(attempt: Any, tmp_path: Path) -> None:
    def loop(accelerator: Any, ckpt: Any, train: Any, loader: Any) -> None:
        for _ in ckpt.epochs(1):
            for number, batch in enumerate(loader):
                accelerator.gradient_state._set_sync_gradients(number % 2 == 1)
                train(batch)
                ckpt.step(healthy=number != 0)

    attempt(lambda: accelerated(tmp_path, loop, shuffled()), 2)
    assert attempt.daemon.wait_for("progress", step=1)["unhealthy"]
    assert "unhealthy" not in attempt.daemon.wait_for("progress", step=2)


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


def trained(
    directory: Path,
    data: Any,
    *callbacks: Any,
    resume: str | None = None,
    kind: Any = None,
    eval_dataset: Any = None,
    **arguments: Any,
) -> Any:
    transformers = pytest.importorskip("transformers")
    from resilient_run.integrations.transformers import protect

    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no", "max_steps": 8}
    settings = transformers.TrainingArguments(
        output_dir=str(directory), report_to=[], disable_tqdm=True, use_cpu=True, **(usual | arguments)
    )
    made = kind or transformers.Trainer
    trainer = made(model=Net(), args=settings, train_dataset=data, eval_dataset=eval_dataset, callbacks=list(callbacks))
    protect(trainer).train(resume_from_checkpoint=resume)
    return trainer


def test_trainer_that_ends_with_a_step_may_take_more_epochs_than_its_ranks_need(tmp_path: Path) -> None:
    """After other ranks, whose epochs were shorter."""
    trainer = trained(tmp_path, Numbers())
    epochs, *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert (epochs, steps) == (8, 8)
    assert (trainer.state.num_train_epochs, trainer.state.global_step) == (2, 8)


def test_trainer_whose_epochs_are_cut_short_takes_no_more_of_them_than_it_does_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Short(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_epoch_stop = state.global_step % 2 == 0

    assert trained(tmp_path, Numbers(), Short()).state.global_step == 2 * 2


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


def test_trainer_goes_on_with_the_generator_of_a_sampler_after_the_last_step_of_an_epoch(
    attempt: Any, tmp_path: Path
) -> None:
    class Drawn(Sampler[int]):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(3)

        def __iter__(self) -> Any:
            return iter(torch.randperm(16, generator=self.generator).tolist())

        def __len__(self) -> int:
            return 16

    class Samples(pytest.importorskip("transformers").Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return Drawn()

    def run() -> Any:
        return content(trained(tmp_path, Numbers(), kind=Samples).model)

    assert attempt(run, 4) == attempt(run)


def test_trainer_logs_at_its_end_in_the_mode_in_which_an_evaluation_left_the_model(
    attempt: Any, tmp_path: Path
) -> None:
    class Modes(pytest.importorskip("transformers").Trainer):
        def log(self, logs: Any, *others: Any) -> None:
            super().log(logs | {"training": self.model.training}, *others)

    def run() -> Any:
        trainer = trained(tmp_path, Numbers(), kind=Modes, eval_dataset=Numbers(), eval_strategy="steps", eval_steps=4)
        return logged(trainer)

    assert attempt(run, 8) == attempt(run)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_goes_on_with_what_its_class_holds(attempt: Any, tmp_path: Path, accumulated: int) -> None:
    def run() -> Any:
        kind = weighing(pytest.importorskip("transformers").Trainer)
        arguments = {"gradient_accumulation_steps": accumulated, "logging_steps": 3}
        trainer = trained(tmp_path, Numbers(), kind=kind, **arguments)
        assert trainer.nested[0] is trainer.nested[1][1]
        assert trainer.wave is trainer.same is trainer.nested[0][0]
        assert trainer.first.item() == 0
        return content(trainer.model), content(trainer.beside), logged(trainer)

    assert attempt(run, 2, 5) == attempt(run)


def test_trainer_goes_on_with_what_its_callbacks_hold(attempt: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Follows(transformers.TrainerCallback, Remembers):
        """Has a module that follows the trained one, made when training begins, and weighs the learning rate."""

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.prepare()
            self.behind = Net()
            self.behind.load_state_dict(model.state_dict())

        def on_step_end(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            for mine, its in zip(self.behind.parameters(), model.parameters(), strict=True):
                mine.data.mul_(0.5).add_(its.data, alpha=0.5)
            for group in optimizer.param_groups:
                group["weight_decay"] = self.weigh(self.behind.net[0].bias.sum()).item()

    def run() -> Any:
        callback = Follows()
        trainer = trained(tmp_path, Numbers(), callback)
        return content(trainer.model), content(callback.behind), list(callback.window)

    assert attempt(run, 2, 5) == attempt(run)


def test_trainer_goes_on_with_what_its_model_holds(attempt: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def forward(self: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        found = plain(self, x, labels)
        return found | {"loss": found["loss"] * self.calls}

    plain = Net.forward
    monkeypatch.setattr(Net, "forward", forward)

    def run() -> Any:
        return content(trained(tmp_path, Numbers()).model)

    assert attempt(run, 2, 5) == attempt(run)


def test_trainer_refuses_what_no_checkpoint_can_have_before_it_is_committed(attempt: Any, tmp_path: Path) -> None:
    kind = weighing(pytest.importorskip("transformers").Trainer, Opaque)
    with pytest.raises(StateError, match=r"^Weighing\.made changes in training.* \(list_iterator\)\. Keep it in"):
        attempt(lambda: trained(tmp_path, Numbers(), kind=kind), 99)
    assert attempt.daemon.watermark[1] == 3


def logged(trainer: Any) -> Any:
    """Return a trainer's log without what time tells."""
    timed = ("runtime", "per_second", "step_time")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timed)} for entry in trainer.state.log_history
    ]


def tokens() -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(29))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def with_trl(name: str, directory: Path) -> Any:
    """Return a small trainer of TRL."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    peft, datasets = pytest.importorskip("peft"), pytest.importorskip("datasets")
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ids)
    texts = [f"{number % 29} {number * 7 % 29} 5" for number in range(12)]
    answers = {"chosen": texts, "rejected": [text[::-1] for text in texts]}
    options, others, columns, kind = {}, {}, {}, transformers.GPT2LMHeadModel
    if name == "SFT":
        columns = {"text": texts}
        others = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2)}
    elif name == "DPO":
        columns = {"prompt": texts} | answers
        options = {"sync_ref_model": True, "ref_model_sync_steps": 2}
        others = {"ref_model": kind(config)}
    elif name == "GRPO":
        columns = {"prompt": texts}
        options = {"steps_per_generation": 2, "num_iterations": 2, "num_generations": 2, "max_completion_length": 4}
        others = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    else:
        columns, kind, config.num_labels = answers, transformers.GPT2ForSequenceClassification, 1
    usual = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 8, "logging_steps": 3}
    usual |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    return getattr(trl, f"{name}Trainer")(
        model=kind(config),
        args=getattr(trl, f"{name}Config")(output_dir=str(directory), **usual, **options),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokens(),
        **others,
    )


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO", "Reward"])
def test_trainers_of_trl_go_on(attempt: Any, tmp_path: Path, name: str) -> None:
    def run() -> Any:
        from resilient_run.integrations.transformers import protect

        trainer = protect(with_trl(name, tmp_path))
        trainer.train()
        reference = getattr(trainer, "ref_model", None)
        return content(trainer.model), None if reference is None else content(reference), logged(trainer)

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


def test_lightning_takes_up_the_files_of_a_step_that_was_not_committed(attempt: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Dies(lightning.pytorch.callbacks.ModelCheckpoint):
        died = False

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            super().on_train_batch_end(trainer, *others)
            if trainer.global_step == 4 and not Dies.died:
                Dies.died = True
                raise Ended

    def run(directory: Path) -> Any:
        directory.mkdir(exist_ok=True)
        kept = Dies(directory, filename="some", save_last=True, every_n_train_steps=2, save_top_k=1)
        fit(shuffled(), kept, enable_checkpointing=True, max_epochs=3)
        last = torch.load(directory / "last.ckpt", weights_only=False)
        return last["global_step"], sorted(path.name for path in directory.iterdir())

    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "some.ckpt").write_text("of somebody else")
        os.utime(tmp_path / name / "some.ckpt", (0, 0))
    killed = attempt(lambda: run(tmp_path / "killed"), 99)
    assert Dies.died
    assert killed == attempt(lambda: run(tmp_path / "whole"))
    assert "last.ckpt" in killed[1]
    assert "last-v1.ckpt" not in killed[1]
    assert (tmp_path / "killed" / "some.ckpt").read_text() == "of somebody else"


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
@pytest.mark.parametrize("ends", [(2, 6), (4, 9)])
def test_lightning_goes_on_averaging_weights(attempt: Any, name: str, ends: tuple[int, ...]) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")

    def run() -> Any:
        made = getattr(callbacks, name)
        average = made(2e-2, swa_epoch_start=2, annealing_epochs=2) if name[0] == "S" else made(decay=0.7)
        return fit(shuffled(), average, max_epochs=4)[1:], content(average._average_model)

    assert attempt(run, *ends) == attempt(run)


def test_lightning_goes_on_with_what_callbacks_and_data_hold(attempt: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Weighs(lightning.Callback, Remembers):
        def on_before_optimizer_step(self, _: Any, __: Any, optimizer: Any) -> None:
            for group in optimizer.param_groups:
                group["weight_decay"] = self.weigh(torch.ones(())).item()

    class Data(lightning.LightningDataModule):
        moved = 0

        def train_dataloader(self) -> Any:
            return shuffled()

        def on_after_batch_transfer(self, batch: Any, _: int) -> Any:
            self.moved += 1
            return {**batch, "x": batch["x"] * self.moved}

    def run() -> Any:
        weighs = Weighs()
        weighs.prepare()
        return fit(Data(), weighs)[1:], content(weighs.beside)

    assert attempt(run, 2, 6) == attempt(run)


def test_lightning_fits_twice(attempt: Any) -> None:
    trainer = attempt(lambda: fit(shuffled())[0])
    loop = trainer.fit_loop.epoch_loop
    assert loop.on_advance_end.__func__ is type(loop).on_advance_end, "it has its methods back"


@pytest.mark.parametrize("name", ["BackboneFinetuning", "LearningRateFinder"])
def test_lightning_refuses_what_changes_the_optimizer_on_the_way(attempt: Any, name: str) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    callback = getattr(callbacks, name)()
    with pytest.raises(StateError, match=f"{name} makes other optimizers, schedules or steps"):
        attempt(lambda: fit(shuffled(), callback), 3)


def test_lightning_refuses_parameters_that_a_hook_changes_again(attempt: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Noise(lightning.Callback):
        def on_train_epoch_start(self, _trainer: Any, module: Any) -> None:
            nn.init.normal_(module.inner.net[0].bias)

    with pytest.raises(StateError, match=r"inner\.net\.0\.bias is not what was restored"):
        attempt(lambda: fit(shuffled(), Noise()), 3)
