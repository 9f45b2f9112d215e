"""FSDP1: `resilient-run --standalone --nproc-per-node 2 examples/with_fsdp1.py`.

FullyShardedDataParallel with a unit for each layer. The only lines about checkpoints are the three with `checkpointer`.
For a new script take FSDP2 (`fully_shard`), as `train_gpt.py --fsdp` does: torch develops that one.
"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from resilient_run import Checkpointer

STEPS = 40
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group(
    "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Embedding(100, 32), nn.TransformerEncoder(layer, num_layers=2), nn.Linear(32, 100)),
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    use_orig_params=True,
    device_id=device,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)

loss = torch.tensor(0.0)
torch.manual_seed(dist.get_rank())
for step in range(checkpointer.restore(), STEPS):
    tokens = torch.randint(100, (8, 16)).to(device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 9:  # an evaluation; before step(), so that it is repeated if a failure interrupts it
        model.eval()
        with torch.no_grad(), checkpointer.pause():
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        model.train()
    checkpointer.step(step + 1)

with FullyShardedDataParallel.summon_full_params(model, writeback=False):
    # Copies, because FSDP1 cannot free memory that NumPy has seen.
    whole = b"".join(parameter.detach().cpu().clone().numpy().tobytes() for parameter in model.parameters())
print(f"rank {dist.get_rank()} ends with loss {loss:.6f}, parameters {hashlib.sha256(whole).hexdigest()}", flush=True)
checkpointer.close()
dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
