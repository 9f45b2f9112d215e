"""The report of a campaign: one line per fault, and a summary."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

_HEADER = ("fault", "kind", "where", "step", "detected", "recovery", "lost")
_UNKNOWN = "-"


def summarize(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the totals of a campaign's entries."""
    struck = [entry for entry in entries if entry["outcome"] is not None and entry["outcome"]["ok"]]
    return {
        "ordered": len(entries),
        "struck": len(struck),
        "refused": sum(entry["outcome"] is not None and not entry["outcome"]["ok"] for entry in entries),
        "unanswered": sum(entry["outcome"] is None for entry in entries),
        "by_kind": dict(sorted(Counter(entry["kind"] for entry in struck).items())),
        "new_generations": sum(entry["generation_after"] - entry["outcome"]["generation"] for entry in struck),
        "not_recovered": sum(not entry["recovered"] for entry in struck),
        "max_steps_lost": max((entry["steps_lost"] for entry in struck), default=0),
    }


def render(entries: Sequence[dict[str, Any]]) -> str:
    """Return the report as a table for a person."""
    rows = [_HEADER, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    totals = summarize(entries)
    lines.append(
        f"{totals['struck']} faults struck, {totals['refused']} refused, {totals['unanswered']} unanswered; "
        f"{totals['new_generations']} new generations, {totals['not_recovered']} not recovered, "
        f"at most {totals['max_steps_lost']} step(s) lost"
    )
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    outcome = entry["outcome"]
    where = f"rank {entry['rank']}" if outcome is None else f"rank {entry['rank']}, host {outcome['host']}"
    if outcome is None or not outcome["ok"]:
        reason = entry.get("error") if outcome is None else f"refused: {outcome['what']}"
        return (str(entry["number"]), entry["kind"], where, _UNKNOWN, str(reason)[:60], _UNKNOWN, _UNKNOWN)
    detected = ", ".join(failure["kind"] for failure in entry["detected"])
    noticed = ", ".join(sorted({str(observation.get("kind")) for observation in entry["observations"]}))
    return (
        str(entry["number"]),
        entry["kind"],
        where,
        str(outcome["step"]),
        "; ".join(part for part in (detected, noticed) if part) or "nothing to recover",
        _recovery(entry),
        str(entry["steps_lost"]),
    )


def _recovery(entry: dict[str, Any]) -> str:
    if not entry["recovered"]:
        return "not recovered"
    if not entry["recoveries"]:
        return _UNKNOWN
    longest = max(entry["recoveries"], key=lambda event: event["total_s"])
    sources = sorted({source for event in entry["recoveries"] for source in event["sources"]})
    return f"{longest['total_s']:.2f} s from {'/'.join(sources) or 'the beginning'}"
