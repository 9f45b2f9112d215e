"""Which command made each committed result, what it needs, and which code its figures depend on.

`reproduce.py` runs what is listed here, `report.py` writes the digests of the code into a result, and
`tests/test_reproduce.py` holds the documents, the scripts and the folder of results against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sources

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One result of a script, `benchmarks/results/DATE-NAME.json`.

    Attributes:
        name: Without date and suffix.
        arguments: What the script is called with, as in a shell at the root of the repository. Its plots are named
            here, too.
        minutes: An estimate for two cores.
        figures: As in docs/internals/papers.md: "6.16" and "Table 5.1" are the thesis's, "SparDL 8" and "ZEN 13"
            those of the other papers.
        needs: Packages beyond `.[test]`, and interpreters of rivals (paths that end in `bin/python`), which
            benchmarks/peers/README.md makes.
        deterministic: It has no times: a nightly test makes it again, and it must be the same to the last digit.
    """

    name: str
    arguments: str = ""
    minutes: float
    figures: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script, and what all of its results have in common.

    Attributes:
        script: Its path from the root of the repository.
        results: In the order in which they are made.
        also: Files and folders on which figures depend, beside what `sources.py` finds from the script.
        root: It builds network namespaces.
        gpu: It needs a CUDA device.
        cores: It needs at least so many.
        output: The option that takes the file of the result.
    """

    script: str
    results: tuple[Result, ...]
    also: tuple[str, ...] = ()
    root: bool = False
    gpu: bool = False
    cores: int = 2
    output: str = "--json"


# Jobs of resilient-run, by the files from which launchers and Checkpointers are imported.
JOB = ("launcher/facade/__init__.py", "launcher/facade/__main__.py")
DAEMON = ("daemon/__main__.py",)
MODELS = ("benchmarks/models",)
LM, NVRX, DLROVER, TORCHFT = (f"{peer}/bin/python" for peer in ("lm", "nvrx", "dlrover", "torchft"))
ELASTIC: Final = f"--peer dlrover={DLROVER} --peer torchft={TORCHFT} --peer nvidia_inprocess={NVRX}"

BENCHMARKS: Final = (
    # Recovery.
    Benchmark(
        script="benchmarks/recovery_time.py",
        also=(*JOB, "benchmarks/peers"),
        results=(
            Result(name="recovery-time", minutes=5),
            Result(name="recovery-time-4", arguments="--ranks 4 --kills 3 --jobs 3 --kill-after 15", minutes=7),
            Result(name="recovery-time-8", arguments="--ranks 8 --kills 3 --jobs 2 --kill-after 15", minutes=5),
            Result(name="recovery-time-loop", arguments="--kills 3 --jobs 3 --kill-after 15", minutes=3),
            Result(name="recovery-time-291", arguments="--tensors 291 --state-mb 144 --kill-after 30", minutes=5),
            Result(name="recovery-time-4000", arguments="--tensors 4000 --kills 3 --kill-after 20", minutes=25),
            Result(
                name="recovery-time-peers",
                arguments=f"--peer lm_resiliency={LM} --peer nvidia_resiliency_ext={NVRX} --peer dlrover={DLROVER}",
                minutes=9,
                needs=(LM, NVRX, DLROVER),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/fewer_hosts.py",
        also=(*JOB, "benchmarks/peers"),
        results=(
            Result(
                name="fewer-hosts",
                arguments=f"--hosts 2 {ELASTIC}",
                minutes=7,
                needs=(DLROVER, TORCHFT, NVRX),
            ),
            Result(
                name="fewer-hosts-4",
                arguments=f"--hosts 4 {ELASTIC}",
                minutes=8,
                needs=(DLROVER, TORCHFT, NVRX),
            ),
            Result(
                name="fewer-hosts-256",
                arguments=f"--hosts 2 --state-mb 256 {ELASTIC}",
                minutes=19,
                needs=(DLROVER, TORCHFT, NVRX),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/straggler.py",
        also=JOB,
        results=(
            Result(name="straggler", arguments="--factors 1.15 1.3 --quiet-minutes 0.3", minutes=7),
            Result(
                name="straggler-noise",
                arguments="--batch 256 --factors 1.3 --injections 1 --quiet-minutes 60",
                minutes=64,
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/recovery_phases.py",
        also=JOB,
        results=(Result(name="recovery-phases", arguments="--rounds 5 --after 60", minutes=8, figures=("6.14",)),),
    ),
    Benchmark(
        script="benchmarks/steps_lost.py",
        also=JOB,
        results=(Result(name="steps-lost", minutes=8),),
    ),
    Benchmark(
        script="benchmarks/chaos.py",
        root=True,
        also=(*JOB, "daemon/inject", "launcher/inject"),
        results=(
            Result(
                name="chaos-seed-53",
                arguments="--seed 53 --steps 520 --faults 42 --mtbf-steps 4 --pause-s 0.5",
                minutes=25,
            ),
            Result(name="chaos-seed-47", arguments="--seed 47 --steps 800 --faults 46 --mtbf-steps 4", minutes=25),
            *(
                Result(name=f"chaos-seed-{seed}", arguments=f"--seed {seed} --steps 260 --faults 14", minutes=4)
                for seed in (71, 72, 73)
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/elastic_chaos.py",
        root=True,
        also=(*JOB, "daemon/inject", "launcher/inject"),
        results=(
            Result(name="elastic-chaos", arguments="--faults 500 --seconds 1260", minutes=23),
            Result(name="elastic-soak", arguments="--seconds 3600 --every-s 20 --seed 6", minutes=62),
        ),
    ),
    Benchmark(
        script="benchmarks/framework_start.py",
        also=(*JOB, "benchmarks/peers", "ckpt/integrations"),
        results=(
            Result(
                name="framework-start-peers",
                arguments=f"--peer nvidia_resiliency_ext={NVRX}",
                minutes=11,
                needs=("lightning", "transformers", NVRX),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/launch_overhead.py",
        also=JOB,
        results=(Result(name="launch-overhead", minutes=3),),
    ),
    Benchmark(
        script="benchmarks/operator_errors.py",
        also=JOB,
        results=(Result(name="operator-errors", minutes=3),),
    ),
    Benchmark(
        script="benchmarks/secure_run.py",
        also=JOB,
        results=(Result(name="secure-run", minutes=10),),
    ),
    # What checkpoints cost.
    Benchmark(
        script="benchmarks/step_cost.py",
        also=JOB,
        results=(
            Result(name="step-cost", minutes=2),
            Result(name="step-cost-4000", arguments="--tensors 4000 --mb 64", minutes=15),
        ),
    ),
    Benchmark(
        script="benchmarks/capture_stall.py",
        also=(*JOB, "benchmarks/peers"),
        results=(
            Result(
                name="capture-stall",
                arguments="--mb 256 --loop plain wrapped closure fsdp2 "
                f"--contender resilient-run 'resilient-run, 2 hosts' async_save --lm {LM}",
                minutes=20,
                needs=(LM,),
            ),
            Result(
                name="capture-stall-64",
                arguments="--mb 64 --loop plain "
                "--contender resilient-run 'resilient-run, 2 hosts' async_save torch.save lm-resiliency "
                f"--lm {LM}",
                minutes=2,
                needs=(LM,),
            ),
            Result(
                name="capture-stall-291",
                arguments="--mb 64 --tensors 291 --loop plain "
                "--contender resilient-run 'resilient-run, 2 hosts' async_save torch.save",
                minutes=2,
            ),
            Result(
                name="capture-stall-1024",
                arguments="--mb 1024 --rounds 5 "
                "--contender resilient-run 'resilient-run, 2 hosts' async_save torch.save lm-resiliency "
                f"--lm {LM}",
                minutes=10,
                needs=(LM,),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/engine_costs.py",
        also=(*JOB, "benchmarks/peers", "ckpt/integrations"),
        results=(
            Result(
                name="engine-costs-zero3",
                arguments=f"--engine zero3 --lm {LM} --kill-after 8",
                minutes=6,
                needs=("deepspeed", LM),
            ),
            Result(
                name="engine-costs-megatron",
                arguments="--engine megatron --kill-after 8",
                minutes=4,
                needs=("megatron",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/interleaving.py",
        root=True,
        also=JOB,
        results=(
            Result(
                name="interleaving",
                arguments="--rounds 5 --steps 8 --profile-steps 4 --state-mib 10 "
                "--plot benchmarks/results/interleaving.svg",
                minutes=15,
                figures=("6.7", "6.8", "6.16"),
            ),
            Result(
                name="interleaving-fsdp2",
                arguments="--parallel fsdp2 --rounds 5 --steps 6 --profile-steps 4 --layers 4 --compute-ms 200 "
                "--bucket-kib 1024 --schemes none interleaved naive blocking",
                minutes=13,
                figures=("6.16",),
            ),
            Result(
                name="interleaving-50",
                arguments="--rate 50mbit --rounds 2 --steps 14 --profile-steps 6 --compute-ms 200 --bucket-kib 128 "
                "--state-mib 2 --schemes none interleaved blocking",
                minutes=7,
                figures=("6.16",),
            ),
            Result(
                name="interleaving-200-b",
                arguments="--rounds 1 --steps 12 --profile-steps 6 --compute-ms 400 "
                "--schemes none interleaved blocking",
                minutes=5,
                figures=("6.16",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/replication_rate.py",
        root=True,
        also=DAEMON,
        results=(
            Result(name="replication-rate-200-b", arguments="--rate 200mbit --seconds 4", minutes=4, figures=("6.11",)),
        ),
    ),
    Benchmark(
        script="benchmarks/transports.py",
        root=True,
        also=JOB,
        results=(
            Result(
                name="transports",
                arguments="--alone-mb 16 --schemes unpaced interleaved --repeats 6",
                minutes=5,
                figures=("6.5",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/etcd_scale.py",
        results=(Result(name="etcd-scale", minutes=4),),
    ),
    Benchmark(
        script="benchmarks/secure_rate.py",
        root=True,
        results=(Result(name="secure-rate", arguments="--mb 128 --seconds 2 --repeats 5", minutes=8),),
    ),
    Benchmark(
        script="benchmarks/after_flood.py",
        also=DAEMON,
        results=(Result(name="after-flood", minutes=10),),
    ),
    # Sums of gradients.
    Benchmark(
        script="benchmarks/zen.py",
        root=True,
        results=(
            Result(
                name="zen",
                arguments="--hosts 4 8 16 --schemes dense agsparse sparcml sparse-ps omnireduce 'zen, elements' zen "
                "index-free --plot benchmarks/results/zen.svg",
                minutes=30,
                figures=("3.7", "3.13", "3.18", "ZEN 15"),
            ),
            Result(
                name="zen-rows",
                arguments="--hosts 4 8 16 --workloads LSTM DeepFM --schemes dense agsparse "
                "'agsparse, rows' sparcml 'sparcml, rows' sparse-ps 'sparse-ps, rows' omnireduce zen",
                minutes=12,
                figures=("3.13",),
            ),
            Result(
                name="zen-delay",
                arguments="--hosts 3 4 6 8 --delay-ms 20 --elements 200000 --workloads LSTM BERT --schemes dense "
                "'agsparse, rows' 'sparcml, rows' 'sparse-ps, rows' 'zen, gather' zen",
                minutes=10,
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/zen_gradients.py",
        results=(
            Result(
                name="zen-gradients",
                arguments="--plot benchmarks/results/zen-gradients.svg",
                minutes=1,
                figures=("3.1", "3.2"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/zen_scaling.py",
        results=(
            Result(
                name="zen-scaling",
                arguments="--plot benchmarks/results/zen-scaling.svg",
                minutes=2,
                figures=("3.2", "3.7", "3.15", "ZEN 8"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/zen_thresholds.py",
        results=(Result(name="zen-thresholds", minutes=2),),
    ),
    Benchmark(
        script="benchmarks/zen_formats.py",
        results=(
            Result(
                name="zen-formats",
                deterministic=True,
                arguments="--plot benchmarks/results/zen-formats.svg",
                minutes=1,
                figures=("3.17", "3.18"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/zen_hash.py",
        results=(Result(name="zen-hash", minutes=2, figures=("3.8", "3.16")),),
    ),
    Benchmark(
        script="benchmarks/zen_convergence.py",
        results=(
            Result(
                name="zen-convergence",
                arguments="--plot benchmarks/results/zen-convergence.png",
                minutes=8,
                figures=("3.14",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/spardl.py",
        root=True,
        results=(
            Result(
                name="spardl",
                arguments="--models lstm-imdb vgg16 --team-hosts",
                minutes=11,
                figures=("SparDL 6", "SparDL Table 3"),
            ),
            Result(
                name="spardl-teams",
                arguments="--hosts 14 6 --models lstm-imdb vgg16 --rounds 5",
                minutes=11,
                figures=("SparDL 5", "SparDL 7"),
            ),
            Result(
                name="spardl-small",
                arguments="--hosts 6 --models matrix resnet20 --rounds 7",
                minutes=2,
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/spardl_accuracy.py",
        root=True,
        results=(
            Result(name="spardl-accuracy", minutes=30),
            Result(
                name="spardl-accuracy-4",
                arguments="--hosts 4 --steps 200 --every 20 --schemes spardl topk-a topk-dsa gtopk ok-topk",
                minutes=8,
                figures=("SparDL 6", "SparDL Table 3"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/sparse_training.py",
        root=True,
        results=(
            Result(
                name="sparse-training",
                arguments="--rates 100mbit --steps 5 --rounds 5",
                minutes=20,
                figures=("3.11", "ZEN 13", "ZEN 14"),
            ),
            Result(
                name="sparse-training-1000",
                arguments="--rates 1000mbit --examples lstm_lm.py --rounds 5",
                minutes=7,
                figures=("3.12",),
            ),
            Result(
                name="sparse-training-1000-gpt",
                arguments="--rates 1000mbit --examples train_gpt.py --steps 6 --rounds 5",
                minutes=7,
                figures=("ZEN 13", "ZEN 14"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/zen_trained.py",
        root=True,
        results=(
            Result(
                name="zen-trained",
                minutes=10,
                figures=("3.1", "3.11", "3.13", "3.15", "ZEN 13", "ZEN 14", "ZEN 15"),
            ),
            Result(
                name="zen-trained-1000",
                arguments="--hosts 4 --rate 1000mbit --settled 0",
                minutes=3,
                figures=("3.12", "ZEN 13", "ZEN 14"),
            ),
            Result(
                name="zen-trained-losses",
                arguments="--hosts 2 --models DeepFM BERT --rate 10000mbit --settled 0 --steps 30 "
                "--contenders all-reduce agsparse zen 'strawman, 2 |G|' 'strawman, 8 |G|' 'dgc, agsparse' 'dgc, zen'",
                minutes=5,
                figures=("3.14", "ZEN 18"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/advise.py",
        root=True,
        also=("comm/cli",),
        results=(Result(name="advise", minutes=19),),
    ),
    Benchmark(
        script="benchmarks/strangers.py",
        root=True,
        also=("comm/cli",),
        results=(
            Result(name="strangers", arguments="--rates 100mbit", minutes=20, needs=("transformers", "sklearn")),
            Result(name="strangers-1000", arguments="--rates 1000mbit", minutes=10, needs=("transformers", "sklearn")),
        ),
    ),
    Benchmark(
        script="benchmarks/comm_ops.py",
        results=(Result(name="comm-ops", minutes=10, figures=("3.9",)),),
    ),
    Benchmark(
        script="benchmarks/compressor_kernels.py",
        results=(Result(name="compressor-kernels", minutes=10, figures=("4.10", "5.2")),),
    ),
    # Convergence.
    Benchmark(
        script="benchmarks/spardl_convergence.py",
        results=(
            Result(
                name="spardl-convergence",
                arguments="--plot benchmarks/results/spardl-convergence.png",
                minutes=30,
                figures=("SparDL 7", "SparDL 8"),
            ),
            Result(
                name="spardl-unions",
                arguments="--ranks 6 --steps 600 --every 10 --seeds 0 1 --schemes 'spardl, 1 teams, R-SAG' "
                "'spardl, 2 teams, R-SAG' 'spardl, 2 teams, B-SAG' 'spardl, 3 teams, B-SAG' "
                "--plot-unions benchmarks/results/spardl-unions.svg",
                minutes=5,
                figures=("SparDL 5",),
            ),
            Result(
                name="spardl-teams-convergence",
                arguments="--ranks 8 --steps 600 --seeds 0 --schemes 'spardl, 2 teams, R-SAG' "
                "'spardl, 4 teams, R-SAG' 'spardl, 8 teams, R-SAG' 'spardl, 8 teams, B-SAG' topk-a",
                minutes=2,
                figures=("SparDL 7",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/compressor_convergence.py",
        results=(
            Result(
                name="compressor-convergence-gpt",
                arguments="gpt --steps 600 --every 30 --plot benchmarks/results/compressor-convergence-gpt.png",
                minutes=120,
                figures=("4.16",),
            ),
            Result(
                name="compressor-convergence-lstm",
                arguments="lstm --steps 3000 --every 150 --variants dense topk dgc randomk efsignsgd onebit fp16 bf16 "
                "'dense, momentum' --plot benchmarks/results/compressor-convergence-lstm.png",
                minutes=150,
                figures=("4.16",),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/slow_network_convergence.py",
        results=(
            Result(
                name="slow-network-convergence",
                arguments="--variants dense int8 'int8, stochastic' fp8 powersgd 'dense, AdamW' 'local 10' 'local 50' "
                "'local 10, int8'",
                minutes=40,
            ),
            Result(
                name="slow-network-convergence-streaming-3000",
                arguments="--steps 3000 --every 250 --variants 'streaming 50'",
                minutes=7,
            ),
            Result(
                name="slow-network-convergence-lstm",
                arguments="--example lstm --variants dense int8 'int8, stochastic' fp8 powersgd 'dense, AdamW' "
                "'local 10' 'local 50' 'local 10, int8' 'local 10, averaged' 'local 50, averaged'",
                minutes=45,
            ),
            Result(
                name="slow-network-convergence-3000",
                arguments="--steps 3000 --every 250 --variants 'local 50' 'local 50, averaged'",
                minutes=40,
            ),
        ),
    ),
    # Plans.
    Benchmark(
        script="benchmarks/cupcake_planning.py",
        also=MODELS,
        results=(
            Result(
                name="cupcake-planning",
                arguments="--repetitions 10",
                minutes=8,
                figures=("5.6", "5.7", "5.9", "Table 5.1"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/espresso_planning.py",
        also=MODELS,
        results=(Result(name="espresso-planning", minutes=10, figures=("4.12", "4.13", "4.14", "4.15", "Table 4.5")),),
    ),
    Benchmark(
        script="benchmarks/espresso_upper_bound.py",
        also=MODELS,
        results=(Result(name="espresso-upper-bound", deterministic=True, minutes=2, figures=("4.14",)),),
    ),
    Benchmark(
        script="benchmarks/planned_scaling.py",
        also=MODELS,
        results=(
            Result(
                name="planned-scaling",
                arguments="--plot benchmarks/results/planned-scaling.svg",
                minutes=5,
                figures=("4.12", "4.13", "4.14", "4.15", "5.6", "5.7", "Table 4.1"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/tensor_sizes.py",
        also=MODELS,
        results=(
            Result(
                name="tensor-sizes",
                arguments="--plot benchmarks/results/tensor-sizes.svg",
                minutes=1,
                figures=("4.10", "4.11", "Table 4.6"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/plans.py",
        root=True,
        also=MODELS,
        results=(
            Result(
                name="plans-lstm",
                arguments="--models lstm --rounds 5 --iterations 2 --plot benchmarks/results/plans-lstm.svg",
                minutes=33,
                figures=("4.12", "5.6", "5.7", "5.9"),
            ),
            Result(
                name="plans-resnet50",
                arguments="--models resnet50 --rounds 5 --iterations 1 --plot benchmarks/results/plans-resnet50.svg",
                minutes=31,
                figures=("4.12", "5.6", "5.7", "5.9"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/planned_training.py",
        root=True,
        also=(*MODELS, "comm/cli"),
        results=(
            Result(
                name="planned-training",
                arguments="--plot benchmarks/results/planned-training.svg",
                minutes=15,
                figures=("4.16", "5.8"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/whole_steps.py",
        root=True,
        also=MODELS,
        results=(
            Result(
                name="whole-steps-lstm",
                arguments="--models LSTM --hosts 4 8 --rates-mbit 100 1000 --dense-s 0.5",
                minutes=15,
            ),
            Result(
                name="whole-steps-lstm-4000",
                arguments="--models LSTM --hosts 4 8 --rates-mbit 4000 --dense-s 0.2",
                minutes=7,
            ),
            Result(
                name="whole-steps-lstm-16",
                arguments="--models LSTM --hosts 16 --rates-mbit 100 --dense-s 0.5",
                minutes=14,
            ),
            Result(
                name="whole-steps-lstm-16-1000",
                arguments="--models LSTM --hosts 16 --rates-mbit 1000 --dense-s 0.5",
                minutes=17,
            ),
            Result(
                name="whole-steps-lstm-16-4000",
                arguments="--models LSTM --hosts 16 --rates-mbit 4000 --dense-s 0.2",
                minutes=10,
            ),
            Result(
                name="whole-steps-dense",
                arguments="--models dense --hosts 4 8 --rates-mbit 100 1000",
                minutes=40,
            ),
            Result(
                name="whole-steps-dense-16",
                arguments="--models dense --hosts 16 --rates-mbit 100 --dense-s 0.5",
                minutes=16,
            ),
            Result(
                name="whole-steps-dense-few-cores",
                arguments="--models dense --hosts 8 --rates-mbit 100 --total-mbit 300 --dense-s 0.35",
                minutes=5,
            ),
            Result(
                name="whole-steps-dense-4000",
                arguments="--models dense --hosts 4 8 --rates-mbit 4000 --dense-s 0.2",
                minutes=14,
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/predicted.py",
        root=True,
        also=MODELS,
        results=(
            Result(name="predicted", arguments="--seed 300 --count 50 --others 1", minutes=125),
            Result(name="predicted-unseen", arguments="--seed 500 --count 25 --others 1", minutes=62),
            Result(
                name="predicted-models",
                arguments="--models lstm resnet50 resnet101 vgg16 gpt2 bert_base ugatit",
                minutes=30,
            ),
            Result(
                name="predicted-8x8",
                arguments="--models resnet50 --shape 8 8 --scale 64 --cores-per-worker 0.5 --iterations 3",
                minutes=15,
            ),
            Result(
                name="predicted-8x8-vgg16",
                arguments="--models vgg16 --shape 8 8 --scale 320 --cores-per-worker 0.5 --iterations 3",
                minutes=15,
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/collectives.py",
        root=True,
        results=(Result(name="collectives", minutes=3),),
    ),
    Benchmark(
        script="benchmarks/latency.py",
        root=True,
        results=(Result(name="latency", minutes=3),),
    ),
    Benchmark(
        script="benchmarks/at_once.py",
        root=True,
        results=(Result(name="at-once", minutes=5),),
    ),
    # GPUs.
    Benchmark(
        script="benchmarks/fingerprint_gpu.py",
        gpu=True,
        results=(Result(name="fingerprint-gpu", minutes=2),),
    ),
    Benchmark(
        script="benchmarks/gpu_steps.py",
        gpu=True,
        also=JOB,
        results=(Result(name="gpu-steps", minutes=2),),
    ),
    Benchmark(
        script="benchmarks/comm_ops.py",
        gpu=True,
        results=(Result(name="comm-ops-gpu", arguments="--sizes 1000000 --densities 0.01", minutes=1),),
    ),
    Benchmark(
        script="benchmarks/compressor_kernels.py",
        gpu=True,
        results=(
            Result(
                name="compressor-kernels-gpu",
                arguments="--devices cuda --sizes-bytes 4194304 67108864",
                minutes=1,
                figures=("4.10", "5.2"),
            ),
        ),
    ),
    Benchmark(
        script="benchmarks/gpu.py",
        gpu=True,
        also=(*JOB, "tests"),
        results=(Result(name="gpu", minutes=10),),
    ),
    # Soundness.
    Benchmark(
        script="tests/zoo",
        output="--out",
        also=(*JOB, "ckpt/integrations"),
        results=(
            Result(name="zoo-seed-24", arguments="--kills 2000 --seed 24", minutes=180),
            Result(
                name="evaluations",
                arguments="--kills 300 --seed 51 --kinds evaluation --kills-per-job 14 --loops ema-evaluation "
                "averaged-model schedule-free numpy-evaluation ddp-ema collective-evaluation fsdp2-evaluation "
                "early-stopping",
                minutes=25,
            ),
        ),
    ),
    Benchmark(
        script="tests/test_capture_soundness.py",
        results=(Result(name="capture-soundness", arguments="--cases 100000 --seed 25", minutes=45),),
    ),
    Benchmark(
        script="tests/flips.py",
        also=JOB,
        results=(Result(name="flips", arguments="--flips 80 --seed 3", minutes=10),),
    ),
    Benchmark(
        script="tests/fuzz.py",
        also=("ckpt", "comm", "daemon", "launcher"),
        results=(Result(name="fuzz", arguments="--inputs 10000000 --seed 7", minutes=13),),
    ),
    Benchmark(
        script="tests/fuzz_live.py",
        also=DAEMON,
        results=(Result(name="fuzz-live", arguments="--seconds 330 --seed 2", minutes=6),),
    ),
    # From other results, so that it comes last.
    Benchmark(
        script="benchmarks/goodput.py",
        results=(
            Result(
                name="goodput",
                deterministic=True,
                arguments="--plot benchmarks/results/goodput.svg",
                minutes=1,
                figures=("6.9", "6.10", "6.11", "6.12", "6.15"),
            ),
        ),
    ),
)
"""Every script of benchmarks/ that writes a result, and the campaigns below tests/."""

KEPT: Final = {
    "2026-11-29-loops.json": "1,301 kills of the design in which step() copies; stopped there",
    "2026-11-28-zoo-handled.json": "the loop that came after the campaign",
    "2026-11-25-predicted-fast-links.json": "faster links, drawn by an earlier version of the script",
    "2026-11-26-predicted.json": "up to 8 workers in real time on two cores, earlier code",
    "2026-11-26-advise.json": "a quiet machine, twice as fast as that of the newest",
}
"""Results beside the newest, or that no script writes: why each is kept. None is made again."""


def entries() -> Iterator[tuple[Benchmark, Result]]:
    """Yield each result with its benchmark, in the order of the table."""
    for benchmark in BENCHMARKS:
        for result in benchmark.results:
            yield benchmark, result


def latest(name: str, folder: Path = RESULTS) -> Path | None:
    """Return the newest result of this name in a folder; None if there is none."""
    return max(folder.glob(f"????-??-??-{name}.json"), default=None)


def name_of(file: str) -> str:
    """Return the name of a result from that of its file, `DATE-NAME.json`."""
    return file[len("YYYY-MM-DD-") :].removesuffix(".json")


def digests(benchmark: Benchmark, root: Path = ROOT) -> dict[str, str]:
    """Return a digest of each file that the figures of a benchmark depend on, by path."""
    return sources.digests((benchmark.script, *benchmark.also), root)


def digests_of_script(script: Path) -> dict[str, str] | None:
    """Return the digests for a script by its path; None if it is none of the table."""
    for benchmark in BENCHMARKS:
        if script.resolve() == ROOT / benchmark.script:
            return digests(benchmark)
    return None
