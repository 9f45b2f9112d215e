"""A loop of a framework whose number of ranks may change: `elastic.py LIBRARY KIND GATE DIRECTORY`.

Says which samples each rank had in each step once it is committed; no step begins before GATE says at least its number.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, Dataset

from resilient_run import Checkpointer

SAMPLES, BATCH, EPOCHS = 50, 3, 2
ACCUMULATE = {1: 3, 2: 2, 3: 2}
"""Number of ranks → of how many batches each accumulates gradients."""


class Samples(Dataset[dict[str, Any]]):
    """Each sample has its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "labels": x.sum()[None], "number": index}


class Net(nn.Module):
    """Notes the numbers that it is trained with."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            noted.append(number.tolist())
        return {"loss": nn.functional.mse_loss(self.net(x.to(self.dtype)), labels.to(self.dtype))}


noted: list[list[int]] = []


def dtype_of(kind: str) -> torch.dtype:
    """Return the precision of a model; ZeRO's own state is float32, as are the norms of FSDP1's gradients."""
    return torch.float32 if kind in {"fsdp1", "zero2", "zero3"} else torch.float64


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)


def replayed(steps: list[list[list[list[int]]]], rates: dict[int, float], *, divides_by_given: bool) -> list[float]:
    """Return the parameters after steps, of each of which these are the batches of each rank."""
    data, model = Samples(), Net()
    optimizer = optimizer_of(model)
    for number, ranks in enumerate(steps):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rates.get(number, 0.01)
        for batches in ranks:
            for batch in batches:
                items = [data[number] for number in batch]
                loss = model(
                    **{name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}
                )
                (
                    (loss["loss"] / (len(batches) if divides_by_given else ACCUMULATE[len(ranks)])) / len(ranks)
                ).backward()
        optimizer.step()
    return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]


def accumulated() -> int:
    return ACCUMULATE[int(os.environ["WORLD_SIZE"])]


def say(**fields: object) -> None:
    """Print one JSON line, in one write: the ranks of a host share its output."""
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **fields}) + "\n").encode())


def audit(gate: Path) -> None:
    """Let each step of a Checkpointer wait for its commit, and the next one for the gate."""
    advance, restore = Checkpointer.step, Checkpointer.restore

    def restored(self: Checkpointer) -> int:
        step = restore(self)
        say(restored=step)
        while int(gate.read_text()) < step + 1:
            time.sleep(0.01)
        return step

    def step(self: Checkpointer, n: int | None = None, **told: Any) -> None:
        before = self._step
        advance(self, n, **told)
        if self._step == before:
            return
        while (self.watermark or (0, 0))[1] < self._step:
            time.sleep(0.001)
        say(step=self._step, of=int(os.environ["WORLD_SIZE"]), had=list(noted))
        noted.clear()
        while int(gate.read_text()) < self._step + 1:
            time.sleep(0.01)

    Checkpointer.step, Checkpointer.restore = step, restored  # type: ignore[method-assign]


def zero_config(kind: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a ZeRO stage, in the precision of the replay."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulated(),
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0},
    }


def accelerate(kind: str, _directory: str) -> nn.Module:
    if kind != "ddp":
        import on_cpu
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.utils import set_seed

    from resilient_run.integrations.accelerate import AcceleratorCheckpointer

    set_seed(0)
    if kind.startswith("zero"):
        plugin = DeepSpeedPlugin(hf_ds_config=zero_config(kind))
        accelerator = Accelerator(gradient_accumulation_steps=accumulated(), deepspeed_plugin=plugin)
    elif kind.startswith("fsdp"):
        # Accelerate gives no optimizer flat parameters.
        kept = {"use_orig_params": True} if kind == "fsdp1" else {}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind[-1]), auto_wrap_policy="no_wrap", **kept)
        accelerator = Accelerator(gradient_accumulation_steps=accumulated(), fsdp_plugin=plugin)
    else:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated())
    model = Net(dtype_of(kind))
    model, optimizer, loader, other = accelerator.prepare(
        model, optimizer_of(model), DataLoader(Samples(), BATCH, shuffle=True), DataLoader(Samples(), 4)
    )
    if kind.startswith("fsdp"):
        on_cpu.scale_no_sums(model)
    checkpointer = AcceleratorCheckpointer(accelerator)
    checkpointer.restore()
    for _ in checkpointer.epochs(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        for batch in () if kind.startswith("zero") else other:  # beside DeepSpeed it gathers on GPUs only
            accelerator.gather_for_metrics(batch["number"])
    checkpointer.close()
    return model


def transformers(kind: str, directory: str) -> nn.Module:
    if kind.startswith("fsdp"):
        import on_cpu
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from resilient_run.integrations.transformers import protect

    class Watches(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            if kind.startswith("fsdp"):
                on_cpu.scale_no_sums(model)

        def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, optimizer: Any = None, **__: Any) -> None:
            say(at=state.global_step, rate=optimizer.param_groups[0]["lr"])

    how: dict[str, Any] = {"use_cpu": True}
    if kind.startswith("fsdp"):
        # FSDP1 of Trainer sends the parameters to the other ranks over a GPU only.
        kept = {"use_orig_params": True, "sync_module_states": False} if kind == "fsdp1" else {}
        how = {"fsdp": True, "fsdp_config": {"version": int(kind[-1]), **kept}}
    elif kind.startswith("zero"):
        how["deepspeed"] = zero_config(kind)
    arguments = TrainingArguments(
        output_dir=directory,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulated(),
        learning_rate=0.01,
        lr_scheduler_type="linear",
        max_grad_norm=0,
        weight_decay=0,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **how,
    )
    trainer = Trainer(
        model=Net(dtype_of(kind)),
        args=arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(),
        callbacks=[Watches()],
    )
    protect(trainer).train()
    return trainer.model


def lightning(kind: str, _directory: str) -> nn.Module:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.strategies import ModelParallelStrategy

    from resilient_run.integrations.lightning import ResilientCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def configure_model(self) -> None:
            if kind == "fsdp2":
                fully_shard(self.inner, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = self.inner(**batch)["loss"]
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("validation", self.inner(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    L.seed_everything(0)
    module = Module()
    world = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp"
        if kind == "ddp"
        else ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulated(),
        num_sanity_val_steps=0,
        callbacks=[ResilientCallback(), EarlyStopping("validation", patience=3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Samples(), BATCH, shuffle=True), DataLoader(Samples(), 4))
    return module


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return all of each parameter."""
    if isinstance(model, FullyShardedDataParallel):
        return list(model.state_dict().values())
    if any(hasattr(each, "ds_id") for each in model.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return [each.detach().clone() for each in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]


def main(library: str, kind: str, gate: str, directory: str) -> None:
    say(pid=os.getpid(), world=int(os.environ["WORLD_SIZE"]))
    audit(Path(gate))
    model = {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}[library](kind, directory)
    say(parameters=[number for each in whole(model) for number in each.detach().flatten().tolist()])
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main(*sys.argv[1:])
