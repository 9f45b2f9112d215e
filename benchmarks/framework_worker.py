"""The training of `framework_start.py`: as people write it in each framework, with a checkpoint of every step."""

import argparse
import importlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_worker import make_keeper
from torch import nn
from torch.nn import functional as F
from workload import emit

PAUSE_S = 0.02
OURS, FILES = "checkpointer", "files"


def completed(step: int, directory: Path) -> None:
    """Report a step; end here once the benchmark has seen enough."""
    emit(
        json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), "step": step, "monotonic_s": time.monotonic()})
    )
    if (directory / "stop").exists():
        os._exit(0)
    time.sleep(PAUSE_S)


def plain(directory: Path, steps: int, keeper: str) -> None:
    """A loop of one's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = make_keeper(keeper, model, optimizer, directory)
    for step in range(kept.restore() + 1, steps + 1):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.step(step)
        completed(step, directory)


def transformers(directory: Path, steps: int, keeper: str) -> None:
    """A `Trainer`, which without us saves and resumes by itself."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    ours = keeper == OURS

    class Report(TrainerCallback):
        def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
            completed(state.global_step, directory)

    data = [{"input_ids": text, "labels": text} for text in torch.randint(100, (400, 16))]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    )
    saving = {} if ours else {"save_steps": 1, "save_total_limit": 2}
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="no" if ours else "steps",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **saving,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Report()])
    if ours:
        from resilient_run.integrations.transformers import protect

        protect(trainer)
    trainer.train(resume_from_checkpoint=None if ours else get_last_checkpoint(str(directory)))


def lightning(directory: Path, steps: int, keeper: str) -> None:
    """A Lightning `Trainer`, which without us saves and resumes by itself."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

        def training_step(self, batch, index):  # type: ignore[no-untyped-def]
            return F.mse_loss(self.net(batch), batch)

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            return torch.optim.AdamW(self.parameters())

    class Report(Callback):
        def on_train_batch_end(self, trainer, *_):  # type: ignore[no-untyped-def]
            completed(trainer.global_step, directory)

    callback: Callback
    plugin, path = None, None
    if keeper == OURS:
        from resilient_run.integrations.lightning import ResilientCallback

        callback = ResilientCallback()
    elif keeper == FILES:
        callback = ModelCheckpoint(directory, save_last=True, every_n_train_steps=1)
        last = directory / "last.ckpt"
        path = last if last.exists() else None
    else:
        callback, plugin, path = importlib.import_module(f"peers.{keeper}_lightning").make(directory)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[callback, Report()],
        plugins=plugin,
        logger=False,
        enable_checkpointing=keeper != OURS,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(torch.randn(6400, 64), batch_size=16), ckpt_path=path)


def main() -> None:
    """Train."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--framework", choices=["plain", "transformers", "lightning"], required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--directory", type=Path, required=True)
    options.add_argument("--keeper", required=True, help="a module in peers/: who keeps the state")
    args = options.parse_args()
    if args.keeper not in (OURS, FILES):
        dist.init_process_group("gloo")  # their libraries ask for one
    {"plain": plain, "transformers": transformers, "lightning": lightning}[args.framework](
        args.directory, args.steps, args.keeper
    )
    os._exit(0)


if __name__ == "__main__":
    main()
