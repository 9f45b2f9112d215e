"""torchtitan: `resilient-run --standalone --nproc-per-node 2 examples/with_torchtitan.py`.

torchtitan's own trainer and its debug model, sharded by FSDP2. What a script adds is `MemoryCheckpoints` and the line
that gives it to the config; the rest makes a data set without a download, and lets torchtitan run on a CPU.
"""

# ruff: noqa: E402 - torchtitan looks for its device when it is imported

import argparse
import hashlib
import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

ON_CPU = not torch.cuda.is_available()
if ON_CPU:  # it takes CUDA for granted
    torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.distributed.utils
from datasets import Dataset
from torchtitan.components import metrics
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from resilient_run import Checkpointer


class MemoryCheckpoints(CheckpointManager):
    """Keeps every step in memory; torchtitan's own checkpoint files are written and loaded as before."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        enable: bool = True

    def __init__(self, config, *, dataloader, model_parts, optimizers, lr_schedulers, states, **others):
        dataloader.generator = torch.Generator()  # a new iterator of it then draws nothing from torch's
        self.memory = Checkpointer(
            model=model_parts, optimizer=optimizers, scheduler=lr_schedulers, loader=dataloader, **states
        )
        parts = {"dataloader": dataloader, "model_parts": model_parts, "optimizers": optimizers}
        super().__init__(config, **parts, lr_schedulers=lr_schedulers, states=states, **others)

    def _load(self, step=-1):
        return self.memory.restore() > 0 or super()._load(step)

    def _save(self, curr_step, last_step=False):
        self.memory.step(curr_step)
        return super()._save(curr_step, last_step)


class Bytes(BaseTokenizer):
    """A token for each byte."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, **_):
        return list(text.encode())

    def decode(self, tokens, **_):
        return bytes(tokens).decode()

    def get_vocab_size(self):
        return 256


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--dump-folder", default="outputs", help="for torchtitan's own checkpoint files")
args = parser.parse_args()

lines = [" ".join(str(n * n) for n in range(i, i + 20 + i % 7)) for i in range(400)]
DATASETS["squares"] = DatasetConfig(
    path="", loader=lambda _: Dataset.from_dict({"text": lines}), sample_processor=lambda sample: sample["text"]
)
config = llama3_debugmodel()
config.checkpoint = MemoryCheckpoints.Config(interval=10, folder="checkpoint")
config.dataloader.dataset = "squares"
config.tokenizer = Bytes.Config()
config.dump_folder = args.dump_folder
config.training.steps = args.steps
config.training.local_batch_size, config.training.seq_len = 2, 64
config.training.disable_cuda_graphs = True
config.validator.enable = False
config.debug.seed = 0
if ON_CPU:
    dist.init_process_group("gloo")
    config.optimizer.implementation = "foreach"
    config.parallelism.spmd_backend = "partial_dtensor"  # its default wants FlexAttention
    for _, _, parent, field in config.model_spec.model.traverse(FlexAttention.Config):  # it has no backward on a CPU
        setattr(parent, field, ScaledDotProductAttention.Config())
    unmeasured = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6), reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: unmeasured
    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # for NCCL

trainer = config.build()
if ON_CPU:
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo scales no sums
trainer.train()
digest = hashlib.sha256()
for parameter in trainer.model_parts[0].parameters():
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    digest.update(whole.detach().cpu().numpy().tobytes())
if dist.get_rank() == 0:
    print(f"parameters {digest.hexdigest()}", flush=True)
trainer.close()
trainer.checkpointer.memory.close()
dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
