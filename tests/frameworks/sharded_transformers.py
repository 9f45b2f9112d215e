"""The Trainer of `with_transformers.py`, sharded by FSDP of a version: `sharded_transformers.py 1|2 DIRECTORY`."""

import os
import sys

import torch
from on_cpu import print_digest, scale_no_sums
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from resilient_run.integrations.transformers import protect

version = int(sys.argv[1])


class ScaleNoSums(TrainerCallback):
    """Does for FSDP2 what Gloo needs, once the model is sharded."""

    def on_train_begin(self, args, state, control, model=None, **others) -> None:
        scale_no_sums(model)


generator = torch.Generator().manual_seed(0)
texts = [torch.randint(100, (16,), generator=generator) for _ in range(100)]
data = [{"input_ids": text, "labels": text} for text in texts]
torch.manual_seed(0)
tokens = {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, **tokens))
arguments = TrainingArguments(
    output_dir=sys.argv[2],
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
    fsdp=True,
    fsdp_config={"version": version, "transformer_layer_cls_to_wrap": ["GPT2Block"], "sync_module_states": "false"},
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:20], callbacks=[ScaleNoSums()])
protect(trainer)
trainer.train()
log = [
    {key: value for key, value in entry.items() if "time" not in key and "per_second" not in key}
    for entry in trainer.state.log_history
]
print_digest(trainer.model, trainer.optimizer.optimizer, log)
torch.distributed.barrier()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
