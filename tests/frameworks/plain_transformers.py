"""A script of transformers that does not know us: a Trainer with evaluation, best model and early stopping."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
texts = torch.randint(100, (100, 16))
dataset = [{"input_ids": text, "labels": text} for text in texts]
config = GPT2Config(
    vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
model = GPT2LMHeadModel(config)
training_args = TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=5,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_strategy="epoch",
    load_best_model_at_end=True,
    save_total_limit=2,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset,
    eval_dataset=dataset[:20],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
metrics = trainer.evaluate()

if trainer.is_world_process_zero():
    trainer.save_model()
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    best = trainer.state.best_metric, trainer.state.best_global_step, metrics["eval_loss"]
    print(best, f"parameters {hashlib.sha256(parameters).hexdigest()}", sep="\n", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end
