"""What `resilientctl status` says about a job's root."""

import time
from typing import Any

_SHOWN_DECISIONS = 5


def root_lines(root: dict[str, Any], now_unix_s: float) -> list[str]:
    """Return the lines about who is root, which hosts are in quarantine, and what was decided last."""
    lines = [f"  root: host {root['host']}" if root["host"] else "  root: none elected"]
    for host, quarantine in sorted(root["quarantines"].items()):
        left_s = quarantine["until_unix_s"] - now_unix_s
        if left_s > 0:
            lines.append(f"  host {host} is in quarantine for another {left_s:.0f} s: {quarantine['reason']}")
    for entry in root["decisions"][-_SHOWN_DECISIONS:]:
        clock = time.strftime("%H:%M:%S", time.localtime(entry.get("unix_s", 0)))
        lines.append(f"  {clock} generation {entry.get('generation')}: {entry.get('reason')}")
    return lines
