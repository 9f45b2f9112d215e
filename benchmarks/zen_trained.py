"""What do the figures of the Zen papers show where models are trained, and gradients are not drawn?

A DeepFM, an NMT with attention and a small BERT (`zen_trained_models.py`) are trained on hosts of a laboratory network
(namespaces, links shaped by tbf), one Gloo rank each. DDP's all-reduce, torch's all-gather of sparse tables, Zen, the
schemes that the papers compare it with, and DGC (5 %) before some of them train the same steps from the beginning, in
one job and in turns. A step is that of the slowest rank; of a turn the median counts. Sparse schemes sum the tables, as
in the thesis, and those behind DGC all large gradients. "Rows" is a scheme with one index for a row, or a bitmap.

- Steps: thesis, Figures 3.11 and 3.12; ZEN, 11 to 14.
- Messages: those of the last step, repeated with nothing computed between them, over an all-reduce of the same
  gradients (3.13; ZEN 15); and the bytes that they have, of the rank that receives most.
- Losses, accuracy on examples that nobody trains on, and whether parameters end with the bits of all-reduce
  (3.14; ZEN 18).
- Gradients: after `--settled` steps of 16 ranks in one process, how dense they are, how much denser their sums, how
  skewed, and how balanced servers are; also of what DGC selects (3.1, 3.2, 3.15).

All hosts share this machine's processors, so that computing weighs more than where each has its own.

    python benchmarks/zen_trained.py --json FILE.json
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import sparsity
import torch
from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json
from torch import Tensor
from zen_trained_models import TRAININGS, Training

from resilient_run.comm.compress.compressors import SampledTopK
from resilient_run.comm.compress.feedback import MomentumCorrection
from resilient_run.comm.runtime.bucket import LEAST_ELEMENTS
from resilient_run.comm.zen.partition import Balanced

WORKER: Final = str(Path(__file__).with_name("zen_trained_worker.py"))
BASE: Final = "all-reduce"
NATURAL: Final = (
    BASE,
    "all-gather, sparse tables",
    "agsparse",
    "sparcml",
    "sparcml, rows",
    "sparse-ps",
    "omnireduce",
    "zen",
)
SELECTED: Final = ("dgc, agsparse", "dgc, sparcml", "dgc, omnireduce", "dgc, zen")
STRAWMEN: Final = ("strawman, 2 |G|", "strawman, 8 |G|")
CONTENDERS: Final = {
    "DeepFM": (*NATURAL, "dgc, zen"),
    "NMT": (*NATURAL, "dgc, zen"),
    "BERT": (BASE, "omnireduce", "zen", *SELECTED),
}
"""For each model those of the figures."""
DENSITY: Final = 0.05
"""Of what DGC selects, as in the papers."""
RANKS: Final = (2, 4, 8, 16)
WARM_UP: Final = 4
"""Steps that do not count: buckets are made anew, Zen profiles, decides, and goes its way for the first time."""
SMOOTHED: Final = 10
"""Steps over which a loss is averaged."""


def settled(training: Training, ranks: int, steps: int, *, selects: bool) -> tuple[int, list[Tensor]]:
    """Train in one process as all ranks; return the width of a row, and of each rank what it sends in the last step.

    Args:
        training: Of as many ranks.
        ranks: How many.
        steps: At least 1.
        selects: Whether DGC selects from all large gradients; without it tables are returned as they are.
    """
    large = {name: each for name, each in training.module.named_parameters() if each.numel() >= LEAST_ELEMENTS}
    memories = [MomentumCorrection(SampledTopK(DENSITY), ranks=ranks) for _ in range(ranks)]
    optimizer, sent = training.optimizer(), list[Tensor]()
    for _ in range(steps):
        sums: dict[str, Tensor] = {}
        sent.clear()
        for rank, memory in enumerate(memories):
            training.module.zero_grad()
            training.module(*training.batch(rank)).backward()
            own = {name: each.grad for name, each in training.module.named_parameters() if each.grad is not None}
            if selects:
                own |= {name: _chosen(memory, name, own[name]) for name in large}
            sent.append(torch.cat([own[name].flatten() for name in (large if selects else training.tables)]))
            sums = {name: sums.get(name, 0) + each for name, each in own.items()}
        for name, parameter in training.module.named_parameters():
            parameter.grad = sums[name] / ranks
        optimizer.step()
    return 1 if selects else next(iter(training.tables.values())).shape[1], sent


def _chosen(memory: MomentumCorrection, name: str, gradient: Tensor) -> Tensor:
    message, seed = memory.compress(name, gradient.flatten())
    chosen = memory.compressor.decompress(message, gradient.numel(), gradient.dtype, seed=seed)
    memory.undo_unless_finite([name], chosen)
    return chosen.view_as(gradient)


def describe(width: int, gradients: Sequence[Tensor]) -> dict[str, Any]:
    """Return what figures show of gradients that ranks send, in rows of so many elements; all by number of ranks."""
    rows = gradients[0].numel() // width
    touched = [sparsity.nonzero(gradient, width) for gradient in gradients]
    overlaps = [sparsity.overlap_ratio(gradients[i], gradients[j]) for i in range(4) for j in range(i)]
    own = fmean(each.numel() for each in touched) / rows
    sums = sparsity.densities(gradients, width)
    counts = [ranks for ranks in RANKS if ranks <= len(gradients)]

    def even(parts: int) -> sparsity.Mapping:
        return lambda indices: indices * parts // rows

    def zen(parts: int) -> sparsity.Mapping:
        balanced = Balanced(length=rows, servers=parts)
        return lambda indices: balanced.spread.owners(indices.int()).long()

    return {
        "elements": gradients[0].numel(),
        "width": width,
        "density": own,
        "overlap": Summary.of(overlaps),
        "density_of_sum": {ranks: sums[ranks - 1] for ranks in counts},
        "densification": {ranks: sums[ranks - 1] / own for ranks in counts},
        "skewness": {parts: max(sparsity.skewness(each, parts) for each in gradients) for parts in counts},
        "imbalance": {
            who: {
                parts: {
                    "push": sparsity.push_imbalance(touched[:parts], parts, mapping(parts)),
                    "pull": sparsity.pull_imbalance(touched[:parts], parts, mapping(parts)),
                }
                for parts in counts
            }
            for who, mapping in {"Sparse PS": even, "Zen": zen}.items()
        },
    }


def trained(model: str, contenders: Sequence[str], hosts: int, rate: str, options: Any) -> dict[str, Any]:
    """Return of each contender how it trained, over all-reduce, and of all-reduces of gradients how long they take."""
    shared = {
        "model": model,
        "contenders": contenders,
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up": WARM_UP,
    }
    found: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(list))
    dense: dict[str, dict[str, Any]] = {}
    with NetLab(hosts, rate=rate) as lab:
        for line in map(json.loads, lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)])):
            if "dense" in line:
                dense[line.pop("dense")] = line
                continue
            each = found[line.pop("contender")]
            if "seconds" in line:
                each["seconds"].append(line["seconds"])
                each["accuracy"].append(line["accuracy"])
            else:
                each |= line
    step_s = {name: Summary.of(each["seconds"]) for name, each in found.items()}
    dense_s = {what: Summary.of(each["messages_s"]) for what, each in dense.items()}
    return {
        name: {
            "step_s": step_s[name],
            "steps_per_s": 1 / step_s[name].median,
            "speedup": step_s[BASE].median / step_s[name].median,
            "losses": each["losses"],
            "loss_at_end": fmean(each["losses"][-SMOOTHED:]),
            "accuracy": each["accuracy"],
            "furthest_loss": max(
                abs(own / base - 1) for own, base in zip(each["losses"], found[BASE]["losses"], strict=True)
            ),
            "bits_of_all_reduce": each["parameters"] == found[BASE]["parameters"],
            **(
                _messages(each, dense, dense_s, "all" if name in SELECTED else "tables") if "messages_s" in each else {}
            ),
        }
        for name, each in found.items()
    }


def _messages(
    each: Mapping[str, Any], dense: Mapping[str, Mapping[str, Any]], dense_s: Mapping[str, Summary], what: str
) -> dict[str, Any]:
    """Return what is told of a contender's messages over those of an all-reduce of the same gradients."""
    most = max(each["received_bytes"])
    alone_s = Summary.of(each["messages_s"])
    return {
        "messages_s": alone_s,
        "dense_messages_s": dense_s[what],
        "messages_speedup": dense_s[what].median / alone_s.median,
        "received_bytes": most,
        "over_dense": most / max(dense[what]["received_bytes"]),
        "imbalance": most / fmean(each["received_bytes"]),
    }


def show(title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table for a model on some hosts."""
    table(
        title,
        (
            "contender",
            "step, ms",
            "speed-up",
            "messages, ms",
            "speed-up",
            "bytes over dense",
            "loss",
            "accuracy",
            "bits",
        ),
        [
            (
                name,
                f"{1e3 * each['step_s'].median:.0f} ({1e3 * each['step_s'].p10:.0f}..{1e3 * each['step_s'].p90:.0f})",
                f"{each['speedup']:.2f}",
                *(
                    (
                        f"{1e3 * each['messages_s'].median:.1f}",
                        f"{each['messages_speedup']:.2f}",
                        f"{each['over_dense']:.3f}",
                    )
                    if "messages_s" in each
                    else ("", "", "")
                ),
                f"{each['loss_at_end']:.4f}",
                f"{each['accuracy'][-1]:.2%}",
                "equal" if each["bits_of_all_reduce"] else f"{each['furthest_loss']:.0e}",
            )
            for name, each in found.items()
        ],
    )
    sys.stdout.flush()


def show_gradients(found: Mapping[str, Mapping[str, Any]], steps: int) -> None:
    """Print a table of what was sent."""
    most = RANKS[-1]
    table(
        f"Gradients of step {steps}, {most} ranks",
        ("model", "density", "overlap", "density of the sum", "densification", "skew", "Sparse PS", "Zen"),
        [
            (
                name,
                f"{each['density']:.2%}",
                f"{each['overlap'].median:.2f}",
                f"{each['density_of_sum'][most]:.1%}",
                f"{each['densification'][most]:.1f}",
                f"{each['skewness'][most]:.1f}",
                *("{push:.2f}, {pull:.2f}".format(**each["imbalance"][who][most]) for who in ("Sparse PS", "Zen")),
            )
            for name, each in found.items()
        ],
    )
    sys.stdout.flush()


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    arguments.add_argument("--rate", default="100mbit")
    arguments.add_argument("--models", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    arguments.add_argument(
        "--contenders",
        nargs="+",
        choices=(*NATURAL, *SELECTED, *STRAWMEN),
        help=f"{BASE} and others; by default those of the figures",
    )
    arguments.add_argument("--steps", type=int, default=1, help="of a turn")
    arguments.add_argument("--rounds", type=int, default=5, help="in which contenders take turns")
    arguments.add_argument(
        "--settled", type=int, default=20, help="steps before gradients are looked at; 0: not at all"
    )
    options = arguments.parse_args()
    if options.contenders and BASE not in options.contenders:
        arguments.error(f"--contenders without {BASE}: add it, all others are compared with it")
    torch.set_num_threads(1)
    gradients = {
        f"{model}, {what}": describe(
            *settled(TRAININGS[model](RANKS[-1]), RANKS[-1], options.settled, selects=what != "tables")
        )
        for model in options.models
        for what in ("tables", "DGC")
        if options.settled
    }
    if gradients:
        show_gradients(gradients, options.settled)
    steps: list[dict[str, Any]] = []
    loads = []
    for hosts in options.hosts:
        for model in options.models:
            found = trained(model, options.contenders or CONTENDERS[model], hosts, options.rate, options)
            show(f"{model}, {hosts} hosts at {options.rate}", found)
            steps += [{"model": model, "hosts": hosts, "contender": name, **each} for name, each in found.items()]
            loads.append(os.getloadavg()[0])
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={name: value for name, value in vars(options).items() if name != "json"} | {"load_average": loads},
        results={"gradients": gradients, "trained": steps},
    )


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        sys.exit(str(error))
