"""DeepSpeed: `DS_ACCELERATOR=cpu resilient-run --standalone --nproc-per-node 2 examples/with_deepspeed.py`.

ZeRO 3 with gradient accumulation, a schedule and an evaluation now and then. On GPUs, leave DS_ACCELERATOR out.
Where no kernel of DeepSpeed's is built yet, the first start compiles one for about a minute.
"""

import hashlib
import os
import sys

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from resilient_run import Checkpointer
from resilient_run.integrations.deepspeed import EngineState
from resilient_run.integrations.torch import ResumableLoader

STEPS, ACCUMULATE = 60, 2
stage = int(sys.argv[1]) if len(sys.argv) > 1 else 3
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": ACCUMULATE,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
}
deepspeed.init_distributed(verbose=False)
torch.manual_seed(0)
inputs = torch.randn(320, 16)
data = TensorDataset(inputs.bfloat16(), inputs.sum(1).sign().add(1).div(2).long())
model = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.1), nn.Linear(65, 2))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    config=config,
)
sampler = DistributedSampler(data)
loader = ResumableLoader(DataLoader(data, batch_size=8, sampler=sampler))

checkpointer = Checkpointer(engine=EngineState(engine), loader=loader, epoch=0)  # after deepspeed.initialize()


def batches():
    while True:
        sampler.set_epoch(checkpointer.values["epoch"])
        yield from loader
        checkpointer.values["epoch"] += 1


first = checkpointer.restore()
stream = batches()
for step in range(first, STEPS):
    for _ in range(ACCUMULATE):
        features, labels = next(stream)
        engine.backward(F.cross_entropy(engine(features), labels))
        engine.step()  # the last one updates the weights
    if step % 20 == 19:
        engine.eval()
        with checkpointer.pause(), torch.no_grad():  # an evaluation may take its time
            right = (engine(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
        engine.train()
        if engine.global_rank == 0:
            print(f"step {step + 1}: {right:.1%} right, learning rate {engine.get_lr()[0]:.6f}", flush=True)
    checkpointer.step(step + 1)  # where gradients are only accumulated, it would be refused

with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
    content = b"".join(parameter.detach().float().numpy().tobytes() for parameter in model.parameters())
if engine.global_rank == 0:
    print(f"parameters {hashlib.sha256(content).hexdigest()}", flush=True)
checkpointer.close()
torch.distributed.barrier()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
