"""The loops of the zoo: what each is, what it needs, and how it is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """One training loop, `loops/<script>.py`.

    Attributes:
        name: Its name, unique.
        about: What is special about it, for the table in docs/internals/loops.md.
        script: The file's stem; several loops may share one by `arguments`.
        arguments: The script's.
        library: The distribution that it is about.
        ranks: Workers on one host.
        steps: Steps of one job.
        kills: Kills of one job.
        in_ci: Whether it is one of those that pytest runs.
        environ: Set for its workers.
    """

    name: str
    about: str
    script: str
    arguments: tuple[str, ...] = ()
    library: str = "torch"
    ranks: int = 1
    steps: int = 40
    kills: int = 12
    in_ci: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The installed version of its library."""
        return version(self.library)


def _plain(variant: str, about: str, *, in_ci: bool = False) -> Loop:
    return Loop(name=variant.replace(" ", "-"), about=about, script="plain", arguments=(variant,), in_ci=in_ci)


LOOPS: tuple[Loop, ...] = (
    Loop(
        name="accelerate-fused",
        about="wrapped fused AdamW, 64 MiB: a capture takes longer than a step",
        script="accelerate_fused",
        library="accelerate",
        steps=24,
        kills=10,
        in_ci=True,
    ),
    Loop(
        name="ema-evaluation",
        about="averages swapped in by `.data.copy_` to evaluate",
        script="ema_evaluation",
        library="torch_ema",
        in_ci=True,
    ),
    Loop(name="averaged-model", about="AveragedModel, `update_bn` to evaluate", script="averaged_model"),
    Loop(
        name="schedule-free",
        about="`optimizer.eval()` and `train()` around the evaluation",
        script="schedule_free",
        library="schedulefree",
        in_ci=True,
    ),
    Loop(
        name="lightning-automatic",
        about="Trainer, fused Adam, a callback, the sampler's start",
        script="lightning_loop",
        arguments=("automatic",),
        library="lightning",
    ),
    Loop(
        name="lightning-manual",
        about="manual optimisation; `self.optimizers()`, the wrapper, is what is registered",
        script="lightning_loop",
        arguments=("manual",),
        library="lightning",
    ),
    Loop(
        name="lightning-closure",
        about="manual optimisation with a closure; `trainer.optimizers[0]` is registered",
        script="lightning_loop",
        arguments=("closure",),
        library="lightning",
    ),
    Loop(
        name="transformers-trainer",
        about="Trainer with a tiny GPT-2, a callback, the data set's start",
        script="transformers_trainer",
        library="transformers",
    ),
    Loop(
        name="stateful-loader-0",
        about="StatefulDataLoader without workers, random augmentation",
        script="stateful_loader",
        arguments=("0",),
        library="torchdata",
        in_ci=True,
    ),
    Loop(
        name="stateful-loader-2",
        about="StatefulDataLoader with two workers",
        script="stateful_loader",
        arguments=("2",),
        library="torchdata",
    ),
    Loop(name="random-loader", about="torch's DataLoader, random augmentation", script="random_loader"),
    Loop(name="gan", about="two models, two optimizers", script="gan", in_ci=True),
    Loop(name="sam", about="weights perturbed by `.data` between two backward passes", script="sam"),
    Loop(name="lbfgs", about="a closure, a state that grows", script="lbfgs", in_ci=True),
    _plain("scaler", "GradScaler whose first steps are inf", in_ci=True),
    _plain("accumulation", "four backward passes for a step"),
    _plain("clipping", "`clip_grad_norm_`"),
    _plain("clamping", "weights clamped after the step"),
    _plain("noise", "noise on the gradients"),
    _plain("one cycle", "OneCycleLR"),
    _plain("tied", "one weight under two names"),
    _plain("curriculum", "a batch size that grows, a plain value"),
    _plain("fused", "fused Adam", in_ci=True),
    _plain("foreach", "foreach AdamW with amsgrad"),
    _plain("tensor lr", "fused Adam whose learning rate is a tensor, as `capturable` wants it on a GPU"),
    _plain("nadam", "NAdam, foreach"),
    _plain("nesterov", "SGD with Nesterov's momentum"),
    _plain("muon", "Muon on the matrices"),
    _plain("compiled model", "`torch.compile`, aot_eager"),
    _plain("compiled step", "`torch.compile` of `optimizer.step`"),
    _plain("inductor", "`torch.compile` with inductor"),
    _plain("checkpointing", "activation checkpointing"),
    Loop(name="low-precision", about="bf16 parameters, fp32 masters, a float8 buffer", script="low_precision"),
    Loop(
        name="bf16-fp32-state",
        about="fp32 optimizer state of bf16 parameters",
        script="bf16_fp32_state",
        in_ci=True,
    ),
    Loop(name="in-backward", about="an optimizer per parameter, stepped by hooks in backward", script="in_backward"),
    Loop(name="manual-sgd", about="`p.data -= …` and `p.data.copy_`, no optimizer", script="manual_sgd", in_ci=True),
    Loop(
        name="numpy-evaluation", about="numpy views rounded to evaluate; a 0-dim parameter", script="numpy_evaluation"
    ),
    Loop(name="background-ema", about="a thread writes averages by `.data`", script="background_ema"),
    Loop(
        name="optimizer-list",
        about="a container of optimizers with torchtitan's flat state",
        script="optimizer_list",
        in_ci=True,
    ),
    Loop(
        name="handled",
        about="tensors swapped, resized, copied, pickled and shared between steps; a lazy layer, flags of any bytes",
        script="handled",
        in_ci=True,
    ),
    Loop(name="unfreezing", about="the optimizer is made again as parts are unfrozen", script="unfreezing"),
    Loop(name="ddp", about="DDP", script="distributed", arguments=("plain",), ranks=2),
    Loop(
        name="ddp-ema",
        about="DDP, averages swapped in to evaluate, two ranks",
        script="distributed",
        arguments=("ema",),
        library="torch_ema",
        ranks=2,
        in_ci=True,
    ),
    Loop(
        name="collective-evaluation",
        about="ranks of their own, an in-place `all_reduce` of weights to evaluate",
        script="distributed",
        arguments=("collective",),
        ranks=2,
    ),
    Loop(
        name="early-stopping",
        about="a collective decides whether to stop",
        script="distributed",
        arguments=("early stopping",),
        ranks=2,
    ),
    Loop(
        name="post-local-sgd",
        about="PostLocalSGDOptimizer around fused Adam",
        script="distributed",
        arguments=("local sgd",),
        ranks=2,
    ),
    Loop(
        name="fsdp2-mixed",
        about="FSDP2, bf16 compute",
        script="fully_sharded",
        arguments=("plain",),
        ranks=2,
    ),
    Loop(
        name="fsdp2-evaluation",
        about="FSDP2, averages swapped in by `no_grad` copies of DTensors",
        script="fully_sharded",
        arguments=("evaluation",),
        ranks=2,
    ),
    Loop(
        name="fsdp2-hybrid",
        about="FSDP2, two replicas of two shards",
        script="fully_sharded",
        arguments=("hybrid",),
        ranks=4,
        steps=24,
        kills=6,
    ),
)
