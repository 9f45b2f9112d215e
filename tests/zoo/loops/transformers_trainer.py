"""transformers' Trainer with a tiny GPT-2: a callback restores before the first step and counts steps."""

import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from harness import STEPS, Checkpointer, at, finish
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

warnings.filterwarnings("ignore")


class Resilient(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        self.checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=lr_scheduler)
        state.global_step = data.start = self.checkpointer.restore()
        self.generator = torch.get_rng_state() if data.start else None

    def on_step_begin(self, args, state, control, **_):
        if self.generator is not None:
            # The iterator of a DataLoader draws from it when it is made.
            torch.set_rng_state(self.generator)
            self.generator = None
        at("forward")

    def on_pre_optimizer_step(self, args, state, control, **_):
        at("optimizer")

    def on_step_end(self, args, state, control, **_):
        self.checkpointer.step(state.global_step)
        at("data")


class Tokens(torch.utils.data.IterableDataset):
    """Batches by their number, from the one that follows what was restored."""

    start = 0

    def __iter__(self):
        for number in range(4 * self.start, 4 * STEPS):
            tokens = torch.randint(100, (16,), generator=torch.Generator().manual_seed(number))
            yield {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
data = Tokens()
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=2))
callback = Resilient()
arguments = TrainingArguments(
    output_dir="/tmp/unused",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    optim="adamw_torch_fused",
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    seed=0,
)
Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
finish(callback.checkpointer)
