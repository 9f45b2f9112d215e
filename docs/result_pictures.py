"""Draws the plots of these documents from the newest committed results: recovery, starts, stall, Zen and SparDL.

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
    "spardl": "SparDL",
    "ok-topk": "Ok-Topk",
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
        limit: Where a vertical line marks a limit or a rival that all bars are measured against.
    """
    rows = sum(len(group.bars) for group in groups) + sum(1 for group in groups if group.title)
    height = _HEAD + _ROW * rows + 10 * (len(groups) - 1) + _FOOT
    longest = max(bar.high or bar.median for group in groups for bar in group.bars)
    scale = (_WIDTH - _LABELS - _VALUES) / longest
    picture = Picture(_WIDTH, height, title)
    picture.box(0.5, 0.5, _WIDTH - 1, height - 1, stroke="#d9e2ec", radius=12, weight=1)
    picture.text(20, 32, title, size=15, bold=True)
    y: float = _HEAD
    for group in groups:
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
        y += 10
    if limit is not None:
        picture.box(_LABELS + scale * limit, _HEAD - 6, 1, y - _HEAD, fill=LINE, stroke=LINE, radius=0, weight=0)
    picture.text(20, height - 14, note, size=11, color=MUTED)
    return picture.to_svg()


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


def zen() -> str:
    """Return the plot of how much faster than all-reduce sparse schemes sum a gradient, with rows for all of them."""
    measured = _load("zen-rows")["measured"]
    shown = {
        "zen": "Zen",
        "sparcml, rows": "SparCML, rows",
        "agsparse, rows": "all-gather, rows",
        "sparse-ps, rows": "sparse servers, rows",
        "omnireduce": "OmniReduce",
    }
    groups = []
    for workload in ("LSTM", "DeepFM"):
        for ranks in (4, 8, 16):
            rows = [row for row in measured if (row["ranks"], row["workload"]) == (ranks, workload)]
            best = sorted((row for row in rows if row["scheme"] in shown), key=lambda row: -float(row["speedup"]))
            found = [Bar(name=shown[row["scheme"]], median=row["speedup"], color=_color(row["scheme"])) for row in best]
            groups.append(Group(title=f"{workload}, {ranks} hosts", bars=found))
    return bars(
        "Sum of a sparse gradient: how many times as fast as all-reduce",
        "100 Mbit/s, 2 million elements, messages alone. The line is all-reduce.",
        groups,
        unit="",
        limit=1.0,
    )


def spardl() -> str:
    """Return the plot of how near SparDL and its rivals come to the time that their bytes need at least."""
    measured = [row for row in _load("spardl")["measured"] if "refused" not in row]
    groups = []
    for numel in sorted({row["numel"] for row in measured}):
        for ranks in (4, 14):
            rows = [row for row in measured if (row["ranks"], row["numel"]) == (ranks, numel)]
            best = sorted(rows, key=lambda row: float(row["over_limit"]))
            shown = [Bar.of(row["scheme"], row["messages_s"], scale=1 / row["limit_s"]) for row in best]
            groups.append(Group(title=f"{numel / 1e6:.1f} million elements, {ranks} hosts", bars=shown))
    return bars(
        "Sum of the greatest 1 % of a gradient: times the least possible time",
        "100 Mbit/s; messages alone. The line is the time of 4k(P - 1)/P words, the least that SparDL has to move.",
        groups,
        unit="",
        limit=1.0,
    )


PLOTS: Final[Mapping[str, Callable[[], str]]] = {
    "recovery.svg": recovery,
    "starts.svg": starts,
    "stall.svg": stall,
    "zen.svg": zen,
    "spardl.svg": spardl,
}


def _load(name: str) -> Any:
    """Return what the newest result of this name found."""
    path = latest(name)
    if path is None:
        raise SystemExit(f"no result {name}: run python benchmarks/reproduce.py {name} first")
    return json.loads(path.read_text())["results"]


def _color(name: str) -> str:
    if name == "floor":
        return FLOOR
    return OURS if name.startswith(("resilient-run", "zen", "spardl")) else OTHERS


def _figure(value: float) -> str:
    """Return two or three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for plot, draw in PLOTS.items():
        (FOLDER / plot).write_text(draw())
