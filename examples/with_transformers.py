"""transformers: `resilient-run --standalone --nproc-per-node 2 examples/with_transformers.py`.

A Trainer as people have it: epochs, shuffled data, gradient accumulation, a schedule, an evaluation in every epoch.
Nothing is downloaded: the model is a GPT-2 of two layers with random weights.
"""

import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resilient_run.integrations.transformers import protect

generator = torch.Generator().manual_seed(0)
texts = [torch.randint(100, (16,), generator=generator) for _ in range(100)]
data = [{"input_ids": text, "labels": text} for text in texts]
torch.manual_seed(0)
tokens = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, **tokens))
arguments = TrainingArguments(
    output_dir=os.path.join(tempfile.gettempdir(), "with_transformers"),
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=5,
    eval_strategy="epoch",
    logging_strategy="epoch",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:20])
protect(trainer)  # all that it needs: before train()
trainer.train()

if trainer.is_world_process_zero():
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"parameters {hashlib.sha256(parameters).hexdigest()}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
