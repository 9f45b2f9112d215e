"""Megatron's optimizers under resilient-run, on a CPU: prints what a `Checkpointer` that covers none says to each."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import nn

from resilient_run import Checkpointer
from resilient_run.ckpt.errors import StateError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from with_megatron import on_cpu

RANK = int(os.environ["RANK"])

dist.init_process_group("gloo")
on_cpu()
parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
for distributed in (True, False):
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        kind = {"bf16": dtype == torch.bfloat16, "params_dtype": dtype}
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True, **kind
        )
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        parallel = DistributedDataParallel(config, buffers, model)
        (one,) = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=distributed, clip_grad=1.0, **kind),
            [parallel],
        ).chained_optimizers
        for _ in range(2):
            parallel.zero_grad_buffer()
            parallel(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
            parallel.finish_grad_sync()
            assert one.step()[0]
        for registered in (
            {"model": parallel, "optimizer": one},
            {"model": model, "optimizer": one.optimizer},
            {"model": model},
        ):
            error = None
            try:
                Checkpointer(**registered).close()
            except StateError as refusal:
                error = refusal
            line = {"rank": RANK, "made": f"{type(one).__name__} {dtype}", "registered": "+".join(registered)}
            os.write(1, f"{json.dumps({**line, 'error': type(error).__name__, 'text': str(error)})}\n".encode())
dist.barrier()
os._exit(0)
