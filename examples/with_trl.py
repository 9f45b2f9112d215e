"""TRL: `resilient-run --standalone --nproc-per-node 2 examples/with_trl.py`.

GRPO as people have it: completions that several steps train on, a reference model that follows, and metrics that are
averages since they were logged last. Nothing is downloaded: the model is a GPT-2 of two layers with random weights,
and its words are numbers.
"""

import hashlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from resilient_run.integrations.transformers import protect

words = ["<pad>", "<eos>", "<unk>", *map(str, range(61))]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokens = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)


def even(completions, **_):
    """Reward even numbers."""
    return [sum(int(word) % 2 == 0 for word in text.split() if word.isdigit()) / 8 for text in completions]


directory = sys.argv[1] if len(sys.argv) > 1 else os.path.join(tempfile.gettempdir(), "with_trl")
torch.manual_seed(0)
ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, **ids))
model.save_pretrained(os.path.join(directory, f"model{os.environ.get('RANK', '0')}"))  # the reference is loaded
data = Dataset.from_dict({"prompt": [f"{number % 61} {number * 7 % 61} 5" for number in range(8)]})
arguments = GRPOConfig(
    output_dir=directory,
    num_train_epochs=3,
    per_device_train_batch_size=4,
    num_generations=4,
    steps_per_generation=2,
    num_iterations=2,
    max_completion_length=8,
    learning_rate=1e-3,
    beta=0.1,
    sync_ref_model=True,
    ref_model_sync_steps=3,
    eval_strategy="epoch",
    per_device_eval_batch_size=4,
    logging_steps=4,
    save_strategy="no",
    bf16=False,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = GRPOTrainer(
    model=GPT2LMHeadModel.from_pretrained(os.path.join(directory, f"model{os.environ.get('RANK', '0')}")),
    reward_funcs=even,
    args=arguments,
    train_dataset=data,
    eval_dataset=data.select(range(4)),
    processing_class=tokens,
)
protect(trainer)  # all that it needs: before train()
trainer.train()

if trainer.is_world_process_zero():
    kept = [*trainer.model.parameters(), *trainer.ref_model.parameters()]
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in kept)
    timed = ("runtime", "per_second", "step_time")
    log = [
        {key: value for key, value in entry.items() if not key.endswith(timed)} for entry in trainer.state.log_history
    ]
    print(log, f"parameters {hashlib.sha256(parameters + repr(log).encode()).hexdigest()}", sep="\n", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
