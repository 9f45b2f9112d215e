"""Draws the plots of these documents from the newest committed results: recovery, starts, stall, steps and losses.

    python docs/result_pictures.py

A bar is a median; the thin line through its end goes from the tenth percentile to the ninetieth.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drawing import INK, LINE, MUTED, Picture

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from catalogue import latest

FOLDER: Final = Path(__file__).parent / "plots"

OURS: Final = "#1d5fbf"
OTHERS: Final = "#b8c2cc"
FLOOR: Final = "#7bbf9b"

_WIDTH: Final = 860
_LABELS: Final = 230
_VALUES: Final = 120
_BAR: Final = 16
_ROW: Final = 24
_HEAD: Final = 58
_FOOT: Final = 34

_NAMES: Final = {
    "floor": "floor: copy the state, do a step",
    "lm_resiliency": "lm-resiliency",
    "nvidia_resiliency_ext": "nvidia-resiliency-ext",
    "async_save": "DCP async_save",
    "resilient-run, 2 hosts": "resilient-run, two hosts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One measurement: its median, and from where to where it spread (None if only the median is known)."""

    name: str
    median: float
    low: float | None = None
    high: float | None = None
    color: str = OTHERS

    @classmethod
    def of(cls, name: str, result: Mapping[str, Any], *, scale: float = 1.0) -> "Bar":
        """Take the statistics of a result, multiplied by `scale`."""
        return cls(
            name=_NAMES.get(name, name),
            median=scale * result["median"],
            low=scale * result["p10"],
            high=scale * result["p90"],
            color=_color(name),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bars that are compared with each other."""

    title: str
    bars: Sequence[Bar]


def bars(title: str, note: str, groups: Sequence[Group], *, unit: str, limit: float | None = None) -> str:
    """Return an SVG of horizontal bars.

    Args:
        title: What was measured.
        note: Under which conditions, for the last line.
        groups: The bars from above to below.
        unit: Behind each figure.
        limit: Where a line marks the rival of all bars; then each group has its own scale.
    """
    rows = sum(len(group.bars) for group in groups) + sum(1 for group in groups if group.title)
    height = _HEAD + _ROW * rows + 10 * (len(groups) - 1) + _FOOT
    longest = max(bar.high or bar.median for group in groups for bar in group.bars)
    picture = _frame(title, note, height)
    y: float = _HEAD
    for group in groups:
        if limit is not None:
            longest = max(bar.high or bar.median for bar in group.bars)
        scale = (_WIDTH - _LABELS - _VALUES) / longest
        if group.title:
            picture.text(20, y + 12, group.title, size=12.5, bold=True, color=MUTED)
            y += _ROW
        for bar in group.bars:
            ours = bar.color == OURS
            picture.text(_LABELS - 10, y + 12, bar.name, size=12.5, bold=ours, anchor="end")
            picture.box(
                _LABELS, y, max(scale * bar.median, 1), _BAR, fill=bar.color, stroke=bar.color, radius=2, weight=0
            )
            end = scale * bar.median
            if bar.low is not None and bar.high is not None:
                end = max(end, scale * bar.high)
                picture.box(
                    _LABELS + scale * bar.low,
                    y + _BAR / 2 - 0.5,
                    max(scale * (bar.high - bar.low), 1),
                    1,
                    fill=INK,
                    stroke=INK,
                    radius=0,
                    weight=0,
                )
            picture.text(_LABELS + end + 8, y + 12, f"{_figure(bar.median)} {unit}".rstrip(), size=12.5, bold=ours)
            y += _ROW
        if limit is not None:
            tall = _ROW * len(group.bars)
            picture.box(_LABELS + scale * limit, y - tall - 2, 1, tall, fill=INK, stroke=INK, radius=0, weight=0)
        y += 10
    return picture.to_svg()


def points(title: str, note: str, groups: Sequence[Group], *, unit: str) -> str:
    """Return an SVG of medians as dots, which may be negative, on lines from the tenth percentile to the ninetieth."""
    values = [value for group in groups for bar in group.bars for value in (bar.median, bar.low, bar.high)]
    low, high = min(0.0, *filter(None, values)), max(filter(None, values))
    scale = (_WIDTH - _LABELS - _VALUES) / (high - low)
    picture = _frame(title, note, _HEAD + sum(_ROW * (1 + len(group.bars)) + 10 for group in groups) - 10 + _FOOT)
    y: float = _HEAD
    for group in groups:
        picture.text(20, y + 12, group.title, size=12.5, bold=True, color=MUTED)
        y += _ROW
        tall = _ROW * len(group.bars)
        picture.box(_LABELS - scale * low, y - 2, 1, tall, fill=LINE, stroke=LINE, radius=0, weight=0)
        for bar in group.bars:
            left, middle, right = (
                _LABELS + scale * ((bar.median if value is None else value) - low)
                for value in (bar.low, bar.median, bar.high)
            )
            picture.text(_LABELS - 10, y + 12, bar.name, size=12.5, anchor="end")
            picture.box(left, y + _BAR / 2 - 0.5, max(right - left, 1), 1, fill=INK, stroke=INK, radius=0, weight=0)
            picture.box(middle - 4, y + _BAR / 2 - 4, 8, 8, fill=bar.color, stroke=bar.color, radius=4, weight=0)
            picture.text(max(right, middle + 4) + 8, y + 12, f"{round(bar.median, 1) + 0.0:+.1f} {unit}", size=12.5)
            y += _ROW
        y += 10
    return picture.to_svg()


def _frame(title: str, note: str, height: float) -> Picture:
    """Return a picture that has its title and its last line."""
    picture = Picture(_WIDTH, height, title)
    picture.box(0.5, 0.5, _WIDTH - 1, height - 1, stroke="#d9e2ec", radius=12, weight=1)
    picture.text(20, 32, title, size=15, bold=True)
    picture.text(20, height - 14, note, size=11, color=MUTED)
    return picture


def recovery() -> str:
    """Return the plot of the time from a killed worker to the next completed step."""
    seconds = _load("recovery-time-peers")["seconds"]
    ordered = sorted((each for each in seconds if each != "floor"), key=lambda each: float(seconds[each]["median"]))
    return bars(
        "A worker is killed: seconds until the next step is completed",
        "Two ranks, 64 MiB of state each, a checkpoint of every step (torchrun: by DCP); one machine with 2 cores.",
        [Group(title="", bars=[Bar.of(each, seconds[each]) for each in ordered])],
        unit="s",
    )


def starts() -> str:
    """Return the plot of first steps after the command and after a kill, for three kinds of scripts."""
    results = _load("framework-start-peers")
    contenders = ("resilient-run", "torchrun", "nvidia_resiliency_ext")
    moments = {"command": "from the command", "killed early": "killed early", "killed late": "killed late"}
    scripts = {"plain": "plain torch", "transformers": "transformers", "lightning": "Lightning"}
    return bars(
        "Seconds until the next step is completed, by script",
        "One worker; resilient-run with --rr-preload learn, the others with a checkpoint of every step in tmpfs.",
        [
            Group(
                title=f"{shown}, {when}",
                bars=[
                    Bar.of(who, results[of]) for who in contenders if (of := f"{script} / {moment} / {who}") in results
                ],
            )
            for script, shown in scripts.items()
            for moment, when in moments.items()
        ],
        unit="s",
    )


def stall() -> str:
    """Return the plot of how long the training thread waits for a checkpoint."""
    results = _load("capture-stall")
    loops = {
        "plain": "plain DDP",
        "wrapped": "fused optimizer inside another",
        "closure": "optimizer with a closure",
        "fsdp2": "FSDP2",
    }
    groups = []
    for case, contenders in results.items():
        if not case.endswith("256 MiB"):
            continue
        seconds = contenders["resilient-run"]["memcpy_s"]
        copy = Bar(name="one memcpy", median=1e3 * seconds["median"], color=FLOOR)
        order = ("resilient-run", "resilient-run, 2 hosts", "lm-resiliency", "async_save")
        waited = [Bar.of(each, contenders[each]["stall_s"], scale=1e3) for each in order]
        groups.append(Group(title=loops[case.partition(",")[0]], bars=[copy, *waited]))
    return bars(
        "Milliseconds that training waits for one checkpoint of 256 MiB per rank",
        "Two ranks on 2 cores; async_save writes to tmpfs.",
        groups,
        unit="ms",
    )


def steps_sparse() -> str:
    """Return the plot of whole steps with a sparse gradient, over those with all-reduce."""
    shown = {
        "zen, sparse table": "Zen",
        "sparcml, rows, sparse table": "SparCML, rows",
        "torch's all-gather, sparse table": "torch's all-gather",
        "omnireduce": "OmniReduce",
    }
    names = [f"whole-steps-lstm{which}" for which in ("", "-16", "-16-1000", "-4000", "-16-4000")]
    return bars(
        "Whole steps with a sparse gradient: how many times as fast as with all-reduce",
        "An embedding as sparse as that of the thesis; dilated time. Line: all-reduce; each group has its own scale.",
        _steps(names, shown, hosts=(4, 16)),
        unit="",
        limit=1.0,
    )


def steps_dense() -> str:
    """Return the plot of whole steps with dense gradients, over those with all-reduce."""
    shown = {
        "spardl": "SparDL, 1 %",
        "plan of espresso-fused": "plan (espresso-fused)",
        "powersgd": "PowerSGD",
        "torch's powerSGD_hook": "torch's PowerSGD",
        "topk-a": "TopkA, 1 %",
        "local steps": "local steps, every 5",
        "int8": "int8",
        "torch's fp16_compress_hook": "torch's fp16",
    }
    return bars(
        "Whole steps with dense gradients: how many times as fast as with all-reduce",
        "Twelve equal matrices; dilated time. Line: all-reduce; each group has its own scale.",
        _steps(("whole-steps-dense", "whole-steps-dense-4000"), shown, hosts=(4,)),
        unit="",
        limit=1.0,
    )


def losses() -> str:
    """Return the plot of how far from all-reduce's the loss ends, by what sums the gradients."""
    shown = {
        "fp16": "fp16",
        "int8": "int8",
        "fp8": "fp8",
        "powersgd": "PowerSGD",
        "topk": "top-k, 1 %",
        "onebit": "1-bit",
        "efsignsgd": "EFSignSGD",
        "dgc": "DGC, 1 %",
        "local 50": "local steps, every 50",
        "local 10": "local steps, every 10",
    }
    groups = []
    for model, name, spread in (("GPT", "gpt", "2 to 3"), ("LSTM", "lstm", "about 2")):
        network = "slow-network-convergence" + ("" if name == "gpt" else "-lstm")
        found = _load(f"compressor-convergence-{name}") | _load(network)
        results = {each: found[each]["over_reference"] for each in shown}
        dots = [
            Bar(
                name=shown[each],
                median=100 * (ratio["median"] - 1),
                low=100 * (ratio["p10"] - 1),
                high=100 * (ratio["p90"] - 1),
                color=OURS,
            )
            for each, ratio in results.items()
        ]
        groups.append(Group(title=f"{model}; seeds of all-reduce differ by {spread} %", bars=dots))
    return points(
        "Loss at the end, over that of all-reduce, in percent",
        "Small models, three seeds, 4 ranks, 600 steps; LSTM with fp16, top-k, 1-bit, EFSignSGD and DGC: 3000.",
        groups,
        unit="%",
    )


PLOTS: Final[Mapping[str, Callable[[], str]]] = {
    "recovery.svg": recovery,
    "starts.svg": starts,
    "stall.svg": stall,
    "steps-sparse.svg": steps_sparse,
    "steps-dense.svg": steps_dense,
    "losses.svg": losses,
}


def _steps(names: Sequence[str], shown: Mapping[str, str], *, hosts: Sequence[int]) -> list[Group]:
    """Return a group of speed-ups for each rate and number of hosts, the fastest first."""
    lines = [line for name in names for line in _load(name)["steps"]]
    groups = []
    for rate in sorted({line["rate_mbit_s"] for line in lines}):
        for count in hosts:
            found = {line["contender"]: line for line in lines if (line["rate_mbit_s"], line["hosts"]) == (rate, count)}
            base = found["all-reduce"]["step_s"]["median"]
            speeds = [
                Bar(
                    name=shown[name],
                    median=base / line["step_s"]["median"],
                    low=base / line["step_s"]["p90"],
                    high=base / line["step_s"]["p10"],
                    color=OURS if not name.startswith(("torch", "sparcml", "omni")) else OTHERS,
                )
                for name, line in found.items()
                if name in shown
            ]
            title = f"{rate:.0f} Mbit/s, {count} hosts" if rate < 1000 else f"{rate / 1000:.0f} Gbit/s, {count} hosts"
            groups.append(Group(title=title, bars=sorted(speeds, key=lambda bar: -bar.median)))
    return groups


def _load(name: str) -> Any:
    """Return what the newest result of this name found."""
    path = latest(name)
    if path is None:
        raise SystemExit(f"no result {name}: run python benchmarks/reproduce.py {name} first")
    return json.loads(path.read_text())["results"]


def _color(name: str) -> str:
    if name == "floor":
        return FLOOR
    return OURS if name.startswith("resilient-run") else OTHERS


def _figure(value: float) -> str:
    """Return two or three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for plot, draw in PLOTS.items():
        (FOLDER / plot).write_text(draw())
