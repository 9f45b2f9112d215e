"""A trainer and a callback of a script's own, derived from TRL's: `own_trl.py SFT|DPO DIRECTORY`.

The loss depends on what the trainer holds: a deque, a tensor, a generator and a text. SFT trains an adapter (LoRA),
DPO has a reference model that follows. It prints a hash of all of that, the parameters and the log.
"""

import hashlib
import os
import sys
from collections import deque
from typing import Any

import peft
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback

from resilient_run.integrations.transformers import protect

kind, directory = sys.argv[1:]
words = ["<pad>", "<eos>", "<unk>", *map(str, range(29))]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
tokens = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def gpt() -> GPT2LMHeadModel:
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ids))


class Average(TrainerCallback):
    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.steps = 0

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.steps += 1
        for name, parameter in model.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(parameter.detach(), 0.1)
            else:
                self.weights[name] = parameter.detach().clone()


class Own(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recent: deque[float] = deque(maxlen=4)
        self.weight, self.generator, self.phase = torch.ones(()), torch.Generator().manual_seed(5), "warm"

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        if model.training:
            self.recent.append(loss.item())
            self.weight = 0.99 * self.weight + 0.01 * torch.rand((), generator=self.generator)
            self.phase = "hot" if len(self.recent) == 4 else self.phase
            loss = loss * self.weight * (2 if self.phase == "hot" else 1)
        return loss


torch.manual_seed(0)
texts = [f"{number % 29} {number * 7 % 29} 5 {number * 3 % 29}" for number in range(32)]
columns = {"text": texts}
options: dict[str, Any] = {}
others: dict[str, Any] = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2)}
if kind == "DPO":
    columns = {"prompt": texts, "chosen": texts, "rejected": [text[::-1] for text in texts]}
    options = {"sync_ref_model": True, "ref_model_sync_steps": 3}
    others = {"ref_model": gpt()}
data = Dataset.from_dict(columns)
average = Average()
trainer = Own(
    model=gpt(),
    args=getattr(trl, f"{kind}Config")(
        output_dir=directory,
        num_train_epochs=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=3,
        save_strategy="no",
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    ),
    train_dataset=data,
    eval_dataset=data.select(range(4)),
    processing_class=tokens,
    callbacks=[average],
    **others,
)
protect(trainer)
trainer.train()
if trainer.is_world_process_zero():
    kept = [*trainer.model.parameters(), *average.weights.values(), trainer.weight, trainer.generator.get_state()]
    kept += [*trainer.ref_model.parameters()] if kind == "DPO" else []
    timed = ("runtime", "per_second")
    log = [{key: value for key, value in e.items() if not key.endswith(timed)} for e in trainer.state.log_history]
    content = b"".join(tensor.detach().numpy().tobytes() for tensor in kept)
    content += repr((log, list(trainer.recent), trainer.phase, average.steps)).encode()
    print(f"parameters {hashlib.sha256(content).hexdigest()}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
