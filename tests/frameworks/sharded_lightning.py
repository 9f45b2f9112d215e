"""Lightning's Trainer with FSDP2: module and data of `with_lightning.py`, sharded by `ModelParallelStrategy`."""

import hashlib
import os
import runpy
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from resilient_run.integrations.lightning import ResilientCallback

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_lightning.py"


class Sharded(runpy.run_path(str(EXAMPLE))["Classifier"]):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=mesh)


if __name__ == "__main__":
    L.seed_everything(0)
    inputs = torch.randn(640, 16)
    data = TensorDataset(inputs, inputs.sum(1).sign().add(1).div(2).long())
    module = Sharded()
    world, tensor = int(os.environ["WORLD_SIZE"]), int(os.environ.get("TENSOR_PARALLEL", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=world // tensor, tensor_parallel_size=tensor),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[ResilientCallback(), EarlyStopping("validation_loss", patience=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
    parameters = b"".join(parameter.detach().full_tensor().numpy().tobytes() for parameter in module.parameters())
    if trainer.is_global_zero:
        print(f"parameters {hashlib.sha256(parameters).hexdigest()}", flush=True)
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
