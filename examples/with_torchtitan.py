"""torchtitan: `resilient-run --standalone --nproc-per-node 2 examples/with_torchtitan.py`, with torchtitan's options.

torchtitan's own `train` and its debug models. What a run of yours adds is the option `--override.imports`; the rest
makes a data set and a tokenizer without a download, and lets torchtitan run on a CPU.
"""

# ruff: noqa: E402 - torchtitan looks for its device when it is imported

import os
import sys
from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

ON_CPU = not torch.cuda.is_available()
if ON_CPU:  # it takes CUDA for granted
    torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.distributed.utils
import torchtitan.train
from datasets import Dataset
from torchtitan.components import metrics
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

OPTIONS = ["--override.imports", "resilient_run.integrations.torchtitan.every_step"]


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


def small(config: Trainer.Config) -> Trainer.Config:
    config.dataloader.dataset = config.validator.dataloader.dataset = "squares"
    config.tokenizer = Bytes.Config()
    config.training.steps = 30
    config.training.local_batch_size, config.training.seq_len = 4, 64
    config.training.disable_cuda_graphs = True
    config.validator.enable, config.validator.freq, config.validator.steps = True, 5, 2
    config.checkpoint.enable, config.checkpoint.interval = True, 10
    config.checkpoint.last_save_model_only = False
    config.debug.seed = 0
    if ON_CPU:
        config.optimizer.implementation = "foreach"
        config.parallelism.spmd_backend = "partial_dtensor"  # its default wants FlexAttention
        for _, _, parent, field in config.model_spec.model.traverse(FlexAttention.Config):  # no backward on a CPU
            setattr(parent, field, ScaledDotProductAttention.Config())
    return config


def dense() -> Trainer.Config:
    return small(llama3_debugmodel())


def experts() -> Trainer.Config:
    return small(deepseek_v3_debugmodel())


def train(self: Trainer, original: Any = Trainer.train) -> None:
    for part in self.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo scales no sums
    original(self)


def step(
    self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any = None, **_: Any
) -> None:
    """Take microbatches as torchtitan 0.3 gives them: torch 2.13 splits a batch itself."""
    for stage in self._stages if isinstance(self, schedules.PipelineScheduleMulti) else [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)


lines = [" ".join(str(n * n) for n in range(i, i + 20 + i % 7)) for i in range(400)]
DATASETS["squares"] = DatasetConfig(
    path="", loader=lambda _: Dataset.from_dict({"text": lines}), sample_processor=lambda sample: sample["text"]
)
if "arg_mbs" not in signature(schedules.PipelineScheduleMulti.step).parameters:
    schedules.PipelineScheduleSingle.step = schedules.PipelineScheduleMulti.step = step
if ON_CPU:
    dist.init_process_group("gloo")
    Trainer.train = train
    unmeasured = SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6), reset_peak_stats=lambda: None
    )
    metrics.build_device_memory_monitor = lambda: unmeasured
    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # for NCCL
sys.modules["with_torchtitan"] = sys.modules["__main__"]
config = [] if "--config" in sys.argv else ["--config", "dense"]
sys.argv[1:] = ["--module", "with_torchtitan", *config, *OPTIONS, *sys.argv[1:]]
torchtitan.train.main()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
