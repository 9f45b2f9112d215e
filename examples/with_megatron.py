"""megatron-core: `resilient-run --standalone --nproc-per-node 2 examples/with_megatron.py --tensor 2`.

The loop has the shape of Megatron-LM's `pretrain`: set up, train, evaluate. What a script adds is the `Checkpointer`
with its `MegatronState`, `restore()` and `step()`; `on_cpu()` lets Megatron run without a GPU.
"""

import argparse
import hashlib
import itertools
import json
import logging
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from resilient_run import Checkpointer
from resilient_run.integrations.megatron import MegatronState

VOCABULARY, LENGTH = 64, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_cpu():
    """Let Megatron, which takes CUDA for granted, use the CPU where it says so."""

    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if function is torch.Tensor.cuda:
                return args[0]
            made = function(*args, **kwargs)
            # The names of types by which its optimizers tell the parameters apart.
            if function is torch.Tensor.type and isinstance(made, str):
                return made.replace("torch.", "torch.cuda.")
            return made

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = tensor_parallel.random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tensor_parallel.random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None  # it is there with Transformer Engine only
    # Its trackers of random states tell of each use that they have changed those of the CPU.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    OnCPU().__enter__()


def initialize_megatron(args):
    dist.init_process_group("gloo" if args.cpu else "nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        expert_model_parallel_size=args.expert,
    )
    torch.manual_seed(args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    init_num_microbatches_calculator(
        dist.get_rank(), args.rampup, args.global_batch, args.micro_batch, parallel_state.get_data_parallel_world_size()
    )


def model_provider(args):
    """Return the chunks of the model on this rank."""
    mixture = {
        "num_moe_experts": args.experts,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "add_bias_linear": False,
    }
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        expert_model_parallel_size=args.expert,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        params_dtype=DTYPES[args.dtype],
        pipeline_dtype=DTYPES[args.dtype],
        use_cpu_initialization=args.cpu,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=not args.cpu,
        **(mixture if args.experts else {}),
    )
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.distributed,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.distributed,
        bucket_size=10_000 if args.overlap else None,
    )
    model = []
    for number in range(args.chunks):
        stage = number if args.chunks > 1 else None
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=args.experts or None),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=True,
            vp_stage=stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        wrapped = chunk if args.dtype == "fp32" else Float16Module(config, chunk)
        model.append(DistributedDataParallel(config, buffers, wrapped, disable_bucketing=number > 0))
    return model


def setup_model_and_optimizer(args):
    model = model_provider(args)
    for chunk in model:
        chunk.broadcast_params()
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        params_dtype=DTYPES[args.dtype],
        use_distributed_optimizer=args.distributed,
        overlap_param_gather=args.overlap and args.distributed,
        initial_loss_scale=2.0**20,
        loss_scale_window=5,
        hysteresis=1,
    )
    optimizer = get_megatron_optimizer(config, model)
    samples = args.train_iters * args.global_batch
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, config.lr, config.min_lr, samples // 5, samples, "cosine", 0.1, 0.1, samples, "constant"
    )
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap:
        no_syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_syncs if len(model) > 1 else no_syncs[0]
    return model, optimizer, scheduler


def build_data_iterator(args, model, consumed):
    """Return what each chunk of the model reads: microbatches of this rank, after `consumed` samples."""

    def microbatches():
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        for first in itertools.count(consumed + rank * args.micro_batch, args.micro_batch * ranks):
            samples = torch.arange(first, first + args.micro_batch)[:, None]
            yield (samples * 7 + torch.arange(LENGTH + 1) ** 2) % VOCABULARY

    iterators = [microbatches() for _ in model]
    return iterators if len(iterators) > 1 else iterators[0]


def forward_step(iterator, model):
    tokens = next(iterator)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], torch.arange(LENGTH).expand(len(tokens), -1), mask, labels=tokens[:, 1:])

    def loss_of(losses):
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}  # Megatron scales the other in place

    return output, loss_of


def run_batches(args, iterator, model, *, forward_only):
    """Return the mean loss of this step's microbatches, the same on all ranks."""
    told = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=model if len(model) > 1 else model[0],
        num_microbatches=get_num_microbatches(),
        seq_length=LENGTH,
        micro_batch_size=args.micro_batch,
        forward_only=forward_only,
    )
    total = torch.stack([each["loss"] for each in told]).mean() if told else torch.zeros(())
    dist.all_reduce(total)
    return total.item() * args.pipeline / dist.get_world_size()  # the other stages have none


def train_step(args, iterator, model, optimizer, scheduler):
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run_batches(args, iterator, model, forward_only=False)
    succeeded, norm, _ = optimizer.step()
    samples = get_num_microbatches() * args.micro_batch * parallel_state.get_data_parallel_world_size()
    if succeeded:
        scheduler.step(samples)
    args.consumed_train_samples += samples
    return loss, norm, succeeded


def evaluate(args, iterator, model):
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        loss = run_batches(args, iterator, model, forward_only=True)
    for chunk in model:
        chunk.train()
    args.consumed_valid_samples += (
        get_num_microbatches() * args.micro_batch * parallel_state.get_data_parallel_world_size()
    )
    return loss


def train(args, model, optimizer, scheduler, checkpointer):
    iteration = start = checkpointer.restore()
    train_iterator = build_data_iterator(args, model, args.consumed_train_samples)
    valid_iterator = build_data_iterator(args, model, 1_000_000 + args.consumed_valid_samples)
    overlapped = args.overlap and args.distributed
    if overlapped:  # as Megatron-LM does: the first iteration gathers nothing
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        loss, norm, succeeded = train_step(args, train_iterator, model, optimizer, scheduler)
        if overlapped and iteration == start:
            start += not succeeded
            if succeeded:
                for chunk in model:
                    chunk.enable_forward_pre_hook()
        iteration += 1
        line = {"rank": dist.get_rank(), "step": iteration, "loss": loss, "norm": norm}
        if iteration % args.eval_interval == 0:
            for chunk in model if overlapped else ():
                chunk.disable_forward_pre_hook()
            line["valid"] = evaluate(args, valid_iterator, model)
            for chunk in model if overlapped else ():
                chunk.enable_forward_pre_hook()
        os.write(1, f"{json.dumps(line)}\n".encode())
        checkpointer.step(iteration)
    for chunk in model if overlapped else ():
        chunk.disable_forward_pre_hook()


def digest(state):
    """Return a hash of a state: all numbers and tensors in it."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().contiguous().view(-1).view(torch.uint8).numpy(force=True)).hexdigest()
    if isinstance(state, dict | list):
        parts = state.items() if isinstance(state, dict) else enumerate(state)
        return hashlib.sha256(repr([(key, digest(part)) for key, part in parts]).encode()).hexdigest()
    return repr(state)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1, metavar="RANKS")
    parser.add_argument("--pipeline", type=int, default=1, metavar="RANKS")
    parser.add_argument("--chunks", type=int, default=1, help="of the model on each rank of the pipeline")
    parser.add_argument("--expert", type=int, default=1, metavar="RANKS")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: one MLP in their place")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--distributed", action="store_true", help="shard the optimizer over data-parallel ranks")
    parser.add_argument("--overlap", action="store_true", help="overlap gradient reduction and parameter gathers")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--rampup", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    args.cpu = not torch.cuda.is_available()
    args.consumed_train_samples = args.consumed_valid_samples = 0
    return args


def pretrain(args):
    if args.cpu:
        on_cpu()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    initialize_megatron(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args)
    state = MegatronState(model, optimizer, scheduler, args)
    with Checkpointer(megatron=state) as checkpointer:
        train(args, model, optimizer, scheduler, checkpointer)
    parameters = [dict(chunk.named_parameters()) for chunk in model]
    line = {"rank": dist.get_rank(), "parameters": digest(parameters), "state": digest(state.state_dict())}
    os.write(1, f"{json.dumps(line)}\n".encode())
    dist.barrier()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    pretrain(arguments())
