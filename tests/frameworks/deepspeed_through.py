"""DeepSpeed through Accelerate or through the Trainer of transformers: `deepspeed_through.py LIBRARY STAGE`.

Each rank prints a line `digest RANK …`, as `deepspeed_train.py` does.
"""

import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient_run.integrations.accelerate import AcceleratorCheckpointer
from resilient_run.integrations.transformers import protect

library, stage = sys.argv[1], int(sys.argv[2])
config: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
}


def tell(model: nn.Module, rank: int, **others: Any) -> None:
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        content = b"".join(each.detach().float().numpy().tobytes() for each in parameters)
    found = {"parameters": hashlib.sha256(content).hexdigest(), **{name: repr(each) for name, each in others.items()}}
    os.write(1, f"digest {rank} {json.dumps(found)}\n".encode())


def through_accelerate() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    inputs = torch.randn(72, 16)
    data = TensorDataset(inputs, inputs.sum(1).sign().add(1).div(2).long())
    model: Any = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.1), nn.Linear(65, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    train, test = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
    model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
    checkpointer = AcceleratorCheckpointer(accelerator, losses=[])
    checkpointer.restore()
    for _ in checkpointer.epochs(3):
        model.train()
        for features, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                checkpointer.values["losses"].append(loss.item())
                checkpointer.step()
        model.eval()
        with checkpointer.pause(), torch.no_grad():
            for features, _ in test:
                model(features)
    engine = model
    tell(
        engine.module,
        engine.global_rank,
        losses=checkpointer.values["losses"],
        rate=scheduler.get_last_lr(),
        counters=(engine.global_steps, engine.micro_steps),
    )
    checkpointer.close()


def through_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(100, (16,), generator=generator) for _ in range(72)]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    arguments = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "deepspeed_through"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=2,
        eval_strategy="epoch",
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        deepspeed=config,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, **tokens))
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:20])
    protect(trainer)
    trainer.train()
    # ZeRO 3 shows parameters of different sizes to Trainer's count of operations, by what it has gathered.
    left_out = ("runtime", "per_second", "flos" if stage == 3 else "runtime")
    logs = [
        {name: value for name, value in entry.items() if not any(each in name for each in left_out)}
        for entry in trainer.state.log_history
    ]
    tell(trainer.model, trainer.args.process_index, logs=logs, rate=trainer.lr_scheduler.get_last_lr())


{"accelerate": through_accelerate, "transformers": through_transformers}[library]()
torch.distributed.barrier()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
